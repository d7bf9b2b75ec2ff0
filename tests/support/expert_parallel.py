"""Engines with experts that are divided between ranks, and their whole tensors, found without zckpt."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional

from tests.support.divided import local_state, of_all_ranks, train_on
from tests.support.models import ADAMW
from tests.support.runs import ADAM

EXPERTS, HIDDEN, VOCAB, BATCH = 4, 6, 8, 8
NUMBER = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


class OwnMoE(MoE):  # type: ignore[misc]
    """A class of the user's own."""


class Mixture(nn.Module):
    """A model whose experts have a buffer and a frozen weight."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.moe = OwnMoE(HIDDEN, Expert(), num_experts=EXPERTS, ep_size=ep, k=1, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x))
        out, _, _ = self.moe(h)
        return functional.cross_entropy(self.head(h + out).float().view(-1, VOCAB), y.view(-1))


class Expert(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, 5), nn.Linear(5, HIDDEN)
        self.fixed = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(self.fixed(x)).relu()) * self.scale.mean()
        return out


class Experts(nn.Module):
    """A layer that AutoEP replaces, because its layout is that of Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.top_k = nn.Linear(HIDDEN, EXPERTS, bias=False), 2
        self.experts: Any = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 10, HIDDEN))
        self.experts.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 5))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(h).softmax(-1).topk(self.top_k)
        weights = torch.zeros(*h.shape[:-1], EXPERTS, dtype=h.dtype).scatter(-1, chosen, scores)
        gate, up = torch.einsum("bth,efh->btef", h, self.experts.gate_up_proj).chunk(2, -1)
        down = torch.einsum("btef,ehf->bteh", functional.silu(gate) * up, self.experts.down_proj)
        return (down * weights.unsqueeze(-1)).sum(-2)


class Auto(nn.Module):
    """A model whose experts AutoEP divides, because their layout is that of Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2, hidden_size=HIDDEN,
            intermediate_size=5,
        )  # fmt: skip
        layer: Any = nn.Module()
        layer.norm, layer.mlp = nn.LayerNorm(HIDDEN), Experts()
        layer.self_attn = nn.Module()
        layer.self_attn.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        layer.self_attn.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.model: Any = nn.Module()
        self.model.embed, self.model.layers = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList([layer])
        self.lm_head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, layer = self.model.embed(x), self.model.layers[0]
        h = h + layer.self_attn.o_proj(torch.tanh(layer.self_attn.q_proj(h)))
        out = layer.mlp(layer.norm(h))
        h = h + (out[0] if isinstance(out, tuple) else out)
        return functional.cross_entropy(self.lm_head(h).float().view(-1, VOCAB), y.view(-1))


def first_expert(engine: Any) -> int:
    """Returns the number, among all experts, of the first one that this rank has."""
    if not hasattr(engine.module, "moe"):
        return 0
    layer = engine.module.moe
    return int(dist.get_rank(engine.expert_parallel_group[layer.expert_group_name]) * layer.num_local_experts)


def global_name(name: str, first: int) -> str:
    match = NUMBER.fullmatch(name)
    return name if match is None else f"{match[1]}{first + int(match[2])}{match[3]}"


def make(
    ep: int,
    stage: int,
    *,
    auto: bool = False,
    tp: int = 1,
    frozen: bool = False,
    seed: int = 0,
    dtype: str = "fp32",
    **config: Any,
) -> Any:
    """Returns an engine. ``ep``: the number of ranks over which the experts are divided. ``auto``: whether AutoEP
    divides them, if ``ep`` is not 0. ``tp``: the number of ranks over which AutoTP cuts the other layers. ``frozen``:
    whether some weights of the experts that AutoEP divides are frozen."""
    torch.manual_seed(seed)
    model = Auto() if auto else Mixture(ep)
    if frozen:
        model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").requires_grad_(False)
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp, "preset_model": "mixtral"}
    if auto and ep:
        config["expert_parallel"] = {
            "enabled": True, "autoep_size": ep, "preset_model": "mixtral", "use_grouped_mm": False
        }  # fmt: skip
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH * tp // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == "bf16"},
        **config,
    }
    strided = bool(config.get("use_data_before_expert_parallelism"))
    ranks = dist.get_world_size()
    rank = dist.get_rank() // (ranks // ep) if strided else dist.get_rank() % max(ep, 1)
    with torch.no_grad():  # Experts begin as copies of one another, and must be told apart here.
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            whole = global_name(name, rank * (EXPERTS // max(ep, 1)))
            generator = torch.Generator().manual_seed(sum(map(ord, whole)) * 7 + len(whole) + seed)
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, config=settings, model_parameters=None if auto else trained)[0]


def train(engine: Any, steps: int) -> list[float]:
    return train_on(engine, steps, VOCAB, BATCH)


def whole(engine: Any, keys: tuple[str, ...] = ADAM) -> dict[str, torch.Tensor]:
    """Returns the master weights, moments, weights and buffers of all experts and of the rest of the model, with the
    names and shapes that they have without AutoEP. Every rank calls it."""
    first, local = first_expert(engine), local_state(engine, keys)
    divided = {
        name: described["local_experts"]
        for name, parameter in engine.module.named_parameters()
        if (described := getattr(parameter, "ds_autoep_uc_meta", None)) is not None
    }
    named: dict[str, torch.Tensor] = {}
    for key, tensor in local.items():
        experts = divided.get(key.partition("/")[2])
        if experts is None:
            named[global_name(key, first)] = tensor
        else:
            named |= {f"{key}[{expert}]": part for expert, part in zip(experts, tensor, strict=True)}
    tensors = of_all_ranks(named)
    for key in {key.partition("[")[0] for key in tensors if "[" in key}:
        tensors[key] = torch.stack([tensors.pop(f"{key}[{expert}]") for expert in range(EXPERTS)])
    for key in [key for key in tensors if key.endswith(("experts.w1", "experts.w2", "router.gate.weight"))]:
        tensor = tensors.pop(key)
        if key.endswith("w1"):
            tensor = torch.cat([tensor, tensors.pop(key.replace("w1", "w3"))], 1)
        before = {"experts.w1": "experts.gate_up_proj", "experts.w2": "experts.down_proj", "router.gate": "gate"}
        tensors[next(key.replace(after, name) for after, name in before.items() if after in key)] = tensor
    return dict(sorted(tensors.items()))
