"""Tiny Hugging Face models, one for each way of saving a model, and DeepSpeed checkpoints of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import transformers
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    HrmTextConfig,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3VLMoeConfig,
    T5Config,
)

import zckpt
from tests.support.states import write_state

if TYPE_CHECKING:
    from pathlib import Path

Sizes = dict[str, Any]
SMALL: Sizes = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
VISION: Sizes = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 8}


def make_config(kind: str) -> tuple[str, PreTrainedConfig]:
    """Returns the name of the model's class, and the model's configuration."""
    if kind == "gpt2":  # Conv1D layers and tied weights
        return "GPT2LMHeadModel", GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=11, n_head=2)
    if kind == "t5":  # an encoder and a decoder with tied weights
        sizes: Sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        sizes["decoder_start_token_id"] = 0
        return "T5ForConditionalGeneration", T5Config(**sizes)
    if kind == "mixtral":  # experts that are one tensor in memory
        return "MixtralForCausalLM", MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    if kind == "qwen2_moe":  # the same, and shared experts
        sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 12}
        return "Qwen2MoeForCausalLM", Qwen2MoeConfig(**SMALL, num_key_value_heads=2, **sizes)
    if kind == "llava":  # multimodal, with other names of parameters in files
        vision = {name: size for name, size in SMALL.items() if name != "vocab_size"}
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**vision, image_size=16, patch_size=8), text_config=LlamaConfig(**SMALL)
        )
        return "LlavaForConditionalGeneration", config
    if kind == "qwen3_vl_moe":  # multimodal with experts
        text = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4}
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        vision = {**VISION, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
        return "Qwen3VLMoeForConditionalGeneration", Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    if kind == "hrm_text":  # weights that are joined in files
        return "HrmTextForCausalLM", HrmTextConfig(**SMALL)
    raise ValueError(kind)


def make_hugging_face(kind: str) -> Any:
    torch.manual_seed(0)
    name, config = make_config(kind)
    return getattr(transformers, name)(config)


def write_model(path: Path, model: Any, **options: Any) -> None:
    """Writes a checkpoint of a model, as three ranks write it."""
    names: dict[int, str] = {}
    aliases = {name: names.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if aliases[name] == name}
    aliases = {alias: name for alias, name in aliases.items() if alias != name}
    write_state(path, tensors=tensors, parts=["master"], aliases=aliases, **options)


def content(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in sorted(os.listdir(directory))}


def write_both(directory: str, kind: str, stage: int, dtype: str = "bf16") -> None:
    """Trains a step, and writes ``<directory>/zckpt`` with zckpt and ``<directory>/deepspeed`` with DeepSpeed."""
    model = make_hugging_face(kind)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )
    tokens = torch.arange(16).view(2, 8) + engine.global_rank
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    zckpt.write(engine, f"{directory}/zckpt", latest=False)
    engine.save_checkpoint(f"{directory}/deepspeed")
