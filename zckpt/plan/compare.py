"""Plans which elements of two stored tensors have to be read to compare them, and in which slices."""

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
    """Returns the ranges ``[begin, end)`` of elements of one tensor, in ascending order, that have different digests in
    two checkpoints. Both have cut the tensor into the same pieces and blocks. ``start`` and ``stop``: the first element
    of each piece and the one after its last, in ascending order. ``digests``: for each piece the digests of its blocks
    in the one checkpoint and in the other. ``block_items``: the number of elements of a full block."""
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
    """Cuts the elements ``[begin, end)`` of a tensor into ranges of at most ``limit`` elements. It cuts where a block
    of ``pieces`` begins, so that none of these blocks is read twice. In a checkpoint with other pieces, a range may
    begin or end within a block; such a block is read for both of the ranges that it is in."""
    cuts = [begin]
    while end - cuts[-1] > limit:
        most = cuts[-1] + limit
        piece = int(np.searchsorted(pieces.start, most, side="right")) - 1
        first = int(pieces.start[piece])
        cut = first + (most - first) // block_items * block_items
        cuts.append(cut if cut > cuts[-1] else most)
    return pairwise([*cuts, end])
