"""ZeRO stages 0, 1 and 2: a restored run goes on as if it had never stopped, and every stage reads every other's."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
import zckpt.api
from models import make_engine, train
from runs import (
    BEFORE,
    assert_goes_on_alike,
    assert_same,
    inner,
    logical,
    restore_and_go_on,
    settings,
    weights,
    write_and_go_on,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster

FP32_GRADIENTS = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
CPU = {"offload_optimizer": {"device": "cpu"}}
MODES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "1": {"stage": 1},
    "1-fp32": {"stage": 1, "dtype": "fp32"},
    "1-bf16-optimizer": {"stage": 1, **FP32_GRADIENTS},
    "1-cpu": {"stage": 1, **CPU},
    "2": {"stage": 2},
    "2-fp32": {"stage": 2, "dtype": "fp32"},
    "2-cpu": {"stage": 2, **CPU},
    "2-round-robin": {"stage": 2, "round_robin_gradients": True},
    "2-cpu-round-robin": {"stage": 2, "round_robin_gradients": True, **CPU},
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": True, "scheduler": True},
    "odd": {"model": "odd", "groups": True},
    "frozen-gpt2": {"model": "gpt2", "frozen": True, "groups": True, "scheduler": True},
}
OPTIMIZERS = ("adamw", "torch_adamw", "sgd")
EVERY_COMMIT = {
    ("0", "odd", "adamw"),
    ("0", "frozen-gpt2", "torch_adamw"),
    ("0-fp32", "odd", "adamw"),
    ("0-fp32", "groups", "sgd"),
    ("1", "odd", "adamw"),
    ("1-bf16-optimizer", "odd", "adamw"),
    ("1-bf16-optimizer", "frozen-gpt2", "sgd"),
    ("1-cpu", "frozen-gpt2", "adamw"),
    ("2", "frozen-gpt2", "adamw"),
    ("2-fp32", "odd", "torch_adamw"),
    ("2-cpu", "odd", "torch_adamw"),
    ("2-cpu-round-robin", "frozen-gpt2", "adamw"),
    ("2-round-robin", "odd", "adamw"),
}
CASES = [
    pytest.param(*case, id="-".join(case), marks=() if case in EVERY_COMMIT else pytest.mark.matrix)
    for case in itertools.product(MODES, SHAPES, OPTIMIZERS)
]


@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize(("mode", "shape", "optimizer"), CASES)
def test_a_restored_run_goes_on_bit_for_bit(
    cluster: Cluster, tmp_path: Path, mode: str, shape: str, optimizer: str, trained: int
) -> None:
    setup = {**MODES[mode], **SHAPES[shape], "optimizer": optimizer}
    path = str(tmp_path / "run" / "global_step3")
    through = cluster.run(write_and_go_on, 2, path, setup)
    resumed = cluster.run(restore_and_go_on, 2, path, setup, trained)
    assert_goes_on_alike(through, resumed)
    report = zckpt.validate(path)
    assert report.ok, str(report)
