"""The ranks over which one engine is spread: most often all ranks of the job, but a job may train several models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """An engine's ranks, numbered from 0 on in the order of ``ranks``; the adapter knows a rank by that number."""

    handle: dist.ProcessGroup | None
    """The process group for collectives; None stands for all ranks of the job."""
    rank: int
    """This rank's number within the group."""
    ranks: tuple[int, ...]
    """The numbers that the group's ranks have in the whole job."""

    @property
    def size(self) -> int:
        return len(self.ranks)


def rank_group_of(engine: Any) -> RankGroup:
    """The ranks of a DeepSpeed engine."""
    handle = process_group(engine)
    return RankGroup(handle, dist.get_rank(handle), ranks_of(handle))


def ranks_of(handle: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The numbers that the ranks of a process group have in the whole job."""
    return tuple(range(dist.get_world_size()) if handle is None else dist.get_process_group_ranks(handle))


def process_group(engine: Any) -> dist.ProcessGroup | None:
    """The process group over which ZeRO partitions the engine's state; None if it holds all ranks of the job.

    Never raises: without process groups, the answer is None.
    """
    group = getattr(engine, "seq_data_parallel_group", None)
    if not (dist.is_initialized() and isinstance(group, dist.ProcessGroup)):
        return None
    return None if group.size() == dist.get_world_size() else group
