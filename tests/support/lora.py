"""Tiny models with LoRA adapters, checkpoints of them, and DeepSpeed engines over them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import deepspeed
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.states import BLOCK_BYTES, cuts, fragment
from zckpt.adapters.peft import adapter_configs
from zckpt.checkpoint.writing.collect import pack_tree
from zckpt.engines.tensors import named_parameters, persistent_buffers
from zckpt.format import names
from zckpt.plan import catalog
from zckpt.plan.inventory import BUFFER, MASTER, PARAM
from zckpt.testing.fragments import write_fragments

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from zckpt.plan.inventory import Fragment

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"default": {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}},
    "several": {
        "default": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
        "second": {"target_modules": ["q_proj", "down_proj"], "r": 2, "use_dora": True, "bias": "lora_only"},
    },
    "embedding": {"default": {"target_modules": ["embed_tokens", "o_proj", "lm_head"], "bias": "all"}},
    "tokens": {"default": {"target_modules": "all-linear", "trainable_token_indices": [1, 5]}},
}
"""The settings of each adapter of a model, by variant and by the name of the adapter."""


def make_base(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_model(variant: str, seed: int = 0) -> Any:
    first, *others = VARIANTS[variant].items()
    model = peft.get_peft_model(make_base(seed), peft.LoraConfig(**first[1]), adapter_name=first[0])
    for name, settings in others:
        model.add_adapter(name, peft.LoraConfig(**settings))
    torch.manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # PEFT makes it of zeros
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def write_model(
    path: Path, model: torch.nn.Module, *, frozen: bool = True, configs: Mapping[str, str] | None = None
) -> None:
    """Writes a checkpoint of a model as two ranks write it. The trained parameters are in the part ``master``, and the
    frozen ones are in ``param``, or left out. ``configs``: the configurations of the adapters, if they are not those of
    the model."""
    parameters, tied_parameters = named_parameters(model)
    buffers, tied_buffers = persistent_buffers(model)
    fragments: list[list[Fragment]] = [[], []]
    for name, tensor in {**parameters, **buffers}.items():
        part = BUFFER if name in buffers else MASTER if tensor.requires_grad else PARAM
        for rank, tier, start, stop in cuts(tensor.numel(), 2, "zero3", random.Random(0)):
            if frozen or part != PARAM:
                fragments[rank].append(fragment(part, name, tensor.detach(), start, stop, tier))
    state = pack_tree({names.ADAPTERS: adapter_configs(model) if configs is None else configs}, "", fragments[0], 0)
    stored = {f.name for of_rank in fragments for f in of_rank}
    aliases = {alias: name for alias, name in {**tied_parameters, **tied_buffers}.items() if name in stored}
    write_fragments(path, fragments, catalog.SaveMetadata(1, BLOCK_BYTES, aliases, state, {"created": "by a test"}))


def make_engine(variant: str, stage: int, seed: int = 0, dtype: str = "bf16") -> Any:
    model = make_model(variant, seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
