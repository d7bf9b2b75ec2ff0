"""Python's collector of garbage that refers to itself."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
T = TypeVar("T")

_counting = threading.Lock()
_pauses = 0
"""How many calls have paused the collector and not ended."""


def without_collector(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function so that the collector does not start by itself during a call.

    The collector starts after a number of new objects, and looks through all objects of the process. While the objects
    of many tensors are made, it would start many times, take up to half of the time, and find nothing.
    """

    # A context manager of contextlib as a decorator would have a frame of its own. Warnings would name its line.
    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with _paused():
            return function(*args, **kwargs)

    return called


@contextmanager
def _paused() -> Iterator[None]:
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
