"""How processes share work: every item is one process's, and each has about the same bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.plan.share import shared_out


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
def test_shares(nbytes: list[int], processes: int, expected: list[int]) -> None:
    assert shared_out(nbytes, processes) == expected


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 9))
def test_no_share_exceeds_an_equal_one_by_more_than_an_item(nbytes: list[int], processes: int) -> None:
    owners = shared_out(nbytes, processes)
    assert owners == sorted(owners)
    assert {*owners} <= {*range(processes)}
    for process in range(processes):
        own = [one for one, owner in zip(nbytes, owners, strict=True) if owner == process]
        assert sum(own) <= sum(nbytes) / processes + max(nbytes)
