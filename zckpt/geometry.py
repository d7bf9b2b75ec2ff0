"""Where the elements of tensors lie: grids, boxes, spans, and how the elements of one grid lie in another.

The elements of a tensor have an order, by which ranks and files divide them. It is given by a *grid*. The grid divides
each dimension of the tensor into *sections*. A section is a set of indices, mostly consecutive ones. A *box* is the
elements whose index in each dimension belongs to one given section, so every element is in exactly one box. In the
order of the grid, the boxes come one after the other, in the row-major order of their sections. Within a box, the
elements are in the row-major order of the box. So a rank of tensor parallelism, whose tensor is a box, holds
consecutive elements. Most grids divide nothing, and then the order is the row-major order of the tensor.

A *span* is a range of consecutive elements in the order of a grid. A rank holds spans, a data file stores spans, and a
load asks for spans, so every plan is made of spans. They are cut, intersected and mapped here and nowhere else. Single
spans are objects; many spans are columns.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from zckpt.errors import MismatchError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
    Section = tuple[tuple[int, int], ...]
    """The indices of a section, as intervals in their order: the first index of each, and the number of indices."""
    Sections = tuple[tuple[Section, ...], ...]
    """The sections of each dimension of a grid. A dimension that is not divided has none. If no dimension is divided,
    the whole tuple is empty."""


ROWS_MAX = 1 << 22
"""The most rows of ``Rectangles`` with which the elements of one order are looked for in another one at a time. Each
takes about 500 bytes of memory, and 5 microseconds, while a read is planned and carried out."""


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """An order of the elements of a tensor."""

    shape: tuple[int, ...]
    """The shape of the tensor."""
    sections: Sections = ()
    """How each dimension is divided. It is empty for the row-major order."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def all(self) -> Span:
        """All elements, in the order of the grid."""
        return Span(self, 0, self.numel)

    def box(self, number: int) -> Span:
        """Returns the elements of box ``number``. Boxes are numbered from 0 in the order of the grid."""
        starts = _box_starts(self)
        return Span(self, int(starts[number]), int(starts[number + 1]))


class Span(NamedTuple):
    """The elements ``[start, stop)`` of a tensor, in the order of a grid."""

    grid: Grid
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def narrow(self, start: int, numel: int) -> Span:
        """Returns ``numel`` elements from element ``start`` of the span on."""
        return Span(self.grid, self.start + start, self.start + start + numel)

    def clip(self, start: int, stop: int) -> Span:
        """Returns those of the elements ``[start, stop)``, counted in the span, that the span has. ``start`` may be
        below 0, and ``stop`` larger than the span. The result may be empty."""
        start = min(max(start, 0), self.numel)
        return self.narrow(start, max(min(stop, self.numel) - start, 0))


def all_of(shape: Sequence[int]) -> Span:
    """Returns all elements of a tensor of this shape in row-major order."""
    return _all_of(tuple(shape))


@lru_cache(maxsize=1 << 12)  # It saves time and objects when there are many tensors.
def _all_of(shape: tuple[int, ...]) -> Span:
    return Span(Grid(shape), 0, math.prod(shape))


def slice_of(shape: Sequence[int], index: Sequence[slice]) -> tuple[tuple[int, ...], Span]:
    """Returns the shape and the elements of ``tensor[index]``, where the tensor has the given shape. ``index`` has at
    most one slice for each dimension, with the step 1.

    Raises MismatchError if there are more slices than dimensions, if a step is not 1, or if an item of ``index`` is not
    a slice.
    """
    if len(index) > len(shape):
        raise MismatchError(f"{len(index)} slices for a tensor of shape {list(shape)}")
    bounds = []
    for size, item in zip(shape, (*index, *[slice(None)] * (len(shape) - len(index))), strict=True):
        if not isinstance(item, slice):
            raise MismatchError(f"{item!r} is not a slice")
        start, stop, step = item.indices(size)
        if step != 1:
            raise MismatchError(f"a slice of step {step}; only step 1 can be read")
        bounds.append((start, max(stop - start, 0)))
    return tuple(size for _, size in bounds), span_of(shape, bounds)


