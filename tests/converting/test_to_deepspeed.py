"""Folders in DeepSpeed's own format, made from checkpoints: stock ``engine.load_checkpoint`` resumes from them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import AFTER, BEFORE, everything, settings
from zckpt.converting.to_deepspeed import to_deepspeed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from tests.support.cluster import Cluster

CPU = {"offload_optimizer": {"device": "cpu"}}
MODES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-fp16": {"stage": 0, "dtype": "fp16"},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "1": {"stage": 1},
    "1-fp16": {"stage": 1, "dtype": "fp16"},
    "1-bf16-optimizer": {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "1-aligned": {"stage": 1, "parameter_alignment": True},
    "2": {"stage": 2},
    "2-fp32": {"stage": 2, "dtype": "fp32"},
    "2-cpu": {"stage": 2, **CPU},
    "2-round-robin": {"stage": 2, "round_robin_gradients": True},
    "3": {"stage": 3},
    "3-fp16": {"stage": 3, "dtype": "fp16"},
    "3-fp32": {"stage": 3, "dtype": "fp32"},
    "3-cpu": {"stage": 3, **CPU, "offload_param": {"device": "cpu"}},
    "3-sub-groups": {"stage": 3, "sub_group_size": 1000},
}
SHAPES: dict[str, dict[str, Any]] = {
    "odd": {"model": "odd", "groups": True, "scheduler": True},
    "frozen-gpt2": {"model": "gpt2", "frozen": True, "groups": True},
}
RESHARDED = [
    ("3", 2, "1", 3),
    ("3", 2, "0", 1),
    ("2-round-robin", 2, "3-sub-groups", 3),
    ("2-round-robin", 3, "2-round-robin", 2),
    ("0-fp32", 1, "3-fp32", 2),
    ("3-fp32", 2, "0-fp32", 2),
    ("1-aligned", 2, "1-aligned", 3),
    ("1-bf16-optimizer", 2, "2", 1),
    ("0", 2, "2-cpu", 2),
    ("3-fp16", 2, "0-fp16", 2),
]


def marked(every: Iterable[tuple[Any, ...]], on_every_commit: Collection[tuple[Any, ...]]) -> list[Any]:
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in on_every_commit else pytest.mark.matrix)
        for case in every
    ]


def go_on(engine: Any) -> dict[str, Any]:
    """What the engine holds, then its next steps. No folder of DeepSpeed's has random states."""
    before = held(engine)
    torch.manual_seed(engine.global_rank)
    losses = train(engine, AFTER, BEFORE)
    return {"before": before, "losses": losses, "after": held(engine)}


def held(engine: Any) -> dict[str, Any]:
    """DeepSpeed does not restore the counter of micro steps; where no gradients are accumulated, it says nothing."""
    about = {key: value for key, value in settings(engine).items() if key not in ("micro_steps", "lr")}
    return {**everything(engine), "settings": about}


def write_and_go_on(path: str, setup: dict[str, Any], stock: str | None = None) -> dict[str, Any]:
    engine = make_engine(**setup)
    train(engine, BEFORE)
    zckpt.write(engine, path, client_state={"note": [1, "two"], "where": torch.arange(3)})
    if stock is not None:
        engine.save_checkpoint(stock)
    return go_on(engine)


def load_and_go_on(folder: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    return {**go_on(engine), "client": {key: client_state.get(key) for key in ("note", "where")}}


def get_and_go_on(source: str, setup: dict[str, Any], *, stock: bool) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    if stock:
        assert engine.load_checkpoint(source)[0] is not None
    else:
        zckpt.restore(engine, source)
    return go_on(engine)


def assert_goes_on_alike(through: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for one, other in zip(through, resumed, strict=True):
        assert one["before"] == other["before"]
        assert one["losses"] == other["losses"]
        assert one["after"] == other["after"]


@pytest.mark.parametrize(
    ("mode", "shape"),
    marked(
        itertools.product(MODES, SHAPES),
        {("0-fp32", "odd"), ("1-bf16-optimizer", "frozen-gpt2"), ("2-round-robin", "odd"), ("3-fp16", "odd")},
    ),
)
def test_stock_deepspeed_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, mode: str, shape: str) -> None:
    setup = {**MODES[mode], **SHAPES[shape], "optimizer": "torch_adamw"}
    path, folder = str(tmp_path / "run" / "global_step3"), str(tmp_path / "deepspeed")
    through = cluster.run(write_and_go_on, 2, path, setup)
    missing = to_deepspeed(zckpt.open(path), folder)
    assert any("random number generators" in line for line in missing)
    resumed = cluster.run(load_and_go_on, 2, folder, setup)
    if setup["stage"] < 3 and shape == "odd":  # whose buffers differ: there is a place for rank 0's alone
        through, resumed = through[:1], resumed[:1]
        assert any("running_mean" in line for line in missing)
    assert_goes_on_alike(through, resumed)
    for one in resumed:
        assert one["client"]["note"] == [1, "two"]
        assert torch.equal(one["client"]["where"], torch.arange(3))


@pytest.mark.parametrize(("source", "ranks", "target", "new_ranks"), marked(RESHARDED, [RESHARDED[0], RESHARDED[2]]))
def test_another_stage_and_world_size(
    cluster: Cluster, tmp_path: Path, source: str, ranks: int, target: str, new_ranks: int
) -> None:
    """Stock DeepSpeed has and does, bit for bit, what an engine has and does that zckpt has restored."""
    shape = {"model": "gpt2", "frozen": True, "groups": True, "scheduler": True, "optimizer": "torch_adamw"}
    path, folder = str(tmp_path / "run" / "global_step3"), str(tmp_path / "deepspeed")
    kept = ("sub_group_size", "round_robin_gradients", "parameter_alignment")  # those of the run are kept
    there = {**{key: value for key, value in MODES[target].items() if key in kept}, **MODES[source]}
    here = {**there, **MODES[target]}
    cluster.run(write_and_go_on, ranks, path, {**shape, **there})
    to_deepspeed(zckpt.open(path), folder, stage=here["stage"], world_size=new_ranks)
    setup = {**shape, **here}
    restored = cluster.run(get_and_go_on, new_ranks, path, setup, stock=False)
    resumed = cluster.run(get_and_go_on, new_ranks, folder, setup, stock=True)
    assert_goes_on_alike(restored, resumed)
