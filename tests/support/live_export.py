"""Engines over tiny models of transformers, and exports of them by ``save_pretrained`` and ``zckpt.export``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.utils import output_capturing

import zckpt

if TYPE_CHECKING:
    from pathlib import Path


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":  # with tied weights
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 16,
    }  # fmt: skip
    if kind == "mixtral":  # whose experts are one tensor in memory and many in files
        return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True))
    if kind == "neox":  # whose queries, keys and values are one tensor
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))
    experts: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if kind == "qwen2_moe":  # with a shared expert
        shared: dict[str, Any] = {"num_experts": 4, "num_key_value_heads": 4, "shared_expert_intermediate_size": 24}
        config = Qwen2MoeConfig(**sizes, **experts, **shared)
        return Qwen2MoeForCausalLM(config)
    assert kind == "deepseek_v3"  # with a buffer in each router
    heads: dict[str, Any] = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    }
    groups: dict[str, Any] = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **experts, **heads, **groups, num_key_value_heads=4))


def make_engine(kind: str, stage: int, **config: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **config,
    }
    model, by_autoep = make_model(kind), "expert_parallel" in config
    if by_autoep:
        accept_names_of_classes()
    parameters = None if by_autoep else model.parameters()
    return deepspeed.initialize(model=model, model_parameters=parameters, config=settings)[0]


def accept_names_of_classes() -> None:
    """Lets AutoEP of DeepSpeed 0.19.8 ask transformers' registry of outputs as in older versions of transformers, whose
    registry has the names of classes as its keys."""
    registry: Any = output_capturing._CanRecordRegistry
    get, put = registry.get, registry.__setitem__
    registry.get = lambda self, key, *default: (dict.get if isinstance(key, str) else get)(self, key, *default)
    registry.__setitem__ = lambda self, key, value: (dict.__setitem__ if isinstance(key, str) else put)(
        self, key, value
    )


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        number = torch.distributed.get_rank(engine.seq_data_parallel_group)
        tokens = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(10 * step + number))
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()


def save_pretrained(engine: Any, fresh: Any, directory: Path, **options: Any) -> None:
    """Saves the weights by way of a ``fresh`` model of the same kind, which rank 0 fills with the whole weights.

    The model of the engine itself would not do, because at ZeRO-1 and 2 its weights are in one buffer, which
    transformers puts into one file.
    """
    parameters = list(engine.module.parameters())
    whole = deepspeed.zero.GatheredParameters(parameters) if engine.zero_optimization_stage() == 3 else nullcontext()
    with whole:
        if engine.global_rank == 0:
            fresh.to(next(engine.module.parameters()).dtype).load_state_dict(engine.module.state_dict())
            fresh.save_pretrained(directory, **options)
    torch.distributed.barrier()


def export_both(kind: str, stage: int, directory: Path, data_file: str) -> zckpt.Exported:
    engine = make_engine(kind, stage)
    train(engine, 2)
    save_pretrained(engine, make_model(kind), directory / "saved", max_shard_size=data_file)
    zckpt.write(engine, directory / "checkpoint")
    exported = zckpt.export(engine, directory / "exported", max_shard_size=data_file)
    zckpt.export(engine, directory / "fp32", dtype="fp32", max_shard_size=data_file)
    zckpt.export(engine, directory / "model.pt", format="pt")
    return exported
