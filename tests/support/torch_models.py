"""A small model, and ``TrainState``s of it in each layout that PyTorch has: one process, DistributedDataParallel, and
FSDP2 on meshes of several shapes. It has uneven rows, a buffer of each rank, a tied weight and a frozen layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zckpt
from zckpt.engines.tensors import local_of, plain_name

VOCABULARY = 11
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nadam": torch.optim.NAdam,
    "adagrad": torch.optim.Adagrad,
}


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    seen: torch.Tensor

    def __init__(self, hidden: int = 8, *, more: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(6, hidden) for _ in range(2))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        if more:
            self.more = nn.Parameter(torch.randn(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        self.seen.add_(x.detach().mean())
        out: torch.Tensor = self.head(x + self.more if hasattr(self, "more") else x)
        return out


def make_state(
    layout: str = "fsdp",
    *,
    seed: int = 0,
    optimizer: str = "adamw",
    scheduler: bool = False,
    mixed: bool = False,
    wrapped: bool = False,
    meta: bool = False,
    hidden: int = 8,
    more: bool = False,
    **options: Any,
) -> zckpt.TrainState:
    """Returns a new TrainState. ``layout``: "alone", "ddp", "fsdp", "hsdp" (2 replicas), "tp" (FSDP over pairs of ranks
    with column-wise tensor parallelism), "hsdp-tp" (2 replicas of the same), "rows" (with row-wise parallelism), or
    "columns" (FSDP that cuts the second dimension). ``mixed``: computes in bf16. ``wrapped``: recomputes activations
    and compiles each block. ``meta``: makes the model without memory, which it gets later. ``options``: for
    ``fully_shard``."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model: nn.Module = Net(hidden, more=more)
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout != "alone":
        model = shard(model, layout, wrapped=wrapped, **options)
    if meta:
        model.to_empty(device="cpu")
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    made: Any = OPTIMIZERS[optimizer](groups, lr=1e-2)
    return zckpt.TrainState(model, made, torch.optim.lr_scheduler.StepLR(made, 2, 0.5) if scheduler else None)


def shard(model: Any, layout: str, *, wrapped: bool = False, **options: Any) -> Any:
    ranks = dist.get_world_size()
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    elif layout in ("tp", "hsdp-tp", "rows"):
        replicas = (2,) if layout == "hsdp-tp" else ()
        dims = ("replicate", "dp", "tp")[-2 - len(replicas) :]
        whole = init_device_mesh("cpu", (*replicas, ranks // 2 // (len(replicas) + 1), 2), mesh_dim_names=dims)
        mesh = whole[dims[:-1]]
        columns = ColwiseParallel(output_layouts=Replicate())
        plan: Any = {"up": columns} if layout != "rows" else {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, whole["tp"], plan)
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    if layout == "columns":
        options["shard_placement_fn"] = lambda weight: (
            Shard(1) if weight.ndim == 2 and not weight.shape[1] % ranks else None
        )
    if wrapped:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for name, block in [*model.blocks.named_children()]:
            model.blocks.register_module(name, torch.compile(checkpoint_wrapper(block), backend="eager"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def backward(state: zckpt.TrainState, step: int) -> float:
    generator = torch.Generator().manual_seed(1000 * step + data_rank(state))
    tokens = torch.randint(VOCABULARY, (2, 3), generator=generator)
    loss = nn.functional.cross_entropy(state.model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.item()


def data_rank(state: zckpt.TrainState) -> int:
    """Returns the number that chooses the data of this rank. Ranks of one tensor-parallel group need the same data."""
    if not dist.is_initialized():
        return 0
    meshes = [weight.device_mesh for weight in state.model.parameters() if isinstance(weight, DTensor)]
    with_tp = any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)
    return dist.get_rank() // 2 if with_tp else dist.get_rank()


def train(state: zckpt.TrainState, steps: int) -> list[float]:
    """Trains as most loops do: the gradients stay until the next step begins."""
    losses = []
    for _ in range(steps):
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        losses.append(backward(state, state.step))
        for optimizer in state.optimizers:
            optimizer.step()
        if state.scheduler is not None:
            state.scheduler.step()
    return losses


def held(state: zckpt.TrainState) -> dict[str, Any]:
    """Returns what this rank holds, read without zckpt's adapter. Gradients count only if no step has used them."""
    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    weights = {plain_name(name): weight for name, weight in state.model.named_parameters()}
    states = {
        name: {key: local(value) for key, value in optimizer.state[weight].items()}
        for optimizer in state.optimizers
        for name, weight in weights.items()
        if weight in optimizer.state
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for optimizer in state.optimizers
        for group in optimizer.param_groups
    ]
    return {
        "weights": {name: local(weight) for name, weight in weights.items()},
        "states": states,
        "groups": groups,
        "buffers": {name: buffer.clone() for name, buffer in state.model.named_buffers()},
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
        "step": state.step,
        "pending": state.has_gradients(),
    }


def local(value: Any) -> Any:
    return local_of(value).detach().clone() if isinstance(value, torch.Tensor) else value
