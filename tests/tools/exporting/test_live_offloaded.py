"""Exports of live engines whose state is in host memory, on NVMe, or where ``zckpt.offload`` has moved it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

import zckpt
from tests.support.models import make_engine, train
from tests.support.offload import CPU, NVME, ODD, PARAM_DISK, WIDE
from tests.support.runs import assert_at_rest, fingerprint, fingerprints_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

MATRIX = pytest.mark.matrix
THAWED = {**WIDE, "model": "thawed"}
ON_CPU = {**ODD, "offload_optimizer": CPU, "offload_param": CPU}
CASES = [
    pytest.param(ON_CPU, "", id="cpu+cpu"),
    pytest.param({**ODD, "offload_optimizer": CPU}, "", id="cpu", marks=MATRIX),
    pytest.param({**WIDE, "offload_optimizer": NVME, "offload_param": PARAM_DISK}, "", id="nvme+disk"),
    pytest.param({**WIDE, "offload_optimizer": CPU, "offload_param": PARAM_DISK}, "", id="cpu+disk", marks=MATRIX),
    pytest.param({**THAWED, "offload_optimizer": NVME}, "", id="nvme", marks=MATRIX),
    pytest.param(ODD, "offload", id="moved", marks=pytest.mark.offload),
    pytest.param(ON_CPU, "offload", id="cpu+cpu-moved", marks=[MATRIX, pytest.mark.offload]),
    pytest.param({"groups": True}, "offload_states", id="moved-by-deepspeed", marks=MATRIX),
]


def export(directory: Path, setup: dict[str, Any], moved: str) -> dict[str, str]:
    """Exports the engine. Returns fingerprints of what DeepSpeed says that the engine held before the export, and
    checks that the export has changed nothing."""
    engine = make_engine(**setup, swap=str(directory / "swap"))
    train(engine, 2)
    before = fingerprints_of(engine)
    if moved == "offload":
        zckpt.offload(engine, directory / "scratch")
    elif moved:
        engine.offload_states()
    zckpt.export(engine, directory / "own", max_shard_size="2MB")
    zckpt.export(engine, directory / "fp32", dtype="fp32", max_shard_size="2MB")
    if moved == "offload":
        zckpt.reload(engine)
    elif moved:
        engine.reload_states()
    assert_at_rest(engine)
    assert fingerprints_of(engine) == before
    train(engine, 1, 2)
    return before


@pytest.mark.parametrize(("setup", "moved"), CASES)
def test_the_exported_weights_are_those_of_the_engine(
    cluster: Cluster, tmp_path: Path, setup: dict[str, Any], moved: str
) -> None:
    before, _ = cluster.run(export, 2, tmp_path, setup, moved)
    exported, fp32 = (load(tmp_path / name) for name in ("own", "fp32"))
    assert exported.keys() == fp32.keys()
    for name, tensor in exported.items():
        if name in ("running_mean", "batches"):  # rank 0's values are exported
            assert fingerprint(tensor) == before[f"buffer/{name}"]
        elif tensor.numel():
            assert fingerprint(tensor) == before[f"param/{name}"]
    trained = [name for name in fp32 if f"master/{name}" in before]
    assert len(trained) > 3
    for name in trained:
        assert fingerprint(fp32[name]) == before[f"master/{name}"]


def load(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
