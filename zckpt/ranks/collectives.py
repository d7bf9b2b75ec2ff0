"""The ranks of a job: how they exchange values, and how a failure of one rank ends a call on all ranks."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections import deque
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgpack
import torch
import torch.distributed as dist

from zckpt.errors import OPEN_FILES_HINT, RankError
from zckpt.ranks.heartbeat import PERIOD_SECONDS, Lives, meet, timeout_seconds
from zckpt.ranks.interrupts import Interrupts
from zckpt.system.threads import Watcher

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

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
_job_of_parent: object = None
"""In a forked process, the default process group that its parent had."""


class _Group:
    """A group of gloo, in which one thread at a time exchanges messages. The engine's own group may be one of NCCL,
    which cannot send host memory. torch.distributed does not know this group, because it names groups by counting them,
    and ranks may have made different numbers of groups."""

    def __init__(self, gloo: dist.ProcessGroupGloo, addresses: _Addresses, lives: Lives) -> None:
        self.gloo, self.lives = gloo, lives
        self.closed = False
        self._addresses = addresses  # With TORCH_GLOO_LAZY_INIT=1, gloo connects only when a message is sent.
        self._works: deque[dist.Work] = deque(maxlen=2)
        """The last exchanges. A thread of gloo gives up its reference to an exchange some time after its end. If that
        were the last one, this thread would need the interpreter to free the tensors. If the interpreter is ending at
        that moment, Python ends the thread inside of C++ code, which aborts the process ("terminate called without an
        active exception")."""

    def wait(self, work: dist.Work) -> None:
        """Waits until ``work`` has ended, and looks in between whether all ranks are alive. Raises RankError."""
        self._works.append(work)
        while True:
            # Asked before the wait, because the work may end just after the wait has timed out.
            ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=self.lives.period))
            except RuntimeError as error:
                if ended:
                    raise self.lives.lost(error) from error
                self.lives.check()
            else:
                return

    def close(self) -> None:
        """Ends the group and its threads. After this call, no messages can be exchanged."""
        self.closed = True
        self.lives.close()
        if not all(work.is_completed() for work in self._works):
            # A thread of gloo may wait for a lost rank until this process ends. To destroy the group would wait for it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        else:
            del self.gloo  # This waits until no thread of gloo has a reference to the exchanges any more.
            self._works.clear()


@atexit.register
def _close_groups() -> None:
    """Ends the threads of all groups while the interpreter still runs, because later they could abort the process."""
    while _groups:
        _groups.popitem()[1][1].close()


def _leave_groups_to_parent() -> None:
    """Is called in a forked process, which has none of the threads of its parent."""
    global _groups, _job_of_parent
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_groups))  # To destroy the groups would wait for their threads.
    _groups, _job_of_parent = {}, _job()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_groups_to_parent)


def _job() -> object:
    return dist.group.WORLD if dist.is_available() else None


def _group(members: tuple[int, ...], rank: int, background: bool, call: str) -> _Group:
    """Returns the group of these ranks. It is made once for each process and job, because all ranks have to make it
    together. After a rank was lost, it is made anew."""
    world = _job()
    if world is _job_of_parent:
        raise RankError(
            "this process was forked from a rank of the job, and is no rank itself",
            hint=f"call {call} in the processes that the launcher has started",
        )
    for stale in [key for key, (made_for, _) in list(_groups.items()) if made_for is not world]:
        if stale[1] == background:  # A write in the background may still use a group of a world that is gone.
            _groups.pop(stale)[1].close()
    known = _groups.get((members, background))
    if known is None:
        store = dist.distributed_c10d._get_default_store()
        name = meet(store, f"{members}{background}", rank, members, call)
        lives = Lives(store, name, rank, members)
        try:
            with lives.shown("connect", call), lives.waiting():
                group = _connected(store, name, rank, members, lives)
        except BaseException:
            lives.close()
            raise
        known = _groups[members, background] = world, group
    return known[1]


