"""How far a long operation is: what is told, and a bar for those who watch."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Progress(Protocol):
    """What ``progress=`` takes. Calls come one at a time, but from several threads; what one raises ends the operation.

    On each rank ``nbytes`` are that rank's own.
    """

    def begin(self, action: str, nbytes: int) -> None:
        """``action`` ("write", "restore", "load", "validate", "copy", "compare") begins; ``nbytes`` bytes of tensors
        are to be moved."""

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more have been."""

    def end(self) -> None:
        """It is over, well or not."""


class ProgressBar:
    """A bar on standard error, on rank 0 alone and only where that is a terminal."""

    def begin(self, action: str, nbytes: int) -> None:
        from tqdm import tqdm

        hidden = True if os.environ.get("RANK", "0") != "0" else None  # None: if it is no terminal
        self._bar: Any = tqdm(
            total=nbytes, desc=f"zckpt {action}", unit="B", unit_scale=True, unit_divisor=1024, disable=hidden
        )

    def advance(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def end(self) -> None:
        self._bar.close()


@contextmanager
def reported(progress: Progress | None, action: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Tells ``progress`` of the beginning and the end; the context is what to call with the bytes in between."""
    if progress is None:
        yield lambda nbytes: None
        return
    lock = threading.Lock()

    def advance(nbytes: int) -> None:
        with lock:
            progress.advance(nbytes)

    progress.begin(action, nbytes)
    try:
        yield advance
    finally:
        progress.end()
