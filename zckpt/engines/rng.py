"""Saves and restores the random number generators of this process: those of Python and NumPy, and torch's on the CPU
and on the current device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zckpt.errors import FormatError


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the states of the generators as plain values: {"python", "numpy", "torch", "device": [one per device in
    use]}. For a global generator of NumPy that is not MT19937, "numpy" is the state as NumPy gives it."""
    version, words, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":
        state = numpy["state"]
        has_gauss, cached = int(numpy["has_gauss"]), float(numpy["gauss"])
        numpy = {"words": _words(state["key"]), "position": int(state["pos"]), "has_gauss": has_gauss, "gauss": cached}
    return {
        "python": {"version": version, "words": _words(words), "gauss": gauss},
        "numpy": numpy,
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
            if "words" in numpy
            else _read(numpy)
        )
        torch.set_rng_state(to_tensor(state["torch"]))
        if device.type != "cpu":
            for saved in state["device"]:
                torch.get_device_module(device).set_rng_state(to_tensor(saved), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"not a random number generator's state: {error}") from error


def _read(state: Any) -> Any:
    """Returns the state of a generator of NumPy with the arrays that functions in it return."""
    if isinstance(state, Mapping):
        return {key: _read(value) for key, value in state.items()}
    return state() if callable(state) else state


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
