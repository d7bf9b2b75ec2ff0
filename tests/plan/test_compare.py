"""Which elements are read to compare two stored tensors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zckpt.format.digest import digest
from zckpt.plan.compare import cut_at_blocks, differing
from zckpt.plan.reshard import StoredPieces


def pieces_of(bounds: list[int]) -> StoredPieces:
    start, stop = np.array(bounds[:-1], np.int64), np.array(bounds[1:], np.int64)
    zeros = np.zeros(len(start), np.int64)
    return StoredPieces(zeros, zeros, start, stop, zeros, zeros)


CUTS = st.lists(st.integers(1, 400), min_size=1, max_size=12, unique=True).map(lambda cuts: [0, *sorted(cuts)])


@given(CUTS, st.integers(1, 60), st.integers(1, 5), st.data())
def test_slices_make_up_the_range_and_share_no_block(
    bounds: list[int], block_items: int, blocks: int, data: st.DataObject
) -> None:
    numel, limit = bounds[-1], blocks * block_items
    begin = data.draw(st.integers(0, numel - 1))
    end = data.draw(st.integers(begin + 1, numel))
    found = list(cut_at_blocks(begin, end, pieces_of(bounds), block_items, limit))
    assert [found[0][0], *(stop for _, stop in found)] == [*(start for start, _ in found), end]
    assert found[0][0] == begin
    assert all(0 < stop - start <= limit for start, stop in found)
    blocks_begin = {at for first, last in pairwise(bounds) for at in range(first, last, block_items)}
    assert {start for start, _ in found[1:]} <= blocks_begin


@given(CUTS, st.integers(1, 60), st.data())
def test_what_has_other_digests_is_found(bounds: list[int], block_items: int, data: st.DataObject) -> None:
    numel = bounds[-1]
    changed = data.draw(st.sets(st.integers(0, numel - 1), max_size=5))
    one = np.zeros(numel, np.uint8)
    other = one.copy()
    other[list(changed)] = 1

    blocks = [
        (at, min(at + block_items, last)) for first, last in pairwise(bounds) for at in range(first, last, block_items)
    ]

    def digests(values: np.ndarray) -> np.ndarray:
        return np.stack([np.frombuffer(digest(values[first:last]), np.uint8) for first, last in blocks])

    pieces = pieces_of(bounds)
    found = differing(pieces.start, pieces.stop, digests(one), digests(other), block_items)
    expected = {at for start, stop in blocks if changed & set(range(start, stop)) for at in range(start, stop)}
    assert {at for start, stop in found for at in range(start, stop)} == expected
    assert all(stop < start for (_, stop), (start, _) in pairwise(found)), "neighbours are joined"
