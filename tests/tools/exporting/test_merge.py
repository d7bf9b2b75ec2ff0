"""zckpt.export merges a LoRA adapter into the weights of its model, bit for bit as PEFT merges it in fp32."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.pytorch_utils import Conv1D

import zckpt
from tests.support import lora
from tests.support.hugging_face import content, make_hugging_face
from tests.support.live_export import train
from tests.support.memory import peak_growth
from zckpt.checkpoint.open import open_loader
from zckpt.geometry import Grid, Span
from zckpt.storage.schemes import open_store
from zckpt.tools.exporting.checkpoint_source import CheckpointSource
from zckpt.tools.exporting.merge import ELEMENTS_MAX, Merge, with_merges
from zckpt.tools.exporting.plan import ExportPlan, Extent, OutputTensor, safetensors_file
from zckpt.tools.exporting.write import write_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about what it saves and merges


def llama(**config: Any) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=1, eos_token_id=2, attention_bias=True, **config,
        )
    )  # fmt: skip


def gpt2() -> Any:  # with Conv1D layers, some of which have square weights, and tied embeddings
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1))


def bert() -> Any:
    return BertForSequenceClassification(
        BertConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )


def convolutions() -> Any:
    nn = torch.nn
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), nn.Conv1d(4, 6, 5), nn.Conv3d(2, 3, (2, 3, 1))
    return nn.Sequential(*layers)


def joined() -> Any:  # transformers joins some of its weights in files
    return make_hugging_face("hrm_text")


PATTERNS = {
    "rank_pattern": {"down_proj": 3},
    "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3, "1.mlp.down_proj": 5, "proj": 99},
}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "linear layers": (llama, {"target_modules": ["q_proj", "down_proj"]}),
    "all linear layers": (llama, {"target_modules": "all-linear"}),
    "rsLoRA": (llama, {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "r": 5, "lora_alpha": 7}),
    "patterns": (llama, {"target_modules": ["q_proj", "down_proj"], **PATTERNS}),
    "an embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "a head, and a saved embedding": (llama, {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]}),
    "trained biases": (llama, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "biases of adapters": (bert, {"target_modules": ["query", "dense"], "lora_bias": True, "task_type": "SEQ_CLS"}),
    "Conv1D": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "all"}),
    "convolutions": (convolutions, {"target_modules": ["0", "2", "3", "4"], "modules_to_save": ["1"]}),
    "weights that are joined": (joined, {"target_modules": ["gate_proj", "up_proj", "q_proj"]}),
    "DoRA": (llama, {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_dora": True}),
    "DoRA on Conv1D": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "DoRA on convolutions": (convolutions, {"target_modules": ["0", "2", "3"], "use_dora": True}),
}


def make(model: Any, **adapters: dict[str, Any]) -> Any:
    """Adds adapters to a model, and gives them random weights."""
    (name, config), *others = adapters.items()
    model = peft.get_peft_model(model, peft.LoraConfig(**config), adapter_name=name)
    for name, config in others:
        model.add_adapter(name, peft.LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_" in name or parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("what", CASES)
def test_the_merged_model_is_that_of_merge_and_unload(tmp_path: Path, what: str) -> None:
    make_base, config = CASES[what]
    torch.manual_seed(0)
    model = make(make_base(), default=config)
    lora.write_model(tmp_path / "ckpt", model)
    zckpt.export(tmp_path / "ckpt", tmp_path / "merged.pt", merge="default", format="pt")
    expected = model.merge_and_unload()
    assert_same(torch.load(tmp_path / "merged.pt", weights_only=True), expected.state_dict())
    if not hasattr(expected, "save_pretrained"):
        return
    for dtype in ("fp32", "bf16"):
        folder = expected.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        folder.save_pretrained(tmp_path / dtype, max_shard_size="40KB")
        zckpt.export(
            tmp_path / "ckpt", tmp_path / f"{dtype}-merged", merge="default", dtype=dtype, config=tmp_path / dtype,
            max_shard_size="40KB",
        )  # fmt: skip
        assert content(tmp_path / f"{dtype}-merged") == content(tmp_path / dtype)


@pytest.mark.parametrize("adapter", ["default", "second"])
def test_one_of_several_adapters_is_merged(tmp_path: Path, adapter: str) -> None:
    torch.manual_seed(0)
    model = make(
        lora.make_base(), default={"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        second={"target_modules": ["q_proj", "down_proj"], "use_dora": True, "lora_alpha": 3},
    )  # fmt: skip
    lora.write_model(tmp_path / "ckpt", model)
    exported = zckpt.export(tmp_path / "ckpt", tmp_path / "merged", merge=adapter)
    model.set_adapter(adapter)
    assert_same(load_file(tmp_path / "merged" / "model.safetensors"), model.merge_and_unload().state_dict())
    other = "second" if adapter == "default" else "default"
    assert exported.left_out
    assert all(f".{other}." in name or "original_module" in name for name in exported.left_out)


def test_modules_of_the_model_keep_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = ("base_layer", "original_module", "modules_to_save", "token_adapter", "lora_A", "adapted")
    base = torch.nn.ModuleDict({layer: torch.nn.Linear(3, 4) for layer in layers})
    model = make(base, default={"target_modules": ["adapted"]})
    state = model.get_base_model().state_dict()
    expected = {f"{layer}.{kind}": state[f"{layer}.{kind}"] for layer in layers[:-1] for kind in ("weight", "bias")}
    expected |= {f"adapted.{kind}": state[f"adapted.base_layer.{kind}"] for kind in ("weight", "bias")}
    lora.write_model(tmp_path / "ckpt", model)
    zckpt.export(tmp_path / "ckpt", tmp_path / "merged", merge="default")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert not torch.equal(merged["adapted.weight"], expected["adapted.weight"])
    assert_same({**merged, "adapted.weight": expected["adapted.weight"]}, expected)


class Large(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20011, 128)
        self.linear, self.conv1d = torch.nn.Linear(777, 3011), Conv1D(1025, 2049)


CONFIG = {"target_modules": ["embedding", "linear", "conv1d"], "fan_in_fan_out": True, "r": 37}


def formula(model: Any) -> dict[str, torch.Tensor]:
    """Returns the merged weights by the formula that the documentation states, for rows that are merged at a time."""
    state = {name.removeprefix("base_model.model."): tensor for name, tensor in model.state_dict().items()}
    merged = {}
    for layer, transposed in (("embedding", True), ("linear", False), ("conv1d", True)):
        weight = state[f"{layer}.base_layer.weight"]
        kinds = "lora_embedding_{}.default" if layer == "embedding" else "lora_{}.default.weight"
        a, b = (state[f"{layer}.{kinds.format(x)}"] for x in "AB")
        rows = ELEMENTS_MAX // weight.shape[1]
        parts = []
        for part in torch.arange(len(weight)).split(rows):
            delta = (b @ a[:, part]).T if transposed else b[part] @ a
            parts.append(weight[part] + delta * (8 / 37))
        assert len(parts) > 1
        merged[f"{layer}.weight"] = torch.cat(parts)
    return merged | {name: state[name.replace(".", ".base_layer.")] for name in ("linear.bias", "conv1d.bias")}


@pytest.mark.parametrize("budget", [zckpt.Budget(8 << 20, 2), zckpt.Budget(256 << 20)], ids=["small", "default"])
def test_large_weights_are_merged_some_rows_at_a_time(tmp_path: Path, budget: zckpt.Budget) -> None:
    torch.manual_seed(0)
    model = make(Large(), default=CONFIG)
    lora.write_model(tmp_path / "ckpt", model)
    zckpt.export(tmp_path / "ckpt", tmp_path / "merged", merge="default", budget=budget)
    expected = formula(model)
    assert_same(load_file(tmp_path / "merged" / "model.safetensors"), expected)
    for name, tensor in model.merge_and_unload().state_dict().items():  # BLAS may round the whole product differently
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def test_extents_of_a_merged_weight_are_merged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make(torch.nn.Sequential(torch.nn.Linear(5, 6)), default={"target_modules": ["0"]})
    lora.write_model(tmp_path / "ckpt", model)
    source = CheckpointSource(open_loader(tmp_path / "ckpt"), None, zckpt.Budget(8 << 20, 2))
    layer = "base_model.model.0"
    base = f"{layer}.base_layer.weight"
    merge = Merge(f"{layer}.lora_B.default.weight", f"{layer}.lora_A.default.weight", None, 1.0, False)
    box = Grid((6, 5))
    tensor = OutputTensor("rows", "F32", (3, 5), (Extent(base, Span(box, 22, 30)), Extent(base, Span(box, 3, 10))))
    plan = ExportPlan((safetensors_file("x", [tensor]),))
    plan = with_merges(plan, {base: merge}, source.sources)
    write_files(open_store(tmp_path), plan.files, plan.sources, source)
    merged = model.merge_and_unload().state_dict()["0.weight"].flatten()
    assert torch.equal(load_file(tmp_path / "x")["rows"].flatten(), torch.cat([merged[22:], merged[3:10]]))


def export_merged(directory: Path, stage: int) -> None:
    engine = lora.make_engine("several", stage)
    train(engine, 2)
    zckpt.write(engine, directory / "ckpt", latest=False)
    for dtype in (None, "fp32"):
        zckpt.export(engine, directory / f"live-{dtype}", merge="default", dtype=dtype, max_shard_size="20KB")
    zckpt.export(engine, directory / "live.pt", merge="default", format="pt", budget=zckpt.Budget(4 << 20, 1))


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.matrix), 3])
def test_a_live_engine_is_merged(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    cluster.run(export_merged, 2, tmp_path, stage)
    (tmp_path / "config").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "config" / name).write_bytes((tmp_path / "live-fp32" / name).read_bytes())
    exported = zckpt.export(
        tmp_path / "ckpt", tmp_path / "merged", merge="default", dtype="fp32", config=tmp_path / "config",
        max_shard_size="20KB",
    )  # fmt: skip
    assert len(exported.files) > 5
    assert content(tmp_path / "live-fp32") == content(tmp_path / "merged")

    # Without a dtype, the weights are those with which the engine computes, and the result has their dtype.
    model = lora.make_model("several").bfloat16()
    model.load_state_dict(zckpt.open(tmp_path / "ckpt").state_dict(dtype=torch.bfloat16))
    expected = model.float().merge_and_unload().bfloat16().state_dict()
    assert_same(torch.load(tmp_path / "live.pt", weights_only=True), expected)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "live-None", dtype="auto")
    assert_same(loaded.state_dict(), expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a setting": ({"lora_bias": False, "alora_invocation_tokens": [1]}, "has the setting 'alora_invocation_tokens'"),
    "a setting of later versions": ({"use_magic": True}, "has the setting 'use_magic'"),
    "tokens": ({"trainable_token_indices": [1]}, "has the setting 'trainable_token_indices'"),
    "an expression": (
        {"alpha_pattern": {"q|k": 2}},
        r"its alpha_pattern has 'q\|k', which is not the name of a module",
    ),
    "two patterns": ({"alpha_pattern": {"linear": 2, "^linear": 3}}, "several entries of its alpha_pattern"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_cannot_be_merged_are_refused_by_name(tmp_path: Path, what: str) -> None:
    settings, match = REFUSED[what]
    model = make(Large(), default={"target_modules": ["linear"]})
    config = json.dumps({"peft_type": "LORA", **settings})
    lora.write_model(tmp_path / "ckpt", model, configs={"default": config})
    with pytest.raises(zckpt.UnsupportedError, match=match) as caught:
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", merge="default")
    assert str(tmp_path / "ckpt") in str(caught.value)
    assert "--adapter default" in str(caught.value)
    assert not (tmp_path / "out").exists()


def pack(model: Any) -> None:
    """Replaces a weight by one as bitsandbytes packs it, with two numbers of four bits in a byte."""
    packed = torch.zeros(12, 1, dtype=torch.uint8)
    model.base_model.model[0].base_layer.weight = torch.nn.Parameter(packed, requires_grad=False)


def mix(model: Any) -> None:
    """Gives a linear layer a tensor that only embeddings have."""
    model.base_model.model[0].lora_embedding_A["default"] = torch.nn.Parameter(torch.ones(8, 4))


def keep(model: Any) -> None:
    pass


def linear(bias: bool = True) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 6, bias=bias))


WEIGHTS: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[[Any], None], str]] = {
    "quantized": (linear, {"target_modules": ["0"]}, pack, r"0\.base_layer\.weight is quantized \(U8\)"),
    "of other kinds": (linear, {"target_modules": ["0"]}, mix, "its tensors for base_model.model.0 are"),
    "tied": (
        lambda: llama(tie_word_embeddings=True), {"target_modules": ["embed_tokens"]}, keep,
        r"it changes a weight that model\.embed_tokens\.weight and lm_head\.weight share",
    ),
    "in groups": (
        lambda: torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2)), {"target_modules": ["0"]}, keep,
        r"0\.base_layer\.weight is \[6, 2, 3, 3\], its matrices are \[8, 4, 3, 3\] and \[6, 4, 1, 1\]",
    ),
    "without a bias": (
        lambda: linear(bias=False), {"target_modules": ["0"], "lora_bias": True}, keep,
        "it has a bias for base_model.model.0, and the base model has none",
    ),
    "of both orientations": (
        lambda: torch.nn.Sequential(Conv1D(4, 4), torch.nn.Linear(4, 6), Conv1D(8, 6)),
        {"target_modules": ["0", "1", "2"]}, keep, r"fan_in_fan_out is not that of all layers, and .*\.0\.base_layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_cannot_be_merged_are_refused_by_name(tmp_path: Path, what: str) -> None:
    base, config, change, match = WEIGHTS[what]
    model = make(base(), default=config)
    change(model)
    lora.write_model(tmp_path / "ckpt", model)
    with pytest.raises(zckpt.UnsupportedError, match=f"adapter 'default' cannot be merged: .*{match}"):
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", merge="default")
    assert not (tmp_path / "out").exists()


def test_an_adapter_without_its_model_is_not_merged(tmp_path: Path) -> None:
    lora.write_model(tmp_path / "ckpt", make(linear(), default={"target_modules": ["0"]}), frozen=False)
    with pytest.raises(zckpt.MismatchError, match=r"no weight base_model\.model\.0\.base_layer\.weight") as caught:
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", merge="default")
    assert "--adapter default) exports the adapter" in str(caught.value)
    with pytest.raises(ValueError, match="give one of them"):
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", merge="default", adapter="default")
    zckpt.export(tmp_path / "ckpt", tmp_path / "out", adapter="default")


def test_the_configuration_of_the_adapter_is_beside_that_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make(llama(), default={"target_modules": ["q_proj"]})
    lora.write_model(tmp_path / "ckpt", model, configs={})
    with pytest.raises(zckpt.MismatchError, match="is not in the checkpoint"):
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", merge="default")
    model.save_pretrained(str(tmp_path / "config"))
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    shutil.copy(tmp_path / "merged" / "config.json", tmp_path / "config")
    zckpt.export(tmp_path / "ckpt", tmp_path / "out", merge="default", config=tmp_path / "config")
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "merged" / weights).read_bytes()


def measure_growth(directory: Path, budget: zckpt.Budget) -> tuple[int, int]:
    """Returns by how many bytes the memory grows at most during an export, and how many bytes are exported."""
    base = torch.nn.Sequential(*(torch.nn.Linear(2048, 4096, bias=False) for _ in range(8))).bfloat16()
    model = make(base, default={"target_modules": [str(number) for number in range(8)]})
    lora.write_model(directory / "ckpt", model)
    zckpt.export(directory / "ckpt", directory / "warm", merge="default", budget=budget)
    exported: list[zckpt.Exported] = []
    growth = peak_growth(
        lambda: exported.append(zckpt.export(directory / "ckpt", directory / "out", merge="default", budget=budget))
    )
    return growth, exported[0].nbytes


@pytest.mark.linux
def test_memory_is_bounded_by_the_budget(cluster: Cluster, tmp_path: Path) -> None:
    budget = zckpt.Budget(64 << 20)
    ((growth, exported_bytes),) = cluster.run(measure_growth, 1, tmp_path, budget, init=False)
    assert exported_bytes > 128 << 20
    assert growth < budget.nbytes
