"""Real ZeRO-3 engines: what is written is what they held, and a restored run goes on as if it had never stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from models import make_engine, train
from zckpt.engines import adapt

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster

BEFORE, AFTER = 3, 3


def held(engine: Any) -> dict[tuple[str, int, int], torch.Tensor]:
    """Everything that this rank's engine holds, 16-bit weights and all, by key and span."""
    adapter = adapt(engine)
    everything = [*adapter.inventory(None).fragments, *adapter.inventory(["param"]).fragments]
    return {(f.key, f.start, f.stop): f.data.clone() for f in everything}


def settings(engine: Any) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.optimizer.param_groups]
    scheduler = engine.lr_scheduler and engine.lr_scheduler.state_dict()
    counters = {name: getattr(engine, name) for name in ("global_steps", "global_samples", "micro_steps")}
    return {"groups": groups, "scheduler": scheduler, "lr": engine.get_lr(), **counters}


def write_and_go_on(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup)
    train(engine, BEFORE)
    before = held(engine), settings(engine)
    written = zckpt.write(engine, path, client_state={"note": "made by a test", "where": torch.arange(3)})
    assert all(torch.equal(value, before[0][key]) for key, value in held(engine).items())
    losses = train(engine, AFTER, BEFORE)
    return {"path": written, "before": before, "losses": losses, "after": (held(engine), settings(engine))}


def restore_and_go_on(path: str, setup: dict[str, Any], trained: int) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    if trained:
        train(engine, trained, 100)
    client_state = zckpt.restore(engine, path, rng=True)
    before = held(engine), settings(engine)
    losses = train(engine, AFTER, BEFORE)
    return {"client": client_state, "before": before, "losses": losses, "after": (held(engine), settings(engine))}


def assert_same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    differ = [key for key in one if not (one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]))]
    assert not differ


CASES = {
    "bf16": {},
    "fp32": {"dtype": "fp32"},
    "torch-adamw": {"optimizer": "torch_adamw"},
    "sgd": {"optimizer": "sgd"},
    "groups-scheduler": {"groups": True, "scheduler": True},
    "odd": {"model": "odd", "groups": True},
    "odd-fp32-sub-groups": {"model": "odd", "dtype": "fp32", "sub_group_size": 1000},
    "frozen-gpt2": {"model": "gpt2", "frozen": True, "groups": True, "scheduler": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
def test_a_restored_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, case: str, trained: int) -> None:
    path = str(tmp_path / "run" / "global_step3")
    through = cluster.run(write_and_go_on, 2, path, CASES[case])
    resumed = cluster.run(restore_and_go_on, 2, path, CASES[case], trained)
    for one, other in zip(through, resumed, strict=True):
        assert_same(one["before"][0], other["before"][0])
        assert one["before"][1] == other["before"][1]
        assert one["losses"] == other["losses"]
        assert_same(one["after"][0], other["after"][0])
        assert one["after"][1] == other["after"][1]
        assert other["client"]["note"] == "made by a test"
        assert torch.equal(other["client"]["where"], torch.arange(3))


@pytest.mark.parametrize("case", CASES)
def test_loaded_tensors_are_what_the_engines_held(cluster: Cluster, tmp_path: Path, case: str) -> None:
    path = str(tmp_path / "run" / "global_step3")
    ranks = [result["before"][0] for result in cluster.run(write_and_go_on, 2, path, CASES[case])]
    checkpoint = zckpt.open(tmp_path / "run")
    assert checkpoint.step == BEFORE
    assert checkpoint.world_size == 2
    loaded = checkpoint.load()
    assert set(loaded) == set(checkpoint)
    covered: dict[str, int] = {}
    for rank, pieces in enumerate(ranks):
        for (key, start, stop), value in pieces.items():
            if key in loaded and not (key.startswith("buffer/") and rank):
                assert torch.equal(loaded[key].reshape(-1)[start:stop], value), key
                covered[key] = covered.get(key, 0) + stop - start
    assert covered == {key: tensor.numel() for key, tensor in loaded.items()}
    report = zckpt.validate(path)
    assert report.ok, str(report)
