"""Grids, spans in their order, and how the elements of one grid lie in another."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.grids import grids, order_of
from zckpt.errors import MismatchError
from zckpt.geometry import (
    Grid,
    Span,
    Spans,
    all_of,
    box_of,
    distinct,
    joined,
    ragged,
    section_of,
    slice_of,
    spans_in_both,
)
from zckpt.orders import Rectangles, Spaced, rectangles_in, row_count

if TYPE_CHECKING:
    from zckpt.geometry import Sections

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements_of(rectangles: Rectangles) -> dict[int, int]:
    """Returns the element of the second order for each element of the first one. Checks that each is there once."""
    pairs = []
    for one, other, numel, count, one_stride, other_stride in np.stack(rectangles, 1).tolist():
        assert numel > 0
        assert count > 0
        assert one_stride >= numel
        assert other_stride >= numel
        pairs += [
            (one + run * one_stride + number, other + run * other_stride + number)
            for run in range(count)
            for number in range(numel)
        ]
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


@given(st.data(), SHAPES)
def test_runs_have_each_element_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    own, other = data.draw(grids(shape)), data.draw(grids(shape))
    start = data.draw(st.integers(0, own.numel))
    span = Span(own, start, data.draw(st.integers(start, own.numel)))
    rectangles = rectangles_in(span, other)
    place_of = {element: place for place, element in enumerate(order_of(other).tolist())}
    elements = order_of(own)[span.start : span.stop].tolist()
    assert elements_of(rectangles) == {at: place_of[element] for at, element in enumerate(elements)}
    # A run that is cut at both ends of the span is at most three rows.
    assert len(rectangles.one) <= 3 * row_count(span, other)


@pytest.mark.parametrize(
    ("shape", "sections", "rows"),
    [
        ((64, 6), ((), (((0, 3),), ((3, 3),))), 2),
        ((4, 16, 6), ((), (), (((0, 3),), ((3, 3),))), 2),  # the first two dimensions have one stride
        ((4, 16, 6), ((), (((0, 8),), ((8, 8),)), ()), 2),
        ((8, 4, 6), ((), (((0, 2),), ((2, 2),)), (((0, 3),), ((3, 3),))), 8 * 4),
        ((8, 6, 5, 1), ((((0, 4),), ((4, 4),)), (((0, 3),), ((3, 3),)), (), ()), 4),
    ],
)
def test_a_box_is_one_row_if_it_has_one_stride(shape: tuple[int, ...], sections: Sections, rows: int) -> None:
    grid = Grid(shape, sections)
    assert len(rectangles_in(all_of(shape), grid).one) == row_count(all_of(shape), grid) == rows
    assert len(rectangles_in(grid.all, Grid(shape)).one) == row_count(grid.all, Grid(shape)) == rows


def test_only_the_rows_that_a_span_has_are_looked_at() -> None:
    grid = Grid((64, 8, 6), ((), (((0, 4),), ((4, 4),)), (((0, 3),), ((3, 3),))))
    assert row_count(all_of(grid.shape), grid) == 64 * 4
    assert row_count(all_of(grid.shape).narrow(60, 4), grid) == 2
    assert row_count(grid.box(1), grid) == 1


@given(st.data(), st.lists(st.tuples(*[st.integers(0, 30)] * 2, *[st.integers(1, 6)] * 2, st.integers(0, 5))))
def test_cuts_are_the_elements_in_a_window(data: st.DataObject, rows: list[tuple[int, ...]]) -> None:
    columns = [(low, start, numel, count, numel + gap) for low, start, numel, count, gap in rows]
    low, *columns_of_rows = np.array(columns, np.int64).reshape(-1, 5).T
    spaced = Spaced(*columns_of_rows)
    high = low + np.array([data.draw(st.integers(0, 40)) for _ in rows], np.int64)
    found: list[list[int]] = [[] for _ in rows]
    for row, run, before, numel, count in np.stack(spaced.clip(low, high), 1).tolist():
        begin = columns[row][1] + run * columns[row][4] + before
        assert numel > 0
        assert count > 0
        assert (count == 1 and before + numel <= columns[row][2]) or (before, numel) == (0, columns[row][2])
        found[row] += [begin + n * columns[row][4] + at for n in range(count) for at in range(numel)]
    for number, (begin, start, numel, count, stride) in enumerate(columns):
        elements = {start + run * stride + at for run in range(count) for at in range(numel)}
        assert found[number] == sorted(elements & {*range(begin, int(high[number]))})
        assert spaced.stop[number] == max(elements) + 1


@given(st.data(), SHAPES)
def test_boxes_follow_each_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    grid = data.draw(grids(shape))
    count = int(np.prod([max(len(sections), 1) for sections in grid.sections]))
    boxes = [grid.box(number) for number in range(count)]
    assert [box.start for box in boxes] == [0, *(box.stop for box in boxes[:-1])]
    assert boxes[-1].stop == grid.numel


def test_slices_are_what_numpy_gives() -> None:
    whole = np.arange(6 * 5 * 4).reshape(6, 5, 4)
    for index in [
        (), (slice(1, 3),), (slice(2, -1), slice(3, 1)), (slice(2, 3), slice(1, 4)),
        (slice(None), slice(None), slice(1)), (slice(5, 9), slice(-2, None), slice(1, 3)),
    ]:  # fmt: skip
        shape, span = slice_of(whole.shape, index)
        assert shape == whole[index].shape
        rectangles = rectangles_in(span, Grid(whole.shape))
        assert elements_of(rectangles) == dict(enumerate(whole[index].ravel().tolist()))
    assert len(rectangles_in(slice_of(whole.shape, (slice(2, 3), slice(1, 4)))[1], Grid(whole.shape)).one) == 1
    assert slice_of((), ()) == ((), all_of(()))
    wrong: list[Any] = [(slice(None),) * 3, (slice(0, 4, 2),), (slice(None, None, -1),), (1,)]
    for index in wrong:
        with pytest.raises(MismatchError):
            slice_of((4, 4), index)


@given(st.data(), SHAPES)
def test_chunks_of_all_ranks_are_boxes_of_one_grid(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Each element belongs to one rank, and a rank has its elements in the order of its own part of the tensor."""
    chunks = []
    for size in shape:
        cuts = sorted([0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))])
        chunks.append([(first, stop - first) for first, stop in pairwise(cuts)])
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    grids, seen = set(), []
    for bounds in product(*chunks):
        span = box_of(shape, chunks, bounds)
        local = whole[tuple(slice(first, first + size) for first, size in bounds)].ravel().tolist()
        assert order_of(span.grid)[span.start : span.stop].tolist() == local
        grids.add(span.grid)
        seen += local
    assert len(grids) == 1
    assert sorted(seen) == list(range(whole.size))
    divided = [dim for dim, of_dim in enumerate(chunks) if sum(size > 0 for _, size in of_dim) > 1]
    if len(divided) < 2 and (not divided or all(size == 1 for size in shape[: divided[0]])):
        assert grids == {Grid(shape)}, "it is the row-major order if it can be"


