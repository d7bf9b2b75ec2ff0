"""Changes the fields of a checkpoint that has been taken apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.apart import PIECE, ROW, SEALS, Apart, get

if TYPE_CHECKING:
    from collections.abc import Iterator

EDGES: tuple[int, ...] = (0, 1, 2, 3, 4, 7, 8, 16, 4095, 4096, 4097, 8192, 1 << 20, 1 << 31, 1 << 32)
EDGES += ((1 << 62) - 1, 1 << 62, (1 << 64) - 1)
"""Integers at which something may change: near 0, near the sizes of pages and blocks, and at the limits of types."""
TEXTS: tuple[str, ...] = ("", "w", "b", "head", "master", "exp_avg", "state", "F32", "I64", "U8", "F64", "BOOL", "@pad")
TEXTS += ("w@0:2", "w@0:3", "..", "a/b", "rank/0", "rank/1", "tree/0/0", "__metadata__", "0123456789abcdef", "{}")
TEXTS += ('{"w":[3]}', "\0", "1.0")
"""Strings that mean something in a checkpoint."""


class Draw:
    """Makes choices from bytes. When no bytes are left, it always chooses the first."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, below: int) -> int:
        """Returns a number from 0 to ``below`` - 1."""
        if below <= 1 or self.at >= len(self.data):
            return 0
        size = 1 if below <= 256 else 2
        value = int.from_bytes(self.data[self.at : self.at + size], "little")
        self.at += size
        return value % below

    def choice(self, options: Any) -> Any:
        """Returns one item of a sequence."""
        return options[self.number(len(options))]

    def value(self, old: Any, depth: int = 0) -> Any:
        """Returns a value to put in the place of ``old``. Most of the time it is of the same type.

        ``depth`` is 0 if the value may be an array of several values.
        """
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
            i, j = self.number(len(old)), self.number(len(old))
            if kind < 3:
                return [*old[:i], *old[i + 1 :]]
            if kind < 6:
                return [*old[:i], old[j], *old[i:]]
            swapped = [*old]
            swapped[i], swapped[j] = old[j], old[i]
            return swapped
        plain: tuple[Any, ...] = (None, True, -1, 1.5, "", b"", [], {}, self.choice(EDGES), self.choice(TEXTS))
        chosen = self.choice(plain)
        return [chosen] * (1 + self.number(3)) if depth == 0 and kind == 15 else chosen


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path to every value inside nested maps and lists: the keys and positions that lead to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def change(value: Any, draw: Draw) -> None:
    """Makes one change inside nested maps and lists: it replaces or removes one value, or adds one key."""
    paths = list(places(value))
    if not paths:
        return
    *path, last = draw.choice(paths)
    for key in path:
        value = value[key]
    kind = draw.number(16)
    if kind == 15 and isinstance(value, dict):
        del value[last]
    elif kind == 14 and isinstance(value, dict):
        value[draw.choice(TEXTS)] = value[last]
    else:
        value[last] = draw.value(value[last])


def spoil(apart: Apart, draw: Draw) -> Apart:
    """Makes changes to a checkpoint until all bytes of ``draw`` are used."""
    while draw.at < len(draw.data):
        kind = draw.number(12)
        if kind < 4:
            change(apart.body, draw)
        elif kind < 6:
            change(apart.index, draw)
        elif kind < 8:
            change(draw.choice(apart.files).header, draw)
        elif kind == 8:
            change(apart.state, draw)
        elif kind == 9:
            data = draw.choice(apart.files).data
            data[draw.number(len(data))] ^= 1 << draw.number(8)
        elif kind == 10:
            data = draw.choice(apart.files).data
            data += b"\0" * (1 + draw.number(9))
        else:
            apart.seal.discard(draw.choice(sorted(SEALS)))
    apart.index = [{name: fit(get(chunk, name), dtype) for name, dtype in ROW + PIECE} for chunk in apart.index]
    return apart


def fit(column: Any, dtype: str) -> list[int]:
    """Returns the integers of a column, each reduced to the size that the dtype of the index allows."""
    largest = (1 << 8 * np.dtype(dtype).itemsize) - 1
    return [value & largest for value in column if isinstance(value, int)] if isinstance(column, list) else []
