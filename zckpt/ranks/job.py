"""The job that a rank belongs to, and how its ranks reach each other. Mostly it is that of ``torch.distributed``."""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

    from zckpt.ranks.groups import Group


class Job(ABC):
    """A job as one of its ranks sees it: what ``Ranks`` needs to send messages.

    Ranks that do not reach each other by ``torch.distributed`` have a class that derives from this one, as those of
    ``tests.support.thread_ranks``. The thread of such a rank enters its job by ``in_job``.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[tuple[int, ...], str], Group] = {}
        """The groups that this rank has made, by the ranks in them and by their channels."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the ranks cannot reach each other any more."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this rank in the job."""

    @abstractmethod
    def members(self, group: Any) -> tuple[int, ...]:
        """Returns the ranks of a process group, by their numbers in the job. None stands for all ranks."""

    @property
    @abstractmethod
    def store(self) -> Store:
        """A key-value store that all ranks use. The methods that are called have to do what those of a store of
        ``torch.distributed`` do: ``set``, ``get``, ``add``, ``check``, ``delete_key``, ``has_extended_api`` and
        ``multi_get``. They raise RuntimeError once the store is gone."""

    @abstractmethod
    def connect(self, name: str, number: int, size: int, timeout: timedelta, closed: threading.Event) -> Any:
        """Returns a group of ranks that are connected with each other. All of them call this at the same time, with the
        same ``name``. This rank has the given ``number`` among them. The call ends with an error soon after ``closed``
        is set, or if a connection to another rank that has called it takes longer than ``timeout``.

        The methods of the group that are called have to do what those of ``ProcessGroupGloo`` do: ``rank``, ``size``,
        ``gather`` and ``scatter`` with rank 0 as the root, and ``alltoall_base``. An operation raises RuntimeError if
        the connection to a rank is lost that it needs.
        """


class TorchJob(Job):
    """The job of ``torch.distributed``. ``world`` is its default process group."""

    def __init__(self, world: Any) -> None:
        super().__init__()
        self.world = world

    @property
    def is_over(self) -> bool:
        return job() is not self

    @property
    def rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank()

    def members(self, group: Any) -> tuple[int, ...]:
        import torch.distributed as dist

        return tuple(range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group))

    @property
    def store(self) -> Store:
        import torch.distributed as dist

        return dist.distributed_c10d._get_default_store()

    def connect(self, name: str, number: int, size: int, timeout: timedelta, closed: threading.Event) -> Any:
        from zckpt.ranks.groups import Gloo

        return Gloo(self.store, name, number, size, timeout, closed)


_made: list[TorchJob] = []
"""The job of this process, and before it those that are over and still have groups."""
_making = threading.Lock()
_of_thread = threading.local()
"""``job`` is the job that this thread has entered."""
_of_parent: Job | None = None
"""In a forked process, the job that its parent had."""


def job() -> Job | None:
    """Returns the job of this thread or else that of ``torch.distributed``, or None if there is none. A process that
    has not imported torch has none, and need not wait for torch to be imported."""
    entered: Job | None = getattr(_of_thread, "job", None)
    if entered is not None:
        return entered
    distributed: Any = sys.modules.get("torch.distributed")
    world = distributed.group.WORLD if distributed is not None and distributed.is_available() else None
    if world is None:
        return None
    with _making:
        if not _made or _made[-1].world is not world:
            _made[:] = [*(earlier for earlier in _made if earlier.groups), TorchJob(world)]
        return _made[-1]


@contextmanager
def in_job(entered: Job) -> Iterator[None]:
    """Inside this block, this thread is a rank of the job ``entered``."""
    _of_thread.job = entered
    try:
        yield
    finally:
        del _of_thread.job


def jobs() -> list[Job]:
    """Returns the job of ``torch.distributed`` of this process, and those before it of which it still has groups."""
    return list(_made)


def is_of_parent(of: Job) -> bool:
    """Returns whether this is the job of the process from which this one was forked. A forked process is no rank."""
    return of is _of_parent


def _note_job_of_parent() -> None:
    global _making, _of_parent  # noqa: PLW0603  a fork has no other way to tell
    _making = threading.Lock()  # Another thread of the parent may have held it.
    _of_parent = job()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_job_of_parent)