@given(st.data(), SHAPES)
def test_sections_of_all_ranks_are_boxes_of_one_grid(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """The same, if a part may have indices that are not consecutive, in any order. Not every dimension is cut."""
    parts: dict[int, list[Any]] = {}
    for dim, size in enumerate(shape):
        if data.draw(st.booleans()):
            sections = data.draw(grids((size,))).sections
            parts[dim] = [*(sections[0] if sections else [((0, size),)]), ()]
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    orders, seen = set(), []
    for numbers in product(*(range(len(of_dim)) for of_dim in parts.values())):
        cuts = {dim: (parts[dim], number) for dim, number in zip(parts, numbers, strict=True)}
        span = section_of(shape, cuts)
        held = [((0, size),) if dim not in cuts else cuts[dim][0][cuts[dim][1]] for dim, size in enumerate(shape)]
        indices = [[index for first, count in section for index in range(first, first + count)] for section in held]
        local = (whole[np.ix_(*indices)] if indices else whole).ravel().tolist()
        assert order_of(span.grid)[span.start : span.stop].tolist() == local
        orders.add(span.grid)
        seen += local
    assert len(orders) == 1
    assert sorted(seen) == list(range(whole.size))


def test_what_is_clipped_stays_in_the_tensor() -> None:
    bounds = [(-5, 3), (3, 40), (-5, -1), (20, 30), (5, 5)]
    assert [Grid((4, 3)).all.clip(*bound)[1:] for bound in bounds] == [(0, 3), (3, 12), (0, 0), (12, 12), (5, 5)]


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_common_elements_of_spans(lengths: list[list[int]], data: st.DataObject) -> None:
    tensor, _ = ragged(np.array([len(of_tensor) for of_tensor in lengths]))
    stops = np.concatenate([np.cumsum(of_tensor) for of_tensor in lengths])
    held = Spans(tensor, stops - np.concatenate(lengths), stops)
    numel = np.array([sum(of_tensor) for of_tensor in lengths])
    rows = []
    for _ in range(data.draw(st.integers(1, 5))):
        number = data.draw(st.integers(0, len(lengths) - 1))
        start = data.draw(st.integers(0, int(numel[number]) - 1))
        rows.append((number, start, data.draw(st.integers(start + 1, int(numel[number])))))
    one, other, common = spans_in_both(Spans(*np.array(rows).T), held)
    assert (common.tensor == held.tensor[other]).all()
    assert (common.start >= held.start[other]).all()
    assert (common.stop <= held.stop[other]).all()
    for number, (of_tensor, start, stop) in enumerate(rows):
        mine = common.take(one == number)
        assert (mine.tensor == of_tensor).all()
        starts, stops = joined(mine.start, mine.stop)
        assert (starts.tolist(), stops.tolist()) == ([start], [stop])


@given(st.lists(st.integers(-5, 5)))
def test_distinct_values_are_those_of_numpy(values: list[int]) -> None:
    column = np.array(values, np.int64)
    expected = np.unique(column, return_index=True, return_inverse=True)
    assert [part.tolist() for part in distinct(column)] == [part.tolist() for part in expected]
