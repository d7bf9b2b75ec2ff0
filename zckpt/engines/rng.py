"""Saves and restores the random number generators of this process: those of Python and NumPy, and torch's on the CPU
and on the current device."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the states of the generators as plain values: {"python", "numpy", "torch", "device": [one per device in
    use]}.

    Raises UnsupportedError if the global generator of NumPy has been replaced by one that is not MT19937.
    """
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()
    if kind != "MT19937":
        raise UnsupportedError(f"the global NumPy generator is {kind}; only MT19937 is supported")
    return {
        "python": {"version": version, "words": _words(words), "gauss": gauss},
        "numpy": {"words": _words(key), "position": int(position), "has_gauss": int(has_gauss), "gauss": float(cached)},
        "torch": to_bytes(torch.get_rng_state()),
        "device": [] if device.type == "cpu" else [to_bytes(torch.get_device_module(device).get_rng_state(device))],
    }


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Sets every generator to the state that ``capture`` has returned. A device state is not used if this process has
    no such device. Raises FormatError for a state that a generator does not accept."""
    try:
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(_unpacked(python["words"]).tolist()), python["gauss"]))
        np.random.set_state(
            ("MT19937", _unpacked(numpy["words"]), numpy["position"], numpy["has_gauss"], numpy["gauss"])
        )
        torch.set_rng_state(to_tensor(state["torch"]))
        if device.type != "cpu":
            for saved in state["device"]:
                torch.get_device_module(device).set_rng_state(to_tensor(saved), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"not a random number generator's state: {error}") from error


def to_bytes(state: torch.Tensor) -> bytes:
    """Returns the state of a torch generator as bytes. ``state``: 1-D, uint8, in host memory."""
    return state.numpy().tobytes()


def to_tensor(state: object) -> torch.Tensor:
    """Returns the tensor that ``to_bytes`` was given. Raises FormatError for anything but bytes."""
    if not isinstance(state, bytes):
        raise FormatError(f"a generator's state is {type(state).__name__} instead of bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _words(values: Any) -> bytes:
    return np.asarray(values, dtype="<u4").tobytes()


def _unpacked(words: bytes) -> Any:
    return np.frombuffer(words, dtype="<u4").astype(np.uint32)
