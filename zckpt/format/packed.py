"""msgpack values. The memory that it takes to parse one is bounded by its length and its number of arrays and maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from zckpt.geometry import Ints

ERRORS = (ValueError, TypeError, msgpack.UnpackException)
"""The errors that ``unpack`` raises for bytes that are not one msgpack value."""
_RUNS_MAX = 8
"""The most runs of integers of one length that ``integers`` looks at. It looks at all items for each run."""
_VALUE_TYPES = {0xCC: "u1", 0xCD: ">u2", 0xCE: ">u4", 0xCF: ">u8"}
"""The first byte of each longer form of an integer that is not negative, and the dtype of the bytes behind it."""
_KEYS_MAX = 64
"""``unpack_map`` looks at each key only if there are at most this many."""
_LENGTH_BYTES = {0xDC: 2, 0xDD: 4}
"""The first byte of each longer form of an array, and the number of bytes behind it that have its length."""


def _reader(raw: bytes | memoryview) -> Any:
    reader = msgpack.Unpacker(max_buffer_size=max(len(raw), 1))
    reader.feed(raw)
    return reader


def _check_whole(raw: bytes | memoryview) -> None:
    """Raises ERRORS unless ``raw`` is exactly one msgpack value. It makes no objects.

    msgpack before 1.2 allocates memory for as many items as an array announces, and for each array inside it again. So
    this looks first whether all of the items are there.
    """
    reader = _reader(raw)
    reader.skip()
    if reader.tell() != len(raw):
        raise ValueError("bytes follow the value")


def _next(reader: Any, raw: memoryview) -> memoryview:
    """Returns the bytes of the next value of ``raw``. ``reader`` has read ``raw`` up to this value."""
    start = reader.tell()
    reader.skip()
    return raw[start : reader.tell()]


def items(raw: memoryview) -> Iterator[memoryview]:
    """Yields the items of a packed array, each of them still packed. It looks at the bytes behind an item only when the
    next one is asked for. Raises ERRORS for bytes that are not one msgpack array, also if more bytes follow it."""
    reader = _reader(raw)
    for _ in range(reader.read_array_header()):
        yield _next(reader, raw)
    if reader.tell() != len(raw):
        raise ValueError("bytes follow the array")


def integers(raw: memoryview) -> Ints | None:
    """Returns a packed array of integers as a column, without making an object of each. Returns None if the array has
    other items, or if its integers are of few bytes and of many bytes by turns: then the caller has to unpack it.
    Integers of 2^63 or more become negative. ``raw`` is one whole value."""
    count, position = array_header(raw)
    if count < 0:
        return None
    column = np.empty(count, np.int64)
    first = 0
    for _ in range(_RUNS_MAX):
        if first == count:
            break
        tag = raw[position]
        if tag > 0x7F and tag not in _VALUE_TYPES:
            return None
        form = np.dtype([("tag", "u1"), ("value", _VALUE_TYPES[tag])] if tag > 0x7F else [("value", "u1")])
        items = np.frombuffer(raw, form, min(count - first, (len(raw) - position) // form.itemsize), position)
        others = np.flatnonzero(items["tag"] != tag if tag > 0x7F else items["value"] > 0x7F)
        run = int(others[0]) if len(others) else len(items)
        column[first : first + run] = items["value"][:run]
        first, position = first + run, position + run * form.itemsize
    return column if first == count else None


def words(raw: memoryview, known: Sequence[str]) -> NDArray[np.uint8] | None:
    """Returns for each item of a packed array its position in ``known``, a list of up to 32 words of less than 32 ASCII
    letters and digits, without making an object of each. Returns None if the array has other items. ``raw`` is one
    whole value."""
    count, position = array_header(raw)
    column = np.frombuffer(raw, np.uint8, offset=position)
    if count < 0 or column.min(initial=0xFF) < len(known):
        return None
    # The first byte of a packed word has its length, and differs from all bytes of words. So each word can be replaced
    # by its position wherever it is, until only positions are left.
    positions = {msgpack.packb(word): bytes([number]) for number, word in enumerate(known)}
    while (column >= len(known)).any():
        first, items = int((column >= len(known)).argmax()), column.tobytes()
        word = items[first : first + 1 + (items[first] & 0x1F)]
        if word not in positions:
            return None
        column = np.frombuffer(items.replace(word, positions[word]), np.uint8)
    return column if len(column) == count else None


def array_header(raw: memoryview) -> tuple[int, int]:
    """Returns the number of items of the array that ``raw`` begins with, and the byte of its first item. The number is
    -1 if ``raw`` does not begin with an array."""
    if raw[0] & 0xF0 == 0x90:
        return raw[0] & 0x0F, 1
    length = raw[1 : 1 + _LENGTH_BYTES.get(raw[0], 0)]
    return int.from_bytes(length) if length else -1, 1 + len(length)


class TooManyError(Exception):
    """A value has more arrays and maps than are allowed."""


class Containers:
    """The number of arrays and maps that may still be unpacked. ``take`` counts one, or raises TooManyError."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def take(self) -> None:
        """Counts one more array or map. Raises TooManyError if it is not allowed any more."""
        self.remaining -= 1
        if self.remaining < 0:
            raise TooManyError


def unpack_map(raw: memoryview, containers: Containers, columns: Mapping[str, Callable[[memoryview], Any]]) -> Any:
    """Does what ``unpack`` does. If ``raw`` is a map, ``columns`` has for some of its keys a function that unpacks the
    value, which is an array. If this function returns None, ``unpack`` unpacks the value."""
    reader = _reader(raw)
    count = reader.read_map_header() if raw[:1] and (raw[0] & 0xF0 == 0x80 or raw[0] in (0xDE, 0xDF)) else -1
    if not 0 <= count <= _KEYS_MAX:
        return unpack(raw, containers)
    containers.take()
    values: dict[Any, Any] = {}
    for _ in range(count):
        packed_key, value = _next(reader, raw), _next(reader, raw)
        key = unpack(packed_key, containers, is_whole=True)
        if key in values:
            raise ValueError("a map has a duplicate key")
        column = columns[key](value) if type(key) is str and key in columns else None
        if column is not None:
            containers.take()
        values[key] = unpack(value, containers, is_whole=True) if column is None else column
    if reader.tell() != len(raw):
        raise ValueError("bytes follow the value")
    return values


def unpack(
    raw: bytes | memoryview,
    containers: Containers,
    *,
    is_whole: bool = False,
    is_key: Callable[[object], bool] | None = None,
    ext_hook: Callable[[int, bytes], object] = msgpack.ExtType,
) -> Any:
    """Returns the one value that ``raw`` consists of. ``containers``, the number of arrays and maps that may be
    unpacked, is counted down. ``is_whole``: whether the caller knows that ``raw`` is exactly one msgpack value.
    ``is_key`` says whether a value may be the key of a map. ``ext_hook`` makes a value of the type and the payload of
    an extension. Raises one of ERRORS if ``raw`` is not exactly one msgpack value, if a map has a duplicate key, or if
    ``is_key`` refuses a key, and TooManyError if there are too many arrays and maps."""

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

    if not is_whole:
        _check_whole(raw)
    return msgpack.unpackb(
        raw, raw=False, strict_map_key=False, object_pairs_hook=mapping, list_hook=array, ext_hook=ext_hook
    )
