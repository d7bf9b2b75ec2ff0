"""Ctrl-C in the middle of what several ranks do together: raised where it does no harm to the others."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Interrupts:
    """What becomes of Ctrl-C (SIGINT) inside of ``held``: it is raised in ``allowed`` alone, at its begin if it came
    earlier, or at the end of ``held``. Where an error ends ``held``, it is raised from that error. The second one is
    raised at once, for whoever does not want to wait.

    Elsewhere, in other threads than the main one, and where the program has a handler of its own, nothing changes.
    """

    def __init__(self) -> None:
        self._allowed = True
        self._count = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Once in the life of this object."""
        here = threading.current_thread() is threading.main_thread()
        if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        self._allowed = False
        signal.signal(signal.SIGINT, self._handle)
        try:
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self._allowed = True
        except Exception as error:
            self._raise_earlier(error)
            raise
        self._raise_earlier()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside of it an interrupt is raised."""
        before, self._allowed = self._allowed, True
        try:
            self._raise_earlier()
            yield
        finally:
            self._allowed = before

    def _raise_earlier(self, cause: Exception | None = None) -> None:
        if self._count:
            self._count = 0
            raise KeyboardInterrupt from cause

    def _handle(self, *_: Any) -> None:
        self._count += 1
        if self._allowed or self._count > 1:
            self._count = 0
            raise KeyboardInterrupt
