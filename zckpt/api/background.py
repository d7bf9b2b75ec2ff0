"""What goes on while training does, such as a write: one at a time, never lost from sight."""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from zckpt.errors import RankError
from zckpt.system.threads import Worker, stop
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zckpt.ranks.collectives import Ranks

_current: Background | None = None


class Background:
    """Work that a thread of its own does, on all ranks.

    Nothing has to be done with it. A failure is printed on stderr at once. The next write, restore, offload or reload
    waits for it and raises its error. A process that ends waits for it too, and prints an error that has not been
    raised yet.
    """

    def __init__(self, what: str, finish: Callable[[Snapshot], None], ranks: Ranks) -> None:
        """``what``: for messages, such as "the write of /run/step1". ``finish`` does it, from ``start`` on; it is given
        what to tell of the engine's state. ``ranks``: those that do it together, as the background knows them."""
        self._what = what
        self.error: BaseException | None = None
        """Why it has failed; the same kind of failure on every rank."""
        self._finish = finish
        self._ranks = ranks
        self._snapshot = Snapshot()
        self._started = threading.Event()
        self._cancelled = False
        self._seen = False
        # No daemon: the interpreter waits for it before it exits
        self._worker = Worker(self._run, "zckpt-background", daemon=False)

    def stand_by(self) -> None:
        """Has its thread ready. Raises RuntimeError where the system has no thread left."""
        self._worker.start()

    def start(self) -> None:
        """Has it begin, after ``stand_by``. From now on the next write, restore, offload or reload waits for it, and so
        does the end of the process. Raises nothing."""
        global _current  # noqa: PLW0603  the one that there is
        _current = self
        self._started.set()

    def cancel(self) -> bool:
        """To be called after a failure. Before ``start``: stops the thread, and returns True. After it: the work goes
        on if ``Snapshot.copied`` is set, and is given up if not; returns False."""
        if self._started.is_set() and not self._cancelled:
            if not self._snapshot.copied.is_set():
                self._give_up()
            return False
        self._cancelled = True
        self._started.set()
        stop([self._worker])
        self._snapshot.end()
        return True

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._worker.ended

    def join(self, timeout: float | None = None) -> None:
        """Returns once it is done. Raises its error, and TimeoutError after ``timeout`` seconds. May be called again
        after that, or after an interrupt."""
        if not self._worker.wait(timeout):
            raise TimeoutError(f"{self._what} is still under way")
        if self.error is not None:
            self._seen = True
            raise self.error

    def settle(self) -> None:
        """Waits until it has ended, well or not. Raises nothing but an interrupt."""
        self._worker.wait()

    def finish(self) -> None:
        """As ``join``, but an error that the caller has seen is not raised again."""
        if not self._seen:
            self.join()

    def wait_until_copied(self, ranks: Ranks) -> None:
        """Until what may change at any time has been copied. Raises nothing but an interrupt, and gives up then; one
        that comes later than the copies is not raised here."""
        if not self._snapshot.copied.is_set():
            with self._giving_up(), ranks.interruptible():
                self._snapshot.copied.wait()

    def wait_until_taken(self) -> None:
        """Until all of the engine's state may change. Raises nothing but an interrupt, and gives up then."""
        with self._giving_up():
            self._snapshot.taken.wait()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # the state may change now
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._snapshot.give_up("it was interrupted before all of the state had been copied")

    def _run(self) -> None:
        self._started.wait()
        try:
            if not self._cancelled:
                self._finish(self._snapshot)
        except BaseException as error:  # raised by join()
            traceback.clear_frames(error.__traceback__)  # what is open there goes now, whoever keeps the error
            self.error = error
            if self._ranks.rank == 0 or not isinstance(error, RankError):
                why = f"{type(error).__name__}: {error}"
                what = f"zckpt: {self._what} in the background has failed: {why}\n"
                with suppress(Exception):
                    print(
                        f"{what}The next write, restore, offload, reload or wait raises this error.",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            del self._finish  # and with it the state
            self._snapshot.end()

    def _report(self) -> None:
        if self.error is not None and not self._seen:
            traceback.print_exception(self.error)


class PendingWrite(Background):
    """What ``zckpt.write(..., background=True)`` returns.

    Nothing has to be done with it. A failure is printed on stderr at once. The next write, restore, offload or reload
    waits for it and raises its error. A process that ends waits for it too, and prints an error that has not been
    raised yet.
    """

    def __init__(self, path: str, finish: Callable[[Snapshot], None], ranks: Ranks) -> None:
        """``finish`` writes and commits; ``ranks`` write together."""
        super().__init__(f"the write of {path}", finish, ranks)
        self.path = path
        """The checkpoint's absolute path."""

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "under way"
        return f"<zckpt.PendingWrite {self.path!r}: {state}>"

    def wait(self, timeout: float | None = None) -> str:
        """Returns the path once the checkpoint is durable. Raises what ``zckpt.write`` would have raised, and
        TimeoutError after ``timeout`` seconds. May be called again after that, or after an interrupt."""
        self.join(timeout)
        return self.path


def wait() -> None:
    """Waits until this rank has nothing under way in the background, be it a write or an offload. Every rank that takes
    part in that calls it. Raises its error on every one of them, unless ``PendingWrite.wait`` or ``Offloaded.wait`` has
    done so on all of them. An interrupt on one of them ends the wait on all, and not the work: the next write, restore,
    offload or reload waits for it again."""
    global _current  # noqa: PLW0603  the one that there is
    pending = _current
    if pending is not None:
        ranks = pending._ranks.foreground("zckpt.wait")
        with ranks.undivided():
            ranks.together(pending._worker.wait, "wait for what goes on in the background")
            _current = None  # on all ranks or none: they go on together
            ranks.together(pending.finish, "finish what goes on in the background")


@atexit.register
def _report() -> None:
    if _current is not None:
        _current._report()
