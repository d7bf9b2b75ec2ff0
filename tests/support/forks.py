"""Processes of their own, made by fork: quick, and good enough for what only reads and writes files."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 60


def fork(action: Callable[[], object]) -> tuple[int, int]:
    """Starts it in a new process; returns its id and what to read its pickled result or error from."""
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
    with os.fdopen(child[1], "rb") as read:
        raw = read.read()
    os.waitpid(child[0], 0)
    return pickle.loads(raw) if raw else None


def in_processes(count: int, action: Callable[[int], object]) -> list[Any]:
    """What ``action(0)``, ``action(1)``, ... return or raise, each in a process of its own, all at once."""
    children = [fork(lambda number=number: action(number)) for number in range(count)]
    return [result_of(child) for child in children]


@contextmanager
def stopped_at(action: Callable[[Callable[[], None]], object]) -> Iterator[tuple[int, Callable[[], Any]]]:
    """A process that runs ``action`` as far as its call of what it is given, and waits there. The context is its id,
    and what lets it go on and returns its result. It is killed at the end."""
    reached, tell = os.pipe()
    hold, let_go = os.pipe()

    def act() -> object:
        def wait() -> None:
            os.write(tell, b"!")
            os.read(hold, 1)

        return action(wait)

    child = fork(act)
    done: list[Any] = []
    os.close(tell)
    assert os.read(reached, 1), result_of(child)

    def go_on() -> Any:
        os.write(let_go, b"!")
        done.append(result_of(child))
        return done[0]

    try:
        yield child[0], go_on
    finally:
        if not done:
            os.kill(child[0], signal.SIGKILL)
            result_of(child)
        for fd in (reached, hold, let_go):
            os.close(fd)
