"""Python's collector of garbage that refers to itself."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_counting = threading.Lock()
_pauses = 0
"""How many calls have paused the collector and not ended."""


@contextmanager
def paused_collector() -> Iterator[None]:
    """Returns a context, which also serves as a decorator, in which the collector does not start by itself.

    The collector starts after a number of new objects, and looks through all objects of the process. While the objects
    of many tensors are made, it would start many times, take up to half of the time, and find nothing.
    """
    global _pauses  # noqa: PLW0603  the collector is one for the process
    with _counting:
        if gc.isenabled() or _pauses:
            _pauses += 1
        was_enabled = _pauses > 0
        gc.disable()
    try:
        yield
    finally:
        with _counting:
            if was_enabled and _pauses:
                _pauses -= 1
                if not _pauses:
                    gc.enable()


def _continue_in_child() -> None:
    """Is called in a forked process, in which the threads that have paused the collector do not exist."""
    global _counting, _pauses  # noqa: PLW0603
    _counting = threading.Lock()  # Another thread of the parent may have held it.
    if _pauses:
        _pauses = 0
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_continue_in_child)
