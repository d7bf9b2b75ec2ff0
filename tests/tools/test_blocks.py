"""The ranges of elements that are read to compare two stored tensors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zckpt.format.digest import digest
from zckpt.geometry import Grid, Span
from zckpt.plan.reshard import StoredPieces
from zckpt.tools.blocks import cut_at_blocks, differing


def pieces_of(bounds: list[int]) -> StoredPieces:
    start, stop = np.array(bounds[:-1], np.int64), np.array(bounds[1:], np.int64)
    zeros = np.zeros(len(start), np.int64)
    return StoredPieces(zeros, start, stop, zeros, zeros, zeros)


CUTS = st.lists(st.integers(1, 400), min_size=1, max_size=12, unique=True).map(lambda cuts: [0, *sorted(cuts)])


@given(CUTS, st.integers(1, 60), st.integers(1, 5), st.data())
def test_slices_make_up_the_range_and_share_no_block(
    bounds: list[int], block_items: int, blocks: int, data: st.DataObject
) -> None:
    numel, limit = bounds[-1], blocks * block_items
    begin = data.draw(st.integers(0, numel - 1))
    end = data.draw(st.integers(begin + 1, numel))
    span = Span(Grid((numel,)), begin, end)
    slices = list(cut_at_blocks(span, pieces_of(bounds).start, block_items, limit))
    assert [slices[0].start, *(part.stop for part in slices)] == [*(part.start for part in slices), end]
    assert slices[0].start == begin
    assert all(0 < part.numel <= limit for part in slices)
    blocks_begin = {at for first, last in pairwise(bounds) for at in range(first, last, block_items)}
    assert {part.start for part in slices[1:]} <= blocks_begin


@given(CUTS, st.integers(1, 60), st.data())
def test_blocks_with_different_digests_are_found(bounds: list[int], block_items: int, data: st.DataObject) -> None:
    numel = bounds[-1]
    changed = data.draw(st.sets(st.integers(0, numel - 1), max_size=5))
    values_a = np.zeros(numel, np.uint8)
    values_b = values_a.copy()
    values_b[list(changed)] = 1

    blocks = [
        (at, min(at + block_items, last)) for first, last in pairwise(bounds) for at in range(first, last, block_items)
    ]

    def digests(values: np.ndarray) -> np.ndarray:
        return np.stack([np.frombuffer(digest(values[first:last]), np.uint8) for first, last in blocks])

    box = Grid((numel,))
    spans = differing(box, pieces_of(bounds), digests(values_a), digests(values_b), block_items)
    expected = {at for start, stop in blocks if changed & set(range(start, stop)) for at in range(start, stop)}
    assert {at for span in spans for at in range(span.start, span.stop)} == expected
    assert all(one.stop < other.start for one, other in pairwise(spans)), "neighbours are joined"