class _Addresses(dist.Store if dist.is_available() else object):  # type: ignore[misc]
    """The store by which the ranks tell each other their addresses. A wait for the address of another rank ends with an
    error once ``closed`` is set."""

    def __init__(self, store: Store, closed: threading.Event) -> None:
        super().__init__()
        self._store, self._closed = store, closed

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pause = 0.001
        while not self._store.check(keys):
            if self._closed.wait(pause):
                raise RuntimeError("the wait was given up")
            pause = min(2 * pause, PERIOD_SECONDS / 4)


def _connected(store: Store, name: str, rank: int, members: tuple[int, ...], lives: Lives) -> _Group:
    """Makes a new group. A thread makes it, so that nobody has to wait for a rank that cannot connect."""
    made: list[_Group] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            # While a thread waits on a store, no other thread can use it.
            own_store = store.clone() if hasattr(store, "clone") else store
            prefix = dist.distributed_c10d.PrefixStore(f"zckpt/{name}/gloo", own_store)
            addresses = _Addresses(prefix, watcher.closed)
            gloo = dist.ProcessGroupGloo(addresses, rank, len(members), timedelta(seconds=timeout_seconds()))
            gloo._set_default_timeout(_FOREVER)
            made.append(_Group(gloo, addresses, lives))
        except Exception as error:  # raised again below
            errors.append(error)

    watcher = Watcher(connect, "zckpt-connect")
    watcher.start()
    try:
        while not watcher.wait(lives.period):
            lives.check()
    except BaseException:
        watcher.close(lives.period)
        raise
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
        if dist.is_available() and dist.is_initialized():
            members = tuple(range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group))
            number = dist.get_rank()
        self._connect(members, number, background, call)

    def _connect(self, members: tuple[int, ...], number: int, background: bool, call: str) -> None:
        self.members, self._background, self._call = members, background, call
        self.job_rank = number
        self.rank = members.index(number)
        self.size = len(members)
        self._interrupts = Interrupts()
        self._job = _job()
        self._group = None if self.size == 1 else _group(members, self.rank, background, call)

    def foreground(self, call: str) -> Ranks:
        """The same ranks, for calls at the time when the background uses its own group. If the training has destroyed
        its process groups since, this is this process alone."""
        ranks = object.__new__(Ranks)
        number = self.members[self.rank]
        ranks._connect((number,) if self.job_is_over else self.members, number, False, call)
        return ranks

    @property
    def job_is_over(self) -> bool:
        """Whether the training has destroyed its process groups."""
        return self._job is not _job()

    @property
    def lost(self) -> bool:
        """Whether one of these ranks was lost, so that the others cannot exchange messages any more."""
        return self._group is not None and self._group.closed

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
            group.wait(group.gloo.alltoall_base(received, sent, list(received_bytes), list(sent_bytes)))  # type: ignore[attr-defined]

        self._waiting(group, "send tensors", exchange)

    def _waiting(self, group: _Group, doing: str, action: Callable[[], T]) -> T:
        """Runs an action that waits for all other ranks. Raises RankError if one of them is gone or hangs."""
        try:
            with group.lives.shown(doing, self._call), group.lives.waiting():
                return action()
        except RankError:
            group.close()
            _groups.pop((self.members, self._background), None)
            raise

    def _gather(self, group: _Group, data: bytes) -> list[bytes]:
        def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
            # The group's own method: torch.distributed's refuses a group that was destroyed by its users
            gathered = [torch.zeros_like(mine) for _ in range(self.size)]
            group.wait(group.gloo.allgather([gathered], [mine]))  # type: ignore[attr-defined]
            return gathered

        sizes = [int(size) for size in all_gather(torch.tensor([len(data)]))]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return [bytes(one[:size].numpy()) for one, size in zip(all_gather(mine), sizes, strict=True)]

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
