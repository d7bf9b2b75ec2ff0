"""Tiny models with LoRA adapters over a base that bitsandbytes has quantized, and DeepSpeed engines over them."""

from __future__ import annotations

import importlib
from typing import Any

import peft
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.support.extra_state import make_engine as make_engine_over
from tests.support.lora import make_base

bnb: Any = importlib.import_module("bitsandbytes")  # whose types mypy need not know, because it may not be installed
SETTINGS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def quantized(layer: nn.Linear, kind: str) -> nn.Linear:
    """Returns the layer with a quantized weight. ``kind``: "int8", "nf4" or "fp4", with the suffix "-bf16" if the
    4-bit numbers are kept in a tensor of bf16, which ZeRO-3 can partition, and "-once" if their scales are not
    quantized."""
    sizes: dict[str, Any] = {"input_features": layer.in_features, "output_features": layer.out_features}
    if kind == "int8":
        new = bnb.nn.Linear8bitLt(**sizes, has_fp16_weights=False)
        new.weight = bnb.nn.Int8Params(layer.weight.detach(), requires_grad=False)
    else:
        options: dict[str, Any] = {
            "quant_type": kind[:3], "compress_statistics": "once" not in kind,
            "quant_storage": torch.bfloat16 if "bf16" in kind else torch.uint8,
        }  # fmt: skip
        new = bnb.nn.Linear4bit(**sizes, compute_dtype=torch.bfloat16, **options)
        new.weight = bnb.nn.Params4bit(layer.weight.detach(), requires_grad=False, module=new, **options)
    new.bias = layer.bias
    return new.to(get_accelerator().current_device_name())  # this quantizes the weight


def make_quantized(kind: str, seed: int = 0) -> Any:
    model = make_base(seed).bfloat16()
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, quantized(child, kind))
    return model


def make_model(kind: str, seed: int = 0) -> Any:
    model = peft.get_peft_model(make_quantized(kind, seed), peft.LoraConfig(**SETTINGS))
    torch.manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # PEFT makes it of zeros
            nn.init.normal_(parameter, std=0.02)
    return model


def make_engine(kind: str, stage: int, seed: int = 0) -> Any:
    return make_engine_over(stage, model=make_model(kind, seed))


def tokens(step: int = 0, rank: int = 0) -> torch.Tensor:
    return torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Any, steps: int) -> list[float]:
    """Trains some steps and returns their losses."""
    losses = []
    for step in range(engine.global_steps, engine.global_steps + steps):
        batch = tokens(step, engine.global_rank).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> torch.Tensor:
    output: torch.Tensor = model(input_ids=tokens().to(next(model.parameters()).device)).logits.detach().clone()
    return output
