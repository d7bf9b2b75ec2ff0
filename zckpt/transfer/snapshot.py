"""What the thread that writes and the thread that called ``write`` tell each other about the state."""

from __future__ import annotations

import threading

from zckpt.errors import ZckptError


class Snapshot:
    """Which part of the state has been copied, and whether the write was given up."""

    def __init__(self) -> None:
        self.copied = threading.Event()
        """Set when the part of the state that may change at any time has been read."""
        self.taken = threading.Event()
        """Set when all of the state has been read. It may change from then on."""
        self._reason: str | None = None

    def give_up(self, reason: str) -> None:
        """From now on the write begins no further operation, and it does not commit."""
        self._reason = reason

    def check(self) -> None:
        """Raises ZckptError if the write was given up."""
        if self._reason is not None:
            raise ZckptError(f"the write was given up: {self._reason}", hint="write again")

    def end(self) -> None:
        """The write has ended, well or not: nobody has to wait for it any more."""
        self.copied.set()
        self.taken.set()
