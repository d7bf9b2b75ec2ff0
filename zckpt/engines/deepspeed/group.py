"""The ranks over which a DeepSpeed engine is spread."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zckpt.engines.group import RankGroup, rank_group_of


def group_of_engine(engine: Any) -> RankGroup:
    """Returns the ranks of a DeepSpeed engine."""
    return rank_group_of(process_group(engine))


def process_group(engine: Any) -> dist.ProcessGroup | None:
    """Returns the process group over which ZeRO partitions the engine's state, or None if it has all ranks of the job.

    This never raises an error. If process groups have not been set up, it returns None.
    """
    group = getattr(engine, "seq_data_parallel_group", None)
    if not (dist.is_initialized() and isinstance(group, dist.ProcessGroup)):
        return None
    return None if group.size() == dist.get_world_size() else group
