"""msgpack values, parsed in memory that their length and number of arrays and maps bound."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable

ERRORS = (ValueError, TypeError, msgpack.UnpackException)
"""What ``unpack`` raises for bytes that are no msgpack value."""


def _reader(raw: bytes) -> Any:
    reader = msgpack.Unpacker(max_buffer_size=max(len(raw), 1))
    reader.feed(raw)
    return reader


def _check_whole(raw: bytes) -> None:
    """msgpack before 1.2 takes memory for as many elements as an array announces, and for each array inside it again:
    so first a look, which makes no objects, whether all of them are there."""
    reader = _reader(raw)
    reader.skip()
    if reader.tell() != len(raw):
        raise ValueError("bytes follow the value")


def elements(raw: bytes, count_max: int) -> tuple[int, list[bytes]]:
    """How many elements the array has that ``raw`` is, and the first ``count_max`` of them, packed."""
    _check_whole(raw)
    reader = _reader(raw)
    count = reader.read_array_header()
    bounds = [reader.tell()]
    while len(bounds) <= min(count, count_max):
        reader.skip()
        bounds.append(reader.tell())
    return count, [raw[start:stop] for start, stop in pairwise(bounds)]


class TooManyError(Exception):
    """More arrays and maps than allowed."""


class Containers:
    """How many arrays and maps may still be unpacked."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooManyError


def unpack(
    raw: bytes,
    containers: Containers,
    *,
    is_key: Callable[[object], bool] | None = None,
    ext_hook: Callable[[int, bytes], object] = msgpack.ExtType,
) -> Any:
    """All of ``raw`` as one value, whose maps have distinct keys, which ``is_key``. Raises ERRORS, TooManyError."""

    def array(items: list[Any]) -> list[Any]:
        containers.take()
        return items

    def mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        containers.take()
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a map has a duplicate key")
        if is_key is not None and not all(is_key(key) for key, _ in pairs):
            raise ValueError("a map has a key of another kind")
        return found

    _check_whole(raw)
    return msgpack.unpackb(
        raw, raw=False, strict_map_key=False, object_pairs_hook=mapping, list_hook=array, ext_hook=ext_hook
    )
