"""Engines without an optimizer, which only evaluate. Their weights and buffers are saved and restored like other
states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import assert_same, logical, tensors_of, weights
from zckpt.engines import adapt
from zckpt.format.names import Tier

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

ODD: dict[str, Any] = {"model": "odd", "groups": True}
EVALUATING: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "3": {"stage": 3},
    "3-fp32": {"stage": 3, "dtype": "fp32"},
    "3-cpu": {"stage": 3, "offload_param": {"device": "cpu"}},
}


def evaluate(engine: Any) -> torch.Tensor:
    """Returns the output of the model for an input that is the same on every rank. This changes the model's buffers."""
    x = torch.linspace(-1, 1, 4 * 63).view(4, 63).to(next(engine.module.parameters()).dtype)
    engine.eval()
    with torch.no_grad():
        return engine(x).detach().clone()


def train_and_evaluate(path: str, stage: int) -> dict[str, Any]:
    engine = make_engine(stage, **ODD)
    train(engine, 2)
    zckpt.write(engine, path, parts=["master", "exp_avg", "exp_avg_sq", "param", "buffer"])
    zckpt.write(engine, f"{path}-weights", parts=["param", "buffer"])
    values = {"weights": weights(engine), "masters": logical(engine, ())}
    return {**values, "output": evaluate(engine)}


def restore_and_evaluate(path: str, setups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    evaluated: dict[str, Any] = {}
    for name, setup in setups.items():
        for source in ("", "-weights"):
            engine = make_engine(**ODD, **setup, optimizer="none", seed=1)
            evaluate(engine)
            zckpt.restore(engine, path + source)
            assert engine.global_steps == 2
            restored = weights(engine)
            zckpt.write(engine, f"{path}-{name}{source}")
            evaluated[name + source] = {"weights": restored, "output": evaluate(engine)}
            second = make_engine(**ODD, **setup, optimizer="none", seed=2)
            zckpt.restore(second, f"{path}-{name}{source}")
            assert_same(weights(second), restored)
    return evaluated


@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.matrix)])
def test_trained_weights_are_evaluated_without_an_optimizer(
    cluster: Cluster, tmp_path: Path, stage: int, ranks: int
) -> None:
    path = str(tmp_path / "run" / "global_step2")
    trained = cluster.run(train_and_evaluate, 3 - ranks, path, stage)[0]
    masters = {key.partition("/")[2]: master for key, master in trained["masters"].items()}
    for rank in cluster.run(restore_and_evaluate, ranks, path, EVALUATING):
        for name, evaluated in rank.items():
            dtype = torch.float32 if "fp32" in name else torch.bfloat16
            exact = {} if name.endswith("-weights") else masters
            expected = {key: exact.get(key, weight) for key, weight in trained["weights"].items()}
            assert {evaluated["weights"][key].dtype for key in masters} == {dtype}
            assert_same(
                {key: w.to(evaluated["weights"][key].dtype) for key, w in expected.items()}, evaluated["weights"]
            )
            if dtype == torch.bfloat16:
                assert torch.equal(trained["output"], evaluated["output"])
    checkpoint = zckpt.open(f"{path}-0")
    assert set(checkpoint.parts) == {"param", "buffer"}
    assert_same(checkpoint.load(), zckpt.open(f"{path}-3").load())
    assert zckpt.validate(f"{path}-3").ok


def take_from_evaluation(path: str, stages: list[int]) -> None:
    source = make_engine(0, **ODD, optimizer="none", seed=1)
    zckpt.write(source, path)
    expected = weights(source)
    for stage in stages:
        engine = make_engine(stage, **ODD)
        train(engine, 1)
        before = tensors_of(engine)
        with pytest.raises(zckpt.MismatchError, match="optimizer: none") as refused:
            zckpt.restore(engine, path)
        assert 'parts=["param", "buffer"] restores the weights alone' in str(refused.value)
        assert_same(tensors_of(engine), before)
        zckpt.restore(engine, path, parts=["param", "buffer"])
        assert_same(weights(engine), expected)
        assert engine.global_steps == 1
        after = tensors_of(engine)
        for (key, start, stop), value in after.items():  # With one rank, each piece is a whole tensor.
            part, _, name = key.partition("/")
            if part == "master":
                assert torch.equal(value, after[f"param/{name}", start, stop].float())
            elif part.startswith("exp_avg"):
                assert torch.equal(value, before[key, start, stop])


def test_weights_of_an_evaluation_are_trained_further(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(take_from_evaluation, 1, str(tmp_path / "c"), [0, 2, 3])


def unknown_state(path: str) -> None:
    engine = make_engine(0, optimizer="none")
    with pytest.raises(ValueError, match="master"):
        zckpt.write(engine, path, parts=["master"])
    zckpt.write(engine, path, background=True, snapshot="lazy").wait()
    with pytest.raises(zckpt.MismatchError, match=r"layers\.0\.weight"):
        zckpt.restore(make_engine(0, "bf16", "wide", optimizer="none"), path)


def test_a_checkpoint_that_does_not_fit_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(unknown_state, 1, str(tmp_path / "c"))


def move_weights(path: str, swap: str) -> None:
    disk = {"device": "nvme", "buffer_size": 1050000, "max_in_cpu": 0}
    trained = make_engine(2, model="wide")
    zckpt.write(trained, path)
    engine = make_engine(3, model="wide", optimizer="none", swap=swap, offload_param=disk, seed=1)
    assert Tier.NVME in {fragment.tier for fragment in adapt(engine).inventory(None).fragments}
    zckpt.restore(engine, path)
    assert_same(weights(engine), weights(trained))
    zckpt.write(engine, f"{path}-again")
    other = make_engine(0, model="wide", optimizer="none", seed=2)
    zckpt.restore(other, f"{path}-again")
    assert_same(weights(other), weights(trained))


@pytest.mark.nvme
def test_weights_on_nvme_are_evaluated_without_an_optimizer(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(move_weights, 2, str(tmp_path / "c"), str(tmp_path / "swap"))
