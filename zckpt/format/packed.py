"""msgpack values. The memory that it takes to parse one is bounded by its length and its number of arrays and maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOO_DEEP = msgpack.StackError
"""The error that ``unpack`` raises for a value that is nested deeper than msgpack's parser can go. It is one of
ERRORS."""
ERRORS = (ValueError, TypeError, msgpack.UnpackException)
"""The errors that ``unpack`` raises for bytes that are not one msgpack value."""


def _reader(raw: bytes | memoryview) -> Any:
    reader = msgpack.Unpacker(max_buffer_size=max(len(raw), 1))
    reader.feed(raw)
    return reader


def _check_whole(raw: bytes) -> None:
    """Raises ERRORS unless ``raw`` is exactly one msgpack value. It makes no objects.

    msgpack before 1.2 allocates memory for as many items as an array announces, and for each array inside it again. So
    this looks first whether all of the items are there.
    """
    reader = _reader(raw)
    reader.skip()
    if reader.tell() != len(raw):
        raise ValueError("bytes follow the value")


def items(raw: memoryview) -> Iterator[memoryview]:
    """Yields the items of a packed array, each of them still packed.

    It looks at the bytes behind an item only when the next item is asked for. It raises ERRORS for bytes that are not
    one msgpack array, also if more bytes follow the array.
    """
    reader = _reader(raw)
    for _ in range(reader.read_array_header()):
        start = reader.tell()
        reader.skip()
        yield raw[start : reader.tell()]
    if reader.tell() != len(raw):
        raise ValueError("bytes follow the array")


class TooManyError(Exception):
    """A value has more arrays and maps than are allowed."""


class Containers:
    """The number of arrays and maps that may still be unpacked."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def take(self) -> None:
        """Counts one more array or map. Raises TooManyError if it is not allowed any more."""
        self.remaining -= 1
        if self.remaining < 0:
            raise TooManyError


def unpack(
    raw: bytes,
    containers: Containers,
    *,
    is_key: Callable[[object], bool] | None = None,
    ext_hook: Callable[[int, bytes], object] = msgpack.ExtType,
) -> Any:
    """Returns the one value that ``raw`` consists of. ``containers``, the number of arrays and maps that may be
    unpacked, is counted down. ``is_key`` says whether a value may be the key of a map. ``ext_hook`` makes a value of
    the type and the payload of an extension. Raises one of ERRORS if ``raw`` is not exactly one msgpack value, if a map
    has a duplicate key, or if ``is_key`` refuses a key, and TooManyError if there are too many arrays and maps."""

    def array(values: list[Any]) -> list[Any]:
        containers.take()
        return values

    def mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        containers.take()
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a map has a duplicate key")
        if is_key is not None and not all(is_key(key) for key, _ in pairs):
            raise ValueError("a map has a key of another kind")
        return values

    _check_whole(raw)
    return msgpack.unpackb(
        raw, raw=False, strict_map_key=False, object_pairs_hook=mapping, list_hook=array, ext_hook=ext_hook
    )
