"""The ranks of a job: what they tell each other, and how a failure on one reaches all."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgpack
import torch
import torch.distributed as dist

from zckpt.errors import OPEN_FILES_HINT, RankError
from zckpt.ranks.heartbeat import Lives, meet, timeout_seconds
from zckpt.ranks.interrupts import Interrupts
from zckpt.system.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch._C._distributed_c10d import Store

if sys.platform != "win32":  # which has no such limits
    import resource

T = TypeVar("T")

_FOREVER = timedelta(days=365)
"""For gloo, once all have connected: it cannot tell a slow rank from one that hangs. That is up to signs of life."""

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
"""The groups that were made, by their members and whether they are for the background. Beside each stands the default
group of the job for which it was made."""


@dataclass(frozen=True)
class _Group:
    """A gloo group, since the engine's own group may be NCCL's, which cannot carry host memory. torch.distributed does
    not know of this group: it would name it by counting groups, and ranks may differ in how many they have made."""

    group: dist.ProcessGroupGloo
    lives: Lives


def _group(members: tuple[int, ...], rank: int, background: bool, call: str) -> _Group:
    """The group of these ranks. It is made once per process and world, since making it is collective, and made anew
    after a rank was lost."""
    world = dist.group.WORLD
    for stale in [key for key, (made_for, _) in list(_groups.items()) if made_for is not world]:
        if stale[1] == background:  # A write in the background may still use a group of a world that is gone.
            _groups.pop(stale)[1].lives.close()
    found = _groups.get((members, background))
    if found is None:
        store = dist.distributed_c10d._get_default_store()
        name = meet(store, f"{members}{background}", rank, members, call)
        lives = Lives(store, name, rank, members)
        try:
            with lives.shown("connect", call), lives.waiting():
                group = _connected(store, name, rank, members, lives)
        except RankError:
            lives.close()
            raise
        found = _groups[members, background] = world, _Group(group, lives)
    return found[1]


def _connected(store: Store, name: str, rank: int, members: tuple[int, ...], lives: Lives) -> dist.ProcessGroupGloo:
    """A new gloo group. A thread makes it, so that nobody has to wait for a rank that cannot connect."""
    made: list[dist.ProcessGroupGloo] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            # A thread that waits on a store keeps others from using it.
            own = store.clone() if hasattr(store, "clone") else store
            prefix = dist.distributed_c10d.PrefixStore(f"zckpt/{name}/gloo", own)
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
    hint = next((hint for said, hint in _LIMITS.items() if said in str(error).lower()), None)
    if hint is None or "refused" in str(error).lower():  # The rank on the other side may have died.
        lost = lives.lost(error)
        lost.hint = hint if lost.rank is None else None
        raise lost from error
    if hint is OPEN_FILES_HINT and sys.platform != "win32":
        hint = f"{hint}; it is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} here"
    lives.give_up_self(f"cannot connect to the other ranks: {reason}; {hint}")
    raise RankError(f"cannot connect to the other ranks: {reason}", rank=members[rank], hint=hint) from error


class Ranks:
    """The ranks of ``group``, numbered from 0 on in its order. Without ``group``, all ranks of the job, or this process
    alone if there is no job.

    Every method is collective: all ranks call it, in the same order. Those of ``background`` ranks may be called by
    another thread at the same time, and go on when the training has given up its process groups. ``call``: the function
    that every rank has to call; the messages about late ranks name it. The error of a rank that fails or is gone names
    it by its number in the job.
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
        self._world = dist.group.WORLD if dist.is_available() else None
        self._group = None if self.size == 1 else _group(members, self.rank, background, call)

    def foreground(self, call: str) -> Ranks:
        """The same ranks, to be used while the background uses its own group. If the training has given up its process
        groups since, this process alone."""
        ranks = object.__new__(Ranks)
        number = self.members[self.rank]
        same = self._world is not None and self._world is dist.group.WORLD
        ranks._connect(self.members if same else (number,), number, False, call)
        return ranks

    def undivided(self) -> AbstractContextManager[None]:
        """Inside this block, Ctrl-C is raised only while an action of ``share`` or ``together`` runs, or at the end of
        the block: raised while this rank waits for others, it would leave them waiting. So one that comes after the
        last action ends nothing that the ranks do together. Once for each object."""
        return self._interrupts.held()

    def gather(self, data: bytes, doing: str = "go on") -> list[bytes]:
        """``data`` of every rank, on every rank. Raises RankError, which names the rank, if one is gone or hangs."""
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
            # A thread of gloo's may wait for that rank until this process ends. To destroy the group would wait too.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group.group))
            group.lives.close()
            _groups.pop((self.members, self._background), None)
            raise

    def _gather(self, group: _Group, data: bytes) -> list[bytes]:
        def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
            # The group's own method: torch.distributed's refuses a group that was destroyed by its users
            found = [torch.zeros_like(mine) for _ in range(self.size)]
            self._wait(group, group.group.allgather([found], [mine]))  # type: ignore[attr-defined]
            return found

        sizes = [int(size) for size in all_gather(torch.tensor([len(data)]))]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return [bytes(one[:size].numpy()) for one, size in zip(all_gather(mine), sizes, strict=True)]

    @staticmethod
    def _wait(group: _Group, work: dist.Work) -> None:
        """Waits until ``work`` has ended, and looks in between whether all ranks are alive. Raises RankError."""
        while True:
            ended = work.is_completed()  # asked before: it may end just after the wait has run out of time
            try:
                work.wait(timedelta(seconds=group.lives.period))
            except RuntimeError as error:
                if ended:
                    raise group.lives.lost(error) from error
                group.lives.check()
            else:
                return

    def interruptible(self) -> AbstractContextManager[None]:
        """Inside of it, Ctrl-C is raised, also one that came earlier: for an action of ``together`` that is not
        interruptible as a whole."""
        return self._interrupts.allowed()

    def together(self, action: Callable[[], T], doing: str, *, interruptible: bool = True) -> T:
        """Runs ``action`` on every rank; returns its result only if it succeeded on all.

        A rank where it failed raises its own error, every other one a RankError that names the first failed rank.
        """
        results: list[T] = []
        self.share(lambda: results.append(action()), doing, interruptible=interruptible)
        return results[0]

    def share(self, action: Callable[[], T], doing: str, *, interruptible: bool = True) -> list[T]:
        """Runs ``action`` on every rank. If it succeeded on all of them, every rank returns the results of all.
        Raises as ``together`` does. ``interruptible``: whether the action raises Ctrl-C inside of ``undivided``.

        A result is a value that msgpack can carry: None, a bool, a number, a string, bytes, or a sequence or mapping of
        such. Tuples come back as lists, on the rank that gave them too. A string may be a path whose bytes are not
        UTF-8 (``os.fsdecode``). The action fails on a rank whose result is anything else.

        If everything that can fail is inside the actions of successive calls, all ranks leave at the same call.
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
            _unpack(report)  # what cannot come back is this rank's error
        except BaseException as caught:  # raised again below, once the others know
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
        """Runs ``action`` on rank 0 alone; every rank gets its result, or an error.

        No rank raises Ctrl-C in it, inside of ``undivided``: one that has nothing to do would report a failure of what
        rank 0 has done.
        """
        return cast("T", self.share(lambda: action() if self.rank == 0 else None, doing, interruptible=False)[0])

    def agree(self, value: T, what: str) -> T:
        """``value``, if it is the same on every rank; otherwise RankError on all."""
        check_equal(self.share(lambda: value, f"agree on {what}"), what)
        return value


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, unicode_errors="surrogatepass", strict_map_key=False)


def _said(error: BaseException) -> str:
    """What another rank shows of it: text that can be encoded, whatever bytes are in the name of a file, say."""
    try:
        said = str(error)
    except Exception as why:
        said = f"it has no text, for {type(why).__name__} was raised"
    return f"{type(error).__name__}: {said}".encode(errors="backslashreplace").decode()


def check_equal(values: Sequence[object], what: str) -> None:
    """Raises RankError unless the values of all ranks are the same."""
    for rank, other in enumerate(values[1:], 1):
        if other != values[0]:
            raise RankError(
                f"the ranks have different {what}: {values[0]!r} on rank 0, {other!r} on rank {rank}", rank=rank
            )


def comparable(**arguments: object) -> dict[str, object]:
    """The arguments of a call, for ``check_arguments``: plain values, and collections of names in any order."""
    return {
        name: value if value is None or isinstance(value, (str, bool)) else sorted(value)  # type: ignore[call-overload]
        for name, value in arguments.items()
    }


def check_arguments(calls: Sequence[Mapping[str, object]]) -> None:
    """Raises RankError, which names the argument, unless all ranks have called with the same arguments."""
    for name in calls[0]:
        check_equal([call[name] for call in calls], f"{name} arguments" if name != "path" else "paths")
