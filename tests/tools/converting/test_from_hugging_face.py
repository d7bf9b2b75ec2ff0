"""zckpt.convert turns the folder of a Hugging Face model into a checkpoint of weights, from which a run can begin."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import weights
from zckpt.storage.local_store import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


def save_model(folder: Path, **options: Any) -> GPT2LMHeadModel:
    """Makes a model like that of ``make_engine(model="gpt2")``, and saves it."""
    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    model.save_pretrained(folder, **options)
    return model


def begin(path: str, stage: int) -> dict[str, torch.Tensor]:
    engine = make_engine(stage, model="gpt2", frozen=True, seed=1)
    zckpt.restore(engine, path, parts=zckpt.open(path).parts)
    actual = weights(engine)
    train(engine, 1)
    return actual


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}])
def test_the_checkpoint_has_the_same_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    model = save_model(tmp_path / "model", **options)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == bool(options)
    converted = zckpt.convert(tmp_path / "model", tmp_path / "new")
    assert converted.found_format == "Hugging Face model"
    assert zckpt.validate(converted.path).ok
    actual = zckpt.open(converted.path).state_dict()
    assert actual.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(actual[name], tensor)


def test_weights_in_a_pickle(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    actual = zckpt.open(zckpt.convert(tmp_path / "model", tmp_path / "new").path).state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in model.state_dict().items())


def test_a_run_begins_with_the_weights(cluster: Cluster, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    converted = zckpt.convert(tmp_path / "model", tmp_path / "new")
    for actual in cluster.run(begin, 2, converted.path, 3):
        assert all(torch.equal(actual[name], p.bfloat16()) for name, p in model.named_parameters())


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model")
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 1000)
    with pytest.raises(zckpt.NoSpaceError, match="1,000 are free"):
        zckpt.convert(tmp_path / "model", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(zckpt.FormatError, match="cut off"):
        zckpt.convert(tmp_path / "model", tmp_path / "new")
    save_model(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    with pytest.raises(zckpt.UnsupportedError, match="of the model"):
        zckpt.convert(tmp_path / "model", tmp_path / "new")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["Nobody"]}))
    with pytest.raises(zckpt.UnsupportedError, match="Nobody"):
        zckpt.convert(tmp_path / "model", tmp_path / "new")
    assert not (tmp_path / "new").exists()
