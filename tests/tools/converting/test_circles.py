"""Conversions from DeepSpeed to zckpt and back, and from zckpt to DeepSpeed and back. A run that resumes from the
result trains on, bit for bit, as a run that never stopped."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.offload import CPU, NVME, WIDE
from tests.support.runs import AFTER, BEFORE, everything

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

SHAPE: dict[str, Any] = {"model": "gpt2", "groups": True, "scheduler": True}
MODES: dict[str, dict[str, Any]] = {
    f"{stage}-{dtype}{'-cpu' if offload else ''}": {
        **SHAPE, "stage": stage, "dtype": dtype, "frozen": stage > 0,  # at stage 0, convert finds the names by shapes
        **({"offload_optimizer": CPU} if offload else {}), **({"offload_param": CPU} if offload and stage == 3 else {}),
    }
    for stage, dtype, offload in itertools.product(range(4), ("fp32", "bf16", "fp16"), (False, True))
    if stage or not offload
}  # fmt: skip
MODES |= {
    "3-bf16-nvme": {**WIDE, "offload_optimizer": NVME},
    "3-fp16-nvme": {**WIDE, "dtype": "fp16", "offload_optimizer": NVME},
    "3-fp32-nvme": {**WIDE, "dtype": "fp32", "offload_optimizer": NVME},
}
EVERY_COMMIT = {"2-bf16-cpu", "3-fp16"}


def save_and_go_on(folder: str, setup: dict[str, Any], swap: str) -> dict[str, Any]:
    engine = make_engine(**setup, swap=swap)
    train(engine, BEFORE)
    engine.save_checkpoint(f"{folder}/stock", client_state={"note": "made by a test"})
    zckpt.write(engine, f"{folder}/own/global_step3", client_state={"note": "made by a test"})
    return go_on(engine)


def go_on(engine: Any) -> dict[str, Any]:
    torch.manual_seed(engine.global_rank)  # because DeepSpeed's folders have no random states
    results = {"losses": train(engine, AFTER, BEFORE), **everything(engine)}
    results["settings"].pop("micro_steps")  # DeepSpeed's folders lack this counter too
    return results


def load(folder: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    assert client_state["note"] == "made by a test"
    return go_on(engine)


def restore(path: str, setup: dict[str, Any], swap: str) -> dict[str, Any]:
    engine = make_engine(**setup, swap=swap, seed=1)
    assert zckpt.restore(engine, path) == {"note": "made by a test"}
    return go_on(engine)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in EVERY_COMMIT else pytest.mark.matrix) for mode in MODES]
)
def test_there_and_back(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    setup = {**MODES[mode], "optimizer": "torch_adamw"}
    through = cluster.run(save_and_go_on, 2, str(tmp_path), setup, str(tmp_path / "swap"))

    converted = zckpt.convert(tmp_path / "stock", tmp_path / "converted")
    missing = zckpt.convert(converted.path, tmp_path / "there and back", to="deepspeed").missing
    on_nvme = setup.get("offload_optimizer") == NVME
    assert on_nvme == any("offload to NVMe" in line for line in missing)
    # Stock DeepSpeed does not resume engines that offload to NVMe.
    there = {**setup, "offload_optimizer": CPU} if on_nvme else setup
    assert_same(through, cluster.run(load, 2, str(tmp_path / "there and back"), there))

    zckpt.convert(tmp_path / "own", tmp_path / "there", to="deepspeed")
    back = zckpt.convert(tmp_path / "there", tmp_path / "back").path
    assert zckpt.validate(back, level="deep").ok
    assert setup_of(tmp_path / "own") == setup_of(back)
    assert_same(through, cluster.run(restore, 2, back, setup, str(tmp_path / "other swap")))


def assert_same(through: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """Checks on each rank that both engines hold the same."""
    for expected, actual in zip(through, resumed, strict=True):
        assert expected.keys() == actual.keys()
        assert not [key for key in expected if expected[key] != actual[key]]


def setup_of(path: Path | str) -> Any:
    """Returns the settings on which DeepSpeed's files depend."""
    return zckpt.open(path).state["engine"]["deepspeed"]
