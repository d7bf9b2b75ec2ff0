"""A write that goes on while training does: one at a time, never lost from sight."""

from __future__ import annotations

import atexit
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_current: PendingWrite | None = None


class PendingWrite:
    """What ``zckpt.write(..., background=True)`` returns.

    Nothing has to be done with it: the next write or restore waits for it and raises its error, a process that ends
    waits for it too and prints what nobody has seen.
    """

    def __init__(self, path: str, finish: Callable[[Callable[[], None]], None]) -> None:
        """``finish`` writes and commits; it is given what to call once the engine's state is not needed any more."""
        self.path = path
        """The checkpoint's absolute path."""
        self.error: BaseException | None = None
        """Why it has failed; the same kind of failure on every rank."""
        self._taken = threading.Event()
        self._seen = False
        # No daemon: the interpreter waits for it before it exits
        self._thread = threading.Thread(target=self._run, args=(finish,), name="zckpt-background", daemon=False)
        self._thread.start()

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "under way"
        return f"<zckpt.PendingWrite {self.path!r}: {state}>"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> str:
        """Returns the path once the checkpoint is durable. Raises what ``zckpt.write`` would have raised, and
        TimeoutError after ``timeout`` seconds."""
        self._thread.join(timeout)
        if not self.done:
            raise TimeoutError(f"the write of {self.path} is still under way")
        if self.error is not None:
            self._seen = True
            raise self.error
        return self.path

    def finish(self) -> None:
        """As ``wait``, but an error that the caller has seen is not raised again."""
        self._thread.join()
        if not self._seen:
            self.wait()

    def wait_until_taken(self) -> None:
        """Until the engine's state may change again. Raises nothing."""
        self._taken.wait()

    def _run(self, finish: Callable[[Callable[[], None]], None]) -> None:
        try:
            finish(self._taken.set)
        except BaseException as error:  # raised by wait()
            traceback.clear_frames(error.__traceback__)  # what is open there goes now, whoever keeps the error
            self.error = error
        finally:
            self._taken.set()

    def _report(self) -> None:
        if self.error is not None and not self._seen:
            traceback.print_exception(self.error)


def start_write(path: str, finish: Callable[[Callable[[], None]], None]) -> PendingWrite:
    """Call ``finish_current`` first, on every rank."""
    global _current  # noqa: PLW0603  the one write under way
    _current = PendingWrite(path, finish)
    return _current


def finish_current() -> None:
    """Until this rank has no write under way. Raises its error, unless ``PendingWrite.wait`` has."""
    global _current
    pending, _current = _current, None
    if pending is not None:
        pending.finish()


@atexit.register
def _report() -> None:
    if _current is not None:
        _current._report()
