"""Engines that divide a model in several ways at once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from zckpt.checkpoint.open import open_loader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

Setup = tuple[str, dict[str, Any], int]
"""The module that makes the engine, its settings, and the number of ranks."""

COMBINED: dict[str, tuple[Setup, Setup]] = {
    "tensor, pipeline and data parallelism, stage 1": (
        ("pipelines", {"stages": 2, "tp": 2, "zero": 1}, 8),
        ("pipelines", {"stages": 1, "tp": -1, "zero": 0}, 2),
    ),
    "tensor, pipeline and data parallelism": (
        ("pipelines", {"stages": 2, "tp": 2, "zero": 0}, 8),
        ("pipelines", {"stages": 3, "tp": -1, "zero": 1}, 3),
    ),
    "experts in a pipeline": (
        ("pipelines", {"stages": 2, "ep": 2, "zero": 1}, 4),
        ("pipelines", {"stages": 1, "ep": 1, "zero": 0}, 2),
    ),
    "AutoTP and AutoEP": (
        ("expert_parallel", {"auto": True, "tp": 2, "ep": 2, "stage": 2}, 4),
        ("expert_parallel", {"auto": True, "ep": 4, "stage": 1}, 4),
    ),
}
"""For each combination, an engine, and another one with the same whole tensors."""


def write(path: str, module: str, options: dict[str, Any]) -> list[float]:
    support: Any = import_module(f"tests.support.{module}")
    engine = support.make(**options)
    support.train(engine, 3)
    zckpt.write(engine, path)
    losses: list[float] = support.train(engine, 2)
    return losses


def restore(path: str, there: str, module: str, options: dict[str, Any]) -> list[float]:
    """Restores a checkpoint and writes it again."""
    support: Any = import_module(f"tests.support.{module}")
    engine = support.make(**options, seed=1)
    zckpt.restore(engine, path)
    zckpt.write(engine, there)
    losses: list[float] = support.train(engine, 2)
    return losses


TOLD = {
    "tensor, pipeline and data parallelism, stage 1": "tensor 2, pipeline 2",
    "tensor, pipeline and data parallelism": "tensor 2, pipeline 2",
    "experts in a pipeline": "pipeline 2, experts 2",
    "AutoTP and AutoEP": "tensor 2, experts 2",
}
"""What a checkpoint tells of the first engine of each combination."""


@pytest.mark.parametrize(
    "name",
    [name if name == "AutoTP and AutoEP" else pytest.param(name, marks=pytest.mark.matrix) for name in COMBINED],
)
def test_it_resumes_and_moves_to_another_division_and_back(cluster: Cluster, tmp_path: Path, name: str) -> None:
    (module, options, ranks), (_, other, others) = COMBINED[name]
    paths = [str(tmp_path / name) for name in ("first", "again", "other", "back")]
    through = cluster.run(write, ranks, paths[0], module, options)
    assert cluster.run(restore, ranks, paths[0], paths[1], module, options) == through
    cluster.run(restore, others, paths[0], paths[2], module, other)
    assert cluster.run(restore, ranks, paths[2], paths[3], module, options) == through
    assert open_loader(paths[0]).manifest.writer["parallelism"] == TOLD[name]
    first, *copies = (zckpt.open(path).load() for path in paths)
    for copy in copies:
        assert copy.keys() == first.keys()
        assert all(torch.equal(copy[key], first[key]) for key in first)
