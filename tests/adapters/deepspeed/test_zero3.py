"""A checkpoint has what the ZeRO-3 engines held, and a restored run goes on as if it had never stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import BEFORE, assert_goes_on_alike, restore_and_go_on, write_and_go_on

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "fp32"},
    "torch-adamw": {"optimizer": "torch_adamw"},
    "sgd": {"optimizer": "sgd"},
    "groups-scheduler": {"groups": True, "scheduler": True},
    "odd": {"model": "odd", "groups": True},
    "odd-fp32-sub-groups": {"model": "odd", "dtype": "fp32", "sub_group_size": 1000},
    "frozen-gpt2": {"model": "gpt2", "frozen": True, "groups": True, "scheduler": True},
}


@dataclass(frozen=True)
class Run:
    setup: dict[str, Any]
    path: Path
    through: list[Any]
    """What each rank had when it wrote the checkpoint, and after it had trained on."""


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("run") / "global_step3"
    setup = CASES[request.param]
    return Run(setup, path, cluster.run(write_and_go_on, 2, str(path), setup))


def gathered_after(path: str) -> list[dict[str, bool]]:
    """Returns which parameters are gathered after each of these actions: none, DeepSpeed's own save, zckpt's two ways
    to write, and a restore."""
    gathered = []
    for action in (
        lambda engine: None,
        lambda engine: engine.save_checkpoint(f"{path}-stock"),
        lambda engine: zckpt.write(engine, path),
        lambda engine: zckpt.write(engine, f"{path}-lazy", background=True, snapshot="lazy"),
        lambda engine: zckpt.restore(engine, path),
    ):
        engine = make_engine()
        with torch.no_grad():
            engine.eval()
            engine(torch.ones(4, 64, dtype=torch.bfloat16))  # leaves some other parameters gathered
        engine.optimizer.persistent_parameters[0].partition(engine.optimizer.persistent_parameters)
        action(engine)
        gathered.append({name: p.ds_status.name == "AVAILABLE" for name, p in engine.module.named_parameters()})
        train(engine, 1)
    return gathered


def test_parameters_are_gathered_as_by_deepspeed_s_own_save(cluster: Cluster, tmp_path: Path) -> None:
    for before, stock, *ours in cluster.run(gathered_after, 2, str(tmp_path / "c")):
        assert before != stock
        assert {name for name, gathered in stock.items() if gathered} == {"layers.0.bias", "layers.2.bias"}
        assert ours == [stock] * 3


def go_on_after_inference_mode(path: str) -> dict[str, Any]:
    """Returns the losses of a run that is written in the course of an evaluation, and of one that is restored there."""
    written, restored = make_engine(), make_engine(seed=1)
    train(written, 2)
    with torch.inference_mode():
        zckpt.write(written, path)
        zckpt.restore(restored, path)
    return {"written": train(written, BEFORE), "restored": train(restored, BEFORE)}


def test_a_run_goes_on_after_a_write_and_a_restore_in_inference_mode(cluster: Cluster, tmp_path: Path) -> None:
    for losses in cluster.run(go_on_after_inference_mode, 2, str(tmp_path / "a")):
        assert losses["written"] == losses["restored"]


@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
def test_a_restored_run_goes_on_bit_for_bit(cluster: Cluster, run: Run, trained: int) -> None:
    assert_goes_on_alike(run.through, cluster.run(restore_and_go_on, 2, str(run.path), run.setup, trained))


def test_loaded_tensors_are_what_the_engines_held(run: Run) -> None:
    ranks = [result["before"][0] for result in run.through]
    checkpoint = zckpt.open(run.path.parent)
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
    report = zckpt.validate(run.path)
    assert report.ok, str(report)
