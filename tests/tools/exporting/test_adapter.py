"""zckpt.export writes an adapter as the folder that ``PeftModel.save_pretrained`` writes, from a checkpoint and from a
live engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import zckpt
from tests.support import lora
from tests.support.live_export import save_pretrained, train
from zckpt.adapters.peft import adapter_configs
from zckpt.cli import main
from zckpt.engines.tensors import named_parameters, persistent_buffers
from zckpt.tools.exporting.adapter import Adapter
from zckpt.tools.exporting.selection import everything

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
    names = everything(tensors, {**aliases, **more})
    configs = adapter_configs(model)
    for adapter in configs:
        expected = get_peft_model_state_dict(model, model.state_dict(keep_vars=True), adapter)
        own = Adapter.find(names, adapter, configs, None).own(names)
        assert own.keys() == expected.keys()
        assert all(tensors[own[key]] is expected[key] for key in expected)


@pytest.mark.filterwarnings("ignore")  # PEFT warns about what it saves and expects
@pytest.mark.parametrize("what", MODELS)
def test_the_tensors_are_those_that_peft_saves(what: str) -> None:
    make, config = MODELS[what]
    check_names(peft.get_peft_model(make(), peft.LoraConfig(**config)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", lora.VARIANTS)
def test_the_tensors_of_each_of_several_adapters_are_those_that_peft_saves(variant: str) -> None:
    check_names(lora.make_model(variant))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("what", MODELS)
def test_an_adapter_that_is_loaded_computes_what_was_trained_whether_frozen_weights_were_written_or_not(
    tmp_path: Path, what: str, frozen: bool
) -> None:
    make, config = MODELS[what]
    torch.manual_seed(0)
    base = make()
    given = torch.randint(61, (2, 8)) if hasattr(base, "config") else torch.randn(2, 3, 8, 8)
    base_state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(**config))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    lora.write_model(tmp_path / "ckpt", model, frozen=frozen)
    zckpt.export(tmp_path / "ckpt", tmp_path / "adapter", adapter="default")
    again = make()
    again.load_state_dict(base_state)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    outputs = [logits(some.eval(), given) for some in (model, loaded, make())]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def logits(model: Any, given: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        outputs = model(given)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def export_adapters(directory: Path, stage: int) -> None:
    engine = lora.make_engine("several", stage)
    train(engine, 2)
    save_pretrained(engine, lora.make_model("several", seed=1), directory / "saved")
    zckpt.write(engine, directory / "checkpoint")
    for adapter in lora.VARIANTS["several"]:
        zckpt.export(engine, directory / "live" / adapter, adapter=adapter)
    with pytest.raises(zckpt.UnsupportedError, match=r"has adapters \(default, second\)") as caught:
        zckpt.export(engine, directory / "whole")
    assert "adapter='default' exports one" in str(caught.value)


TOKENS = torch.arange(16).view(2, 8)
OTHERS = ("plain", "several")


def compute_with_both_kinds(directory: Path, variant: str, stage: int) -> list[torch.Tensor]:
    """Returns what the engine computes, what adapters of a checkpoint with frozen weights and of one without them
    compute, and what the base model computes."""
    engine = lora.make_engine(variant, stage)
    train(engine, 2)
    zckpt.write(engine, directory / "with", latest=False)
    zckpt.write(engine, directory / "without", latest=False, exclude=["param"])
    engine.eval()
    outputs = [logits(engine, TOKENS)]
    for kind in ("with", "without"):
        zckpt.export(directory / kind, directory / f"{kind}-adapter", adapter="default", dtype="bf16")
        folder = directory / f"{kind}-adapter"
        loaded = peft.PeftModel.from_pretrained(base_of_engine(), folder, autocast_adapter_dtype=False)
        outputs.append(logits(loaded.eval(), TOKENS))
    return [*outputs, logits(base_of_engine().eval(), TOKENS)]


def base_of_engine() -> Any:
    base = lora.make_base()
    for parameter in base.parameters():  # not the buffers, which DeepSpeed does not convert either
        parameter.data = parameter.data.bfloat16()
    return base


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.matrix), 3])
@pytest.mark.parametrize("variant", ["embedding", *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS)])
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_computes_what_the_engine_computes(
    cluster: Cluster, tmp_path: Path, variant: str, stage: int
) -> None:
    for expected, *loaded, base in cluster.run(compute_with_both_kinds, 2, tmp_path, variant, stage):
        assert all(torch.equal(computed, expected) for computed in loaded)
        assert not torch.equal(base, expected)


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
    def find(names: list[str], adapter: str, **configs: str) -> None:
        Adapter.find(everything(names, {}), adapter, configs, "/ckpt")

    with pytest.raises(zckpt.UnsupportedError, match="no adapter"):
        find(["a.weight"], "default")
    names = [f"a.{name}" for name in ("lora_A.first.weight", "lora_B.first.weight", "base_layer.weight")]
    with pytest.raises(zckpt.KeyNotFoundError, match="no adapter 'fist'") as missing:
        find(names, "fist")
    assert missing.value.hint == "the nearest are: first"
    with pytest.raises(zckpt.MismatchError, match="is not in the checkpoint") as unknown:
        find(names, "first")
    assert "give a folder with its adapter_config.json as `config`" in str(unknown.value)
    with pytest.raises(zckpt.MismatchError, match=r"no weights of the adapter 'other'.*: first"):
        find(names, "other", other='{"peft_type": "LORA"}')
    with pytest.raises(zckpt.MismatchError, match=r"adapter 'first': it lacks a\.lora_B"):
        find([name for name in names if "_B" not in name], "first", first='{"peft_type": "LORA"}')
    with pytest.raises(zckpt.MismatchError, match=r"lacks a\.lora_magnitude_vector"):
        find(names, "first", first='{"peft_type": "LORA", "use_dora": true}')


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "is not one of PEFT"), ("{}", "is not one of"),
        ('{"peft_type": "LORA", "r": ' + "1" * 5000 + "}", "is not JSON"), (" " * (17 << 20), "more than 16,777,216"),
        ('{"peft_type": "IA3", "bias": 5}', "the peft_type 'IA3'"), ('{"peft_type": ["LORA"]}', "peft_type .'LORA'"),
        ('{"peft_type": "LORA", "bias": ["all"]}', "for 'bias'"),
        ('{"peft_type": "LORA", "target_modules": 5}', "has 5 for 'target_modules'"),
        ('{"peft_type": "LORA", "target_modules": [["q"]]}', r"has \[\['q'\]\] for 'target_modules'"),
        ('{"peft_type": "LORA", "target_modules": {"q": 1}}', "for 'target_modules'"),
        ('{"peft_type": "LORA", "lora_alpha": "16"}', "for 'lora_alpha'"),
        ('{"peft_type": "LORA", "lora_alpha": true}', "for 'lora_alpha'"),
        ('{"peft_type": "LORA", "lora_alpha": NaN}', "for 'lora_alpha'"),
        ('{"peft_type": "LORA", "alpha_pattern": ["q"]}', "for 'alpha_pattern'"),
        ('{"peft_type": "LORA", "alpha_pattern": {"q": {}}}', "for 'alpha_pattern'"),
        ('{"peft_type": "LORA", "use_dora": "yes"}', "for 'use_dora'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["adapter", "merge"])
def test_odd_configurations_are_errors_that_name_the_checkpoint_and_the_field(
    tmp_path: Path, text: str, match: str, form: str
) -> None:
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 4)), peft.LoraConfig(target_modules=["0"]))
    lora.write_model(tmp_path / "ckpt", model, configs={"default": text})
    options: dict[str, Any] = {form: "default"}
    with pytest.raises(zckpt.ZckptError, match=match) as caught:
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", **options)
    assert caught.value.file == str(tmp_path / "ckpt")


def test_a_regular_expression_of_a_checkpoint_is_not_run(cluster: Cluster, tmp_path: Path) -> None:
    """A hostile expression takes longer than anybody can wait, and a wrong one cannot be run at all."""
    layers = torch.nn.ModuleDict({"a" * 60: torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(8, 4)})})
    model = peft.get_peft_model(layers, peft.LoraConfig(target_modules=["embed_tokens"]))
    for targets, name in (("(a|aa)+b", "hostile"), ("(", "wrong")):
        config = json.dumps({"peft_type": "LORA", "target_modules": targets})
        lora.write_model(tmp_path / name, model, configs={"default": config})
        command = ["export", str(tmp_path / name), f"{tmp_path / name}-adapter", "--adapter", "default"]
        assert cluster.run(main, 1, command, init=False) == [0]
        assert len(load_file(tmp_path / f"{name}-adapter" / "adapter_model.safetensors")) == 3


def test_a_model_with_lora_layers_of_its_own_has_no_adapter(tmp_path: Path) -> None:
    layers = {"lora_A": torch.nn.Linear(3, 2), "lora_B": torch.nn.Linear(2, 3)}
    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict(layers)})
    lora.write_model(tmp_path / "ckpt", model)
    zckpt.export(tmp_path / "ckpt", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_may_have_the_name_of_a_module() -> None:
    for adapter in ("lora_A", "lora_math", "weight", "base_layer", "q_proj"):
        model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], use_dora=True), adapter)
        check_names(model)
