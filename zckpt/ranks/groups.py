"""The groups of gloo in which the ranks of a job exchange messages."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from zckpt.errors import OPEN_FILES_HINT, RankError
from zckpt.ranks.collectives import job
from zckpt.ranks.heartbeat import PERIOD_SECONDS, Lives, meet, timeout_seconds
from zckpt.system.threads import Watcher

if TYPE_CHECKING:
    import threading

    from torch._C._distributed_c10d import Store

if sys.platform != "win32":  # Windows has no such limits
    import resource

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

_groups: dict[tuple[tuple[int, ...], bool | str], tuple[object, Group]] = {}
"""The groups that were made, by the ranks in them and the argument ``background`` of ``Ranks``. With each group goes
the default process group of the job for which it was made."""


class Group:
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


def close_all() -> None:
    """Ends the threads of all groups."""
    while _groups:
        _groups.popitem()[1][1].close()


def _leave_groups_to_parent() -> None:
    """Is called in a forked process, which has none of the threads of its parent."""
    global _groups  # noqa: PLW0603
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_groups))  # To destroy the groups would wait for their threads.
    _groups = {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_groups_to_parent)


def group_of(members: tuple[int, ...], rank: int, background: bool | str, call: str) -> Group:
    """Returns the group of these ranks. It is made once for each process and job, because all ranks have to make it
    together. After a rank was lost, it is made anew."""
    world = job()
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


def forget(members: tuple[int, ...], background: bool | str) -> None:
    """Closes the group of these ranks, of which one was lost."""
    _groups.pop((members, background))[1].close()


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


def _connected(store: Store, name: str, rank: int, members: tuple[int, ...], lives: Lives) -> Group:
    """Makes a new group. A thread makes it, so that nobody has to wait for a rank that cannot connect."""
    made: list[Group] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            # While a thread waits on a store, no other thread can use it.
            own_store = store.clone() if hasattr(store, "clone") else store
            prefix = dist.distributed_c10d.PrefixStore(f"zckpt/{name}/gloo", own_store)
            addresses = _Addresses(prefix, watcher.closed)
            gloo = dist.ProcessGroupGloo(addresses, rank, len(members), timedelta(seconds=timeout_seconds()))
            gloo._set_default_timeout(_FOREVER)
            made.append(Group(gloo, addresses, lives))
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
