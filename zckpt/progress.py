"""Reports the progress of a long operation, shows it as a bar, and logs how the operation was done."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


logger = logging.getLogger("zckpt")
"""The logger for all messages of zckpt. INFO has a line for each write and restore. DEBUG says when a slower way was
taken and why, such as the page cache because the file system has no direct I/O."""


class Progress(Protocol):
    """The type of the argument ``progress=``.

    Its methods are called one at a time, but from several threads. An error that one of them raises ends the operation.
    On each rank, ``nbytes`` is the number of bytes of this rank alone.
    """

    def begin(self, action: str, nbytes: int) -> None:
        """Tells that an operation begins.

        Args:
            action: "write", "restore", "load", "validate", "copy", "compare", "export", "convert", "show" or "report".
            nbytes: the number of bytes of tensors that this rank moves in the operation.
        """

    def advance(self, nbytes: int) -> None:
        """Tells that more bytes have been moved.

        Args:
            nbytes: the number of bytes since the last call.
        """

    def end(self) -> None:
        """Tells that the operation has ended, with success or with an error."""


class ProgressBar:
    """A progress bar on standard error. It is shown only on rank 0, and only if standard error is a terminal."""

    def __init__(self, file: TextIO | None = None) -> None:
        """``file``: a stream that takes the place of standard error."""
        self._file = file

    def begin(self, action: str, nbytes: int) -> None:
        from tqdm import tqdm

        # With None, tqdm shows the bar only on a terminal.
        hidden = True if os.environ.get("RANK", "0") != "0" else None
        self._bar: Any = tqdm(
            total=nbytes, desc=f"zckpt {action}", unit="B", unit_scale=True, unit_divisor=1024, disable=hidden,
            file=self._file, dynamic_ncols=True,
        )  # fmt: skip

    def advance(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def end(self) -> None:
        self._bar.close()


class PartOfProgress:
    """The progress of one part of an operation that has begun already. Passes the bytes on to ``advance``."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def begin(self, action: str, nbytes: int) -> None: ...

    def end(self) -> None: ...


def check_progress(progress: Progress | None) -> None:
    """Raises TypeError if ``progress`` is neither None nor an object with the methods of ``Progress``."""
    methods = (getattr(progress, name, None) for name in ("begin", "advance", "end"))
    if progress is not None and (isinstance(progress, type) or not all(map(callable, methods))):
        raise TypeError(
            f"progress must have the methods of zckpt.Progress, as zckpt.ProgressBar() has them, got {progress!r}"
        )


@contextmanager
def reported(progress: Progress | None, action: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Tells ``progress`` that an operation begins and ends. The value of the context is a function. Call it with the
    number of bytes that have been moved since the last call. Raises TypeError if ``progress`` is no such object."""
    check_progress(progress)
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


@contextmanager
def logged(action: str, path: str, nbytes: int) -> Iterator[None]:
    """Logs how long the context took, if it ends without an error. ``action`` is what this rank has done with
    ``nbytes`` bytes of tensors of the checkpoint at ``path``."""
    begin = time.perf_counter()
    yield
    seconds = time.perf_counter() - begin
    size = nbytes / 2**30
    logger.info("%s %s: %.3f GiB on this rank in %.2f s, %.2f GiB/s", action, path, size, seconds, size / seconds)