def span_of(shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> Span:
    """Returns the elements of a rectangular part of a tensor of this shape, in row-major order of the part. ``bounds``:
    the first index and the number of indices in each dimension. If the elements are consecutive in the tensor, the
    result is a span of the tensor in row-major order."""
    numel = math.prod(size for _, size in bounds)
    divided = [dim for dim, (_, size) in enumerate(bounds) if size != shape[dim]]
    if not numel or all(size == 1 for _, size in bounds[: max(divided, default=0)]):
        start = sum(first * math.prod(shape[dim + 1 :]) for dim, (first, _) in enumerate(bounds)) if numel else 0
        return all_of(shape).narrow(start, numel)
    sections: list[tuple[Section, ...]] = []
    for total, (first, size) in zip(shape, bounds, strict=True):
        others = tuple(interval for interval in ((0, first), (first + size, total - first - size)) if interval[1])
        # The part is the first section in each dimension, so it is the first box.
        sections.append((((first, size),), others) if others else ())
    return Span(Grid(tuple(shape), tuple(sections)), 0, numel)


def box_of(
    shape: Sequence[int], chunks: Sequence[Sequence[tuple[int, int]]], bounds: Sequence[tuple[int, int]]
) -> Span:
    """Returns the elements that one rank holds of a tensor that is cut into chunks in several dimensions. All ranks get
    spans of the same order. It is the row-major order of the tensor if the elements of each rank are consecutive in it.

    ``chunks`` has all chunks of each dimension, and ``bounds`` the chunks of this rank: the first index of each, and
    the number of indices. A chunk may be empty.
    """
    chunks = [[chunk for chunk in of_dim if chunk[1]] for of_dim in chunks]
    divided = [dim for dim, of_dim in enumerate(chunks) if len(of_dim) > 1]
    last = max(divided, default=0)
    if all(size <= 1 for of_dim in chunks[:last] for _, size in of_dim) or not math.prod(shape):
        return span_of(shape, bounds)
    grid = Grid(
        tuple(shape),
        tuple(tuple((chunk,) for chunk in of_dim) if len(of_dim) > 1 else () for of_dim in chunks),
    )
    if not math.prod(size for _, size in bounds):
        return Span(grid, 0, 0)
    places = [of_dim.index(chunk) for of_dim, chunk in zip(chunks, bounds, strict=True)]
    return grid.box(int(np.ravel_multi_index(places, [len(of_dim) for of_dim in chunks])))


def section_of(shape: Sequence[int], cuts: Mapping[int, tuple[Sequence[Section], int]]) -> Span:
    """Returns the elements that one rank holds of a tensor that is cut in some dimensions. All ranks get spans of the
    same order, as from ``box_of``. ``cuts``: for each dimension that is cut, the indices of each part in this
    dimension, and the number of the part that the rank holds. A part may be empty."""
    held: list[Section] = []
    used: list[tuple[Section, ...]] = []
    for dim, size in enumerate(shape):
        sections, number = cuts.get(dim, ((((0, size),),), 0))
        joined_sections = [_joined_section(section) for section in sections]
        held.append(joined_sections[number])
        used.append(tuple(filter(None, joined_sections)))
    if all(len(section) == 1 for of_dim in used for section in of_dim):
        bounds = [section[0] if section else (0, 0) for section in held]
        return box_of(shape, [[interval for (interval,) in of_dim] for of_dim in used], bounds)
    sections_of_dims = (() if of_dim == (((0, size),),) else of_dim for of_dim, size in zip(used, shape, strict=True))
    grid = Grid(tuple(shape), tuple(sections_of_dims))
    if not (all(held) and grid.numel):
        return Span(grid, 0, 0)
    places = [of_dim.index(section) for of_dim, section in zip(used, held, strict=True)]
    return grid.box(int(np.ravel_multi_index(places, [len(of_dim) for of_dim in used])))


def _joined_section(section: Section) -> Section:
    """Joins intervals of which one begins where the one before it ends, and leaves out empty ones."""
    joined: list[tuple[int, int]] = []
    for first, count in section:
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        elif count:
            joined.append((first, count))
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans as int64 columns: the elements ``[start, stop)`` of tensor number ``tensor`` of some tensors, each in the
    order of its grid. A class that derives from this one has more columns, such as the places at which the spans are
    stored."""

    tensor: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def numel(self) -> Ints:
        """The number of elements of each span."""
        return self.stop - self.start

    @classmethod
    def concatenated(cls, groups: Sequence[Self]) -> Self:
        """Returns the spans of all groups, one group after the other."""
        columns = ([getattr(group, name) for group in groups] for name in cls.__dataclass_fields__)
        return cls(*(np.concatenate([np.empty(0, np.int64), *column]) for column in columns))

    def take(self, which: slice | Ints | NDArray[np.bool_]) -> Self:
        """Returns the spans that ``which`` selects, with all their columns."""
        return type(self)(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


# Mapping


def spans_in_both(wanted: Spans, held: Spans) -> tuple[Ints, Ints, Spans]:
    """Finds the elements that are in ``wanted`` and in ``held``. Both are spans of the same tensors in the same order.

    ``held`` is ordered by tensor and by element, and has each element of each tensor once. Returns columns with an item
    for each wanted span and each held span that have elements in common: the number of the wanted span, that of the
    held span, and the common elements.
    """
    numel = np.zeros(int(held.tensor.max(initial=-1)) + 1, np.int64)
    numel[held.tensor] = held.stop  # that of the last span of each tensor stays
    base = np.cumsum(numel) - numel  # the number of the first element of each tensor, if all are counted together
    held_start = base[held.tensor] + held.start
    first = np.searchsorted(held_start, base[wanted.tensor] + wanted.start, side="right") - 1
    count = np.searchsorted(held_start, base[wanted.tensor] + wanted.stop, side="left") - first
    of_wanted, number = ragged(count)
    of_held = first[of_wanted] + number
    start = np.maximum(wanted.start[of_wanted], held.start[of_held])
    stop = np.minimum(wanted.stop[of_wanted], held.stop[of_held])
    return of_wanted, of_held, Spans(wanted.tensor[of_wanted], start, stop)


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
    boxes, starts = _boxes(span), _box_starts(span.grid)
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


def same_order(one: Grid, other: Grid) -> bool:
    """Returns whether two grids are equal. Mostly they are one object, and then they are not compared."""
    return one is other or one == other


def _tables(span: Span, grid: Grid) -> Iterator[list[_Table]]:
    """Yields the tables of each box that has elements of ``span``: one for each dimension. Boxes with the same section
    share its table."""
    own, starts = span.grid, _box_starts(span.grid)

    @cache
    def table(dim: int, section: int) -> _Table:
        return _Table.of(_sections(own, dim)[section], _intervals(grid, dim))

    counts = [len(_sections(own, dim)) for dim in range(len(own.shape))]
    for number in _boxes(span):
        tables = [table(dim, int(section)) for dim, section in enumerate(np.unravel_index(number, counts))]
        yield _narrowed(tables, max(span.start - int(starts[number]), 0), span.stop - int(starts[number]))


def _boxes(span: Span) -> range:
    """Returns the numbers of the boxes that have elements of a span."""
    starts = _box_starts(span.grid)
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


def _sections(grid: Grid, dim: int) -> tuple[Section, ...]:
    """Returns the sections of one dimension. A dimension that is not divided is one section."""
    return (grid.sections and grid.sections[dim]) or (((0, grid.shape[dim]),),)


@lru_cache(maxsize=1 << 5)
def _intervals(grid: Grid, dim: int) -> tuple[Ints, ...]:
    """Returns the intervals of the sections of one dimension, in ascending order, as columns: the first index, the
    index after the last one, the number of indices in the sections before, the number of indices in the section, and
    the first index counted in the section."""
    rows, before = [], 0
    for section in _sections(grid, dim):
        size, at = sum(count for _, count in section), 0
        for first, count in section:
            rows.append((first, first + count, before, size, at))
            at += count
        before += size
    return tuple(np.array(sorted(rows), np.int64).T)


@lru_cache(maxsize=1 << 5)
def _box_starts(grid: Grid) -> Ints:
    """Returns the first element of each box, and the number of elements of the tensor."""
    numel = np.ones(1, np.int64)
    for dim in range(len(grid.shape)):
        sizes = [sum(count for _, count in section) for section in _sections(grid, dim)]
        numel = (numel[:, None] * np.array(sizes, np.int64)).ravel()
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(numel)])


def runs_of_view(shape: Sequence[int], strides: Sequence[int], start: int) -> tuple[Ints, Ints]:
    """Returns the elements of a view, in the row-major order of the view, as runs of adjacent elements of the tensor:
    the first element of each run, and the number of elements. ``shape``, ``strides``, ``start``: the shape of the view,
    its strides in elements, and the element of the tensor at which it begins."""
    if 0 in shape:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    dims, inner = _outer_dims(shape, strides)
    first = np.array([start], np.int64)
    for size, stride in zip(dims, strides, strict=False):
        first = (first[:, None] + np.arange(size) * stride).ravel()
    begins, stops = joined(first, first + inner)
    return begins, stops - begins


def count_runs(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the largest number of runs that ``runs_of_view`` can return for a view of this shape."""
    return math.prod(_outer_dims(shape, strides)[0])


def _outer_dims(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Returns the sizes of the first dimensions of a view, up to the last one whose elements are not adjacent, and the
    number of elements in all other dimensions."""
    inner, dims = 1, len(shape)
    while dims and (shape[dims - 1] == 1 or strides[dims - 1] == inner):
        dims -= 1
        inner *= shape[dims]
    return tuple(shape[:dims]), inner


# Cutting and joining


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


def joined(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Joins ranges of numbers, in their order, where one begins at the end of the one before it. Returns the begins and
    the ends of the results."""
    gaps = start[1:] != stop[:-1]
    return start[np.append(True, gaps)[: len(start)]], stop[np.append(gaps, True)[: len(stop)]]


# Columns of groups


def ragged(count: Ints) -> tuple[Ints, Ints]:
    """Returns two columns for groups that follow each other and have ``count`` members: the group of each member, and
    the number of each member in its group."""
    first = np.cumsum(count) - count
    group = np.repeat(np.arange(len(count)), count)
    return group, np.arange(len(group)) - first[group]


def runs_of_equal(column: Ints) -> list[tuple[int, int]]:
    """Returns ``(start, stop)`` of each run of equal items that follow each other."""
    begins = np.flatnonzero(np.diff(column)) + 1
    return list(itertools.pairwise([0, *begins.tolist(), len(column)])) if len(column) else []
