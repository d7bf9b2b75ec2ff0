"""Writes a last checkpoint when a signal announces the end of the job."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from zckpt.checkpoint.background import wait_for
from zckpt.checkpoint.write import write_engine
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.engines import adapt, group_of
from zckpt.engines.hooks import after_calls, before_calls
from zckpt.errors import UnsupportedError, ZckptError, check_flags, warn
from zckpt.frameworks.last_step import LastStep
from zckpt.ranks.collectives import Ranks
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from zckpt.checkpoint.writing.options import CopyTo
    from zckpt.storage.location import StrPath


_CALL = "zckpt.on_preemption"
_active: list[Preemption] = []
"""The objects that were not cancelled, in the order in which they were made."""


class Preemption:
    """Writes a last checkpoint after a signal. ``zckpt.on_preemption`` returns it."""

    def __init__(self, engine: Any, write_last: Callable[[], str], signals: Collection[int], exits: bool) -> None:
        self.requested = False
        """Whether a signal has come and the last checkpoint has been written. It becomes True on all ranks after the
        same step, so a training loop can use it to stop."""
        self._engine, self._write_last, self._exits = engine, write_last, exits
        self._error: Exception | None = None
        """The error with which the last checkpoint has failed."""
        self._ranks = Ranks(group_of(engine), call=_CALL)
        self._last_step = LastStep(self._ranks)
        self._former_handlers: dict[int, Any] = {}
        """The handlers that the signals had before, by the number of the signal."""
        self._step = -1
        """The number of steps that the engine had taken before the current call of its ``step``."""
        self._process = os.getpid()
        self._undo: list[Callable[[], None]] = []
        _active.append(self)
        try:
            self._ranks.together(lambda: self._begin(signals), "watch for signals")
        except BaseException:
            self._end_watch()
            raise

    def _begin(self, signals: Collection[int]) -> None:
        if not signals or not all(isinstance(number, int) for number in signals):
            raise TypeError(f"signals must be numbers of signals, such as [signal.SIGTERM], got {signals!r}")
        for number in dict.fromkeys(signals):
            try:
                self._former_handlers[number] = signal.signal(number, self._handle)
            except OSError as error:
                raise ValueError(f"no program can handle the signal {number!r}") from error
        self._undo.append(workers_ignore(self._former_handlers))
        self._undo.append(before_calls([(self._engine, "step", self._before_step)]))
        self._undo.append(after_calls([(self._engine, "step", self._after_step)]))

    def cancel(self) -> None:
        """Stops waiting for signals, and gives them back the handlers that they had before. No last checkpoint is
        written any more. If a signal has reached rank 0, and the step at whose end the last checkpoint is written has
        not come, rank 0 says so on stderr. Every rank has to call this. It may be called several times."""
        self._say_if_too_late()
        self._end_watch()

    def _end_watch(self) -> None:
        if self in _active:
            _active.remove(self)
        while self._undo:
            self._undo.pop()()
        for number in self._former_handlers:
            if signal.getsignal(number) == self._handle:  # Other code may have set another handler meanwhile.
                former = self._former(number)
                signal.signal(number, signal.SIG_DFL if former is None else former)
        self._last_step.close()

    def _former(self, number: int) -> Any:
        """Returns the handler that a signal had before, but not that of an object which was cancelled since."""
        former = self._former_handlers.get(number)
        owner = getattr(former, "__self__", None)
        return owner._former(number) if isinstance(owner, Preemption) and owner not in _active else former

    def _handle(self, number: int, frame: Any) -> None:
        former = self._former(number)
        # A forked child has this handler too. multiprocessing ends its processes by SIGTERM, so SIGTERM has to end the
        # child. The other signals do not end it.
        if number == signal.SIGTERM and os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL if former is None else former)
            os.kill(os.getpid(), number)
            return
        self._last_step.ask(number)
        if callable(former) and former is not signal.default_int_handler:
            former(number, frame)

    def _before_step(self) -> None:
        self._step = adapt(self._engine).step

    def _after_step(self) -> None:
        if adapt(self._engine).step == self._step:  # The engine only accumulated gradients.
            return
        if not self._is_done:
            try:
                if not self._last_step.ended():
                    return
                self._write()
            except BaseException:
                self._end_watch()
                raise
        self._end()

    @property
    def _is_done(self) -> bool:
        return self.requested or self._error is not None

    def _write(self) -> None:
        reason = self._last_step.reason
        for other in _active:  # Perhaps the signal has reached only ranks that do not have the other engines.
            if reason in other._former_handlers:
                other._last_step.ask(reason)
        try:
            path = self._write_last()
        except Exception as error:  # raised by ``_end``
            self._error = error
            self._say(f"no last checkpoint was written: {error}")
        else:
            self.requested = True
            self._say(f"the last checkpoint is {path}")

    def _end(self) -> None:
        """Raises the first error or ends the process, once each engine that was asked for a last checkpoint has written
        it or has failed to. Until then, this is called again after each step: ranks that have only some of the engines
        go on too, because the others could not end a step without them."""
        asked = [preemption for preemption in _active if preemption._last_step.reason is not None]
        is_done = all(preemption._is_done for preemption in asked)
        # Only an engine with the most ranks ends the process. If a smaller one did, ranks outside of its group would
        # still be in a step.
        is_largest = all(other._ranks.size <= self._ranks.size or other._ranks.lost for other in asked)
        may_end = is_done and is_largest
        if not self._ranks.lost:
            may_end = self._ranks.decide(lambda: may_end, all, "end the process")
        if not may_end:
            return
        errors = [preemption._error for preemption in asked if preemption._error is not None]
        for preemption in asked:
            preemption._end_watch()
        if errors:
            raise errors[0]
        if any(preemption._exits for preemption in asked):
            sys.exit(128 + (self._last_step.reason or 0))

    def _say_if_too_late(self) -> None:
        is_waited_for = self in _active and self._process == os.getpid() and not self._is_done
        if is_waited_for and self._last_step.reason is not None:
            self._say(
                "no last checkpoint was written: the training has ended before the step after which all ranks write it"
            )

    def _say(self, what: str) -> None:
        if self._ranks.rank == 0:
            print(f"zckpt: after the signal {self._last_step.reason}, {what}", file=sys.stderr)


@atexit.register
def _say_which_signals_were_too_late() -> None:
    for preemption in _active:
        preemption._say_if_too_late()


def on_preemption(
    engine: Any,
    path: StrPath | Callable[[], StrPath] | None = None,
    *,
    signals: Collection[int] = (signal.SIGTERM,),
    client_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    copy_to: StrPath | CopyTo | None = None,
    exit: bool = True,  # noqa: A002  the usual name for users
) -> Preemption:
    """Makes the engine write a last checkpoint when a signal announces the end of the job.

    Schedulers send such a signal some time before they kill a job. Every rank has to call this after the same step, in
    its main thread. The signal may reach one, some or all of the ranks, once or several times. The ranks then agree on
    the next step that none of them has ended yet, and write the checkpoint at the end of this step, inside of
    ``engine.step()``. Without a signal, the ranks exchange nothing in a step. Rank 0 prints the path of the last
    checkpoint on stderr. The handlers that the signals had before are called too.

    Call this before data loaders start their worker processes. Launchers such as torchrun send the signal to these
    processes too, and without them the training does not reach the end of its step. Workers that are started by fork
    after this call ignore the signal.

    With several engines, call this once for each of them. Each is written at the end of a step of its own, and the
    process ends when all of them are written. If one cannot be written, its error is raised after the others are.

    The last checkpoint also has the states of the objects that are registered with ``zckpt.register``. If a write is
    running in the background, the last checkpoint is written after it. If the process is killed before the last
    checkpoint is committed, the checkpoint before it is complete, and the next write removes the remains. If a rank has
    died, ``engine.step()`` raises RankError after some seconds, and no checkpoint is written. If the write fails,
    ``engine.step()`` raises its error. If the training ends before the step on which the ranks agree, nothing is
    written, and the script goes on to its end. Rank 0 then says so on stderr, if it has heard of the signal.

    Args:
        engine: the engine that ``deepspeed.initialize`` has returned. In a loop of your own, without DeepSpeed, the
            signal is handled by a few lines, which docs/pytorch.md has.
        path: the directory of the last checkpoint. A checkpoint that is there already is replaced. It may also be a
            function that returns the directory after the last step, such as ``lambda:
            f"run/global_step{engine.global_steps}"``. None means ``checkpoints/global_step<N>``, even if other
            checkpoints are in another directory.
        signals: the numbers of the signals.
        client_state: as for ``zckpt.write``, or a function that returns it after the last step. What cannot be kept is
            left out, with a warning.
        copy_to: as for ``zckpt.write``. The end of the process waits for the copy.
        exit: whether the process ends after the checkpoint, on all ranks. Its exit status is 128 plus the number of the
            signal, such as 143 for SIGTERM. With False, ``Preemption.requested`` is True after the last step, and the
            signals have their former handlers again.

    Returns:
        An object that tells whether the last checkpoint was written. Its ``cancel()`` undoes this call.

    Raises:
        ValueError: one of the signals cannot be handled, or this is not the main thread.
        TypeError: ``client_state`` is neither a dict nor a function, or ``exit`` neither True nor False.
        UnsupportedError: zckpt does not support engines of this kind.
        RankError: another rank has failed or is lost.
    """
    check_flags(exit=exit)
    if not callable(getattr(engine, "step", None)):
        raise UnsupportedError(
            f"zckpt.on_preemption writes at the end of engine.step(), which a {type(engine).__name__} does not have",
            hint="in a loop of your own, let the ranks agree on the signal after each step, and call zckpt.write: "
            "docs/pytorch.md shows how",
        )
    # What is wrong raises an error now, and not after the signal.
    of_state = None if callable(client_state) else client_state
    copies = WriteOptions(client_state=of_state, copy_to=copy_to).checked().copies
    if copies is not None:
        open_store(copies.path).refuse_read_only()
    path_or_function = path if path is None or callable(path) else os.fspath(path)

    def write_last() -> str:
        try:
            wait_for(Ranks(group_of(engine), call=_CALL))
        except ZckptError as error:  # An earlier checkpoint has failed, so this last one is needed even more.
            warn(f"a write in the background has failed: {error}")
        state = client_state() if callable(client_state) else client_state
        last_path = path_or_function() if callable(path_or_function) else path_or_function
        options = WriteOptions(
            client_state=state, overwrite=True, replace_foreign=True, pending_gradients="drop", leave_out=True,
            copy_to=copy_to,
        )  # fmt: skip
        return str(write_engine(engine, last_path, options))

    return Preemption(engine, write_last, signals, exit)


def workers_ignore(signals: Iterable[int]) -> Callable[[], None]:
    """Arranges that worker processes of data loaders ignore these signals, if they are started by fork from now on.
    Launchers send the signals to the workers too, and without its workers the training could not finish its next step.
    Returns a function that ends this for workers that are started later."""
    from torch.utils.data._utils import signal_handling

    numbers = [*signals]

    def ignore() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    return after_calls([(signal_handling, "_set_worker_signal_handlers", ignore)])
