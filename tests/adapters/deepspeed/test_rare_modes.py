"""Modes of ZeRO that keep their state elsewhere or in other dtypes, which DeepSpeed's own checkpoints lose or round."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import fingerprints_of, settings
from zckpt.adapters.deepspeed import data_sampler
from zckpt.adapters.deepspeed.twin_flow import TwinOptimizer
from zckpt.engines import adapt
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.cluster import Cluster

Setup = dict[str, Any]
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
ON_HOST = {"device": "cpu"}
RATIO = {"offload_optimizer": {**ON_HOST, "ratio": 0.5}, "sub_group_size": 2000}
MODES: dict[str, tuple[int, Setup]] = {
    "hpz": (4, {"zero_hpz_partition_size": 2}),
    "bf16 masters": (2, {"stage": 2, "config": {"bf16": BF16}, "offload_optimizer": ON_HOST}),
    "bf16 masters, stage 3": (2, {"config": {"bf16": BF16}, "offload_optimizer": ON_HOST}),
    "bf16 states": (2, {"stage": 2, "config": {"bf16": {**BF16, "bf16_optimizer_states": True}}}),
    "ratio": (2, {**RATIO, "groups": True, "scheduler": True}),
    "hybrid": (2, {"config": {"hybrid_engine": {"enabled": True}}}),
    "sequence parallelism by a mesh": (4, {"config": {"sequence_parallel_size": 2, "data_parallel_size": 2}}),
    "sequence parallelism by an mpu": (4, {"stage": 1, "sequences": 2}),
}
"""For each mode, the number of ranks and the settings of the engine."""


def make(setup: Setup, seed: int = 0) -> Any:
    sequences = setup.get("sequences")
    if sequences:
        setup = {key: value for key, value in setup.items() if key != "sequences"}
        parallel_state_sp.initialize_sequence_parallel(sequences)
    mpu = parallel_state_sp if sequences else None
    engine = make_engine(**{"model": "odd", **setup}, seed=seed, mpu=mpu)
    if setup.get("offload_optimizer", {}).get("ratio"):
        # On the CPU, all sub-groups have the same device. By another name of it, the first ones count as on a GPU.
        for number in range(len(engine.optimizer.subgroup_to_device) // 2):
            engine.optimizer.subgroup_to_device[number] = "cpu:0"
    return engine


def held(engine: Any) -> Mapping[Any, Any]:
    """Returns all state of an engine on this rank, in a form that can be compared."""
    adapter = adapt(engine)
    fragments = [*adapter.inventory(None).fragments, *adapter.inventory(["param"]).fragments]
    tensors: dict[Any, Any] = {(f.key, *f.span[1:]): f.data for f in fragments}
    if engine.zero_optimization_stage() == 3:
        tensors = {key: value for key, value in tensors.items() if not key[0].startswith("param/")}
        tensors |= {("whole", key): value for key, value in fingerprints_of(engine).items() if key.startswith("param/")}
    more = [getattr(engine.optimizer, name, None) for name in ("optimizer", "backup_optimizer")]
    states = [[*optimizer.state.values()] for optimizer in more if optimizer is not None]
    # With sequence parallelism, a step makes a float of the number of samples.
    counted = {"global_samples": int(engine.global_samples)}
    return frozen({"tensors": tensors, "states": states, "settings": settings(engine) | counted})


def write_and_go_on(path: str, setup: Setup) -> Any:
    engine = make(setup)
    train(engine, 3)
    zckpt.write(engine, path)
    before = held(engine)
    return before, train(engine, 2, 3), held(engine)


def restore_and_go_on(path: str, setup: Setup, trained: int) -> Any:
    engine = make(setup, seed=1)
    train(engine, trained, 100)
    zckpt.restore(engine, path, rng=True)
    before = held(engine)
    return before, train(engine, 2, 3), held(engine)


OFTEN = ("hpz", "bf16 states", "ratio", "hybrid", "sequence parallelism by an mpu")


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode in OFTEN else pytest.mark.matrix) for mode in MODES]
)
def test_a_resumed_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    ranks, setup = MODES[mode]
    path = str(tmp_path / "c")
    through = cluster.run(write_and_go_on, ranks, path, setup)
    assert zckpt.validate(path).ok
    trained = 2 * (len(mode) % 2)  # Half of the engines that are restored into have trained before.
    assert cluster.run(restore_and_go_on, ranks, path, setup, trained) == through


def move(path: str, there: str, setup: Setup) -> dict[str, torch.Tensor]:
    """Restores into an engine of any mode, and writes it again."""
    engine = make(setup, seed=1)
    zckpt.restore(engine, path)
    zckpt.write(engine, there)
    train(engine, 1)
    return {}


@pytest.mark.parametrize(
    "mode",
    [mode if mode in ("bf16 masters", "ratio") else pytest.param(mode, marks=pytest.mark.matrix) for mode in MODES],
)
def test_it_restores_into_plain_zero_and_back(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    ranks, setup = MODES[mode]
    options = {key: value for key, value in setup.items() if key in ("groups", "scheduler")}
    paths = [str(tmp_path / name) for name in ("first", "plain", "back")]
    cluster.run(write_and_go_on, ranks, paths[0], setup)
    cluster.run(move, 1, paths[0], paths[1], {"stage": 1, **options})
    cluster.run(move, ranks, paths[1], paths[2], setup)
    first, plain, back = (zckpt.open(path).load() for path in paths)
    weights = [key for key in first if key.startswith(("master/", "exp_avg"))]
    assert len(weights) > 6
    for key in weights:
        assert torch.equal(first[key].float(), plain[key].float())
        assert torch.equal(first[key], back[key])
        assert first[key].dtype == back[key].dtype


def look_at_ratio() -> None:
    engine = make({**RATIO, "groups": True})
    train(engine, 2)
    states = engine.optimizer.backup_optimizer.state, engine.optimizer.optimizer.state
    assert all(states)
    adapter: Any = adapt(engine)
    optimizer = adapter.kind.optimizer
    assert isinstance(optimizer, TwinOptimizer)
    assert {type(optimizer.state[flat]["step"]) for flat in engine.optimizer.fp32_partitioned_groups_flat} == {int}


def test_both_optimizers_have_state(cluster: Cluster) -> None:
    cluster.run(look_at_ratio, 1)


CLUSTER = {"name": "cluster_x2", "position": 1, "samples": np.arange(4)}
SAMPLER: dict[str, Any] = {
    "batch": np.arange(3), "consumed_samples": 4, "curriculum_step": 1, "current_difficulties": {"x": 2},
    "clusters": [CLUSTER], "rng": json.dumps(np.random.default_rng(0).bit_generator.state),
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"clusters": None}, {"clusters": [3]}, {"clusters": [CLUSTER, CLUSTER]}, {"rng": "[" * 9999}, {"rng": 3},
        {"rng": SAMPLER["rng"].replace('"has_uint32": 0', f'"has_uint32": {2**70}')}, {"batch": np.zeros(3)},
        {"consumed_samples": -1}, {"current_difficulties": None},
        *(
            {"clusters": [{**CLUSTER, **change}]}
            for change in (
                {"name": "../x"}, {"name": "cluster/../x"}, {"name": "cluster" * 50}, {"name": "cluster\n"},
                {"position": 5}, {"position": -1}, {"samples": np.zeros(0, int)}, {"samples": np.zeros((2, 2), int)},
            )
        ),
    ],
)  # fmt: skip
def test_a_state_that_no_sampler_has_is_refused(change: dict[str, Any]) -> None:
    data_sampler.check(SAMPLER)
    with pytest.raises(zckpt.FormatError, match="data_sampler"):
        data_sampler.check({**SAMPLER, **change})


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), index / 24)


def make_curriculum(path: str, seed: int) -> tuple[Any, Any]:
    """Returns an engine that learns by a curriculum, and its data."""
    schedule = {"total_curriculum_step": 6, "difficulty_step": 2}
    metric = {
        "index_to_sample_path": "x", "index_to_metric_path": "x", "difficulty_type": "percentile",
        "clustering_type": "single_cluster", "min_difficulty": 2, "max_difficulty": 10,
        "schedule_type": "fixed_linear", "schedule_config": schedule,
    }  # fmt: skip
    learning = {"enabled": True, "data_cluster_path": path, "curriculum_metrics": {"length": metric}}
    sampling = {"enabled": True, "num_epochs": 100, "num_workers": 0, "curriculum_learning": learning}
    config = {"data_efficiency": {"enabled": True, "seed": 3, "data_sampling": sampling}}
    engine = make_engine(1, config=config, seed=seed, training_data=Numbers())
    return engine, iter(engine.training_dataloader)


def learn(engine: Any, data: Any, steps: int) -> list[Any]:
    seen = []
    for _ in range(steps):
        batch = next(data)
        loss = engine(batch.to(torch.bfloat16))
        engine.backward(loss)
        engine.step()
        seen.append((batch[:, 0].tolist(), loss.item()))
    return seen


def write_curriculum(path: str, clusters: str) -> list[Any]:
    engine, data = make_curriculum(clusters, 0)
    learn(engine, data, 5)
    zckpt.write(engine, path)
    return learn(engine, data, 8)


def restore_curriculum(path: str, clusters: str) -> list[Any]:
    engine, data = make_curriculum(clusters, 1)
    zckpt.restore(engine, path)
    return learn(engine, data, 8)


def refuse_without_curriculum(path: str, clusters: str) -> None:
    engine, _ = make_curriculum(clusters, 1)
    with pytest.raises(zckpt.MismatchError, match="data_sampler: none"):
        zckpt.restore(engine, path)


def write_plain(path: str) -> None:
    zckpt.write(make_engine(1), path)


def test_a_curriculum_goes_on_with_the_same_samples(cluster: Cluster, tmp_path: Path) -> None:
    """The samples are drawn by a generator of the sampler's own, from files that the sampler changes as it goes on."""
    path = str(tmp_path / "c")
    through = cluster.run(write_curriculum, 2, path, str(tmp_path / "one"))
    for clusters in ("one", "two"):
        assert cluster.run(restore_curriculum, 2, path, str(tmp_path / clusters)) == through
    cluster.run(write_plain, 1, str(tmp_path / "plain"))
    cluster.run(refuse_without_curriculum, 1, str(tmp_path / "plain"), str(tmp_path / "three"))
