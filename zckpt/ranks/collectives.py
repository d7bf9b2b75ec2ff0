"""The ranks of a job: how they exchange values, and how a failure of one rank ends a call on all ranks."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgpack

from zckpt.errors import OPEN_FILES_HINT, RankError
from zckpt.ranks.heartbeat import Lives, meet, timeout_seconds
from zckpt.ranks.interrupts import Interrupts
from zckpt.system.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

if sys.platform != "win32":  # Windows has no such limits
    import resource

T = TypeVar("T")

_FOREVER = timedelta(days=365)
"""The timeout of gloo once all ranks have connected. Gloo cannot tell a slow rank from one that hangs, so zckpt looks
at signs of life instead (``heartbeat``)."""

_INTERFACE = (
    "set GLOO_SOCKET_IFNAME, on every machine, to the network interface (`ip addr`) by which the machines reach each "
    "other"
)
_LIMITS = {
    "too many open files": OPEN_FILES_HINT,
    "unable to find": _INTERFACE,
    "no such device": _INTERFACE,
    "connection refused": _INTERFACE,
    "no route to host": _INTERFACE,
    "network is unreachable": _INTERFACE,
}
"""Maps what the system says when ranks cannot connect to a hint that says what to do."""

_groups: dict[tuple[tuple[int, ...], bool], tuple[object, _Group]] = {}
"""The groups that were made, by the ranks in them and whether they are used in the background. With each group goes the
default process group of the job for which it was made."""


_recent: deque[object] = deque(maxlen=2)
"""The tensors of the last two exchanges of messages. A thread of gloo gives up its references to these tensors some
time after the exchange has ended. If nobody else had a reference then, the thread would need the interpreter to free
them. And if the interpreter is ending at that moment, Python ends the thread inside of C++ code, which aborts the
process ("terminate called without an active exception")."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_recent))  # The end of the interpreter must not free them either.


