"""Waits of this process that end by themselves."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ends: dict[object, float] = {}
"""When each of the waits of ``bounded_wait`` ends at the latest."""


@contextmanager
def bounded_wait(seconds: float) -> Iterator[None]:
    """Inside this block, but for at most ``seconds``, a thread of this process waits for something that ends by itself,
    such as a request to a server that cannot be reached and is asked again and again. Other ranks do not take this rank
    for one that hangs meanwhile."""
    wait = object()
    _ends[wait] = time.monotonic() + seconds
    try:
        yield
    finally:
        del _ends[wait]


def is_in_bounded_wait() -> bool:
    """Returns whether any thread is in such a block, and its time is not over."""
    now = time.monotonic()
    return any(end > now for end in list(_ends.values()))
