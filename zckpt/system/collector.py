"""Python's collector of garbage that refers to itself."""

from __future__ import annotations

import gc
import os
import threading
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_counting = threading.RLock()  # A handler of a signal may call zckpt while this thread holds it.
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
        global _pauses  # noqa: PLW0603  the collector is one for the process
        with _counting:
            pauses = gc.isenabled() or _pauses > 0
            _pauses += pauses
            gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            with _counting:
                if pauses and _pauses:
                    _pauses -= 1
                    if not _pauses:
                        gc.enable()

    return called


def _continue_in_child() -> None:
    """Is called in a forked process, in which the threads that have paused the collector do not exist."""
    global _counting, _pauses  # noqa: PLW0603
    _counting = threading.RLock()  # Another thread of the parent may have held it.
    if _pauses:
        _pauses = 0
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_continue_in_child)
