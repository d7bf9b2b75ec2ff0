"""Unpacking a packed array as a column of numbers gives what msgpack gives, or None if only msgpack can unpack it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.format.dtypes import DTYPES
from zckpt.format.packed import Containers, integers, unpack_map, words

NUMBERS = [0, 127, 128, 255, 256, (1 << 16) - 1, 1 << 16, (1 << 32) - 1, 1 << 32, (1 << 63) - 1]
runs = st.lists(st.tuples(st.sampled_from(NUMBERS), st.integers(1, 40)), max_size=12)
others: st.SearchStrategy[Any] = st.sampled_from([None, True, -1, 1.0, "F32", b"\0", [], {}])


@given(runs, st.none() | st.tuples(st.integers(0, 100), others))
def test_integers_are_those_that_msgpack_unpacks(runs: list[tuple[int, int]], other: tuple[int, Any] | None) -> None:
    values: list[Any] = [number for number, count in runs for _ in range(count)]
    if other is not None:
        values.insert(*other)
    column = integers(memoryview(msgpack.packb(values)))
    if other is None and len(runs) <= 8:
        assert column is not None
    if column is not None:
        assert other is None
        assert column.tolist() == values


@given(st.lists(st.sampled_from(DTYPES), max_size=40), st.none() | st.tuples(st.integers(0, 40), others | st.just(0)))
def test_words_are_those_that_msgpack_unpacks(dtypes: list[str], other: tuple[int, Any] | None) -> None:
    values: list[Any] = [*dtypes]
    if other is not None:
        values.insert(*other)
    column = words(memoryview(msgpack.packb(values)), DTYPES)
    if other is None or other[1] == "F32":
        assert column is not None
        assert [DTYPES[number] for number in column] == values
    else:
        assert column is None


@pytest.mark.parametrize("raw", [b"\x00", b"\xa3F32", b"\xc0", b"\x80", b"\x92\xa3F32\xd9\x03F32", b"\x91\xa5X\xa3F32"])
def test_what_is_no_array_of_short_words_is_left_to_msgpack(raw: bytes) -> None:
    assert words(memoryview(raw), DTYPES) is None


def test_a_column_counts_as_one_array() -> None:
    raw = memoryview(msgpack.packb({"a": [1, 2], "b": [[]], "c": 3}))
    containers = Containers(9)
    values = unpack_map(raw, containers, {"a": integers, "b": integers, "c": integers})
    assert values.pop("a").tolist() == [1, 2]
    assert values == {"b": [[]], "c": 3}
    assert containers.remaining == 9 - 4
