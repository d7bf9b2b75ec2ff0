"""Several models in one job, each on some of its ranks: an engine is written and restored by its own ranks alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import assert_same, held, weights
from zckpt.engines import group_of

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

PARTS = {"actor": [0, 2], "critic": [1]}


class Share:
    """What DeepSpeed calls an mpu: the ranks of one model among those of the job, all of them data parallel."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_data_parallel_world_size(self) -> int:
        return self.group.size()

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> Any:
        return self.alone

    alone: Any = None


def each_model_alone(directory: str) -> None:
    rank = dist.get_rank()
    groups = {name: dist.new_group(ranks) for name, ranks in PARTS.items()}
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())]
    name = next(name for name, ranks in PARTS.items() if rank in ranks)
    share = Share(groups[name])
    share.alone = alone[rank]
    assert group_of(share) is None
    for stage in range(4):
        # At stage 3, DeepSpeed itself waits for all ranks of the job while it makes an engine.
        if name == "actor" or stage in (0, 3):
            write_and_restore(os.path.join(directory, f"{name}-{stage}"), stage, share, PARTS[name])


def write_and_restore(path: str, stage: int, share: Share, ranks: list[int]) -> None:
    setup = {"stage": stage, "model": "gpt2", "frozen": True, "groups": True, "mpu": share}
    engine = make_engine(**setup)
    group = group_of(engine)
    assert group is not None
    assert dist.get_process_group_ranks(group) == ranks
    steps = 1 + len(ranks)
    train(engine, steps)
    zckpt.write(engine, path)
    checkpoint = zckpt.open(path)
    assert (checkpoint.step, checkpoint.world_size) == (steps, len(ranks))
    before = held(engine)
    other = make_engine(**setup, seed=1)
    zckpt.restore(other, path, rng=True)
    assert_same(held(other), before)
    assert_same(weights(other), weights(engine))
    assert train(other, 1, steps) == train(engine, 1, steps)
    assert_same(held(other), held(engine))


def test_each_model_is_written_and_restored_by_its_own_ranks(cluster: Cluster, tmp_path: Any) -> None:
    cluster.run(each_model_alone, 3, str(tmp_path))
