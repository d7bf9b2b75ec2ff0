"""Exports of live engines: what ``save_pretrained`` writes of the same model, from ranks that have parts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.support.live_export import export_both

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

MATRIX = pytest.mark.matrix
CASES = [
    ("gpt2", 1, "20KB"),
    pytest.param("gpt2", 2, "1GB", marks=MATRIX),
    pytest.param("gpt2", 3, "20KB", marks=MATRIX),
    pytest.param("gpt2", 0, "20KB", marks=MATRIX),
    pytest.param("mixtral", 1, "1GB", marks=MATRIX),
    ("mixtral", 3, "30KB"),
]


@pytest.mark.parametrize(("kind", "stage", "shard"), CASES)
def test_the_files_are_those_of_save_pretrained(
    cluster: Cluster, tmp_path: Path, kind: str, stage: int, shard: str
) -> None:
    exported, other = cluster.run(export_both, 2, kind, stage, tmp_path, shard)
    assert exported == other
    saved = files(tmp_path / "saved")
    assert files(tmp_path / "exported") == saved
    assert exported.files == tuple(saved)
    assert exported.nbytes == sum(map(len, saved.values()))
    assert any("-of-" in name for name in saved) == (shard != "1GB")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []
    zckpt.export(tmp_path / "checkpoint", tmp_path / "of_checkpoint", config=tmp_path / "saved", max_shard_size=shard)
    assert files(tmp_path / "of_checkpoint") == files(tmp_path / "fp32")
    tensors = torch.load(tmp_path / "model.pt", weights_only=True)
    if kind == "gpt2":  # whose names in memory are those in files
        weights = [load_file(path) for path in (tmp_path / "saved").glob("*.safetensors")]
        assert {name: tensor for part in weights for name, tensor in part.items()}.keys() <= tensors.keys()
        assert all(torch.equal(tensor, tensors[name]) for part in weights for name, tensor in part.items())


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