def _world() -> object:
    """Returns the default process group of the job, or None if there is none. A process that has not imported torch has
    none, and need not wait for torch to be imported."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist.group.WORLD if dist is not None and dist.is_available() else None


@dataclass(frozen=True)
class _Group:
    """A group of gloo. The engine's own group may be one of NCCL, which cannot send host memory. torch.distributed does
    not know this group, because it names groups by counting them, and ranks may have made different numbers of
    groups."""

    group: dist.ProcessGroupGloo
    lives: Lives


def _group(members: tuple[int, ...], rank: int, background: bool, call: str) -> _Group:
    """Returns the group of these ranks. It is made once for each process and job, because all ranks have to make it
    together. After a rank was lost, it is made anew."""
    import torch.distributed as dist

    world = _world()
    for stale in [key for key, (made_for, _) in list(_groups.items()) if made_for is not world]:
        if stale[1] == background:  # A write in the background may still use a group of a world that is gone.
            _groups.pop(stale)[1].lives.close()
    known = _groups.get((members, background))
    if known is None:
        store = dist.distributed_c10d._get_default_store()
        name = meet(store, f"{members}{background}", rank, members, call)
        lives = Lives(store, name, rank, members)
        try:
            with lives.shown("connect", call), lives.waiting():
                group = _connected(store, name, rank, members, lives)
        except RankError:
            lives.close()
            raise
        known = _groups[members, background] = world, _Group(group, lives)
    return known[1]


def _connected(store: Store, name: str, rank: int, members: tuple[int, ...], lives: Lives) -> dist.ProcessGroupGloo:
    """Makes a new gloo group. A thread makes it, so that nobody has to wait for a rank that cannot connect."""
    import torch.distributed as dist

    made: list[dist.ProcessGroupGloo] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            # While a thread waits on a store, no other thread can use it.
            own_store = store.clone() if hasattr(store, "clone") else store
            prefix = dist.distributed_c10d.PrefixStore(f"zckpt/{name}/gloo", own_store)
            group = dist.ProcessGroupGloo(prefix, rank, len(members), timedelta(seconds=timeout_seconds()))
            group._set_default_timeout(_FOREVER)
            made.append(group)
        except Exception as error:  # raised again below
            errors.append(error)

    worker = Worker(connect, "zckpt-connect", daemon=True)
    worker.start()
    while not worker.wait(lives.period):
        lives.check()
    if not errors:
        return made[0]
    (error,) = errors
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    hint = next((hint for message, hint in _LIMITS.items() if message in str(error).lower()), None)
    if hint is None or "refused" in str(error).lower():  # The rank on the other side may have died.
        lost = lives.lost(error)
        lost.hint = hint if lost.rank is None else None
        raise lost from error
    if hint is OPEN_FILES_HINT and sys.platform != "win32":
        hint = f"{hint}; it is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} here"
    lives.give_up_self(f"cannot connect to the other ranks: {reason}; {hint}")
    raise RankError(f"cannot connect to the other ranks: {reason}", rank=members[rank], hint=hint) from error


class Ranks:
    """The ranks of ``group``, numbered from 0 in the order of the group. Without ``group``, these are all ranks of the
    job, or this process alone if there is no job.

    Every method is collective: all ranks call it, in the same order. With ``background``, the methods may be called in
    another thread at the same time, and work even after the training has destroyed its process groups. ``call`` is the
    function of zckpt that every rank has to call. Messages about late ranks name it. An error of a rank that fails or
    is gone names the rank by its number in the job.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, background: bool = False, call: str = "the same function"
    ) -> None:
        members: tuple[int, ...] = (0,)
        number = 0
        if _world() is not None:
            import torch.distributed as dist

            members = tuple(range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group))
            number = dist.get_rank()
        self._connect(members, number, background, call)

    def _connect(self, members: tuple[int, ...], number: int, background: bool, call: str) -> None:
        self.members, self._background, self._call = members, background, call
        self.job_rank = number
        self.rank = members.index(number)
        self.size = len(members)
        self._interrupts = Interrupts()
        self._world = _world()
        self._group = None if self.size == 1 else _group(members, self.rank, background, call)

    def foreground(self, call: str) -> Ranks:
        """The same ranks, for calls at the time when the background uses its own group. If the training has destroyed
        its process groups since, this is this process alone."""
        ranks = object.__new__(Ranks)
        number = self.members[self.rank]
        same = self._world is not None and self._world is _world()
        ranks._connect(self.members if same else (number,), number, False, call)
        return ranks

    def undivided(self) -> AbstractContextManager[None]:
        """Inside this block, Ctrl-C is raised only while an action of ``share`` or ``together`` runs, or at the end of
        the block. If it were raised while this rank waits for others, the others would wait forever. So a Ctrl-C after
        the last action does not end what the ranks do together. This may be used once for each object."""
        return self._interrupts.held()

    def gather(self, data: bytes, doing: str = "go on") -> list[bytes]:
        """Returns the ``data`` of every rank, on every rank. Raises RankError, which names the rank, if a rank is gone
        or hangs."""
        group = self._group
        return [data] if group is None else self._waiting(group, doing, lambda: self._gather(group, data))

    def exchange(
        self, sent: torch.Tensor, sent_bytes: Sequence[int], received: torch.Tensor, received_bytes: Sequence[int]
    ) -> None:
        """Sends bytes from each rank to each rank. ``sent`` and ``received`` are 1-D uint8 tensors in host memory.
        ``sent`` holds first the bytes for rank 0, then those for rank 1, and so on; ``sent_bytes`` says how many each
        of them gets. ``received`` and ``received_bytes`` are the same for the bytes that come from each rank. Raises
        RankError as ``gather`` does."""
        group = self._group
        if group is None:
            received.copy_(sent)
            return

        def exchange() -> None:
            # This calls the method of the group itself, for the reason that `_gather` gives.
            work = group.group.alltoall_base(received, sent, list(received_bytes), list(sent_bytes))  # type: ignore[attr-defined]
            self._wait(group, work)

        self._waiting(group, "send tensors", exchange)

    def _waiting(self, group: _Group, doing: str, action: Callable[[], T]) -> T:
        """Runs an action that waits for all other ranks. Raises RankError if one of them is gone or hangs."""
        try:
            with group.lives.shown(doing, self._call), group.lives.waiting():
                return action()
        except RankError:
            # A thread of gloo may wait for that rank until this process ends. To destroy the group would wait for it
            # too.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group.group))
            group.lives.close()
            _groups.pop((self.members, self._background), None)
            raise

    def _gather(self, group: _Group, data: bytes) -> list[bytes]:
        import torch

        def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
            # The group's own method: torch.distributed's refuses a group that was destroyed by its users
            gathered = [torch.zeros_like(mine) for _ in range(self.size)]
            _recent.append((mine, gathered))
            self._wait(group, group.group.allgather([gathered], [mine]))  # type: ignore[attr-defined]
            return gathered

        sizes = [int(size) for size in all_gather(torch.tensor([len(data)], device="cpu"))]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return [bytes(one[:size].numpy()) for one, size in zip(all_gather(mine), sizes, strict=True)]

    @staticmethod
    def _wait(group: _Group, work: dist.Work) -> None:
        """Waits until ``work`` has ended, and looks in between whether all ranks are alive. Raises RankError."""
        while True:
            # Asked before the wait, because the work may end just after the wait has timed out.
            ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=group.lives.period))
            except RuntimeError as error:
                if ended:
                    raise group.lives.lost(error) from error
                group.lives.check()
            else:
                return

    def interruptible(self) -> AbstractContextManager[None]:
        """Inside this block, Ctrl-C is raised, also if it came earlier. It is for a part of an action of ``together``
        that is not interruptible as a whole."""
        return self._interrupts.allowed()

    def together(self, action: Callable[[], T], doing: str, *, interruptible: bool = True) -> T:
        """Runs ``action`` on every rank. Returns its result only if it succeeded on all ranks. A rank on which it
        failed raises its own error. Every other rank raises a RankError that names the first rank on which it
        failed."""
        results: list[T] = []
        self.share(lambda: results.append(action()), doing, interruptible=interruptible)
        return results[0]

    def share(self, action: Callable[[], T], doing: str, *, interruptible: bool = True) -> list[T]:
        """Runs ``action`` on every rank. If it succeeded on all ranks, every rank returns the results of all. Raises
        the errors of ``together``. ``interruptible`` says whether Ctrl-C is raised in the action inside of
        ``undivided``.

        A result is a value that msgpack can carry: None, a bool, a number, a string, bytes, or a sequence or mapping of
        these. Tuples come back as lists, even on the rank that returned them. A string may be a path whose bytes are
        not UTF-8 (``os.fsdecode``). If the result is anything else, the action has failed on this rank.

        If everything that can fail is in the actions of successive calls, all ranks leave at the same call.
        """

        def run() -> T:
            with self.interruptible() if interruptible else nullcontext():
                return action()

        if self._group is None:
            return [_unpack(_pack(run()))]
        with self._group.lives.shown(doing, self._call):
            return self._share(run, doing)

    def _share(self, action: Callable[[], T], doing: str) -> list[T]:
        error: BaseException | None = None
        step = f"{self._call}, to {doing}"
        try:
            report = _pack([step, None, action()])
            _unpack(report)  # a result that cannot be sent is an error of this rank
        except BaseException as caught:  # raised again below, once the other ranks know
            error = caught
            report = _pack([step, _said(error), None])
        try:
            steps, failures, results = zip(*map(_unpack, self.gather(report, doing)), strict=True)
            check_equal(steps, "calls under way (every rank must make the same calls of zckpt)")
        except RankError as lost:
            raise error or lost from None
        if error is not None:
            raise error
        failed = [number for number, failure in enumerate(failures) if failure is not None]
        if failed:
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            rank = self.members[failed[0]]
            raise RankError(f"rank {rank}{others} failed to {doing}: {failures[failed[0]]}", rank=rank)
        return list(results)

    def first(self, action: Callable[[], T], doing: str) -> T:
        """Runs ``action`` on rank 0 alone. Every rank returns its result or raises an error. Inside of ``undivided``,
        no rank raises Ctrl-C here, because a rank that has nothing to do would report a failure of what rank 0 has
        done."""
        return cast("T", self.share(lambda: action() if self.rank == 0 else None, doing, interruptible=False)[0])

    def agree(self, value: T, what: str) -> T:
        """Returns ``value`` if it is the same on every rank. Otherwise all ranks raise RankError."""
        check_equal(self.share(lambda: value, f"agree on {what}"), what)
        return value


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, unicode_errors="surrogatepass", strict_map_key=False)


def _said(error: BaseException) -> str:
    """Returns the text of an error for other ranks. It can always be encoded, even if the name of a file has bytes that
    are not UTF-8."""
    try:
        text = str(error)
    except Exception as why:
        text = f"it has no text, for {type(why).__name__} was raised"
    return f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()


def check_equal(values: Sequence[object], what: str) -> None:
    """Raises RankError unless the values of all ranks are the same."""
    for rank, other in enumerate(values[1:], 1):
        if other != values[0]:
            raise RankError(
                f"the ranks have different {what}: {values[0]!r} on rank 0, {other!r} on rank {rank}", rank=rank
            )


def comparable(**arguments: object) -> dict[str, object]:
    """Returns the arguments of a call in a form that ``check_arguments`` can compare: plain values, and sorted lists
    for collections of names."""
    return {
        name: value if value is None or isinstance(value, (str, bool)) else sorted(value)  # type: ignore[call-overload]
        for name, value in arguments.items()
    }


def check_arguments(calls: Sequence[Mapping[str, object]]) -> None:
    """Raises RankError, which names the argument, unless all ranks have called with the same arguments."""
    for name in calls[0]:
        check_equal([call[name] for call in calls], f"{name} arguments" if name != "path" else "paths")
