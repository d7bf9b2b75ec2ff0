"""What the thread that writes and the thread that has called ``write`` tell each other about the state."""

from __future__ import annotations

import threading

from zckpt.errors import ZckptError


class Snapshot:
    """Records how much of the state has been read, and whether the write was given up."""

    def __init__(self) -> None:
        self.copied = threading.Event()
        """Set when the part of the state that may change at any time has been read."""
        self.taken = threading.Event()
        """Set when all of the state has been read. From then on the training may change it."""
        self._reason: str | None = None

    def give_up(self, reason: str) -> None:
        """Ends the write early. The write begins no further operation, does not commit, and raises an error with
        ``reason`` in its message."""
        self._reason = reason

    def check(self) -> None:
        """Raises ZckptError if the write was given up."""
        if self._reason is not None:
            raise ZckptError(f"the write was given up: {self._reason}", hint="write again")

    def end(self) -> None:
        """Tells all threads that the write has ended, with success or with an error, so that none waits for it any
        more."""
        self.copied.set()
        self.taken.set()
