"""Ranges of tensors that end where their blocks end, so that no block is read twice to be compared with its digest, and
blocks that have different digests in two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import block_count
from zckpt.geometry import Span, joined, ragged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from zckpt.geometry import Grid, Ints, Spans

    Digests = NDArray[np.uint8]
    """The digests of some blocks, as an array of the shape [blocks, DIGEST_BYTES]."""


def block_end(start: int, stop: int, piece_starts: Ints, block_items: int) -> int:
    """Returns the element at which the last block that ends at or before element ``stop`` ends, or ``stop`` if that is
    not after ``start``. ``piece_starts`` are the first elements of the pieces of the tensor, in ascending order. A
    block has ``block_items`` elements, and each piece begins with a new one."""
    begin = int(piece_starts[int(np.searchsorted(piece_starts, stop, side="right")) - 1])
    end = begin + (stop - begin) // block_items * block_items
    return end if end > start else stop


def cut_at_blocks(span: Span, piece_starts: Ints, block_items: int, limit: int) -> Iterator[Span]:
    """Cuts a span into spans of at most ``limit`` elements. They end where blocks end, so none of these blocks is read
    twice, unless a block has more than ``limit`` elements. The other arguments are those of ``block_end``."""
    start = span.start
    while span.stop - start > limit:
        end = block_end(start, start + limit, piece_starts, block_items)
        yield Span(span.grid, start, end)
        start = end
    if start < span.stop:
        yield Span(span.grid, start, span.stop)


def differing(grid: Grid, pieces: Spans, one: Digests, other: Digests, block_items: int) -> list[Span]:
    """Returns the spans of a tensor that have different digests in two checkpoints, in ascending order. Both
    checkpoints have it in the same ``grid``, ``pieces`` and blocks. ``one`` and ``other`` are the digests of the blocks
    of all pieces in the two checkpoints. ``block_items`` is the number of elements of a full block."""
    piece, number = ragged(block_count(pieces.numel, block_items))
    differs = np.flatnonzero((one != other).any(axis=1))
    start = pieces.start[piece[differs]] + number[differs] * block_items
    stop = np.minimum(start + block_items, pieces.stop[piece[differs]])
    return [Span(grid, *bounds) for bounds in zip(*(column.tolist() for column in joined(start, stop)), strict=True)]
