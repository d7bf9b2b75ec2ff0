"""A look at the values of tensors, a few bytes at a time: NaN, infinities, signs, and weights against their masters."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import torch

from zckpt.state.inventory import MASTER, PARAM, STATE
from zckpt.transfer.torch_dtypes import TORCH_DTYPES
from zckpt.validation.report import Observation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.format.manifest import Manifest
    from zckpt.plan.reshard import StoredPieces
    from zckpt.storage.buffers import Bytes

NEVER_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
"""Parts that are sums or means of squares."""
_BASE = 0x9E3779B97F4A7C15
_CHUNK = 1 << 16
_MODULUS = 1 << 64


class Values:
    """Collects what the values of one checkpoint are like. Safe to use from several threads.

    ``derived``: the dtype of the part ``param`` by name, where it has to be the master, rounded. Both are compared by a
    sum over their elements that depends on each one's place, so that pieces may come in any order, from any rank: the
    bytes are read once, and neither tensor is held.
    """

    def __init__(self, derived: Mapping[str, str]) -> None:
        self.derived = derived
        self.counts: Counter[tuple[str, str]] = Counter()
        """Elements by key and kind."""
        self.sums: Counter[str] = Counter()
        """By name: of the master, minus that of the weights."""
        self._lock = threading.Lock()

    def look(self, part: str, name: str, dtype: str, first: int, data: Bytes) -> None:
        """``data`` are the elements of ``part/name`` from number ``first`` on."""
        torch_dtype = TORCH_DTYPES[dtype]
        if part == STATE or not (torch_dtype.is_floating_point or torch_dtype.is_complex):
            return
        values = torch.from_numpy(data).view(torch_dtype)
        found = _odd(values, part in NEVER_NEGATIVE)
        total = 0
        if name in self.derived and part in (MASTER, PARAM):
            total = _placed_sum(values.to(TORCH_DTYPES[self.derived[name]]), first)
        if found or total:
            with self._lock:
                for kind, count in found.items():
                    self.counts[f"{part}/{name}", kind] += count
                self.sums[name] += total if part == MASTER else -total

    def pack(self) -> bytes:
        """What was found, to be sent to another process."""
        counts = [[*about, count] for about, count in self.counts.items()]
        packed: bytes = msgpack.packb([counts, [[name, total % _MODULUS] for name, total in self.sums.items()]])
        return packed

    def add(self, packed: bytes) -> None:
        """What another process has found in other elements."""
        counts, sums = msgpack.unpackb(packed)
        self.counts.update({(key, kind): count for key, kind, count in counts})
        self.sums.update(dict(sums))

    def observations(self) -> tuple[Observation, ...]:
        odd = [Observation(key, kind, count) for (key, kind), count in self.counts.items()]
        unlike = [name for name, total in self.sums.items() if total % _MODULUS]
        return tuple(sorted([*odd, *(Observation(f"{PARAM}/{name}", "unlike_master", 1) for name in unlike)]))


def derived_weights(manifest: Manifest, pieces: StoredPieces) -> dict[str, str]:
    """The names of which there is one copy of a floating point master and one of 16-bit weights; the dtype of those.
    ``pieces`` are all that the index lists; ``want`` is the row of a tensor in the part of its file."""
    part_of = np.array(manifest.files.part, np.int64)[pieces.file]
    dtypes: dict[str, dict[str, str]] = {MASTER: {}, PARAM: {}}
    for name, found in dtypes.items():
        part_id = manifest.part_ids.get(name, -1)
        own = part_of == part_id
        stored = np.bincount(pieces.want[own], (pieces.stop - pieces.start)[own])
        for row, numel in enumerate(stored.tolist()):
            part = manifest.parts[part_id]
            if numel == math.prod(manifest.shapes[part.shapes[row]]):
                found[manifest.names[part.names[row]]] = part.dtypes[row]
    weights, masters = dtypes[PARAM], dtypes[MASTER]
    return {
        name: dtype
        for name, dtype in weights.items()
        if dtype in ("F16", "BF16") and masters.get(name) in ("F32", "F64")
    }


def _odd(values: torch.Tensor, never_negative: bool) -> dict[str, int]:
    if values.is_complex():
        values = torch.view_as_real(values)
    elif values.itemsize == 1:
        values = values.float()  # there is hardly any arithmetic on 8 bits
    low, high = (float(bound) for bound in torch.aminmax(values))  # NaN, if there is one
    if math.isfinite(low) and math.isfinite(high) and not (never_negative and low < 0):
        return {}
    counts = {"nan": values.isnan(), "inf": values.isinf(), "negative": values < 0 if never_negative else _NONE}
    return {kind: count for kind, mask in counts.items() if (count := int(mask.sum()))}


_NONE = torch.zeros(0, dtype=torch.bool)
_POWERS = np.full(_CHUNK, _BASE, np.uint64).cumprod(dtype=np.uint64)


def _placed_sum(values: torch.Tensor, first: int) -> int:
    """The sum of each 16-bit pattern times the odd number ``_BASE`` to the power of its place plus 1, modulo 2^64."""
    patterns = values.view(torch.uint16).numpy()
    total = 0
    for start in range(0, len(patterns), _CHUNK):
        chunk = patterns[start : start + _CHUNK].astype(np.uint64)
        total += pow(_BASE, first + start, _MODULUS) * int(np.dot(chunk, _POWERS[: len(chunk)]))
    return total % _MODULUS
