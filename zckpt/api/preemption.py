"""One last checkpoint when a signal is about to end the job."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from zckpt.api.background import wait
from zckpt.api.write import write
from zckpt.engines import adapt, group_of
from zckpt.engines.hooks import after_calls
from zckpt.errors import ZckptError, warn
from zckpt.ranks.collectives import Ranks
from zckpt.ranks.last_step import LastStep

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from zckpt.storage.location import StrPath


class Preemption:
    """What ``zckpt.on_preemption`` returns."""

    def __init__(self, engine: Any, write_last: Callable[[], object], signals: Collection[int], exits: bool) -> None:
        self.requested = False
        """Whether the last checkpoint has been written because of a signal. It becomes True on all ranks after the same
        step, so a training loop may end because of it."""
        self._engine, self._write_last, self._exits = engine, write_last, exits
        self._ranks = Ranks(group_of(engine), call="zckpt.on_preemption")
        self._last_step = LastStep(self._ranks)
        self._before: dict[int, Any] = {}
        """The handlers that there were, by signal."""
        self._step = adapt(engine).step
        self._undo: Callable[[], None] = lambda: None
        try:
            self._ranks.together(lambda: self._begin(signals), "watch for signals")
        except BaseException:
            self.cancel()
            raise

    def _begin(self, signals: Collection[int]) -> None:
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)
        self._undo = after_calls([(self._engine, "step", self._after_step)])

    def cancel(self) -> None:
        """Gives the signals back to the handlers that they had before. Nothing is written any more. Every rank calls
        it; as often as one likes."""
        self._undo()
        self._undo = lambda: None
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._handle:  # somebody may have put another one in its place
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._last_step.close()

    def _handle(self, number: int, frame: Any) -> None:
        self._last_step.ask(number)
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _after_step(self) -> None:
        step = adapt(self._engine).step
        if step == self._step:  # in the middle of gradient accumulation
            return
        self._step = step
        try:
            if not self._last_step.ended():
                return
            self._write_last()
        except BaseException:
            self.cancel()
            raise
        self.cancel()
        self.requested = True
        if self._exits:
            sys.exit(128 + (self._last_step.reason or 0))


def on_preemption(
    engine: Any,
    path: StrPath | None = None,
    *,
    signals: Collection[int] = (signal.SIGTERM,),
    client_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    exit: bool = True,  # noqa: A002  what users call it
) -> Preemption:
    """Has one last checkpoint written when one of ``signals`` says that the job is about to be ended, as schedulers do
    some time before they kill it. Every rank calls this, after the same step and in its main thread.

    The signal may reach one rank, some or all of them, once or several times. The ranks agree through the store of the
    job on the next step that none of them has ended yet, and write right after it, inside of ``engine.step()``. In all
    other steps nothing is sent. A handler that a signal had before is called when the signal comes.

    ``path``: the directory of the checkpoint, which is replaced if it is a checkpoint already; None:
    ``checkpoints/global_step<N>``. ``client_state``: as for ``zckpt.write``, or a function that returns it, which is
    called after the last step. What ``zckpt.register`` has registered is kept too. A write that is under way in the
    background is waited for.

    ``exit``: end the process after the checkpoint, with the exit status 128 + the number of the signal, 143 for
    SIGTERM, on all ranks. Otherwise ``Preemption.requested`` is True after that step, and the signals have their
    former handlers again.

    If the process is killed before the checkpoint is committed, the one before it is whole, and what was written is
    removed by the next write. If a rank has died, ``engine.step()`` raises RankError after some seconds, and no
    checkpoint is written. Otherwise it raises there what ``zckpt.write`` raises.

    This raises ValueError for a signal that cannot be handled or in another thread, UnsupportedError and RankError.
    """
    named = None if path is None else os.fspath(path)

    def write_last() -> None:
        try:
            wait()
        except ZckptError as error:  # of an earlier checkpoint: the last one is all the more needed
            warn(f"a write in the background has failed: {error}")
        state = client_state() if callable(client_state) else client_state
        write(engine, named, client_state=state, overwrite=True, pending_gradients="drop")

    return Preemption(engine, write_last, signals, exit)
