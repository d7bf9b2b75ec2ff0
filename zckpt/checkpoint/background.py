"""Runs writes and offloads in the background while the training goes on, one at a time for the same ranks, and reports
their errors."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from zckpt.checkpoint.tiers import queue
from zckpt.errors import RankError, ZckptError
from zckpt.system.threads import Worker, stop
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zckpt.ranks.collectives import Ranks

_INTERRUPTED = "it was interrupted before all of the state had been copied"
_pending: dict[tuple[int, ...], BackgroundWork] = {}
"""The work in the background that nobody has waited for yet, by the numbers in the job of the ranks that do it
together."""


class BackgroundWork:
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
        """Starts the thread, which waits for ``start``. Raises ZckptError if the system cannot create a thread."""
        self._worker.start()

    def start(self) -> None:
        """Begins the work, after ``stand_by``. From now on the next write, restore, offload or reload and the end of
        the process wait for it. Raises nothing."""
        _pending[self._ranks.members] = self
        self._started.set()

    def cancel(self) -> bool:
        """Cancels the work after a failure in the caller's thread, and returns whether it never began. After ``start``,
        the work continues if ``Snapshot.copied`` is set, and is given up otherwise."""
        if self._started.is_set() and not self._cancelled:
            if not self._snapshot.copied.is_set():
                self._snapshot.give_up(_INTERRUPTED)
            return False
        self._cancelled = True
        self._started.set()
        stop([self._worker])
        self._snapshot.end()
        return True

    @property
    def done(self) -> bool:
        """Whether the work has ended, with or without an error. In a forked process, it has."""
        return self._worker.ended

    @property
    def state(self) -> str:
        """Whether the work is "under way", "done" or "failed"."""
        ended = self.done and not self._worker.in_parent
        return "failed" if self.error else "done" if ended else "under way"

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the work. Raises its error, or TimeoutError after ``timeout`` seconds. It may be called
        again, also after an interrupt."""
        if not self._worker.wait(timeout):
            raise TimeoutError(f"{self._what} is still under way")
        if self._worker.in_parent:
            raise ZckptError(
                f"{self._what} goes on in another process, from which this one was forked",
                hint="wait for it in that process",
            )
        if self.error is not None:
            self._seen = True
            raise self.error

    def wait_until_ended(self) -> None:
        """Waits until the work has ended, with or without an error. Raises nothing except KeyboardInterrupt."""
        self._worker.wait()

    def finish(self) -> None:
        """Waits as ``join`` does, but does not raise again an error that ``join`` has already raised."""
        if not self._seen:
            self.join()

    def then(self, action: Callable[[], None]) -> None:
        """Makes this rank's thread call ``action``, which must not raise, once all ranks have finished the work. If
        they already have, calls it here and now. If the work fails, it is never called."""
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
            self._wait_until_taken()

    def _wait_until_taken(self) -> None:
        if not self._worker.in_parent:  # A forked process has a copy of the state.
            self._snapshot.taken.wait()

    def _leave_engine(self) -> None:
        """Waits until the work neither reads nor changes the engine's state any more. Raises nothing except
        KeyboardInterrupt."""
        self.wait_until_ended()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # The caller stops waiting, so the state may change under the work.
            self._snapshot.give_up(_INTERRUPTED)
            raise

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
                message = f"zckpt: {self._what} in the background has failed: {reason}"
                if not self._seen:
                    message += "\nThe next write, restore, offload, reload or wait raises this error."
                with suppress(Exception):
                    print(message, file=sys.stderr, flush=True)
        finally:
            del self._finish  # It refers to the engine's state, whose copies must not stay in memory.
            self._snapshot.end()
            self._end()


