"""Changes to the fields of a checkpoint that was taken apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.apart import PIECE, ROW, SEALS, Apart, get

if TYPE_CHECKING:
    from collections.abc import Iterator

EDGES = (0, 1, 2, 3, 4, 7, 8, 16, 4095, 4096, 4097, 8192, 1 << 20, 1 << 31, 1 << 32)
EDGES += ((1 << 62) - 1, 1 << 62, (1 << 64) - 1)
TEXTS = ("", "w", "b", "head", "master", "exp_avg", "state", "F32", "I64", "U8", "F64", "BOOL", "@pad", "w@0:2")
TEXTS += ("w@0:3", "..", "a/b", "rank/0", "rank/1", "tree/0/0", "__metadata__", "0123456789abcdef", "{}")
TEXTS += ('{"w":[3]}', "\0", "1.0")


class Draw:
    """Choices made by bytes; when they are used up, the first of everything."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, below: int) -> int:
        if below <= 1 or self.at >= len(self.data):
            return 0
        size = 1 if below <= 256 else 2
        value = int.from_bytes(self.data[self.at : self.at + size], "little")
        self.at += size
        return value % below

    def choice(self, of: Any) -> Any:
        return of[self.number(len(of))]

    def value(self, old: Any, depth: int = 0) -> Any:
        """Something in the place of ``old``, mostly of its kind."""
        kind = self.number(16)
        if isinstance(old, int) and kind < 12:
            step = self.choice((1, -1, 2, -2, 4, -4, 8, 4096, -4096))
            return (old + step) % (1 << 64) if kind < 7 else self.choice(EDGES)
        if isinstance(old, str) and kind < 12:
            return self.choice(TEXTS)
        if isinstance(old, bytes) and kind < 12:
            changed = bytearray(old or b"\0")
            changed[self.number(len(changed))] ^= 1 << self.number(8)
            return bytes(changed)
        if isinstance(old, list) and kind < 12 and old:
            place, other = self.number(len(old)), self.number(len(old))
            if kind < 3:
                return [*old[:place], *old[place + 1 :]]
            if kind < 6:
                return [*old[:place], old[other], *old[place:]]
            changed = [*old]
            changed[place], changed[other] = old[other], old[place]
            return changed
        plain = (None, True, -1, 1.5, "", b"", [], {}, self.choice(EDGES), self.choice(TEXTS))
        made = self.choice(plain)
        return [made] * (1 + self.number(3)) if depth == 0 and kind == 15 else made


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in nested maps and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*way, key)
        yield from places(item, (*way, key))


def change(value: Any, draw: Draw) -> None:
    """One thing in nested maps and lists: another value, none, or one more key."""
    ways = list(places(value))
    if not ways:
        return
    *way, last = draw.choice(ways)
    for key in way:
        value = value[key]
    what = draw.number(16)
    if what == 15 and isinstance(value, dict):
        del value[last]
    elif what == 14 and isinstance(value, dict):
        value[draw.choice(TEXTS)] = value[last]
    else:
        value[last] = draw.value(value[last])


def spoil(apart: Apart, draw: Draw) -> Apart:
    """As many changes as there are bytes for."""
    while draw.at < len(draw.data):
        what = draw.number(12)
        if what < 4:
            change(apart.body, draw)
        elif what < 6:
            change(apart.index, draw)
        elif what < 8:
            change(draw.choice(apart.files).header, draw)
        elif what == 8:
            change(apart.state, draw)
        elif what == 9:
            data = draw.choice(apart.files).data
            data[draw.number(len(data))] ^= 1 << draw.number(8)
        elif what == 10:
            data = draw.choice(apart.files).data
            data += b"\0" * (1 + draw.number(9))
        else:
            apart.seal.discard(draw.choice(sorted(SEALS)))
    apart.index = [{name: fit(get(chunk, name), dtype) for name, dtype in ROW + PIECE} for chunk in apart.index]
    return apart


def fit(column: Any, dtype: str) -> list[int]:
    """A column as the index can hold it."""
    most = (1 << 8 * np.dtype(dtype).itemsize) - 1
    return [value & most for value in column if isinstance(value, int)] if isinstance(column, list) else []
