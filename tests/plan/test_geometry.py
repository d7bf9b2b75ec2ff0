"""Grids, spans in their order, and how the elements of one grid lie in another."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

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
    joined,
    ragged,
    run_count,
    runs_in,
    slice_of,
    spans_in_both,
)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(st.data(), SHAPES)
def test_runs_are_the_elements_in_order_and_as_long_as_can_be(data: st.DataObject, shape: tuple[int, ...]) -> None:
    own, other = data.draw(grids(shape)), data.draw(grids(shape))
    start = data.draw(st.integers(0, own.numel))
    span = Span(own, start, data.draw(st.integers(start, own.numel)))
    runs = runs_in(span, other)
    found = []
    for at, place, numel in zip(runs.one.tolist(), runs.other.tolist(), runs.numel.tolist(), strict=True):
        assert numel > 0
        found += [(at + number, place + number) for number in range(numel)]
    place_of = {element: place for place, element in enumerate(order_of(other).tolist())}
    assert found == [
        (at, place_of[element]) for at, element in enumerate(order_of(own)[span.start : span.stop].tolist())
    ]
    breaks = sum((at[0] - before[0], at[1] - before[1]) != (1, 1) for before, at in pairwise(found))
    assert len(runs.numel) == breaks + bool(found)


def test_only_the_rows_that_a_span_has_are_looked_at() -> None:
    grid = Grid((64, 8, 6), ((), (), (((0, 3),), ((3, 3),))))
    assert run_count(all_of(grid.shape), grid) == 64 * 8 * 2
    assert run_count(all_of(grid.shape).narrow(60, 4), grid) == 2
    assert run_count(grid.box(1), grid) == 1


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
        runs = runs_in(span, Grid(whole.shape))
        pairs = zip(runs.other.tolist(), runs.numel.tolist(), strict=True)
        assert [n for start, numel in pairs for n in range(start, start + numel)] == whole[index].ravel().tolist()
    assert len(runs_in(slice_of(whole.shape, (slice(2, 3), slice(1, 4)))[1], Grid(whole.shape)).one) == 1
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
    one, other, common = spans_in_both(Spans(*np.array(rows).T), held, numel)
    assert (common.tensor == held.tensor[other]).all()
    assert (common.start >= held.start[other]).all()
    assert (common.stop <= held.stop[other]).all()
    for number, (of_tensor, start, stop) in enumerate(rows):
        mine = common.take(one == number)
        assert (mine.tensor == of_tensor).all()
        starts, stops = joined(mine.start, mine.stop)
        assert (starts.tolist(), stops.tolist()) == ([start], [stop])
