"""Which elements of two stored tensors have to be read to compare them, and in which slices."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import DIGEST_BYTES, block_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.plan.reshard import StoredPieces


def differing(
    start: Sequence[int], stop: Sequence[int], digests: Sequence[tuple[memoryview, memoryview]], block_items: int
) -> list[tuple[int, int]]:
    """The elements ``[start, stop)`` of one tensor, in ascending ranges, of which two checkpoints that cut it into the
    same pieces and blocks have different digests. ``start`` and ``stop`` are the elements of each piece, in order, and
    ``digests`` those of its blocks in either checkpoint. ``block_items`` is the number of elements of a full block."""
    found: list[tuple[int, int]] = []
    for first, last, (one, other) in zip(start, stop, digests, strict=True):
        if one == other:
            continue
        for number in range(block_count(last - first, block_items)):
            own = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
            if one[own] == other[own]:
                continue
            begin, end = first + number * block_items, min(first + (number + 1) * block_items, last)
            if found and found[-1][1] == begin:
                begin, _ = found.pop()
            found.append((begin, end))
    return found


def slices(begin: int, end: int, pieces: StoredPieces, block_items: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cuts the elements ``[begin, end)`` of a tensor into ranges of at most ``limit``, where blocks of its ``pieces``
    begin, so that none of these blocks is read twice. A range of a checkpoint that is cut otherwise may begin and end
    within a block, which is then read for both."""
    cuts = [begin]
    while end - cuts[-1] > limit:
        most = cuts[-1] + limit
        piece = int(np.searchsorted(pieces.start, most, side="right")) - 1
        first = int(pieces.start[piece])
        cut = first + (most - first) // block_items * block_items
        cuts.append(cut if cut > cuts[-1] else most)
    return pairwise([*cuts, end])
