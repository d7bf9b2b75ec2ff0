"""The memory that a store reads into and writes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

PAGE_BYTES = 4096
"""Direct I/O wants file offsets, lengths and memory addresses to be multiples of it."""


def after(views: Sequence[Bytes | memoryview], nbytes: int) -> Sequence[Bytes | memoryview]:
    """What is left of ``views`` after the first ``nbytes``."""
    if nbytes == 0:
        return views
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def whole_pages(offset: int, nbytes: int) -> tuple[int, int]:
    """Of ``nbytes`` from byte ``offset`` of a file on: where the first whole page begins among them, and where the last
    one ends; the same, which may be behind them, if there is none."""
    first = -offset % PAGE_BYTES
    return first, max(first, nbytes - (offset + nbytes) % PAGE_BYTES)
