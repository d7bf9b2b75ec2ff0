"""Runs writes and offloads in the background while the training goes on, one at a time, and reports their errors."""

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
    """Work that each rank does in a thread of its own, such as a write.

    The caller need not do anything with this object. A failure is printed on stderr at once. The next write, restore,
    offload or reload waits for the work and raises its error. The end of the process waits for it too, and prints an
    error that has not been raised yet.
    """

    def __init__(self, what: str, finish: Callable[[Snapshot], None], ranks: Ranks) -> None:
        """``what``: a name of the work for messages, such as "the write of /run/step1". ``finish``: the function that
        does the work, which the thread calls after ``start``. It has to tell the ``Snapshot`` that it gets when the
        engine's state may change. ``ranks``: the ranks that do the work together, made for use in the background."""
        self._what = what
        self.error: BaseException | None = None
        """The error with which the work has failed. All ranks fail together, each with an error of its own."""
        self._finish = finish
        self._ranks = ranks
        self._snapshot = Snapshot()
        self._started = threading.Event()
        self._cancelled = False
        self._seen = False
        self._afterwards: list[Callable[[], None]] | None = []
        """The functions that this rank's thread calls once all ranks have finished the work. None means that the thread
        calls no more of them."""
        self._ending = threading.Lock()
        # The interpreter waits for threads that are no daemons before it exits.
        self._worker = Worker(self._run, "zckpt-background", daemon=False)

    def stand_by(self) -> None:
        """Starts the thread, which waits for ``start``. Raises RuntimeError if the system cannot create a thread."""
        self._worker.start()

    def start(self) -> None:
        """Begins the work, after ``stand_by``. From now on the next write, restore, offload or reload and the end of
        the process wait for it. Raises nothing."""
        global _current  # noqa: PLW0603  only one runs at a time
        _current = self
        self._started.set()

    def cancel(self) -> bool:
        """Cancels the work after a failure in the caller's thread, and returns whether it never began. Before
        ``start``, it stops the thread and returns True. After ``start``, it returns False: the work continues if
        ``Snapshot.copied`` is set, and is given up otherwise."""
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
        """Whether the work has ended, with or without an error."""
        return self._worker.ended

    @property
    def state(self) -> str:
        """Whether the work is "under way", "done" or "failed"."""
        return "failed" if self.error else "done" if self.done else "under way"

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the work. Raises its error, or TimeoutError after ``timeout`` seconds. It may be called
        again, also after an interrupt."""
        if not self._worker.wait(timeout):
            raise TimeoutError(f"{self._what} is still under way")
        if self.error is not None:
            self._seen = True
            raise self.error

    def settle(self) -> None:
        """Waits until the work has ended, with or without an error. Raises nothing except KeyboardInterrupt."""
        self._worker.wait()

    def finish(self) -> None:
        """Waits as ``join`` does, but does not raise again an error that ``join`` has already raised."""
        if not self._seen:
            self.join()

    def then(self, action: Callable[[], None]) -> None:
        """Makes this rank's thread call ``action`` once all ranks have finished the work. If they already have, calls
        ``action`` here and now. If the work fails, ``action`` is never called. ``action`` must not raise."""
        with self._ending:
            if self._afterwards is not None:
                self._afterwards.append(action)
                return
        if self.error is None:
            action()

    def _end(self) -> None:
        while True:
            with self._ending:
                if self.error is not None or not self._afterwards:
                    self._afterwards = None
                    return
                action = self._afterwards.pop(0)
            action()

    def wait_until_copied(self, ranks: Ranks) -> None:
        """Waits until the state that may change as soon as training goes on has been copied. Raises nothing except
        KeyboardInterrupt, which gives up the work. An interrupt that arrives after the copies are made is not raised
        here."""
        if not self._snapshot.copied.is_set():
            with self._giving_up(), ranks.interruptible():
                self._snapshot.copied.wait()

    def wait_until_taken(self) -> None:
        """Waits until all of the engine's state may change. Raises nothing except KeyboardInterrupt, which gives up the
        work."""
        with self._giving_up():
            self._snapshot.taken.wait()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # The caller stops waiting, so the state may change under the work.
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._snapshot.give_up("it was interrupted before all of the state had been copied")

    def _run(self) -> None:
        self._started.wait()
        try:
            if not self._cancelled:
                self._finish(self._snapshot)
        except BaseException as error:  # ``join`` raises it again.
            # The frames refer to open files and large tensors, which would stay alive as long as the error.
            traceback.clear_frames(error.__traceback__)
            self.error = error
            if self._ranks.rank == 0 or not isinstance(error, RankError):
                reason = f"{type(error).__name__}: {error}"
                message = f"zckpt: {self._what} in the background has failed: {reason}\n"
                with suppress(Exception):
                    print(
                        f"{message}The next write, restore, offload, reload or wait raises this error.",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            del self._finish  # It refers to the engine's state, whose copies must not stay in memory.
            self._snapshot.end()
            self._end()

    def _report(self) -> None:
        if self.error is not None and not self._seen:
            traceback.print_exception(self.error)


class PendingWrite(Background):
    """A write in the background, as ``zckpt.write(..., background=True)`` returns it.

    The caller need not do anything with this object. A failure is printed on stderr at once. The next write, restore,
    offload or reload waits for the write and raises its error. The end of the process waits for it too, and prints an
    error that has not been raised yet.
    """

    def __init__(self, path: str, finish: Callable[[Snapshot], None], ranks: Ranks) -> None:
        """``finish``: the function that writes and commits. ``ranks``: the ranks that write together."""
        super().__init__(f"the write of {path}", finish, ranks)
        self.path = path
        """The absolute path of the checkpoint."""

    def __repr__(self) -> str:
        return f"<zckpt.PendingWrite {self.path!r}: {self.state}>"

    def wait(self, timeout: float | None = None) -> str:
        """Waits until the checkpoint is durable. It may be called again, also after an interrupt.

        Args:
            timeout: the number of seconds to wait at most. None waits without a limit.

        Returns:
            The absolute path of the checkpoint.

        Raises:
            TimeoutError: the write is still under way.
            ZckptError: the write has failed. This is the error that ``zckpt.write`` raises without ``background``.
        """
        self.join(timeout)
        return self.path


def wait() -> None:
    """Waits for the end of the write or offload that is running in the background, if there is one.

    All ranks that write or offload together have to call this. An interrupt on one rank ends the wait on all of them,
    but not the write or offload itself. The next write, restore, offload or reload waits for it again.

    Raises:
        ZckptError: the write or offload has failed. Every rank raises its error, unless ``PendingWrite.wait`` or
            ``Offloaded.wait`` has already raised it on every rank.
    """
    global _current  # noqa: PLW0603  only one runs at a time
    pending = _current
    if pending is not None:
        ranks = pending._ranks.foreground("zckpt.wait")
        with ranks.undivided():
            ranks.together(pending._worker.wait, "wait for what goes on in the background")
            _current = None  # ``together`` raises on all ranks or on none, so all of them get here or none does.
            ranks.together(pending.finish, "finish what goes on in the background")


def settle() -> None:
    """Waits until the work of this rank in the background has ended, with or without an error. Unlike ``wait``, a
    single rank may call it. Raises nothing except KeyboardInterrupt."""
    if _current is not None:
        _current.settle()


def after_commit(action: Callable[[], None]) -> None:
    """Calls ``action`` on this rank once the write that is running in the background is committed. If that write fails,
    ``action`` is never called. If no write is running, ``action`` is called at once."""
    if _current is None:
        action()
    else:
        _current.then(action)


@atexit.register
def _report() -> None:
    if _current is not None:
        _current._report()
