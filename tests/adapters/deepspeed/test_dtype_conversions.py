"""Restores into another compute dtype, and restores of a model in which only adapters are trained."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch
from torch import nn

import zckpt
from tests.support.models import ADAMW, train
from tests.support.runs import (
    ADAM,
    BEFORE,
    assert_same,
    link_all,
    logical,
    restore_whole,
    settings,
    weights,
    write_whole,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EVERY_COMMIT = {
    (3, "bf16", 3, "fp16", 3),
    (2, "fp16", 0, "fp32", 2),
    (0, "bf16", 2, "fp32", 3),
    (3, "fp32", 3, "bf16", 1),
    (0, "fp32", 2, "bf16", 1),
}
PAIRS = [pair for pair in itertools.product(DTYPES, DTYPES) if pair[0] != pair[1]]
STAGES = [(0, 0, 2), (2, 2, 3), (3, 3, 1), (0, 3, 3), (3, 2, 1)]
CASES = EVERY_COMMIT | {
    (there, old, here, new, ranks) for (there, here, ranks), (old, new) in itertools.product(STAGES, PAIRS)
}


@pytest.mark.parametrize(
    ("there", "old", "here", "new", "ranks"),
    [pytest.param(*case, marks=() if case in EVERY_COMMIT else pytest.mark.matrix) for case in sorted(CASES)],
)
def test_another_compute_dtype(
    cluster: Cluster, tmp_path: Path, there: int, old: str, here: int, new: str, ranks: int
) -> None:
    path, shape = str(tmp_path / "c"), {"model": "odd", "groups": True}
    saved = cluster.run(write_whole, 2, path, {**shape, "stage": there, "dtype": old}, ADAM)
    masters = {k.partition("/")[2]: master for k, master in saved[0]["logical"].items() if k.startswith("master/")}
    for rank, restored in enumerate(
        cluster.run(restore_whole, ranks, path, {**shape, "stage": here, "dtype": new}, ADAM)
    ):
        written = saved[rank if ranks == 2 else 0]  # each rank has its own value of a buffer
        expected = {name: masters.get(name, weight) for name, weight in written["weights"].items()}
        assert {"frozen.weight", "running_mean", "batches"} <= expected.keys() - masters.keys()
        computed = {name: restored["weights"][name].dtype for name in expected}
        assert {computed[name] for name in (*masters, "frozen.weight")} == {DTYPES[new]}
        assert_same({name: value.to(computed[name]) for name, value in expected.items()}, restored["weights"])
        assert_same(written["logical"], restored["logical"])
        assert written["parameters"] == restored["parameters"]
        assert written["step"] == restored["step"]


class Adapted(nn.Module):
    """A frozen model whose layers have low-rank adapters, as PEFT makes them."""

    scales: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 33)
        self.base = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.head = nn.Linear(33, 64, bias=False)
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(33, 3, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(3, 33, bias=False) for _ in range(3))
        self.shared = nn.Linear(33, 3, bias=False)
        self.shared.weight = self.down[0].get_parameter("weight")
        self.left_out = nn.Parameter(torch.randn(5, 7))  # requires gradients, but is in no param group
        self.register_buffer("scales", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for base, down, up, scale in zip(self.base, self.down, self.up, self.scales, strict=True):
            hidden = base(hidden) + scale * up(down(hidden) + self.shared(hidden))
        return self.head(hidden).float().square().mean()


def make_adapted(stage: int, seed: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(seed)
    module = Adapted()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50},
    }
    groups = [
        {"params": [*module.down.parameters()], "weight_decay": 0.1},
        {"params": [*module.up.parameters()], "lr": 2e-2},
    ]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
    return engine


def write_adapted(path: str, stage: int) -> dict[str, Any]:
    engine = make_adapted(stage, 0)
    train(engine, BEFORE)
    zckpt.write(engine, path)
    if stage in (1, 2):
        link_all(engine)
    return look(engine) | {"next": train(engine, 1, BEFORE)}


def restore_adapted(path: str, stage: int) -> dict[str, Any]:
    engine = make_adapted(stage, 1)
    zckpt.restore(engine, path)
    return look(engine) | {"next": train(engine, 1, BEFORE)}


def look(engine: deepspeed.DeepSpeedEngine) -> dict[str, Any]:
    left_out = engine.module.left_out
    # `logical` expects a master for each parameter that requires gradients, and this one has none.
    left_out.requires_grad_(False)
    values = {"logical": logical(engine, ADAM), "weights": weights(engine), "groups": settings(engine)["groups"]}
    left_out.requires_grad_(True)
    return values


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        (3, 3),
        (2, 0),
        *(
            pytest.param(there, here, marks=pytest.mark.matrix)
            for there, here in [(0, 0), (1, 1), (2, 2), (0, 3), (3, 1), (1, 2), (3, 0)]
        ),
    ],
)
def test_a_model_with_few_trained_parameters(
    cluster: Cluster, tmp_path: Path, there: int, here: int, ranks: int
) -> None:
    path = str(tmp_path / "c")
    saved = cluster.run(write_adapted, 2, path, there)
    checkpoint = zckpt.open(path)
    assert {key.partition("/")[2] for key in checkpoint if key.startswith("master/")} == {
        f"{kind}.{number}.weight" for kind in ("down", "up") for number in range(3)
    }
    assert checkpoint.aliases == {"shared.weight": "down.0.weight"}
    assert {"param/left_out", "param/base.0.weight", "buffer/scales"} <= set(checkpoint)
    for written, restored in zip(saved, cluster.run(restore_adapted, ranks, path, here), strict=False):
        assert_same(written["logical"], restored["logical"])
        assert_same(written["weights"], restored["weights"])
        assert written["groups"] == restored["groups"]
        assert written["next"] == restored["next"]
