"""Where the elements of tensors lie: grids, boxes and spans. ``orders`` maps the elements of one grid to another one.

The elements of a tensor have an order, by which ranks and files divide them. It is given by a *grid*. The grid divides
each dimension of the tensor into *sections*. A section is a set of indices, mostly consecutive ones. A *box* is the
elements whose index in each dimension belongs to one given section, so every element is in exactly one box. In the
order of the grid, the boxes come one after the other, in the row-major order of their sections. Within a box, the
elements are in the row-major order of the box. So a rank of tensor parallelism, whose tensor is a box, holds
consecutive elements. Most grids divide nothing, and then the order is the row-major order of the tensor.

A *span* is a range of consecutive elements in the order of a grid. A rank holds spans, a data file stores spans, and a
load asks for spans, so every plan is made of spans. Single spans are objects; many spans are columns.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from zckpt.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
    Section = tuple[tuple[int, int], ...]
    """The indices of a section, as intervals in their order: the first index of each, and the number of indices."""
    Sections = tuple[tuple[Section, ...], ...]
    """The sections of each dimension of a grid. A dimension that is not divided has none. If no dimension is divided,
    the whole tuple is empty."""


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

    def sections_in(self, dim: int) -> tuple[Section, ...]:
        """Returns the sections of one dimension. A dimension that is not divided is one section."""
        return (self.sections and self.sections[dim]) or (((0, self.shape[dim]),),)

    def box(self, number: int) -> Span:
        """Returns the elements of box ``number``. Boxes are numbered from 0 in the order of the grid."""
        starts = box_starts(self)
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


_SLICES = "pass a slice, or a tuple of slices for the first dimensions, such as (slice(0, 2), slice(None))"


def slice_of(shape: Sequence[int], index: Sequence[object]) -> tuple[tuple[int, ...], Span]:
    """Returns the shape and the elements of ``tensor[index]``, where the tensor has the given shape. ``index`` has at
    most one slice for each dimension, with the step 1.

    Raises MismatchError if there are more slices than dimensions, if a step is not 1, or if an item of ``index`` is not
    a slice.
    """
    if len(index) > len(shape):
        raise MismatchError(f"{len(index)} slices for a tensor of shape {list(shape)}", hint=_SLICES)
    bounds = []
    for size, item in zip(shape, (*index, *[slice(None)] * (len(shape) - len(index))), strict=True):
        if not isinstance(item, slice):
            alone = f"slice({item}, {item + 1 or None}) has index {item} alone; " if isinstance(item, int) else ""
            raise MismatchError(f"{item!r} is not a slice", hint=alone + _SLICES)
        start, stop, step = item.indices(size)
        if step != 1:
            raise MismatchError(
                f"a slice of step {step}; only step 1 can be read",
                hint="read the range with step 1, and index the result",
            )
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


def same_order(one: Grid, other: Grid) -> bool:
    """Returns whether two grids are equal. Mostly they are one object, and then they are not compared."""
    return one is other or one == other


@lru_cache(maxsize=1 << 5)
def box_starts(grid: Grid) -> Ints:
    """Returns the first element of each box, and the number of elements of the tensor."""
    numel = np.ones(1, np.int64)
    for dim in range(len(grid.shape)):
        sizes = [sum(count for _, count in section) for section in grid.sections_in(dim)]
        numel = (numel[:, None] * np.array(sizes, np.int64)).ravel()
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(numel)])


def joined(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Joins ranges of numbers, in their order, where one begins at the end of the one before it. Returns the begins and
    the ends of the results."""
    gaps = start[1:] != stop[:-1]
    return start[np.append(True, gaps)[: len(start)]], stop[np.append(gaps, True)[: len(stop)]]


def ragged(count: Ints) -> tuple[Ints, Ints]:
    """Returns two columns for groups that follow each other and have ``count`` members: the group of each member, and
    the number of each member in its group."""
    first = np.cumsum(count) - count
    group = np.repeat(np.arange(len(count)), count)
    return group, np.arange(len(group)) - first[group]


def distinct(column: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns the values of a column in ascending order, each one once; the position of the first item with each value;
    and for each item, the position of its value among them. ``np.unique`` does the same, but its first call imports
    ``numpy.ma``, which takes longer than to open a checkpoint."""
    order = np.argsort(column, kind="stable")
    begins = np.ones(len(column), bool)
    begins[1:] = np.diff(column[order]) != 0
    first = order[begins]
    number = np.empty(len(column), np.int64)
    number[order] = np.cumsum(begins) - 1
    return column[first], first, number


def runs_of_equal(column: Ints) -> list[tuple[int, int]]:
    """Returns ``(start, stop)`` of each run of equal items that follow each other."""
    begins = np.flatnonzero(np.diff(column)) + 1
    return list(itertools.pairwise([0, *begins.tolist(), len(column)])) if len(column) else []
