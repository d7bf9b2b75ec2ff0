"""Frozen weights of real engines are written once. All later checkpoints share their files, also after a resume."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.models import make_engine, train
from zckpt.checkpoint.open import open_loader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

MODES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3-cpu": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def write(run: str, setup: dict[str, Any]) -> list[float]:
    engine = make_engine(model="wide", **setup)
    for tag in ("a", "b"):
        train(engine, 1, engine.global_steps)
        # No ``latest`` is needed, because zckpt remembers the last checkpoint of an engine.
        zckpt.write(engine, f"{run}/{tag}", latest=False)
    return train(engine, 1, engine.global_steps)


def resume(run: str, setup: dict[str, Any]) -> list[float]:
    engine = make_engine(model="wide", seed=1, **setup)
    zckpt.restore(engine, f"{run}/b")
    losses = train(engine, 1, engine.global_steps)
    zckpt.write(engine, f"{run}/c", background=True).wait()
    return losses


def frozen_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*/rank-*/*param.safetensors"))


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "3" else pytest.mark.matrix) for mode in MODES]
)
def test_frozen_weights_are_written_once(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    run, setup = tmp_path / "run", MODES[mode]
    assert cluster.run(write, 2, str(run), setup) == cluster.run(resume, 2, str(run), setup)
    files = [frozen_files(run / tag) for tag in ("a", "b", "c")]
    assert sum(file.stat().st_size for file in files[0]) > 2 << 20
    for first, *later in zip(*files, strict=True):
        assert all(os.path.samefile(first, other) for other in later)
    for tag in ("a", "b", "c"):
        report = zckpt.validate(run / tag)
        assert report.ok, str(report)
        manifest = open_loader(run / tag).manifest
        shared = {manifest.parts[file.part_id].name for file in manifest.files if file.origin}
        assert shared == (set() if tag == "a" else {"param"})
