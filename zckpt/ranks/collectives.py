"""The ranks of a job: how they exchange values, and how a failure of one rank ends a call on all ranks."""

from __future__ import annotations

import atexit
import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgpack

from zckpt import errors
from zckpt.errors import RankError, ZckptError
from zckpt.ranks.interrupts import Interrupts
from zckpt.ranks.job import is_of_parent, job
from zckpt.ranks.tree import Answer, StepReport, children, for_branches, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    import torch.distributed as dist

    from zckpt.ranks.groups import Group

T = TypeVar("T")
D = TypeVar("D")
E = TypeVar("E")

CALLS, BACKGROUND, UPLOADS, FILES = "calls", "background", "uploads", "files"
"""The channels of messages between ranks. Each has a group of its own."""


@atexit.register  # here, and not in the module of the groups, so that it is called after the end of all writes
def _close_groups() -> None:
    """Ends the threads of all groups while the interpreter still runs, because later they could abort the process."""
    if "zckpt.ranks.groups" in sys.modules:
        sys.modules["zckpt.ranks.groups"].close_all()


class Ranks:
    """The ranks of ``group``, numbered from 0 in the order of the group. Without ``group``, these are all ranks of the
    job, or this process alone if there is no job.

    Every method is collective: all ranks call it, in the same order. The methods of objects with different channels may
    be called in different threads at the same time: ``CALLS``, ``BACKGROUND`` for writes in the background, which go on
    even after the training has destroyed its process groups, ``UPLOADS`` for copies in another place, and ``FILES`` for
    files that ranks send each other. ``call`` is the function of zckpt that every rank has to call. Messages about late
    ranks name it. An error of a rank that fails or is gone names the rank by its number in the job.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, channel: str = CALLS, call: str = "the same function"
    ) -> None:
        members: tuple[int, ...] = (0,)
        number = 0
        here = job()
        if here is not None:
            members, number = here.members(group), here.rank
        self._connect(members, number, channel, call)

    def _connect(self, members: tuple[int, ...], number: int, channel: str, call: str) -> None:
        self.members, self._channel, self._call = members, channel, call
        self.job_rank = number
        self.rank = members.index(number)
        self.size = len(members)
        self._interrupts = Interrupts()
        self._job = job()
        self._group: Group | None = None
        if self.size == 1:
            return
        assert self._job is not None, "a group of several ranks belongs to a job"
        if is_of_parent(self._job):
            raise RankError(
                "this process was forked from a rank of the job, and is no rank itself",
                hint=f"call {call} in the processes that the launcher has started",
            )
        from zckpt.ranks.groups import joined_group

        self._group = joined_group(self._job, members, self.rank, channel, call)

    def foreground(self, call: str) -> Ranks:
        """The same ranks, for calls at the time when the background uses its own group. If the training has destroyed
        its process groups since, this is this process alone."""
        ranks = object.__new__(Ranks)
        ranks._connect((self.job_rank,) if self.job_is_over else self.members, self.job_rank, CALLS, call)
        return ranks

    def part(self, numbers: Sequence[int]) -> Ranks:
        """Some of these ranks, among them this one, by their numbers in ascending order. This is called in an action of
        a step of all ranks. The ranks of the part may do steps of their own in such an action. If one of these steps
        fails, or if any rank fails elsewhere in the action, all ranks that still wait in the action leave it with an
        error. Ctrl-C is raised only in the steps of the part, or after the action: the step of all ranks is not
        ``interruptible``, and the steps of the part are."""
        ranks = object.__new__(Ranks)
        members = tuple(self.members[number] for number in numbers)
        # If a rank is lost in a step of the part, its group is closed. The step around it still needs its group, so the
        # part has another one, even if it has all ranks.
        ranks._connect(members, self.job_rank, f"{self._channel} of a part", self._call)
        ranks._interrupts = self._interrupts
        return ranks

    @property
    def job_is_over(self) -> bool:
        """Whether the training has destroyed its process groups since this object was made, or has made its first
        ones."""
        return job() is not None if self._job is None else self._job.is_over

    @property
    def lost(self) -> bool:
        """Whether one of these ranks was lost, so that the others cannot exchange messages any more."""
        return self._group is not None and self._group.closed

    def undivided(self) -> AbstractContextManager[None]:
        """Inside this block, Ctrl-C is raised only while the action of a step runs (``decide``, ``together``), or at
        the end of the block. If it were raised while this rank waits for others, the others would wait forever. So a
        Ctrl-C after the last action does not end what the ranks do together. This may be used once for each object."""
        return self._interrupts.held()

    def exchange(
        self, sent: torch.Tensor, sent_bytes: Sequence[int], received: torch.Tensor, received_bytes: Sequence[int]
    ) -> None:
        """Sends bytes from each rank to each rank. ``sent`` and ``received`` are 1-D uint8 tensors in host memory.
        ``sent`` holds first the bytes for rank 0, then those for rank 1, and so on; ``sent_bytes`` says how many each
        of them gets. ``received`` and ``received_bytes`` are the same for the bytes that come from each rank. Raises
        RankError, which names the rank, if a rank is gone or hangs."""
        group = self._group
        if group is None:
            received.copy_(sent)
        else:
            self._waiting(group, "send tensors", lambda: group.exchange(sent, sent_bytes, received, received_bytes))

    def _waiting(self, group: Group, doing: str, action: Callable[[], T]) -> T:
        """Runs an action that waits for all other ranks. Raises RankError if one of them is gone or hangs."""
        try:
            with group.lives.shown(doing, self._call), group.lives.waiting():
                return action()
        except BaseException as error:
            from zckpt.ranks.groups import forget

            if not isinstance(error, RankError):  # The next messages would be taken for those of this step.
                group.lives.give_up_self(f"has left this call ({type(error).__name__})")
            assert self._job is not None, "there is a group"
            forget(self._job, self.members, self._channel)
            raise

    def interruptible(self) -> AbstractContextManager[None]:
        """Inside this block, Ctrl-C is raised, also if it came earlier. It is for a part of an action of ``together``
        that is not interruptible as a whole."""
        return self._interrupts.allowed()

    def together(self, action: Callable[[], T], doing: str, *, interruptible: bool = True) -> T:
        """Runs ``action`` on every rank. Returns its result only if it succeeded on all ranks. A rank on which it
        failed raises its own error, and every other rank a RankError that names the first of these ranks."""
        results: list[T] = []
        self.decide(lambda: results.append(action()), lambda _: None, doing, interruptible=interruptible)
        return results[0]

    def first(self, action: Callable[[], T], doing: str) -> T:
        """Runs ``action`` on rank 0 alone. Every rank returns its result or raises an error. It is not interruptible,
        because a rank that has nothing to do would report a failure of what rank 0 has done."""
        return self.decide(
            lambda: action() if self.rank == 0 else None,
            lambda results: cast("T", results[0]),
            doing,
            interruptible=False,
        )

    def agree(self, value: T, what: str) -> T:
        """Returns ``value`` if it is the same on every rank. Otherwise all ranks raise RankError."""
        self.decide(lambda: value, lambda values: check_equal(values, what), f"agree on {what}")
        return value

    def decide(
        self, action: Callable[[], T], decide: Callable[[list[T]], D], doing: str, *, interruptible: bool = True
    ) -> D:
        """Runs ``action`` on every rank. If it succeeded on all ranks, rank 0 calls ``decide`` with the results of all,
        and every rank returns what ``decide`` has returned. Raises the errors of ``together``. A ZckptError of
        ``decide`` is about all ranks, so every rank raises it. ``interruptible`` says whether Ctrl-C is raised in the
        action inside of ``undivided``.

        A result is a value that msgpack can carry: None, a bool, a number, a string, bytes, or a sequence or mapping of
        these. Tuples come back as lists, even on the rank that returned them. A string may be a path whose bytes are
        not UTF-8 (``os.fsdecode``). If the result is anything else, the action has failed on this rank. All this holds
        for what ``decide`` returns, too.

        If everything that can fail is in the actions of successive calls, all ranks leave at the same call.
        """
        common, _ = self.decide_each(action, lambda results: (decide(results), {}), doing, interruptible=interruptible)
        return common

    def decide_each(
        self,
        action: Callable[[], T],
        decide: Callable[[list[T]], tuple[D, Mapping[int, E]]],
        doing: str,
        *,
        interruptible: bool = True,
    ) -> tuple[D, E | None]:
        """Does what ``decide`` does, but the argument ``decide`` returns a value for all ranks, and one for some of
        them by their numbers. Returns the first one, and that of this rank or None."""

        def run() -> bytes:
            with self.interruptible() if interruptible else nullcontext():
                packed = _pack(action())
            _unpack(packed)  # a result that cannot be sent is an error of this rank
            return packed

        def decided(results: dict[int, bytes]) -> Answer:
            # The results of thousands of ranks may be large, so each is given up once it is unpacked.
            common, each = decide([_unpack(results.pop(rank, _NONE)) for rank in range(self.size)])
            return Answer(_pack(common), {rank: _pack(own) for rank, own in each.items()})

        group = self._group
        if group is None:
            answer = decided({0: run()})
        else:
            with group.lives.shown(doing, self._call):
                answer = self._run_step(group, run, decided, doing)
        own = answer.each.get(self.rank)
        return _unpack(answer.common), None if own is None else _unpack(own)

    def _run_step(
        self, group: Group, action: Callable[[], bytes], decided: Callable[[dict[int, bytes]], Answer], doing: str
    ) -> Answer:
        """Runs the action of a step, and tells the other ranks. Returns the answer of rank 0."""
        error: BaseException | None = None
        step = f"{self._call}, to {doing}"
        try:
            with group.lives.acting():
                result = action()
            own = StepReport(step, {} if result == _NONE else {self.rank: result})
        except BaseException as caught:  # raised again below, once the other ranks know
            error, own = caught, StepReport(step, failure=(self.rank, _said(caught)), failures=1)
            # Other ranks may wait in their action for this one (``part``), and would not hear of its report before.
            named = caught if isinstance(caught, RankError) and caught.rank is not None else None
            group.lives.tell_failure(named or self._failure(own, doing))
        below = children(self.rank, self.size)

        def up() -> StepReport | Answer:
            reports = [StepReport(*_unpack(message)) for message in group.collect()]
            report = joined(own, [*zip(below, reports, strict=True)])
            return Answer(*_unpack(group.ask(_pack(report)))) if self.rank else report

        def down(answer: Answer) -> None:
            group.answer([*map(_pack, for_branches(answer, self.rank, below))])

        try:
            answer = self._waiting(group, doing, up)
            if isinstance(answer, StepReport):
                answer, failed = self._decided(answer, decided)
                error = error or failed
            self._waiting(group, doing, partial(down, answer))
        except RankError as lost:
            raise error or lost from None
        if error is not None:
            raise error
        if answer.report is not None:
            raise self._error(answer, StepReport(*answer.report), doing)
        return answer

    def _decided(
        self, report: StepReport, decided: Callable[[dict[int, bytes]], Answer]
    ) -> tuple[Answer, BaseException | None]:
        """Returns the answer to all ranks, on rank 0, and the error if ``decided`` has failed."""
        if report.failures or report.other:
            return Answer(report=report._replace(results={})), None
        try:
            return decided(report.results), None
        except BaseException as error:  # The caller raises it, once the other ranks know.
            failed = StepReport(report.step, failure=(0, _said(error)), failures=1)
            return Answer(report=failed, error=_described(error)), error

    def _error(self, answer: Answer, report: StepReport, doing: str) -> ZckptError:
        if answer.error is not None:
            name, message, facts = answer.error
            error: ZckptError = getattr(errors, name)(message, **facts)
            return error
        if report.other is not None:
            other, step = report.other
            return RankError(
                "the ranks have different calls under way (every rank must make the same calls of zckpt): "
                f"{report.step!r} on rank 0, {step!r} on rank {other}",
                rank=other,
            )
        return self._failure(report, doing)

    def _failure(self, report: StepReport, doing: str) -> RankError:
        """Returns the error of the ranks on which the step itself has not failed."""
        assert report.failure is not None, "a step has failed"
        number, said = report.failure
        others = f" (and {report.failures - 1} more ranks)" if report.failures > 1 else ""
        rank = self.members[number]
        if said == KeyboardInterrupt.__name__:
            return RankError(
                f"rank {rank} was interrupted before it had finished its part of this step: {doing}", rank=rank,
                hint="Ctrl-C or another SIGINT has reached that rank; nothing else has failed there",
            )  # fmt: skip
        return RankError(f"rank {rank}{others} failed to {doing}: {said}", rank=rank)


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, unicode_errors="surrogatepass", strict_map_key=False)


_NONE = _pack(None)


def _said(error: BaseException) -> str:
    """Returns the text of an error for other ranks. It can always be encoded, even if the name of a file has bytes that
    are not UTF-8."""
    try:
        text = str(error)
    except Exception as why:
        text = f"it has no text, for {type(why).__name__} was raised"
    return f"{type(error).__name__}{': ' if text else ''}{text}".encode(errors="backslashreplace").decode()


def _described(error: BaseException) -> tuple[str, str, dict[str, str | int | None]] | None:
    """Returns what another rank needs to make an equal error, or None if it is not one of zckpt."""
    if not isinstance(error, ZckptError) or getattr(errors, type(error).__name__, None) is not type(error):
        return None
    facts = {name: getattr(error, name) for name in ZckptError.__annotations__ if name != "message"}
    plain = {
        name: value if value is None or isinstance(value, (str, int)) else str(value) for name, value in facts.items()
    }
    return type(error).__name__, error.message, plain


def check_equal(values: Sequence[object], what: str, hint: str | None = None) -> None:
    """Raises RankError, with this hint, unless the values of all ranks are the same."""
    for rank, other in enumerate(values[1:], 1):
        if other != values[0]:
            raise RankError(
                f"the ranks have different {what}: {values[0]!r} on rank 0, {other!r} on rank {rank}", rank=rank,
                hint=hint,
            )  # fmt: skip


def comparable(**arguments: object) -> dict[str, object]:
    """Returns the arguments of a call in a form that ``check_arguments`` can compare: plain values, and sorted lists
    for collections of names."""
    return {
        name: value if value is None or isinstance(value, (str, bool, int)) else sorted(value)  # type: ignore[call-overload]
        for name, value in arguments.items()
    }


def check_arguments(calls: Sequence[Mapping[str, object]]) -> None:
    """Raises RankError, which names the argument, unless all ranks have called with the same arguments."""
    for name in calls[0]:
        hint = "all ranks have to pass the same arguments"
        if name == "path":
            hint += "; make a path with the time or the process id in it on rank 0, and broadcast it"
        check_equal([call[name] for call in calls], f"{name} arguments" if name != "path" else "paths", hint)
