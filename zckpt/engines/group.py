"""Groups of the ranks of a job. A group has all ranks of one engine, or those of its ranks that hold the same local
tensors. A job may train several models, so an engine need not have all ranks of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.ranks.job import job

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """Some ranks of a job. They are numbered from 0 in the order of ``ranks``."""

    handle: dist.ProcessGroup | None
    """The process group for collectives. None stands for all ranks of the job."""
    rank: int
    ranks: tuple[int, ...]
    """The numbers that the group's ranks have in the whole job."""

    @property
    def size(self) -> int:
        return len(self.ranks)


def rank_group_of(handle: dist.ProcessGroup | None) -> RankGroup:
    """Returns the ranks of a process group. ``handle``: the process group, or None for all ranks of the job. Without a
    job of several ranks, there is only rank 0."""
    own_job, ranks = job(), ranks_of(handle)
    return RankGroup(None, 0, ranks) if own_job is None else RankGroup(handle, ranks.index(own_job.rank), ranks)


def ranks_of(handle: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Returns the numbers that the ranks of a process group have in the whole job. None stands for all ranks of the
    job. Without a job of several ranks, there is only rank 0."""
    own_job = job()
    return (0,) if own_job is None else own_job.members(handle)
