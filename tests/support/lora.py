"""Tiny models with LoRA adapters, and DeepSpeed engines over them."""

from __future__ import annotations

from typing import Any

import deepspeed
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
