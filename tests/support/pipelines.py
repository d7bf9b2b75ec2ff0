"""Engines with the stages of a pipeline, and the tensors of all stages."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.nn import functional

from tests.support.divided import local_state, of_all_ranks
from tests.support.models import ADAMW
from tests.support.runs import ADAM
from tests.support.tensor_parallel import CopyIn, SumOut

HIDDEN, VOCAB, BATCH, MICRO_STEPS = 6, 9, 8, 2


class Embedding(nn.Module):
    """The embedding and the head in one."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.3)
        if bias:
            self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.embedding(x, self.weight) + getattr(self, "bias", 0)


def head(embedding: Embedding, h: torch.Tensor) -> torch.Tensor:
    return functional.linear(h + getattr(embedding, "bias", 0), embedding.weight)


class Block(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.fixed = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(torch.tanh(self.fc(self.fixed(x))) * self.scale.mean() + x)
        return out


class Sliced(nn.Module):
    """A matrix whose columns are divided between the ranks of a group."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, ranks = group, dist.get_world_size(group)
        self.first, width = dist.get_rank(group) * (HIDDEN // ranks), HIDDEN // ranks
        whole = torch.randn(HIDDEN, HIDDEN)
        weight: Any = nn.Parameter(whole[:, self.first : self.first + width].contiguous())
        weight.tensor_model_parallel, weight.partition_dim = True, 1
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = CopyIn.apply(x, self.group)[..., self.first : self.first + self.weight.shape[1]]
        return x + torch.tanh(SumOut.apply(functional.linear(own, self.weight), self.group) + self.bias)


class Mixed(nn.Module):
    """A layer of experts."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.moe = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), num_experts=4, ep_size=ep, drop_tokens=False, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.moe(x)[0]
        return out


def loss_of(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(h.float().view(-1, VOCAB), y.view(-1))


def make(
    stages: int,
    zero: int,
    *,
    tp: int = 1,
    ep: int = 0,
    seed: int = 0,
    dtype: str = "fp32",
    bias: bool = False,
    short: bool = False,
    functions: bool = False,
    late: bool = False,
    **config: Any,
) -> Any:
    """Returns an engine.

    Args:
        stages: the number of stages.
        zero: the stage of ZeRO.
        tp: the number of ranks over which each ``Sliced`` layer is cut. There are such layers only if it is above 1, or
            if it is -1, for whole ones.
        ep: the number of ranks over which experts are divided. There are experts only if it is above 0.
        seed: the seed of the weights.
        dtype: "fp32" or "bf16".
        bias: whether the shared module has a parameter that is not tied.
        short: whether there is only one block, so that the second stage has only the shared module.
        functions: whether each layer calls the shared module by a function. Then DeepSpeed saves no file that has the
            shared weights.
        late: whether only the last stages have experts.
        config: more settings of DeepSpeed's configuration.
    """
    topology, sliced = None, []
    if tp != 1:
        tp, ranks = abs(tp), dist.get_world_size()
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tp, num_dp=ranks // stages // tp)
        groups = [dist.new_group(range(first, first + tp)) for first in range(0, ranks, tp)]
        sliced = [LayerSpec(Sliced, groups[dist.get_rank() // tp]) for _ in range(2)]
    mixed = [LayerSpec(Mixed, ep)] if ep else []
    tied: dict[str, Any] = {"tied_weight_attr": ["weight"], "bias": bias}
    layers = [
        TiedLayerSpec("embed", Embedding, forward_fn=Embedding.forward if functions else None, **tied),
        LayerSpec(Block), *([] if late else mixed), torch.tanh, LayerSpec(Block),
        LayerSpec(Block), LayerSpec(Block), *sliced, *mixed,
        TiedLayerSpec("embed", Embedding, forward_fn=head, **tied),
    ]  # fmt: skip
    if short:
        layers = [layers[0], layers[1], torch.tanh, layers[-1]]
    torch.manual_seed(seed)
    division = {"num_stages": stages} if topology is None else {"topology": topology}
    model: Any = PipelineModule(layers=layers, **division, loss_fn=loss_of, partition_method="uniform")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            generator = torch.Generator().manual_seed(sum(map(ord, name)) * 7 + seed)
            if "deepspeed_experts" in name:
                generator.manual_seed(dist.get_rank() % max(ep, 1) + 10 * seed + len(name))
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH * stages * tp // dist.get_world_size() // MICRO_STEPS,
        "gradient_accumulation_steps": MICRO_STEPS,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == "bf16"},
        **config,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, config=settings, model_parameters=trained)[0]


def train(engine: Any, steps: int) -> list[float]:
    """Takes steps, whose data depend on the number of the step. Returns their losses."""
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        data = torch.randint(0, VOCAB, (2, BATCH, 4), generator=generator)
        group = engine.grid.get_data_parallel_group()
        own = data.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
        micro_batches = zip(*(half.chunk(MICRO_STEPS) for half in own), strict=True)
        losses.append(engine.train_batch(data_iter=iter([*micro_batches])).item())
    return losses


def whole(engine: Any, keys: tuple[str, ...] = ADAM) -> dict[str, torch.Tensor]:
    """Returns the tensors of all stages by key, without zckpt. Every rank calls it."""
    return of_all_ranks(local_state(engine, keys))
