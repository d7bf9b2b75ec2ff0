"""How the elements of one grid lie in the order of another grid of the same tensor.

Elements that are adjacent in both orders are a run, and equally spaced runs are one row of ``Rectangles``. So there are
few rows if the boxes of both grids are large, however many elements there are.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.errors import UnsupportedError
from zckpt.geometry import box_starts, ragged, same_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.geometry import Grid, Ints, Section, Span

ROWS_MAX = 1 << 22
"""The most rows of ``Rectangles`` with which the elements of one order are looked for in another one at a time. Each
takes about 500 bytes of memory, and 5 microseconds, while a read is planned and carried out."""


class Spaced(NamedTuple):
    """Equally spaced runs of adjacent elements in one memory, as int64 columns. A row has ``runs`` runs of ``numel``
    elements. The first one begins at element ``start``, and each further one ``stride`` elements after the one before
    it, which is at least ``numel``. A run that is alone is a row whose ``runs`` is 1."""

    start: Ints
    numel: Ints
    runs: Ints
    stride: Ints

    @property
    def stop(self) -> Ints:
        """The element after the last run of each row."""
        return self.start + (self.runs - 1) * self.stride + self.numel

    def take(self, rows: Ints) -> Spaced:
        """Returns the rows with these numbers."""
        return Spaced._make(column[rows] for column in self)

    def clip(self, low: Ints, high: Ints) -> SpacedParts:
        """Returns those elements of each row that are among the elements ``[low, high)`` of the memory. ``low`` and
        ``high`` have an item for each row."""
        start, numel, runs, stride = self
        row = np.arange(len(start))
        if (runs == 1).all():
            before = np.maximum(low - start, 0)
            return _not_empty(row, np.zeros_like(start), before, np.minimum(high - start, numel) - before, runs)
        # The last run that begins at or before ``low``, or the first run.
        first = np.clip((low - start) // stride, 0, runs)
        before = np.where(first < runs, np.maximum(low - start - first * stride, 0), 0)
        head = np.minimum(high - start - first * stride, numel) - before
        whole = first + (before > 0)  # the first run that begins at ``low`` or later
        # The run after the last one that ends at ``high`` or earlier, but none before ``whole``.
        whole_stop = np.maximum(np.clip((high - numel - start) // stride + 1, 0, runs), whole)
        tail = np.where(whole_stop < runs, np.minimum(high - start - whole_stop * stride, numel), 0)
        zeros, ones = np.zeros_like(start), np.ones_like(start)
        columns = (
            (row, first, before, np.where(before > 0, head, 0), ones),
            (row, whole, zeros, np.where(whole_stop > whole, numel, 0), whole_stop - whole),
            (row, whole_stop, zeros, tail, ones),
        )
        return _not_empty(*(np.stack(column, 1).ravel() for column in zip(*columns, strict=True)))


def _not_empty(row: Ints, first: Ints, before: Ints, numel: Ints, runs: Ints) -> SpacedParts:
    """Returns the parts with these columns, without those that have no elements."""
    some = numel > 0
    parts = SpacedParts(row, first, before, numel, runs)
    return parts if some.all() else SpacedParts._make(column[some] for column in parts)


class SpacedParts(NamedTuple):
    """Parts of rows of ``Spaced``, as int64 columns. A part has ``numel`` elements of each of ``runs`` runs of row
    ``row``, from run number ``first`` on. They are those after the first ``before`` elements of the run."""

    row: Ints
    first: Ints
    before: Ints
    numel: Ints
    runs: Ints


class Rectangles(NamedTuple):
    """Elements that lie in two orders, as equally spaced runs of elements that are adjacent in both, in int64 columns.
    A row has ``runs`` runs of ``numel`` elements. The first run begins at element ``one`` of the first order and at
    element ``other`` of the second one. Each further run begins ``one_stride`` elements further in the first order, and
    ``other_stride`` elements further in the second one."""

    one: Ints
    other: Ints
    numel: Ints
    runs: Ints
    one_stride: Ints
    other_stride: Ints


def rectangles_in(span: Span, grid: Grid) -> Rectangles:
    """Returns where the elements of ``span`` lie in the order of ``grid``, another grid of the same tensor. In the
    result, the first order has the elements of ``span``, and the second one all elements in the order of ``grid``. It
    has a row for each rectangle that lies in both orders with one stride, so it is small if the boxes are large.
    Raises UnsupportedError if there are too many rows for the memory."""
    if same_order(span.grid, grid) or not span.numel:
        count = min(span.numel, 1)
        columns = (0, span.start, span.numel, 1, max(span.numel, 1), max(span.numel, 1))
        return Rectangles(*(np.full(count, number, np.int64) for number in columns))
    tables = list(_tables(span, grid))
    if sum(map(_count, tables)) > ROWS_MAX:
        raise UnsupportedError(
            f"a tensor of shape {list(grid.shape)} would be read in more than {ROWS_MAX:,} parts",
            hint="read it in smaller slices",
        )
    of_boxes = [_box_in(of_box, grid.shape) for of_box in tables]
    boxes, starts = _boxes(span), box_starts(span.grid)
    one, other, numel, runs, one_stride, other_stride = map(np.concatenate, zip(*of_boxes, strict=True))
    one += np.repeat(starts[boxes.start : boxes.stop], [len(of_box.one) for of_box in of_boxes]) - span.start
    # What comes before the span, or after it, is left out.
    parts = Spaced(one, numel, runs, one_stride).clip(np.zeros_like(one), np.full_like(one, span.numel))
    one, other, one_stride, other_stride = (column[parts.row] for column in (one, other, one_stride, other_stride))
    one, other = one + parts.first * one_stride + parts.before, other + parts.first * other_stride + parts.before
    begins = np.ones(len(one), bool)
    begins[1:] = (one[1:] != one[:-1] + parts.numel[:-1]) | (other[1:] != other[:-1] + parts.numel[:-1])
    begins[1:] |= (parts.runs[1:] > 1) | (parts.runs[:-1] > 1)
    first = np.flatnonzero(begins)
    numel = np.add.reduceat(parts.numel, first)
    strides = (np.maximum(column[first], numel) for column in (one_stride, other_stride))
    return Rectangles(one[first], other[first], numel, parts.runs[first], *strides)


def row_count(span: Span, grid: Grid) -> int:
    """Returns about how many rows ``rectangles_in`` returns. It takes much less memory than ``rectangles_in``."""
    return 1 if same_order(span.grid, grid) or not span.numel else sum(map(_count, _tables(span, grid)))


def _tables(span: Span, grid: Grid) -> Iterator[list[_Table]]:
    """Yields the tables of each box that has elements of ``span``: one for each dimension. Boxes with the same section
    share its table."""
    own, starts = span.grid, box_starts(span.grid)

    @cache
    def table(dim: int, section: int) -> _Table:
        return _Table.of(own.sections_in(dim)[section], _intervals(grid, dim))

    counts = [len(own.sections_in(dim)) for dim in range(len(own.shape))]
    for number in _boxes(span):
        tables = [table(dim, int(section)) for dim, section in enumerate(np.unravel_index(number, counts))]
        yield _narrowed(tables, max(span.start - int(starts[number]), 0), span.stop - int(starts[number]))


def _boxes(span: Span) -> range:
    """Returns the numbers of the boxes that have elements of a span."""
    starts = box_starts(span.grid)
    return range(int(np.searchsorted(starts, span.start, "right")) - 1, int(np.searchsorted(starts, span.stop)))


def _count(tables: Sequence[_Table]) -> int:
    """Returns how many rows ``_box_in`` returns."""
    outer, inner = _spaced_dims(tables)
    return math.prod(int(table.numel.sum()) for table in tables[:outer]) * math.prod(
        len(table.own) for table in tables[outer:inner]
    )


def _narrowed(tables: list[_Table], start: int, stop: int) -> list[_Table]:
    """Leaves out what the elements ``[start, stop)`` of the box do not need. For example, elements of one row need only
    the table of this row. The result may still have more than they need."""
    size = math.prod(table.own_size for table in tables)
    stop, narrowed = min(stop, size), list(tables)
    for dim, table in enumerate(tables):
        size //= table.own_size
        low, high = start // size, -(-stop // size)
        narrowed[dim] = table.narrow(low, high)
        if high - low > 1:
            break
        start, stop = start - low * size, stop - low * size
    return narrowed


def _spaced_dims(tables: Sequence[_Table]) -> tuple[int, int]:
    """Returns two numbers of dimensions, ``outer`` and ``inner``. The dimensions from ``inner`` on are adjacent in both
    orders. Dimension ``inner - 1`` and those after it make the runs. The dimensions ``[outer, inner - 1)`` repeat a run
    with one stride in each order."""
    inner = next((dim for dim in range(len(tables), 0, -1) if not tables[dim - 1].is_same), 0)
    outer = max(inner - 2, 0)
    while outer and tables[outer].is_same:
        outer -= 1
    return outer, inner


def _box_in(tables: Sequence[_Table], shape: Sequence[int]) -> Rectangles:
    """Returns where the elements of a box lie in the order of another grid. The first order has the elements of the
    box. ``tables``: those of the box. ``shape``: that of the tensor."""
    outer, inner = _spaced_dims(tables)
    # The columns get an item for each row, while the dimensions are added from the last one to the first one.
    place, before, local, numel, size, count = (np.full(1, start, np.int64) for start in (0, 0, 0, 1, 1, 1))
    stride, other_stride, own_size = count, count, 1
    for dim in range(len(tables) - 1, -1, -1):
        table = tables[dim] if dim >= outer else tables[dim].of_each_index()
        if dim == inner - 2:
            stride, other_stride = np.full_like(size, own_size), size
        place = (table.own[:, None] * own_size + place).ravel()
        before = (table.indices_before[:, None] * math.prod(shape[dim + 1 :]) + table.size[:, None] * before).ravel()
        local = (table.other[:, None] * size + local).ravel()
        runs, single = (table.numel[:, None], np.ones_like(table.numel)[:, None])
        numel = ((runs if dim >= inner - 1 else single) * numel).ravel()
        count = ((runs if dim < inner - 1 else single) * count).ravel()
        stride, other_stride = (single * stride).ravel(), (single * other_stride).ravel()
        size = (table.size[:, None] * size).ravel()
        own_size *= table.own_size
    strides = (np.maximum(column, numel) for column in (stride, other_stride))
    return Rectangles(place, before + local, numel, count, *strides)


class _Table(NamedTuple):
    """The indices that a box has in one dimension, and the sections of another grid that have them, as runs of indices
    that are consecutive in both."""

    own: Ints
    """The first index of each run, counted in the box."""
    numel: Ints
    """The number of indices of each run."""
    indices_before: Ints
    """The number of indices in the sections of the other grid that come before the section that has the run."""
    size: Ints
    """The number of indices in the section that has the run."""
    other: Ints
    """The first index of the run, counted in this section."""
    own_size: int
    """The number of indices that the box has in this dimension."""

    @classmethod
    def of(cls, section: Section, intervals: tuple[Ints, ...]) -> _Table:
        """Returns the table of a box with this section. ``intervals``: those of the other grid, in this dimension."""
        rows, own_size = [], 0
        start, stop, before, size, place = intervals
        for first, count in section:
            of_other = slice(np.searchsorted(stop, first, "right"), np.searchsorted(start, first + count))
            low, high = np.maximum(start[of_other], first), np.minimum(stop[of_other], first + count)
            at = place[of_other] + low - start[of_other]
            rows.append((own_size + low - first, high - low, before[of_other], size[of_other], at))
            own_size += count
        return cls._make([*map(np.concatenate, zip(*rows, strict=True)), own_size])

    @property
    def is_same(self) -> bool:
        """Whether both have the same indices in the same order."""
        return len(self.own) == 1 and self.numel[0] == self.own_size == self.size[0]

    def narrow(self, low: int, high: int) -> _Table:
        """Returns the table with only the indices from ``low`` to ``high``, counted in the box."""
        if (low, high) == (0, self.own_size):
            return self
        before = np.maximum(low - self.own, 0)
        numel = np.minimum(self.own + self.numel, high) - self.own - before
        kept = numel > 0
        columns = (self.own + before, numel, self.indices_before, self.size, self.other + before)
        return _Table._make([*(column[kept] for column in columns), self.own_size])

    def of_each_index(self) -> _Table:
        """Returns a table with a run for each index."""
        run, number = ragged(self.numel)
        own, other = self.own[run] + number, self.other[run] + number
        return _Table(own, np.ones_like(run), self.indices_before[run], self.size[run], other, self.own_size)


@lru_cache(maxsize=1 << 5)
def _intervals(grid: Grid, dim: int) -> tuple[Ints, ...]:
    """Returns the intervals of the sections of one dimension, in ascending order, as columns: the first index, the
    index after the last one, the number of indices in the sections before, the number of indices in the section, and
    the first index counted in the section."""
    rows, before = [], 0
    for section in grid.sections_in(dim):
        size, at = sum(count for _, count in section), 0
        for first, count in section:
            rows.append((first, first + count, before, size, at))
            at += count
        before += size
    return tuple(np.array(sorted(rows), np.int64).T)
