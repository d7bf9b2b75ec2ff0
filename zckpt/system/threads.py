"""Threads whose end is waited for, whatever interrupts that."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Worker:
    """Calls ``function`` once, in a thread of its own.

    Not ``threading.Thread`` with its ``join``: in Python 3.11, once Ctrl-C has interrupted a ``join``, the thread
    counts as one that has ended, though it goes on. Then neither a second ``join`` nor the end of the process waits for
    it.
    """

    def __init__(self, function: Callable[[], None], name: str, *, daemon: bool = False) -> None:
        self.ended = False
        """Whether ``function`` has returned or raised, or will never be called."""
        self._function = function
        self._first: dict[str, bool] = {}
        """Who has come first: the thread, to call the function, or ``stop``, so that it is never called."""
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    def start(self) -> None:
        """Raises RuntimeError where the system has no thread left. After this or an interrupt, call ``stop``."""
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Until the function has ended, or for ``timeout`` seconds; returns whether it has ended. May be called again
        after an interrupt."""
        # The lock is free only once `ended` is set, so an interrupt between the two calls does no harm.
        if not self.ended and self._running.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            self._running.release()
        return self.ended

    def stop(self) -> None:
        """Has the function never be called, if that has not begun yet; otherwise waits for its end."""
        if self._first.setdefault("thread", False):
            self.wait()
        else:
            self.ended = True

    def _run(self) -> None:
        if self._first.setdefault("thread", True):
            try:
                self._function()
            finally:
                self.ended = True
                self._running.release()


def stop(workers: Iterable[Worker]) -> None:
    """``stop`` of all of them. An interrupt meanwhile is raised only once none of them runs any more: they use what the
    caller is about to close."""
    interrupts: list[BaseException] = []
    for worker in workers:
        while not worker.ended:
            try:
                worker.stop()
            except BaseException as error:  # raised below
                interrupts.append(error)
    if interrupts:
        raise interrupts[0]
