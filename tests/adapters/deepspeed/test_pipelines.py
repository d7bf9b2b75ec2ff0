"""Engines with the stages of a pipeline: a checkpoint has the layers of all stages, and fits any other number of
stages."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.divided import Setup, check_division
from tests.support.pipelines import make, train
from tests.support.runs import tensors_of
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

SETUPS: list[tuple[Setup, int]] = [
    ({"stages": 2, "zero": 0}, 4), ({"stages": 2, "zero": 1}, 4), ({"stages": 3, "zero": 1}, 3),
    ({"stages": 1, "zero": 1}, 2), ({"stages": 4, "zero": 0}, 4),
]  # fmt: skip
"""Engines, each with a number of ranks."""


@pytest.mark.parametrize("there", [1, 3])
def test_a_pipeline_restores_into_itself_and_into_another_one(cluster: Cluster, tmp_path: Path, there: int) -> None:
    check_division(cluster, str(tmp_path / "c"), "pipelines", SETUPS, there)


@pytest.mark.matrix
def test_every_pipeline_restores_into_every_other_one(cluster: Cluster, tmp_path: Path) -> None:
    for there in range(len(SETUPS)):
        check_division(cluster, str(tmp_path / str(there)), "pipelines", SETUPS, there, everywhere=True)


def write_bf16(path: str, setup: Setup) -> list[Any]:
    engine = make(**setup)
    train(engine, 3)
    zckpt.write(engine, path)
    return [frozen(tensors_of(engine)), train(engine, 2)]


def restore_bf16(path: str, setup: Setup) -> list[Any]:
    engine = make(**setup, seed=1)
    zckpt.restore(engine, path)
    return [frozen(tensors_of(engine)), train(engine, 2)]


def test_a_stage_that_has_only_the_shared_module(cluster: Cluster, tmp_path: Path) -> None:
    """DeepSpeed's optimizer counts the steps of a param group in its last tensor, which differs between the stages. A
    buffer without elements is written by the stage that has it."""
    path, adam = str(tmp_path / "c"), {"type": "AdamW", "params": {"lr": 1e-2}}
    setup = {"stages": 2, "zero": 0, "short": True, "optimizer": adam}
    assert cluster.run(write_bf16, 2, path, setup) == cluster.run(restore_bf16, 2, path, setup)


def test_a_shared_module_that_is_called_by_functions(cluster: Cluster, tmp_path: Path) -> None:
    """DeepSpeed's own checkpoints have no weights of such a module, and it loads them without an error."""
    path, setup = str(tmp_path / "c"), {"stages": 2, "zero": 1, "functions": True}
    assert cluster.run(write_bf16, 2, path, setup) == cluster.run(restore_bf16, 2, path, setup)


def test_experts_that_only_some_stages_have(cluster: Cluster, tmp_path: Path) -> None:
    """DeepSpeed makes param groups for experts on these stages only."""
    path, setup = str(tmp_path / "c"), {"stages": 2, "zero": 0, "ep": 2, "late": True}
    through = cluster.run(write_bf16, 4, path, setup)
    groups = zckpt.open(path).state["engine"]["optimizer"]["param_groups"]
    assert [bool(group.get("moe")) for group in groups] == [False, True]
    assert cluster.run(restore_bf16, 4, path, setup) == through
    cluster.run(restore_bf16, 2, path, {**setup, "stages": 1, "ep": 1})


class Thing:
    """A value that no checkpoint can hold."""


def save_a_thing(directory: str) -> None:
    engine = make(2, 1)
    zckpt.attach(engine)
    engine.optimizer.optimizer.param_groups[0]["thing"] = Thing()
    train(engine, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save_checkpoint(directory)
    engine.module.register_parameter("own", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(zckpt.UnsupportedError, match=r"own, .*no layer"):
        zckpt.write(engine, f"{directory}/other")


def test_what_cannot_be_kept_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_a_thing, 2, str(tmp_path))
    assert zckpt.validate(tmp_path / "global_step1").ok


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_resumed_run_in_bf16_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, zero: int) -> None:
    path, setup = str(tmp_path / "c"), {"stages": 2, "zero": zero, "dtype": "bf16"}
    assert cluster.run(write_bf16, 4, path, setup) == cluster.run(restore_bf16, 4, path, setup)


def save_and_load(directory: str) -> None:
    engine = make(2, 1)
    zckpt.attach(engine)
    train(engine, 2)
    engine.save_checkpoint(directory)
    expected = train(engine, 2)
    other = make(2, 1, seed=1)
    zckpt.attach(other)
    assert other.load_checkpoint(directory)[0] is not None
    assert train(other, 2) == expected


def test_an_attached_pipeline_saves_and_loads(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_and_load, 2, str(tmp_path))


def train_offloaded(directory: str) -> None:
    engine, other = make(2, 1), make(2, 1)
    train(other, 2)
    expected = train(other, 2)
    train(engine, 2)
    zckpt.offload(engine, directory, auto=True)
    assert train(engine, 2) == expected


@pytest.mark.offload
def test_an_offloaded_pipeline_comes_back_before_its_stages_wait_for_each_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.run(train_offloaded, 2, str(tmp_path))


def refuse(path: str) -> None:
    engine = make(2, 1)
    train(engine, 1)
    group = engine.optimizer.optimizer.param_groups[0]
    group["lr"] += torch.distributed.get_rank()
    with pytest.raises(zckpt.ZckptError, match=r"rank 1 .*param groups"):
        zckpt.write(engine, path)
    group["lr"] -= torch.distributed.get_rank()
    if torch.distributed.get_rank():
        engine.module.tied_modules["embed"].weight.data[-1, -1] += 1
    with pytest.raises(zckpt.RankError, match=r"rank 1 .*rank 0: its weights .*tied"):
        zckpt.write(engine, path)
    with pytest.raises(zckpt.UnsupportedError, match=r"tied_modules\.embed\.bias.*tied_weight_attr"):
        zckpt.write(make(2, 1, bias=True), path)


def test_copies_of_a_shared_module_have_to_be_equal(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refuse, 2, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def write_more_layers(path: str) -> None:
    engine = make(1, 0)
    engine.module.register_buffer("7", torch.zeros(2))
    engine.module.get_submodule("1").register_buffer("more", torch.zeros(2))
    zckpt.write(engine, path)


def refuse_more_layers(path: str) -> None:
    with pytest.raises(zckpt.ZckptError) as refused:
        zckpt.restore(make(2, 0), path)
    on_first_stage = torch.distributed.get_rank() == 0
    assert "buffer/7" in str(refused.value)
    assert ("buffer/1.more" in str(refused.value)) == on_first_stage


def test_what_no_stage_has_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Each rank knows only its own layers, and which other numbers of layers there are."""
    cluster.run(write_more_layers, 1, str(tmp_path / "c"))
    cluster.run(refuse_more_layers, 2, str(tmp_path / "c"))
