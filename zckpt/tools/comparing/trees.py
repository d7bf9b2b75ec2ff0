"""Finds where two trees of non-tensor state differ."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.errors import first_few
from zckpt.format.names import LINEAGE, MACHINES
from zckpt.tools.comparing.report import StateDifference
from zckpt.transfer.memory import host_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zckpt.checkpoint.reading.loader import Loader

_NOTHING = object()
LONG_BYTES = 16
"""The largest number of bytes that a text shows. Of longer values, it shows only the number of bytes."""


def settings(checkpoint: Loader) -> dict[str, object]:
    """Returns the non-tensor state that all ranks share: the step, the names of tied weights, and the entries of the
    mapping at the root of the tree of state, except the lineage, which is no state. If the root is not a mapping, it is
    the entry ``state``. Raises FormatError and StorageError."""
    state = checkpoint.state
    shared = state if isinstance(state, Mapping) else {"state": state}
    of_state = {key: value for key, value in shared.items() if key not in (LINEAGE, MACHINES)}
    return {"step": checkpoint.manifest.step, "aliases": checkpoint.manifest.aliases, **of_state}


def tree_differences(a: object, b: object, path: str) -> Iterator[StateDifference]:
    """Yields the places at which two trees differ, in the order of the tree. Numbers, tensors and arrays are equal if
    their type and all their bits are equal, which holds for NaN too."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in {**a, **b}:
            child_path = f"{path}.{key}" if path else str(key)
            yield from tree_differences(a.get(key, _NOTHING), b.get(key, _NOTHING), child_path)
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        for number in range(max(len(a), len(b))):
            in_a, in_b = (items[number] if number < len(items) else _NOTHING for items in (a, b))
            yield from tree_differences(in_a, in_b, f"{path}[{number}]")
    elif _value(a) != _value(b):
        text_a, text_b = _text(a), _text(b)
        other = "other bytes" if isinstance(b, bytes) else "other values"
        yield StateDifference(path, text_a, other if text_a == text_b else text_b)


def _value(leaf: object) -> tuple[object, ...]:
    """Returns a value that is equal for two leaves if and only if their types and all their bits are equal. All NaN of
    Python's ``float`` count as equal."""
    if isinstance(leaf, torch.Tensor):
        return "tensor", leaf.dtype, tuple(leaf.shape), host_bytes(leaf.contiguous()).tobytes()
    if isinstance(leaf, np.ndarray):
        return "array", leaf.dtype, leaf.shape, leaf.tobytes()
    return type(leaf), repr(leaf)


def _text(leaf: object) -> str | None:
    if leaf is _NOTHING:
        return None
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        value = f" of {reprlib.repr(leaf.reshape(-1).tolist()[0])}" if [*leaf.reshape(-1).shape] == [1] else ""
        return f"{type(leaf).__name__} {str(leaf.dtype).removeprefix('torch.')} {[*leaf.shape]}{value}"
    if isinstance(leaf, Mapping) and leaf:
        return f"a map of {first_few([str(key) for key in leaf], 5)}"
    return f"{len(leaf):,} bytes" if isinstance(leaf, bytes) and len(leaf) > LONG_BYTES else reprlib.repr(leaf)
