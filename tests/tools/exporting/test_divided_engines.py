"""An export of a live engine that divides its model between ranks is that of a checkpoint of the same moment."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.live_export import make_engine, make_model, train

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

SETUPS: dict[str, tuple[str, dict[str, Any], int]] = {
    "experts": ("expert_parallel", {"ep": 2, "stage": 1, "dtype": "bf16"}, 4),
    "experts, stage 0": ("expert_parallel", {"ep": 2, "stage": 0}, 4),
    "experts, strided": ("expert_parallel", {"ep": 2, "stage": 2, "use_data_before_expert_parallelism": True}, 4),
    "AutoEP": ("expert_parallel", {"auto": True, "ep": 2, "stage": 3, "dtype": "bf16"}, 4),
    "AutoEP with AutoTP": ("expert_parallel", {"auto": True, "tp": 2, "ep": 2, "stage": 2}, 4),
    "pipeline": ("pipelines", {"stages": 3, "zero": 0}, 3),
    "pipeline in bf16": ("pipelines", {"stages": 2, "zero": 1, "dtype": "bf16"}, 4),
    "pipeline with a stage of its own": ("pipelines", {"stages": 2, "zero": 0, "short": True}, 2),
    "experts in a pipeline": ("pipelines", {"stages": 2, "ep": 2, "zero": 1}, 4),
    "tensor and pipeline parallelism": ("pipelines", {"stages": 2, "tp": 2, "zero": 1}, 8),
    "AutoTP": ("tensor_parallel", {"tp": 3, "stage": 2}, 3),
    "AutoTP, stage 3": ("tensor_parallel", {"tp": 2, "stage": 3, "dtype": "bf16"}, 4),
    "mpu": ("tensor_parallel", {"way": "strided", "tp": 2, "stage": 1}, 4),
}
"""For each way of dividing a model, the module that makes the engine, its settings, and the number of ranks."""
DTYPES = ("bf16", "fp32")
AT_EVERY_COMMIT = ("experts", "experts in a pipeline", "AutoTP")


def write_and_export(directory: Path, module: str, setup: dict[str, Any]) -> None:
    support: Any = import_module(f"tests.support.{module}")
    engine = support.make(**setup)
    support.train(engine, 2)
    for number, (_, buffer) in enumerate(engine.module.named_buffers()):
        buffer.add_(number + torch.distributed.get_rank())  # each rank has other values, and the first one counts
    zckpt.write(engine, directory / "checkpoint")
    for dtype in DTYPES:
        zckpt.export(engine, directory / dtype, max_shard_size=150, dtype=dtype)
    zckpt.export(engine, directory / "own.pt", format="pt")


@pytest.mark.parametrize(
    "name", [name if name in AT_EVERY_COMMIT else pytest.param(name, marks=pytest.mark.matrix) for name in SETUPS]
)
def test_it_is_the_export_of_a_checkpoint(cluster: Cluster, tmp_path: Path, name: str) -> None:
    module, setup, ranks = SETUPS[name]
    cluster.run(write_and_export, ranks, tmp_path, module, setup)
    for dtype in DTYPES:
        out = tmp_path / f"{dtype} of the checkpoint"
        assert len(zckpt.export(tmp_path / "checkpoint", out, max_shard_size=150, dtype=dtype).files) > 1
        assert files(tmp_path / dtype) == files(out)
    stored, own = zckpt.open(tmp_path / "checkpoint").state_dict(), torch.load(tmp_path / "own.pt", weights_only=True)
    assert own.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[key].to(tensor.dtype)) for key, tensor in own.items())


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


AUTOTP: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
AUTOEP: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2, "use_grouped_mm": False}}
MODELS: list[Any] = [
    ("mixtral", 1, AUTOEP),
    pytest.param("qwen2_moe", 3, AUTOEP, marks=pytest.mark.matrix),
    pytest.param("deepseek_v3", 2, AUTOEP, marks=pytest.mark.matrix),
    pytest.param("llama", 3, AUTOTP, marks=pytest.mark.matrix),
    pytest.param("neox", 1, AUTOTP, marks=pytest.mark.matrix),
]
"""Models of transformers, each with a stage of ZeRO, and the settings by which it is divided."""


def export_a_model(directory: Path, kind: str, stage: int, config: dict[str, Any]) -> None:
    engine = make_engine(kind, stage, **config)
    zckpt.export(engine, directory / "fresh", max_shard_size="20KB", dtype="bf16")
    if torch.distributed.get_rank() == 0:
        make_model(kind).bfloat16().save_pretrained(directory / "saved", max_shard_size="20KB")
    train(engine, 2)
    zckpt.write(engine, directory / "checkpoint")
    zckpt.export(engine, directory / "trained", max_shard_size="20KB", dtype="fp32")


@pytest.mark.parametrize(("kind", "stage", "config"), MODELS)
def test_the_files_of_a_divided_model_are_those_of_save_pretrained(
    cluster: Cluster, tmp_path: Path, kind: str, stage: int, config: dict[str, Any]
) -> None:
    cluster.run(export_a_model, 2, tmp_path, kind, stage, config)
    assert files(tmp_path / "fresh") == files(tmp_path / "saved")
    zckpt.export(tmp_path / "checkpoint", tmp_path / "of_checkpoint", config=tmp_path / "saved", max_shard_size="20KB")
    assert files(tmp_path / "of_checkpoint") == files(tmp_path / "trained")
