"""Adapters over a quantized base (QLoRA): a restore into an engine whose base has other weights, and exports."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.support.qlora_runs import write_and_restore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    pytest.mark.filterwarnings("ignore"),  # bitsandbytes and PEFT warn
]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("nf4", 2), ("nf4-bf16", 3), ("int8", 3),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in [("int8", 2), ("fp4-once", 0), ("nf4", 3), ("fp4-bf16", 1)]
        ),
    ],
)  # fmt: skip
def test_a_fresh_engine_gets_the_quantized_base(cluster: Cluster, tmp_path: Path, kind: str, stage: int) -> None:
    cluster.run(write_and_restore, 2, tmp_path, kind, stage)
    zckpt.export(tmp_path / "c", tmp_path / "stored", adapter="default", dtype="bf16")
    saved = (tmp_path / "saved" / "adapter_model.safetensors").read_bytes()
    for folder in ("live", "stored"):
        assert (tmp_path / folder / "adapter_model.safetensors").read_bytes() == saved


def write_one(directory: Path) -> torch.Tensor:
    from tests.support.qlora import logits, make_engine, train

    engine = make_engine("nf4-bf16", 3)
    train(engine, 1)
    zckpt.write(engine, directory / "c")
    engine.save_checkpoint(directory / "ds", "tag")
    return logits(engine)


def restore_one(directory: Path, expected: torch.Tensor) -> None:
    from tests.support.qlora import logits, make_engine

    zckpt.convert(directory / "ds" / "tag", directory / "converted")
    for name, kind in (("c", "nf4-bf16"), ("converted", "nf4-bf16-once")):  # other shapes of the scales
        engine = make_engine(kind, 2, seed=1)
        zckpt.restore(engine, directory / name)
        assert torch.equal(logits(engine), expected)
    with pytest.raises(zckpt.MismatchError, match=r"missing: buffer/.*weight\.quant_state\.bitsandbytes__fp4"):
        zckpt.restore(make_engine("fp4-bf16", 2), directory / "c")


def test_another_stage_and_world_size_and_a_converted_folder(cluster: Cluster, tmp_path: Path) -> None:
    expected = cluster.run(write_one, 2, tmp_path)[0]
    cluster.run(restore_one, 1, tmp_path, expected)


def write_whole(directory: Path) -> torch.Tensor:
    """Trains what is not quantized. The model has a configuration as that of transformers for such models."""
    from transformers import BitsAndBytesConfig

    from tests.support.extra_state import make_engine
    from tests.support.qlora import logits, make_quantized, train

    model = make_quantized("nf4-bf16")
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "bfloat16"}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16", **options)
    model.config.quantization_config = config
    engine = make_engine(2, model=model)
    train(engine, 1)
    zckpt.write(engine, directory / "c")
    model.config.save_pretrained(directory / "config")
    with pytest.raises(zckpt.UnsupportedError, match="quantized weights"):
        zckpt.export(engine, directory / "live")
    zckpt.export(engine, directory / "live.pt", format="pt", dtype="fp16")
    return logits(engine)


def load_whole(folder: Path) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    from tests.support.qlora import logits

    model = LlamaForCausalLM.from_pretrained(folder).train()
    model.model.rotary_emb.bfloat16()  # as DeepSpeed has converted it; it is in no file
    return logits(model)


def test_a_whole_quantized_model_loads_in_transformers(cluster: Cluster, tmp_path: Path) -> None:
    (expected,) = cluster.run(write_whole, 1, tmp_path)
    folder, stored = tmp_path / "folder", zckpt.open(tmp_path / "c").state_dict()
    zckpt.export(tmp_path / "c", folder, dtype="bf16")
    exported, live = load_file(folder / "model.safetensors"), torch.load(tmp_path / "live.pt")
    assert exported.keys() == stored.keys() == live.keys()
    for name, tensor in stored.items():
        if "_proj.weight" in name:  # quantized, in a tensor of bf16 that no conversion may change
            assert torch.equal(exported[name].view(torch.uint8), tensor.view(torch.uint8))
            assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8))
    shutil.copy(tmp_path / "config" / "config.json", folder)
    assert torch.equal(cluster.run(load_whole, 1, folder)[0], expected)
