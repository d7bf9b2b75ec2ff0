"""Processes share work: every item is done by one process, and each process has about the same number of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.tools.share import batches, shared_out


@pytest.mark.parametrize(
    ("nbytes", "processes", "expected"),
    [
        ([], 3, []),
        ([0, 0], 3, [0, 0]),
        ([4, 4, 4], 3, [0, 1, 2]),
        ([4, 4, 4, 2], 2, [0, 0, 1, 1]),
        ([1, 10], 2, [0, 1]),
        ([10, 1, 0], 2, [0, 1, 1]),
        ([7], 4, [2]),
        ([1 << 60, 1 << 60], 2, [0, 1]),
    ],
)
def test_items_are_shared_out(nbytes: list[int], processes: int, expected: list[int]) -> None:
    assert shared_out(nbytes, processes) == expected


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 9))
def test_no_share_exceeds_an_equal_share_by_more_than_one_item(nbytes: list[int], processes: int) -> None:
    owners = shared_out(nbytes, processes)
    assert owners == sorted(owners)
    assert {*owners} <= {*range(processes)}
    for process in range(processes):
        share = [item_bytes for item_bytes, owner in zip(nbytes, owners, strict=True) if owner == process]
        assert sum(share) <= sum(nbytes) / processes + max(nbytes)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        ([], []),
        ([4, 4, 4], [[4, 4], [4]]),
        ([4, 9, 4], [[4], [9], [4]]),
        ([0, 0, 0, 0], [[0, 0, 0], [0]]),
        ([1, 7, 1], [[1, 7], [1]]),
    ],
)
def test_a_batch_has_at_most_three_items_and_eight_bytes_or_one_larger_item(
    nbytes: list[int], expected: list[list[int]]
) -> None:
    assert list(batches(nbytes, int, 8, 3)) == expected
