"""The pieces of an index one by one, in the place of columns."""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.format.index import starts_and_copies, take
from zckpt.format.names import Tier
from zckpt.geometry import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zckpt.format.index import Rows
    from zckpt.geometry import Grid


class Piece(NamedTuple):
    """Elements of a tensor in one data file. ``offset`` and ``block`` are those of ``Rows``."""

    rank: int
    tier: Tier
    copy: int
    span: Span
    offset: int
    block: int


def pieces(layout: Rows, row: int, grid: Grid) -> Iterator[Piece]:
    """Yields the pieces of one row of a layout, copy by copy, in the order of their elements. ``grid``: that of the
    tensor."""
    single = take(layout, np.array([row]))
    start, copy = starts_and_copies(single, np.array([grid.numel], np.int64))
    spans = (Span(grid, *bounds) for bounds in zip(start.tolist(), (start + single.length).tolist(), strict=True))
    columns = single.rank.tolist(), map(Tier, single.tier.tolist()), copy.tolist(), spans
    return starmap(Piece, zip(*columns, single.offset.tolist(), single.block.tolist(), strict=True))
