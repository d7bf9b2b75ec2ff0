"""Plans which elements of two stored tensors have to be read to compare them, and in which slices."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import block_count
from zckpt.format.index import ragged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from zckpt.format.index import Ints
    from zckpt.plan.reshard import StoredPieces

    Digests = NDArray[np.uint8]
    """Of shape [blocks, DIGEST_BYTES]."""


def differing(start: Ints, stop: Ints, one: Digests, other: Digests, block_items: int) -> list[tuple[int, int]]:
    """Returns the ranges ``[begin, end)`` of elements of one tensor, in ascending order, that have different digests in
    two checkpoints. Both have cut the tensor into the same pieces and blocks. ``start`` and ``stop``: the first element
    of each piece and the one after its last, in ascending order. ``one`` and ``other``: the digests of the blocks of
    all pieces in either checkpoint. ``block_items``: the number of elements of a full block."""
    piece, number = ragged(block_count(stop - start, block_items))
    differs = np.flatnonzero((one != other).any(axis=1))
    begin = start[piece[differs]] + number[differs] * block_items
    end = np.minimum(begin + block_items, stop[piece[differs]])
    gaps = begin[1:] != end[:-1]  # where a block does not follow the one before it
    first, last = begin[np.append(True, gaps)[: len(begin)]], end[np.append(gaps, True)[: len(end)]]
    return list(zip(first.tolist(), last.tolist(), strict=True))


def cut_at_blocks(
    begin: int, end: int, pieces: StoredPieces, block_items: int, limit: int
) -> Iterator[tuple[int, int]]:
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
