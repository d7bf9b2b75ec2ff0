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
    """The digests of some blocks, as an array of the shape [blocks, DIGEST_BYTES]."""


def differing(start: Ints, stop: Ints, one: Digests, other: Digests, block_items: int) -> list[tuple[int, int]]:
    """Returns the ranges ``[begin, end)`` of elements of a tensor that have different digests in two checkpoints, in
    ascending order. Both checkpoints have the tensor in the same pieces and blocks.

    ``start`` and ``stop`` are the first element of each piece and the element after its last one, in ascending order.
    ``one`` and ``other`` are the digests of the blocks of all pieces in the two checkpoints. ``block_items`` is the
    number of elements of a full block."""
    piece, number = ragged(block_count(stop - start, block_items))
    differs = np.flatnonzero((one != other).any(axis=1))
    begin = start[piece[differs]] + number[differs] * block_items
    end = np.minimum(begin + block_items, stop[piece[differs]])
    gaps = begin[1:] != end[:-1]  # where a block does not begin at the end of the block before it
    first, last = begin[np.append(True, gaps)[: len(begin)]], end[np.append(gaps, True)[: len(end)]]
    return list(zip(first.tolist(), last.tolist(), strict=True))


def cut_at_blocks(
    begin: int, end: int, pieces: StoredPieces, block_items: int, limit: int
) -> Iterator[tuple[int, int]]:
    """Cuts the elements ``[begin, end)`` of a tensor into ranges of at most ``limit`` elements. The cuts are where
    blocks of ``pieces`` begin, so none of these blocks is read twice. In the other checkpoint, which may have other
    pieces, a range may begin or end within a block. Such a block is read for both ranges that have elements of it."""
    cuts = [begin]
    while end - cuts[-1] > limit:
        most = cuts[-1] + limit
        piece = int(np.searchsorted(pieces.start, most, side="right")) - 1
        first = int(pieces.start[piece])
        cut = first + (most - first) // block_items * block_items
        cuts.append(cut if cut > cuts[-1] else most)
    return pairwise([*cuts, end])
