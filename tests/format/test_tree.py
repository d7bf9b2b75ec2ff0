"""State trees: every kind of value comes back unchanged, and a value that cannot be kept is refused with its path."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.support.states import write_state
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.errors import FormatError, StateError
from zckpt.format import tree
from zckpt.format.limits import TREE_DEPTH_MAX, TREE_INTEGER_DIGITS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def pack(value: object) -> bytes:
    return tree.pack(value, "client_state", lambda path, leaf: None)


def unpack(raw: bytes) -> Any:
    return tree.unpack(raw, lambda ext, name: pytest.fail("there are no tensors"), "some file")


def alike(value: Any, other: Any) -> bool:
    """Returns whether two trees have the same values and types at every level, the same order of keys, and the same
    signs of floats."""
    if type(value) is not type(other):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(alike, value, other))
    if isinstance(value, dict):
        return alike(list(value), list(other)) and all(alike(value[key], other[key]) for key in value)
    if isinstance(value, float):
        return math.copysign(1, value) == math.copysign(1, other) and (
            value == other or (value != value and other != other)
        )
    return bool(value == other)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
keys = texts | st.integers(-(1 << 63), (1 << 64) - 1)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**60), 10**60)
    | st.sampled_from([-(1 << 63), -(1 << 63) - 1, (1 << 64) - 1, 1 << 64])
    | st.floats()
    | texts
    | st.binary(max_size=40)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


@given(trees)
def test_a_tree_comes_back_unchanged(value: object) -> None:
    assert alike(unpack(pack(value)), value)


def test_long_integers_up_to_the_limit() -> None:
    most = 10**TREE_INTEGER_DIGITS_MAX - 1
    for value in (most, -most):
        assert unpack(pack(value)) == value
    for value in (most + 1, -most - 1, 10**100_000):
        with pytest.raises(StateError):
            pack(value)


def nested(levels: int, wrap: Callable[[object], object]) -> object:
    value: object = 7
    for _ in range(levels):
        value = wrap(value)
    return value


WRAPS = {
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "dict": lambda value: {"a": value},
    "OrderedDict": lambda value: OrderedDict(a=value),
}


@pytest.mark.parametrize("kind", WRAPS)
def test_the_deepest_tree_that_can_be_written_can_be_read(kind: str) -> None:
    deepest = nested(TREE_DEPTH_MAX, WRAPS[kind])
    assert alike(unpack(pack(deepest)), deepest)
    with pytest.raises(StateError, match="nested") as caught:
        pack(nested(TREE_DEPTH_MAX + 1, WRAPS[kind]))
    assert caught.value.rule == "T002"


def loop() -> object:
    value: list[object] = []
    value.append(value)
    return value


class Text(str):
    __slots__ = ()


class Pair(NamedTuple):
    first: int
    second: int


class Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"sampler": [{"fn": len}]}, r"client_state.sampler[0].fn: builtin_function_or_method"),
        ({"a b": {3: {1, 2}}}, r"client_state['a b'][3]: set"),
        ({"x": (1, object())}, r"client_state.x[1]: object"),
        ({"x": OrderedDict(y=frozenset())}, r"client_state.x.y: frozenset"),
        ({"x": defaultdict(int)}, r"client_state.x: defaultdict"),
        ({"x": Text("a")}, r"client_state.x: Text, a subclass of str, cannot be kept"),
        ({"x": Pair(1, 2)}, r"client_state.x: Pair, a subclass of tuple, cannot be kept"),
        ({"x": Level.LOW}, "client_state.x: Level, a subclass of int, cannot be kept"),
        ({"x": np.float64(1)}, r"client_state.x: float64"),
        ({"x": bytearray(b"a")}, r"client_state.x: bytearray"),
        ({"x": 1j}, r"client_state.x: complex"),
        ({"x": range(3)}, r"client_state.x: range"),
        ({"x": np.array([object()])}, r"client_state.x: ndarray"),
        ({"x": ["\ud800"]}, r"client_state.x[0] is a string that is not valid Unicode"),
        ({"x": {"\ud800": 1}}, r"client_state.x is a string that is not valid Unicode"),
        ({"x": {True: 1}}, r"client_state.x has the key True"),
        ({"x": {1.5: 1}}, r"client_state.x has the key 1.5"),
        ({"x": {(1, 2): 1}}, r"client_state.x has the key (1, 2)"),
        ({"x": {1 << 64: 1}}, r"client_state.x has the key 18446744073709551616"),
        ({"x": loop()}, r"client_state.x[0]"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(value: object, where: str) -> None:
    with pytest.raises(StateError) as caught:
        pack(value)
    assert where in str(caught.value)
    assert caught.value.key is not None
    assert caught.value.key.startswith("client_state")


def test_a_value_that_cannot_be_kept_says_what_can() -> None:
    for value, hint in (
        (1j, "in client_state, rank_state and state dicts also numpy scalars, paths"),
        (Pair(1, 2), "make it a plain tuple"),
    ):
        with pytest.raises(StateError, match=hint):
            pack({"x": value})


def ext(code: int, data: bytes) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, data))


def deep(levels: int, start: bytes = b"\x91") -> bytes:
    return start * levels + b"\0"


def deep_tuples(levels: int) -> bytes:
    raw = b"\0"
    for _ in range(levels):
        raw = ext(3, b"\x91" + raw)
    return raw


BROKEN = {
    "empty": ("T001", b""),
    "cut off": ("T001", b"\x92\0"),
    "trailing": ("T001", b"\0\0"),
    "reserved byte": ("T001", b"\xc1"),
    "duplicate key": ("T001", b"\x82\xa1a\0\xa1a\0"),
    "duplicate key inside": ("T001", b"\x91\x82\1\0\1\0"),
    "no UTF-8": ("T001", b"\xa1\xff"),
    "null as key": ("T001", b"\x81\xc0\0"),
    "boolean as key": ("T001", b"\x81\xc3\0"),
    "float as key": ("T001", b"\x81\xca\0\0\0\0\0"),
    "bytes as key": ("T001", b"\x81\xc4\1a\0"),
    "list as key": ("T001", b"\x81\x90\0"),
    "tuple as key": ("T001", b"\x81" + ext(3, b"\x90") + b"\0"),
    "long integer as key": ("T001", b"\x81" + ext(4, b"1" * 30) + b"\0"),
    "short integer as key": ("T001", b"\x81" + ext(4, b"12089258") + b"\0"),
    "integer that an int can hold": ("T001", ext(4, b"-9223372036854775808")),
    "timestamp": ("T001", b"\xd6\xff\0\0\0\1"),
    "timestamp as key": ("T001", b"\x81\xd6\xff\0\0\0\1\0"),
    "timestamp in a tuple": ("T001", ext(3, b"\x91\xd6\xff\0\0\0\1")),
    "unknown extension": ("T001", ext(6, b"\0")),
    "negative extension": ("T001", b"\xd4\xfe\0"),
    "tuple of a map": ("T001", ext(3, b"\x80")),
    "tuple of nothing": ("T001", ext(3, b"")),
    "tuple and more": ("T001", ext(3, b"\x90\0")),
    "integer zero": ("T001", ext(4, b"0")),
    "integer with a plus": ("T001", ext(4, b"+1")),
    "integer with a line": ("T001", ext(4, b"1\n")),
    "integer in hex": ("T001", ext(4, b"0x10")),
    "integer in another script": ("T001", ext(4, "١٢".encode())),
    "integer of nothing": ("T001", ext(4, b"")),
    "integer too long": ("T001", ext(4, b"1" * (TREE_INTEGER_DIGITS_MAX + 1))),
    "dict type unknown": ("T001", ext(5, msgpack.packb(["defaultdict", {}]))),
    "dict type of a list": ("T001", ext(5, msgpack.packb(["Counter", []]))),
    "dict type of three": ("T001", ext(5, msgpack.packb(["Counter", {}, 0]))),
    "dict type without a name": ("T001", ext(5, msgpack.packb([["Counter"], {}]))),
    "reference without UTF-8": ("T001", ext(1, b"\xff")),
    "deep": ("T002", deep(TREE_DEPTH_MAX + 2)),
    "very deep": ("T002", deep(900)),
    "deep maps": ("T002", deep(TREE_DEPTH_MAX + 2, b"\x81\0")),
    "deep tuples": ("T002", deep_tuples(TREE_DEPTH_MAX + 2)),
    "tuples of deep lists": ("T002", ext(3, deep(60)[:-1] + ext(3, deep(60)))),
    "unknown reference": ("T003", ext(1, b"tree/0/9")),
    "unknown array": ("T003", ext(2, b"tree/0/9")),
    "reference to a weight": ("T003", ext(1, b"w")),
    "reference to nothing": ("T003", ext(1, b"")),
}


@pytest.mark.parametrize(("rule", "raw"), BROKEN.values(), ids=BROKEN)
def test_a_broken_tree_is_refused(checkpoint: zckpt.Checkpoint, rule: str, raw: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        loader_of(checkpoint)._tree(raw, "some file")
    assert caught.value.rule == rule


def test_a_tree_deeper_than_the_parser_goes_is_refused() -> None:
    with pytest.raises(FormatError):
        unpack(deep(100_000))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> zckpt.Checkpoint:
    path: Path = tmp_path_factory.mktemp("run") / "c"
    write_state(path, 1, {"w": (2,)}, parts=("master",))
    return zckpt.open(path)


def test_a_list_in_many_places_is_counted_while_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values have 2^60 lists, and 10^9 bytes. The first could never be encoded completely, so its lists are counted
    while they are encoded."""
    monkeypatch.setattr(tree, "CONTAINERS_MAX", 10_000)
    monkeypatch.setattr(tree, "TREE_BYTES_MAX", 10_000)
    lists: list[object] = []
    texts = ["x" * 1000]
    for _ in range(60):
        lists, texts = [lists, lists], [*texts, *texts][:1000]
    for value in (lists, [texts] * 1000):
        with pytest.raises(StateError, match="too large") as caught:
            pack(value)
        assert caught.value.rule == "T004"
