"""Runs functions in forked processes, which start quickly and are good enough for code that only uses files."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 600
"""A process that hangs is ended after so many seconds."""


def fork(action: Callable[[], object]) -> tuple[int, int]:
    """Runs ``action`` in a new process.

    Returns the process id, and the file descriptor from which the pickled result or error can be read.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        signal.alarm(SECONDS)
        try:
            result: Any = action()
        except Exception as error:
            result = error
        os.write(write, pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def result_of(child: tuple[int, int]) -> Any:
    """Waits for a process of ``fork`` and returns its result or its error. Returns None if the process was killed."""
    with os.fdopen(child[1], "rb") as read:
        raw = read.read()
    os.waitpid(child[0], 0)
    return pickle.loads(raw) if raw else None


def in_processes(count: int, action: Callable[[int], object]) -> list[Any]:
    """Calls ``action(0)``, ``action(1)``, ... at the same time, each in a process of its own.

    Returns the values that the calls return, or the errors that they raise.
    """
    children = [fork(partial(action, number)) for number in range(count)]
    return [result_of(child) for child in children]


@contextmanager
def stopped_at(action: Callable[[Callable[[], None]], object]) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Runs ``action(wait)`` in a process up to its call of ``wait``, where the process stops.

    Yields the process id, and a function that lets the process go on and returns its result. The process is killed at
    the end if that function was not called.
    """
    reached, tell = os.pipe()
    hold, release = os.pipe()

    def act() -> object:
        def wait() -> None:
            os.write(tell, b"!")
            os.read(hold, 1)

        return action(wait)

    child = fork(act)
    results: list[Any] = []
    os.close(tell)
    assert os.read(reached, 1), result_of(child)

    def go_on() -> Any:
        os.write(release, b"!")
        results.append(result_of(child))
        return results[0]

    try:
        yield child[0], go_on
    finally:
        if not results:
            os.kill(child[0], signal.SIGKILL)
            result_of(child)
        for fd in (reached, hold, release):
            os.close(fd)
