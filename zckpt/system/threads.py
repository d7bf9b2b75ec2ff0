"""Threads whose end is waited for: even if the wait is interrupted, or before the process ends. Also a count of what
several threads have done."""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zckpt.errors import ZckptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

EXIT_SECONDS = 10
"""The end of the process waits at most this many seconds for all watchers together."""

_watchers: set[Watcher] = set()
"""The watchers that were started and are not known to have ended."""


class Worker:
    """Calls ``function`` once, in a thread of its own.

    ``threading.Thread.join`` would not do: in Python 3.11, once Ctrl-C has interrupted a ``join``, the thread counts as
    ended although it still runs. Then neither a second ``join`` nor the end of the process waits for it.
    """

    def __init__(self, function: Callable[[], None], name: str, *, daemon: bool = False) -> None:
        self._function = function
        self._ended, self._process = False, os.getpid()
        self._first: dict[str, bool] = {}
        """Records which came first: the thread that calls the function, or ``stop``, after which the function is never
        called. ``setdefault`` makes this decision atomic."""
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    @property
    def ended(self) -> bool:
        """Whether ``function`` has returned or raised, or will never be called. In a forked process it has ended,
        because such a process has none of the threads of its parent."""
        return self._ended or self.in_parent

    @property
    def in_parent(self) -> bool:
        """Whether this process was forked while the function had not ended, so that only the parent can know its
        end."""
        return not self._ended and self._process != os.getpid()

    def start(self) -> None:
        """Starts the thread. Raises ZckptError if the system cannot start another thread. After this call, or after an
        interrupt, call ``stop``."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ZckptError(
                f"the system cannot start another thread ({self._thread.name}): {error}",
                hint="allow more threads and processes (`ulimit -u`, or pids.max of a container), or free memory",
            ) from error

    def start_or_run(self) -> None:
        """Starts the thread. If the system cannot start another one, calls the function in this thread."""
        try:
            self.start()
        except ZckptError:
            self._run()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the function has ended, or for ``timeout`` seconds. Returns whether it has ended. May be called
        again after an interrupt."""
        # The lock is free only once `_ended` is set, so an interrupt between the two calls does no harm.
        if not self.ended and self._running.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            self._running.release()
        return self.ended

    def stop(self) -> None:
        """Prevents the call of the function if it has not begun yet. Otherwise waits for its end."""
        if self._first.setdefault("thread", False):
            self.wait()
        else:
            self._ended = True

    def _run(self) -> None:
        if self._first.setdefault("thread", True):
            try:
                self._function()
            finally:
                del self._function  # so that nothing that it refers to outlives the wait for its end
                self._ended = True
                self._running.release()


class Watcher:
    """Calls ``function`` once, in a thread that keeps no process alive. The function has to return soon after
    ``closed`` is set. It may use a store of torch.distributed.

    Python before 3.14 ends a thread that returns from compiled code while the interpreter ends. If that code is C++, as
    in such a store, this aborts the process ("terminate called without an active exception"). So the end of the process
    waits for the function.
    """

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self.closed = threading.Event()
        self._worker = Worker(function, name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises ZckptError if the system cannot start another thread."""
        _watchers.add(self)  # before an interrupt can come that leaves the thread running
        try:
            self._worker.start()
        except ZckptError:
            _watchers.discard(self)
            raise

    def wait(self, timeout: float) -> bool:
        """Waits until the function has ended, or for ``timeout`` seconds. Returns whether it has ended."""
        ended = self._worker.wait(timeout)
        if ended:
            _watchers.discard(self)
        return ended

    def close(self, timeout: float) -> None:
        """Sets ``closed``, and waits for the end of the function, but no longer than ``timeout`` seconds, because the
        function may be stuck in the store."""
        self.closed.set()
        if self in _watchers:
            self.wait(timeout)


@atexit.register
def _close_watchers() -> None:
    running = [*_watchers]
    for watcher in running:
        watcher.closed.set()
    deadline = time.monotonic() + EXIT_SECONDS
    for watcher in running:
        watcher.close(deadline - time.monotonic())


def stop(workers: Iterable[Worker]) -> None:
    """Calls ``stop`` of all workers. If it is interrupted, it raises the interrupt only once no worker is running any
    more, because the workers use resources that the caller is about to close."""
    interrupts: list[BaseException] = []
    for worker in workers:
        while not worker.ended:
            try:
                worker.stop()
            except BaseException as error:  # raised below
                interrupts.append(error)
    if interrupts:
        raise interrupts[0]


@contextmanager
def beside(action: Callable[[], None], name: str) -> Iterator[Callable[[], None]]:
    """Returns a context whose value is a function that starts a thread of this ``name``, which calls ``action``. If the
    system cannot start another thread, the function itself calls ``action``. The code in the context has to call this
    function exactly once, in any thread, unless it raises an error. The thread has ended at the end of the context. An
    error of ``action`` is raised then, unless the context itself has raised an error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # raised below
            errors.append(error)

    worker = Worker(run, name)
    started = threading.Event()

    def start() -> None:
        started.set()
        worker.start_or_run()

    try:
        yield start
        if not started.is_set():
            raise RuntimeError(f"the thread {name} was not started")
        worker.wait()
    finally:
        stop([worker])
    if errors:
        raise errors.pop()