class PendingWrite(BackgroundWork):
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

    def _leave_engine(self) -> None:
        self._wait_until_taken()

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
    """Waits for the end of all writes, copies and offloads that this process runs in the background.

    All ranks that write or offload together have to call this. An interrupt on one rank ends the wait on all of them,
    but not the write, copy or offload itself. The next write, restore, offload or reload of the same ranks waits for
    the write or offload again.

    Raises:
        ZckptError: a write or offload has failed, or the last copy that ``copy_to`` of ``zckpt.write`` asks for. Every
            rank raises its error, unless ``PendingWrite.wait`` or ``Offloaded.wait`` has already raised it on every
            rank. If several have failed, the error has a note about each of the others.
    """
    errors: list[Exception] = []
    # Ranks that do several of these together have begun them in this order.
    waits: list[Callable[[], None]] = [partial(_wait_together, pending) for pending in _pending.values()]
    waits += [uploads.finish for uploads in queue.all_uploads()]
    for wait_for_one in waits:
        try:
            wait_for_one()
        except Exception as error:  # raised below, because the ranks of other work wait too
            errors.append(error)
    for other in errors[1:]:
        errors[0].add_note(f"{type(other).__name__}: {other}")
    if errors:
        raise errors[0]


def wait_for(ranks: Ranks) -> None:
    """Waits, together with these ranks, for the end of their work in the background, and raises its error. Then waits
    alone until all other work of this process has left its engine, because two engines may share memory."""
    for pending in list(_pending.values()):
        if pending._ranks.members == ranks.members or pending._ranks.job_is_over:
            _wait_together(pending)
    for pending in list(_pending.values()):
        pending._leave_engine()


def _wait_together(pending: BackgroundWork) -> None:
    ranks = pending._ranks.foreground("zckpt.wait")
    with ranks.undivided():
        ranks.together(pending.wait_until_ended, "wait for what goes on in the background")
        # ``together`` raises on all ranks or on none, so all of them get here or none does.
        del _pending[pending._ranks.members]
        ranks.together(pending.finish, "finish what goes on in the background")


def wait_until_all_ended() -> None:
    """Waits until all work of this rank in the background has ended, with or without an error. Unlike ``wait``, a
    single rank may call it. Raises nothing except KeyboardInterrupt."""
    for pending in list(_pending.values()):
        pending.wait_until_ended()


def after_commit(action: Callable[[], None], ranks: Ranks | None = None) -> None:
    """Calls ``action`` on this rank once the write that these ranks run in the background is committed. Without
    ``ranks``, it waits for all writes that this process runs in the background. If a write fails, ``action`` is never
    called. If no write is running, ``action`` is called at once."""
    for pending in _pending.values():
        if ranks is None or pending._ranks.members == ranks.members:
            action = partial(pending.then, action)
    action()


_is_ending = False
"""Whether the process is ending, so that Python has called ``_wait_before_the_end`` already, or never calls it."""


def is_ending() -> bool:
    """Returns whether the process is ending. Python does not wait then for work that begins in the background."""
    return _is_ending


def _wait_before_the_end() -> None:
    """Waits for the work in the background when the process is about to end. Ctrl-C gives this work up, and then ends
    the process as it ends other programs. A second Ctrl-C does not wait."""
    global _is_ending
    _is_ending, interrupted = True, False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for pending in _pending.values():
            pending._seen = True  # Nothing is left that could raise the error.
            pending._snapshot.give_up(reason)
        for uploads in queue.all_uploads():
            uploads.give_up(reason)

    reason = "Ctrl-C came while the end of the process waited for it"
    works = bool(_pending) or not all(uploads.is_idle for uploads in queue.all_uploads())
    takes_interrupts = works and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes_interrupts:
        signal.signal(signal.SIGINT, interrupt)
    wait_until_all_ended()
    queue.wait_until_all_ended()
    if interrupted:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.kill(os.getpid(), signal.SIGINT)
    elif takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)


try:
    # Python calls this before it waits for threads. It does not expect Ctrl-C while it waits.
    threading._register_atexit(_wait_before_the_end)  # type: ignore[attr-defined]
except RuntimeError:
    _is_ending = True


@atexit.register
def _report() -> None:
    wait_until_all_ended()  # in case that a signal handler of the program has ended the first wait by an error
    for pending in _pending.values():
        if pending.error is not None and not pending._seen:
            traceback.print_exception(pending.error)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)  # a forked process has none of these threads
