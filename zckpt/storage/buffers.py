"""The memory that a store reads into and writes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Buffer, Iterable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

PAGE_BYTES = 4096
"""The unit of direct I/O, in bytes: file offsets, lengths and memory addresses have to be multiples of this number."""


def after(views: Sequence[Bytes | memoryview], nbytes: int) -> Sequence[Bytes | memoryview]:
    """Returns the rest of ``views`` without their first ``nbytes`` bytes. The rest shares their memory."""
    if nbytes == 0:
        return views
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def scatter(pieces: Iterable[Buffer], views: Sequence[Bytes | memoryview]) -> int:
    """Copies the bytes of all pieces into the views, one after the other. Returns the number of bytes, which are not
    more than the views have room for."""
    targets = [np.asarray(view) for view in views if len(view)]
    filled = number = start = 0
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        filled += len(data)
        while len(data):
            room = targets[number][start:]
            nbytes = min(len(room), len(data))
            room[:nbytes] = data[:nbytes]
            data, start = data[nbytes:], start + nbytes
            if start == len(targets[number]):
                number, start = number + 1, 0
    return filled


def whole_pages(offset: int, nbytes: int) -> tuple[int, int]:
    """Finds the whole pages in a part of a file: ``nbytes`` bytes from byte ``offset`` on. Returns the start of the
    first whole page and the end of the last one, counted from the start of the part. If there is no whole page, returns
    the same number twice, which may be larger than ``nbytes``."""
    first = -offset % PAGE_BYTES
    return first, max(first, nbytes - (offset + nbytes) % PAGE_BYTES)
