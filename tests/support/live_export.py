"""Engines over tiny models of transformers, and exports of them by ``save_pretrained`` and ``zckpt.export``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import zckpt

if TYPE_CHECKING:
    from pathlib import Path


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":  # with tied weights
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    return MixtralForCausalLM(  # whose experts are one tensor in memory and many in files
        MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16,
        )
    )  # fmt: skip


def make_engine(kind: str, stage: int, **config: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **config,
    }
    model = make_model(kind)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        tokens = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
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
