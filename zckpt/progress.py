"""Reports how far a long operation is, and shows it as a bar."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Progress(Protocol):
    """What ``progress=`` takes. Its methods are called one at a time, but from several threads. An error that one of
    them raises ends the operation. On each rank, ``nbytes`` is that rank's own number of bytes.
    """

    def begin(self, action: str, nbytes: int) -> None:
        """An operation begins, in which ``nbytes`` bytes of tensors are moved. ``action`` is "write", "restore",
        "load", "validate", "copy", "compare", "export", "convert", "show" or "report"."""

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more bytes have been moved."""

    def end(self) -> None:
        """The operation has ended, with success or with an error."""


class ProgressBar:
    """A bar on standard error. It is shown only on rank 0, and only where standard error is a terminal."""

    def begin(self, action: str, nbytes: int) -> None:
        from tqdm import tqdm

        hidden = True if os.environ.get("RANK", "0") != "0" else None  # with None, tqdm hides it unless on a terminal
        self._bar: Any = tqdm(
            total=nbytes, desc=f"zckpt {action}", unit="B", unit_scale=True, unit_divisor=1024, disable=hidden
        )

    def advance(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def end(self) -> None:
        self._bar.close()


class PartOfProgress:
    """Passes the bytes of a part of an operation on to ``advance``, where the whole operation has begun already."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def begin(self, action: str, nbytes: int) -> None: ...

    def end(self) -> None: ...


@contextmanager
def reported(progress: Progress | None, action: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Tells ``progress`` that an operation begins and ends. The value of the context is a function that is called with
    the number of bytes that have been moved in between."""
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
