"""The ranks over which a DeepSpeed engine is spread."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def process_group(engine: Any) -> dist.ProcessGroup | None:
    """Returns the process group of the engine's ranks, or None if these are all ranks of the job.

    With tensor parallelism or a pipeline, no process group has the ranks of all local tensors, so these have to be all
    ranks of the job. This never raises an error. If process groups have not been set up, it returns None.
    """
    owners = process_group_of_owners(engine)
    ranks = 1 if owners is None else owners.size() * max(int(getattr(engine, "mp_world_size", 1) or 1), 1)
    return None if owners is None or ranks == dist.get_world_size() else owners


def process_group_of_owners(engine: Any) -> dist.ProcessGroup | None:
    """Returns the process group of the ranks that have the same local tensors as this rank, or None if process groups
    have not been set up. ZeRO partitions over it all parameters that belong to no expert."""
    # ZeRO-3 says on each parameter over which ranks it is partitioned. With sequence parallelism by a device mesh,
    # these are more than ``seq_data_parallel_group`` has.
    of_zero_3 = (
        parameter.ds_process_group
        for parameter in engine.module.parameters()
        if hasattr(parameter, "ds_process_group") and getattr(parameter, "allreduce", True)
    )
    group = next(of_zero_3, getattr(engine, "seq_data_parallel_group", None))
    return group if dist.is_initialized() and isinstance(group, dist.ProcessGroup) else None
