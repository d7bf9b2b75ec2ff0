"""zckpt.export writes an adapter as the folder that ``PeftModel.save_pretrained`` writes, from a checkpoint and from a
live engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from peft.utils import get_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import zckpt
from tests.support import lora
from zckpt.engines.peft import adapter_configs
from zckpt.engines.tensors import named_parameters, persistent_buffers
from zckpt.exporting.adapter import plan_adapter
from zckpt.exporting.plan import SourceTensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(**config: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **config))


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1))


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def convolution() -> Any:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "an embedding with an adapter, tied": (tied, {"target_modules": ["embed_tokens", "q_proj"]}),
    "a tied head, saved": (tied, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "a tied embedding, saved": (tied, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "tokens of a tied embedding": (tied, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}),
    "an embedding by a pattern": (llama, {"target_modules": r".*\.(embed_tokens|q_proj)"}),
    "layers by a pattern": (llama, {"target_modules": r"model\.layers\.\d\..*q_proj"}),
    "all linear layers": (llama, {"target_modules": "all-linear"}),
    "adapters with biases": (llama, {"target_modules": ["q_proj"], "lora_bias": True}),
    "an embedding of another name": (gpt2, {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}),
    "all biases": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "DoRA": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "experts": (mixtral, {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "buffers, saved": (convolution, {"target_modules": ["0"], "modules_to_save": ["1"]}),
}


def check_names(model: Any) -> None:
    parameters, aliases = named_parameters(model)
    buffers, more = persistent_buffers(model)
    tensors = {**parameters, **buffers}
    sources = {name: SourceTensor("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    configs = adapter_configs(model)
    for adapter in configs:
        expected = get_peft_model_state_dict(model, model.state_dict(keep_vars=True), adapter)
        plan = plan_adapter(sources, {**aliases, **more}, adapter, configs)
        (file,) = plan.files
        source_of_name = {
            tensor.name: tensors[tensor.runs[0].source] for tensor in file.tensors.values() if tensor.runs
        }
        assert source_of_name.keys() == expected.keys()
        assert all(source_of_name[key] is expected[key] for key in expected)


@pytest.mark.filterwarnings("ignore")  # PEFT warns about what it saves and expects
@pytest.mark.parametrize("what", MODELS)
def test_the_tensors_are_those_that_peft_saves(what: str) -> None:
    make, config = MODELS[what]
    check_names(peft.get_peft_model(make(), peft.LoraConfig(**config)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", lora.VARIANTS)
def test_the_tensors_of_each_of_several_adapters_are_those_that_peft_saves(variant: str) -> None:
    check_names(lora.make_model(variant))


def export_adapters(directory: Path, stage: int) -> None:
    from tests.support.live_export import save_pretrained, train

    engine = lora.make_engine("several", stage)
    train(engine, 2)
    save_pretrained(engine, lora.make_model("several", seed=1), directory / "saved")
    zckpt.write(engine, directory / "checkpoint")
    for adapter in lora.VARIANTS["several"]:
        zckpt.export(engine, directory / "live" / adapter, adapter=adapter)
    with pytest.raises(zckpt.UnsupportedError, match=r"has adapters \(default, second\)") as caught:
        zckpt.export(engine, directory / "whole")
    assert "adapter='default' exports one" in str(caught.value)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.matrix), 3])
@pytest.mark.filterwarnings("ignore")
def test_an_adapters_folder_is_that_of_save_pretrained(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    cluster.run(export_adapters, 2, tmp_path, stage)
    for adapter, folder in {"default": tmp_path / "saved", "second": tmp_path / "saved" / "second"}.items():
        weights, config = (
            (folder / name).read_bytes() for name in ("adapter_model.safetensors", "adapter_config.json")
        )
        of_checkpoint = tmp_path / "of_checkpoint" / adapter
        exported = zckpt.export(tmp_path / "checkpoint", of_checkpoint, adapter=adapter, dtype="bf16")
        assert exported.files == ("adapter_config.json", "adapter_model.safetensors")
        for path in (of_checkpoint, tmp_path / "live" / adapter):
            assert (path / "adapter_model.safetensors").read_bytes() == weights
            written, saved = json.loads((path / "adapter_config.json").read_text()), json.loads(config)
            saved["target_modules"].sort()  # PEFT writes a set, in any order
            assert written == saved
    loaded = peft.PeftModel.from_pretrained(lora.make_base(), tmp_path / "live" / "default")
    loaded.load_adapter(tmp_path / "of_checkpoint" / "second", adapter_name="second")
    again = tmp_path / "again"
    loaded.bfloat16().save_pretrained(str(again))
    for name in ("adapter_model.safetensors", "second/adapter_model.safetensors"):
        assert (again / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


def test_adapters_that_cannot_be_exported(tmp_path: Path) -> None:
    sources = {"a.weight": SourceTensor("F32", (2, 2))}
    with pytest.raises(zckpt.UnsupportedError, match="the model has no adapter"):
        plan_adapter(sources, {}, "default", {})
    lora_sources = {f"a.{name}": SourceTensor("F32", (2, 2)) for name in ("lora_A.first.weight", "base_layer.weight")}
    with pytest.raises(zckpt.KeyNotFoundError, match="there is no adapter 'fist'") as missing:
        plan_adapter(lora_sources, {}, "fist", {})
    assert missing.value.hint == "the nearest are: first"
    with pytest.raises(zckpt.MismatchError, match="is not in the checkpoint") as unknown:
        plan_adapter(lora_sources, {}, "first", {})
    assert "give a folder with its adapter_config.json as `config`" in str(unknown.value)
    for text, message in [
        ("{", "is not JSON"), ("[]", "not the configuration of an adapter"),
        ('{"peft_type": "IA3"}', "is of the type IA3"),
    ]:  # fmt: skip
        with pytest.raises(zckpt.ZckptError, match=message):
            plan_adapter(lora_sources, {}, "first", {"first": text})
    with pytest.raises(zckpt.MismatchError, match="no weights of the adapter 'other'; it has those of: first"):
        plan_adapter(lora_sources, {}, "other", {"other": '{"peft_type": "LORA"}'})
