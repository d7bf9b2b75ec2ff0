"""The groups of gloo in which the ranks of a job exchange messages."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zckpt.errors import OPEN_FILES_HINT, RankError
from zckpt.ranks.family import Family
from zckpt.ranks.heartbeat import PERIOD_SECONDS, Lives, meet, timeout_seconds
from zckpt.ranks.job import jobs
from zckpt.ranks.tree import children, family, parent
from zckpt.system.threads import Watcher

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    import torch
    from torch._C._distributed_c10d import Store

    from zckpt.ranks.job import Job

if sys.platform != "win32":  # Windows has no such limits
    import resource

_INTERFACE = (
    "set GLOO_SOCKET_IFNAME, on every machine, to the network interface (`ip addr`) by which the machines reach each "
    "other"
)
_FOREVER = timedelta(days=365)
"""The timeout of gloo once all ranks have connected. Gloo cannot tell a slow rank from one that hangs, so zckpt looks
at signs of life instead (``heartbeat``)."""
_LIMITS = {
    "too many open files": OPEN_FILES_HINT,
    "unable to find": _INTERFACE,
    "no such device": _INTERFACE,
    "connection refused": _INTERFACE,
    "no route to host": _INTERFACE,
    "network is unreachable": _INTERFACE,
}
"""Maps what the system says when ranks cannot connect to a hint that says what to do."""


class Group:
    """A group of ranks that exchange messages along a tree (``tree``), in one thread at a time. For this, a rank is in
    up to two groups of gloo: one with its parent and the parent's other children, and one with its own children. The
    engine's own group may be one of NCCL, which cannot send host memory. torch.distributed does not know the groups of
    gloo, because it names groups by counting them, and ranks may have made different numbers of groups.

    ``connect(ranks)`` makes a group of gloo of the given ranks. All of them call it at the same time."""

    def __init__(self, rank: int, size: int, connect: Callable[[Sequence[int]], Any], lives: Lives) -> None:
        self.lives, self._connect, self._all = lives, connect, range(size)
        self.closed = False
        self._gloo: dict[tuple[int, int], Any] = {}
        """The groups of gloo, by the first rank of each and the number of its ranks."""
        self._works: deque[dist.Work] = deque(maxlen=2)
        """The last exchanges. A thread of gloo gives up its reference to an exchange some time after its end. If that
        were the last one, this thread would need the interpreter to free the tensors. If the interpreter is ending at
        that moment, Python ends the thread inside of C++ code, which aborts the process ("terminate called without an
        active exception")."""

        self._above = Family(self._group(family(parent(rank), size)), self.wait) if rank else None
        self._below = Family(self._group(family(rank, size)), self.wait) if children(rank, size) else None

    def collect(self) -> list[bytes]:
        return self._below.collect() if self._below else []

    def answer(self, messages: Sequence[bytes]) -> None:
        if self._below:
            self._below.answer(messages)

    def ask(self, message: bytes) -> bytes:
        """Asks the parent of this rank, and returns its answer."""
        assert self._above is not None, "rank 0 has no parent"
        return self._above.ask(message)

    def exchange(
        self, sent: torch.Tensor, sent_bytes: Sequence[int], received: torch.Tensor, received_bytes: Sequence[int]
    ) -> None:
        gloo = self._group(self._all)
        self.wait(gloo.alltoall_base(received, sent, [*received_bytes], [*sent_bytes]))

    def _group(self, ranks: Sequence[int]) -> Any:
        """Returns the group of gloo of these ranks, which is made once."""
        key = ranks[0], len(ranks)
        if key not in self._gloo:
            self._gloo[key] = self._connect(ranks)
        return self._gloo[key]

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
            # This waits until no thread of gloo has a reference to the exchanges any more.
            self._above = self._below = None
            self._gloo.clear()
            self._works.clear()


def close_all() -> None:
    """Ends the threads of all groups of this process."""
    for each in jobs():
        close_groups(each)


def close_groups(of: Job) -> None:
    """Ends the threads of the groups of a job."""
    while of.groups:
        of.groups.popitem()[1].close()


def _leave_groups_to_parent() -> None:
    """Is called in a forked process, which has none of the threads of its parent."""
    for each in jobs():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each.groups))  # To destroy them would wait for their threads.
        each.groups = {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_groups_to_parent)


def joined_group(here: Job, members: tuple[int, ...], rank: int, channel: str, call: str) -> Group:
    """Returns the group of these ranks of the job. It is made once, because all ranks have to make it together, and
    anew after a rank was lost."""
    for earlier in [each for each in jobs() if each.is_over]:
        for key in [key for key in earlier.groups if key[1] == channel]:
            earlier.groups.pop(key).close()  # A write in the background may still use another channel.
    known = here.groups.get((members, channel))
    if known is not None and known.lives.given_up:
        # This rank has ended its last call well, but another rank has left it.
        forget(here, members, channel)
    if (members, channel) not in here.groups:
        store = here.store
        name = meet(store, channel, rank, members, call)
        lives = Lives(store, name, rank, members)
        try:
            with lives.shown("connect", call), lives.waiting():
                connect = partial(_connected, here, f"zckpt/{name}/gloo", rank, members, lives)
                group = Group(rank, len(members), connect, lives)
        except BaseException:
            lives.close()
            raise
        here.groups[members, channel] = group
    return here.groups[members, channel]


def forget(of: Job, members: tuple[int, ...], channel: str) -> None:
    """Closes the group of these ranks, of which one was lost."""
    of.groups.pop((members, channel)).close()


def _connected(here: Job, name: str, rank: int, members: tuple[int, ...], lives: Lives, ranks: Sequence[int]) -> Any:
    """Returns a new group of gloo. A thread makes it, so that nobody has to wait for a rank that cannot connect.
    ``ranks``: the ranks of the group, by their numbers among the ``members``."""
    made: list[Any] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            timeout = timedelta(seconds=timeout_seconds())
            unique = f"{name}/{ranks[0]}-{len(ranks)}"
            made.append(here.connect(unique, ranks.index(rank), len(ranks), timeout, watcher.closed))
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
        lost = lives.lost(error, connecting=True)
        lost.hint = hint if lost.rank is None else None
        raise lost from error
    if hint is OPEN_FILES_HINT and sys.platform != "win32":
        hint = f"{hint}; it is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} here"
    lives.give_up_self(f"cannot connect to the other ranks: {reason}; {hint}")
    raise RankError(f"cannot connect to the other ranks: {reason}", rank=members[rank], hint=hint) from error


class Gloo:
    """A group of gloo, as ``Job.connect`` returns it, with the store of its addresses. With TORCH_GLOO_LAZY_INIT=1,
    gloo connects only when a message is sent, and needs the addresses then."""

    def __init__(
        self, store: Store, name: str, number: int, size: int, timeout: timedelta, closed: threading.Event
    ) -> None:
        self._addresses = _Addresses(dist.distributed_c10d.PrefixStore(name, store), closed)
        gloo: Any = dist.ProcessGroupGloo(self._addresses, number, size, timeout)  # torch has no types for its methods
        gloo._set_default_timeout(_FOREVER)
        self.rank, self.size = gloo.rank, gloo.size
        self.gather, self.scatter, self.alltoall_base = gloo.gather, gloo.scatter, gloo.alltoall_base


class _Addresses(dist.Store if dist.is_available() else object):  # type: ignore[misc]
    """The store by which the ranks tell each other their addresses. A wait for the address of another rank ends with an
    error once ``closed`` is set. It asks again and again, because no other thread can use the store while one thread
    waits in it. A clone of the store would do, too, but rank 0 would have one more connection to each rank."""

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
