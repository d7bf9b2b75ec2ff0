"""Handles Ctrl-C while several ranks do something together. It is raised where it does no harm to the other ranks."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Interrupts:
    """Delays Ctrl-C (SIGINT). Inside of ``held``, it is raised only inside of ``allowed``, at the beginning of
    ``allowed`` if it came earlier, or at the end of ``held``. If an error ends ``held``, Ctrl-C is raised from that
    error. A second Ctrl-C is raised at once, for users who do not want to wait. Nothing changes in other threads than
    the main one, and if the program has a handler of its own."""

    def __init__(self) -> None:
        self._allowed = True
        self._count = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays Ctrl-C inside of this block. It may be used once for each object."""
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
        """Inside this block, Ctrl-C is raised."""
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
