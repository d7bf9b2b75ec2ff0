"""Looks at the values of tensors, a few bytes at a time: NaN, infinities, signs, and weights that differ from their
masters."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import torch

from zckpt.format.dtypes import DTYPES
from zckpt.plan.inventory import MASTER, PARAM, STATE
from zckpt.tools.validating.report import Observation
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.geometry import Grid
    from zckpt.storage.buffers import Bytes

NEVER_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
"""The parts that are sums or means of squares, so none of their elements can be negative."""
_BASE = 0x9E3779B97F4A7C15
"""An odd number whose powers are the factors of a sum over the elements of a tensor."""
_CHUNK = 1 << 16
"""The number of elements that are added up at once."""
_MODULUS = 1 << 64
"""All sums are computed modulo this number."""


class ValueChecks:
    """Collects what the values of one checkpoint are like. Several threads may use it.

    Weights of 16 bits have to be their master weights, rounded. Both are compared by a sum over their elements. The
    factor of each element in the sum depends on its place, so pieces may come in any order and from any rank. The bytes
    are read once, and neither tensor is kept in memory.
    """

    def __init__(self, derived: Mapping[str, str]) -> None:
        self.derived = derived
        """The dtypes of the weights that have to equal their rounded master weights, by the names of the tensors."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """The number of unusual elements by key and kind."""
        self.sums: Counter[str] = Counter()
        """By name, the sum over the master weights minus the sum over the weights."""
        self._lock = threading.Lock()

    def look(self, part: str, name: str, dtype: str, first: int, data: Bytes) -> None:
        """Looks at some elements of the tensor ``part/name``. ``first`` is the number of the first of them."""
        torch_dtype = TORCH_DTYPES[dtype]
        if part == STATE or not (torch_dtype.is_floating_point or torch_dtype.is_complex):
            return
        values = torch.from_numpy(data).view(torch_dtype)
        odd = _odd(values, part in NEVER_NEGATIVE)
        total = 0
        if name in self.derived and part in (MASTER, PARAM):
            total = _placed_sum(values.to(TORCH_DTYPES[self.derived[name]]), first)
        if odd or total:
            with self._lock:
                for kind, count in odd.items():
                    self.counts[f"{part}/{name}", kind] += count
                self.sums[name] += total if part == MASTER else -total

    def pack(self) -> bytes:
        """Returns what was collected, as bytes that can be sent to another process."""
        counts = [[*about, count] for about, count in self.counts.items()]
        packed: bytes = msgpack.packb([counts, [[name, total % _MODULUS] for name, total in self.sums.items()]])
        return packed

    def add(self, packed: bytes) -> None:
        """Adds what another process has collected from other elements."""
        counts, sums = msgpack.unpackb(packed)
        self.counts.update({(key, kind): count for key, kind, count in counts})
        self.sums.update(dict(sums))

    def observations(self) -> tuple[Observation, ...]:
        odd = [Observation(key, kind, count) for (key, kind), count in self.counts.items()]
        unlike = [name for name, total in self.sums.items() if total % _MODULUS]
        return tuple(sorted([*odd, *(Observation(f"{PARAM}/{name}", "unlike_master", 1) for name in unlike)]))


def derived_weights(contents: Contents) -> dict[str, str]:
    """Returns the dtypes of the weights that have to equal their rounded master weights, by the names of the tensors.

    There is exactly one copy of each of them, and exactly one of its master. The dtype has 16 bits, and that of the
    master 32 or 64. Both are stored in the same order.
    """
    manifest = contents.manifest
    found: dict[str, dict[str, tuple[str, Grid]]] = {MASTER: {}, PARAM: {}}
    """The dtype and the grid of each tensor with exactly one copy, by part and name."""
    stored = [np.zeros(len(part.name_ids)) for part in manifest.parts]
    rows = [np.arange(len(part.name_ids) if part.name in found else 0) for part in manifest.parts]
    for pieces in contents.pieces_of_parts(rows):
        np.add.at(stored[pieces.part_id[0]], pieces.tensor, pieces.numel)
    for part_id, (part, numels) in enumerate(zip(manifest.parts, stored, strict=True)):
        for row, numel in enumerate(numels.tolist() if part.name in found else ()):
            grid = manifest.grid(part_id, row)
            if numel == grid.numel:
                found[part.name][manifest.names[part.name_ids[row]]] = DTYPES[part.dtype_ids[row]], grid
    return {
        name: dtype
        for name, (dtype, grid) in found[PARAM].items()
        if dtype in ("F16", "BF16") and found[MASTER].get(name) in (("F32", grid), ("F64", grid))
    }


def _odd(values: torch.Tensor, never_negative: bool) -> dict[str, int]:
    """Returns the number of unusual elements by kind. Kinds without such elements are left out."""
    if values.is_complex():
        values = torch.view_as_real(values)
    elif values.itemsize == 1:
        values = values.float()  # Torch has hardly any arithmetic for floats of 8 bits.
    low, high = (float(bound) for bound in torch.aminmax(values))  # Both are NaN if any element is.
    if math.isfinite(low) and math.isfinite(high) and not (never_negative and low < 0):
        return {}
    counts = {"nan": values.isnan(), "inf": values.isinf(), "negative": values < 0 if never_negative else _NONE}
    return {kind: count for kind, mask in counts.items() if (count := int(mask.sum()))}


_NONE = torch.zeros(0, dtype=torch.bool, device="cpu")
_POWERS = np.full(_CHUNK, _BASE, np.uint64).cumprod(dtype=np.uint64)


def _placed_sum(values: torch.Tensor, first: int) -> int:
    """Returns the sum, modulo 2^64, of the 16-bit pattern of each element times ``_BASE`` to the power of its number
    plus 1."""
    patterns = values.view(torch.uint16).numpy()
    total = 0
    for start in range(0, len(patterns), _CHUNK):
        chunk = patterns[start : start + _CHUNK].astype(np.uint64)
        total += pow(_BASE, first + start, _MODULUS) * int(np.dot(chunk, _POWERS[: len(chunk)]))
    return total % _MODULUS
