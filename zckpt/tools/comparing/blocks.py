"""Plans which elements of two stored tensors have to be read to compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import block_count
from zckpt.geometry import Span, joined, ragged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zckpt.geometry import Grid, Spans

    Digests = NDArray[np.uint8]
    """The digests of some blocks, as an array of the shape [blocks, DIGEST_BYTES]."""


def differing(grid: Grid, pieces: Spans, one: Digests, other: Digests, block_items: int) -> list[Span]:
    """Returns the spans of a tensor that have different digests in two checkpoints, in ascending order. Both
    checkpoints have it in the same ``grid``, ``pieces`` and blocks. ``one`` and ``other`` are the digests of the blocks
    of all pieces in the two checkpoints. ``block_items`` is the number of elements of a full block."""
    piece, number = ragged(block_count(pieces.numel, block_items))
    differs = np.flatnonzero((one != other).any(axis=1))
    start = pieces.start[piece[differs]] + number[differs] * block_items
    stop = np.minimum(start + block_items, pieces.stop[piece[differs]])
    return [Span(grid, *bounds) for bounds in zip(*(column.tolist() for column in joined(start, stop)), strict=True)]
