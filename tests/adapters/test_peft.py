"""Checkpoints of models with PEFT's adapters, and adapters that begin from a checkpoint of their base model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from zckpt.format import names

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


def _write(directory: Path) -> Any:
    from tests.support.live_export import save_pretrained
    from tests.support.lora import make_engine, make_model
    from tests.support.models import make_engine as make_plain_engine

    engine = make_engine("several", stage=3)
    zckpt.write(engine, directory / "adapters")
    save_pretrained(engine, make_model("several", seed=1), directory / "saved")
    zckpt.write(make_plain_engine(stage=0), directory / "none")


def test_a_checkpoint_keeps_the_configuration_of_each_adapter(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(_write, 2, tmp_path)
    kept = zckpt.open(tmp_path / "adapters").state[names.ADAPTERS]
    assert list(kept) == ["default", "second"]
    for name, folder in {"default": ".", "second": "second"}.items():
        saved = json.loads((tmp_path / "saved" / folder / "adapter_config.json").read_text())
        saved["target_modules"].sort()  # PEFT writes a set, which has no order
        assert json.loads(kept[name]) == saved
    assert names.ADAPTERS not in zckpt.open(tmp_path / "none").state


def _begin_from_the_base(directory: Path, stage: int) -> None:
    """Loads the base weights from a checkpoint as docs/lora.md describes it."""
    import deepspeed

    from tests.support.lora import make_base, make_engine

    base = make_base(seed=5).bfloat16()
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    expected = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    trained, *_ = deepspeed.initialize(model=base, model_parameters=base.parameters(), config=config | optimizer)
    zckpt.write(trained, directory / "base")
    engine = make_engine("plain", stage)
    checkpoint = zckpt.open(directory / "base")
    loaded = {}
    for name, parameter in engine.module.named_parameters():
        base_name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        key = f"master/{base_name}"
        if key in checkpoint:
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                checkpoint.load(key, out={key: parameter.data})
            loaded[base_name] = parameter
    assert loaded.keys() == expected.keys()
    for name, parameter in loaded.items():
        with deepspeed.zero.GatheredParameters(parameter):
            assert torch.equal(parameter, expected[name])


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.matrix), 3])
def test_adapters_begin_from_a_checkpoint_of_the_base(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    cluster.run(_begin_from_the_base, 2, tmp_path, stage)
