"""Engines with tensor parallelism, and their whole tensors, put together by DeepSpeed's own description of the cuts."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.affine import ParamAffineMap
from torch import nn
from torch.nn import functional

from tests.support.divided import local_state, train_on
from tests.support.models import ADAMW
from tests.support.runs import ADAM

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 12, 6, 3, 2, 7, 10
BATCH = 12


class Blocks(nn.Module):
    """A model with a fused QKV of unequal parts, a fused gate and up projection, biases, rows of an odd number, and a
    frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * MLP)
        self.down = nn.Linear(MLP, HIDDEN)
        self.col = nn.Linear(HIDDEN, MLP).requires_grad_(False)
        self.row = nn.Linear(MLP, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x))
        qkv = self.qkv(h)
        part = qkv.shape[-1] // 4
        q, k, v = qkv.split([2 * part, part, part], -1)
        h = h + self.o(q * k.repeat_interleave(2, -1) + v.repeat_interleave(2, -1))
        gate, up = self.up(h).chunk(2, -1)
        h = h + self.down(functional.silu(gate) * up)
        h = h + self.row(torch.tanh(self.col(h)))
        return functional.cross_entropy(self.head(h).float().view(-1, VOCAB), y.view(-1))


LAYERS = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [r"^qkv\.weight$"], "partition_type": "column", "partition_dim": 0,
            "shape": [[HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1],
        },
        {"patterns": [r"^up\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [r"^(o|down|row)\.weight$"], "partition_type": "row"},
        {"patterns": [r"^col\.weight$"], "partition_type": "column"},
    ],
}  # fmt: skip
"""How AutoTP cuts the layers of ``Blocks``."""


class Mpu:
    """Knows the ranks of tensor and data parallelism, as Megatron's does. If ``strided``, the ranks that share a layer
    do not follow one another."""

    def __init__(self, tp: int, *, strided: bool) -> None:
        world = dist.get_world_size()
        table = torch.arange(world).view(tp, -1).t() if strided else torch.arange(world).view(-1, tp)
        groups = {}
        for name, rows in (("tp", table), ("dp", table.t())):
            for ranks in rows.tolist():
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    groups[name] = group
        self.tp, self.dp = groups["tp"], groups["dp"]

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tp)

    def get_model_parallel_group(self) -> Any:
        return self.tp

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tp)

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.dp)

    def get_data_parallel_group(self) -> Any:
        return self.dp

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.dp)


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> Any:
        context.group = group
        return x

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> Any:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Megatron(nn.Module):
    """A model that cuts its own layers as Megatron does: the vocabulary, a gate and an up projection that are one
    parameter, and the columns of the down projection."""

    def __init__(self, mpu: Mpu | None, *, patterns: bool = False) -> None:
        """``patterns``: whether the model describes the cuts by patterns of names, and not by attributes."""
        super().__init__()
        self.mpu, self.patterns = mpu, patterns
        self.embed = self._cut(torch.randn(VOCAB, HIDDEN), 0)
        self.gate_up = self._cut(torch.randn(2 * HIDDEN, HIDDEN) * 0.3, 0, stride=2)
        self.gate_up_bias = self._cut(torch.randn(2 * HIDDEN), 0, stride=2)
        self.down = self._cut(torch.randn(HIDDEN, HIDDEN) * 0.3, 1)
        self.down_bias = nn.Parameter(torch.zeros(HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Parameter(torch.randn(VOCAB, HIDDEN))

    def _cut(self, full: torch.Tensor, dim: int, stride: int = 1) -> Any:
        if self.mpu is None:
            return nn.Parameter(full)
        tp, rank = self.mpu.get_model_parallel_world_size(), self.mpu.get_model_parallel_rank()
        own = torch.cat([part.chunk(tp, dim)[rank] for part in full.chunk(stride, dim)], dim)
        parameter: Any = nn.Parameter(own.contiguous())
        parameter.cut = dim, stride
        if not self.patterns:
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
        return parameter

    def universal_checkpoint_info(self) -> dict[str, Any]:
        if not self.patterns:
            return {}
        return {
            "vocabulary_parameter_patterns": ["embed"],
            "parameter_with_2_sub_params_cat_dim_0": ["gate_up$"],
            "parameter_with_sub_params": [
                {"patterns": ["gate_up_bias"], "shape": ((HIDDEN, HIDDEN),), "partition_dim": 0}
            ],
            "parameter_with_row_parallelism_patterns": ["down$"],
            "tp_replicated_parameter_patterns": ["down_bias", "norm[.]", "head"],
        }

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        into, out = lambda x: x, lambda x: x
        rows, first = self.embed.shape[0], 0
        if self.mpu is not None:
            group, first = self.mpu.tp, rows * self.mpu.get_model_parallel_rank()
            into, out = lambda x: CopyIn.apply(x, group), lambda x: SumOut.apply(x, group)
        here = (x >= first) & (x < first + rows)
        h = out(functional.embedding((x - first).clamp(0, rows - 1), self.embed) * here.unsqueeze(-1))
        h = self.norm(h)
        gate, up = functional.linear(into(h), self.gate_up, self.gate_up_bias).chunk(2, -1)
        h = h + out(functional.linear(functional.silu(gate) * up, self.down)) + self.down_bias
        return functional.cross_entropy(functional.linear(h, self.head).view(-1, VOCAB).float(), y.view(-1))


def make(
    tp: int,
    stage: int,
    *,
    way: str = "autotp",
    frozen: bool = False,
    seed: int = 0,
    dtype: str = "fp32",
    offload: bool = False,
    **config: Any,
) -> Any:
    """Returns an engine. ``tp``: the number of ranks over which each layer is cut. ``way``: "autotp", or "mpu",
    "strided" or "patterns" for the way of Megatron. ``frozen``: whether parameters are frozen that are not cut."""
    mpu = Mpu(tp, strided=way == "strided") if tp > 1 and way != "autotp" else None
    torch.manual_seed(seed)
    model = Blocks() if way == "autotp" else Megatron(mpu, patterns=way == "patterns")
    if frozen:
        model.norm.requires_grad_(False)
        model.head.requires_grad_(False)
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 20, "sub_group_size": 200}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH * tp // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **config,
    }
    if dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    if tp > 1 and way == "autotp":
        settings["tensor_parallel"] = {"autotp_size": tp, "partition_config": LAYERS}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, config=settings, model_parameters=trained, mpu=mpu)[0]


def train(engine: Any, steps: int) -> list[float]:
    return train_on(engine, steps, VOCAB, BATCH)


def whole(engine: Any, keys: tuple[str, ...] = ADAM) -> dict[str, torch.Tensor]:
    """Returns the whole tensors by key, without zckpt. Every rank calls it."""
    parameters, local = dict(engine.module.named_parameters()), local_state(engine, keys)
    if engine.mp_world_size == 1:
        return local
    group = getattr(engine.mpu, "get_tensor_model_parallel_group", engine.mpu.get_model_parallel_group)()
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, local, group=group)
    tensors = {}
    for key in local:
        parameter: Any = parameters.get(key.partition("/")[2])
        shards = [tensors_of_rank[key] for tensors_of_rank in of_ranks]
        described = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
        if described is not None and not described["replicated"]:
            affine = ParamAffineMap.from_dict(described["conversion"]["affine_map"])
            full = affine.rebuild({rank: shard.contiguous() for rank, shard in enumerate(shards)})
            tensors[key] = full.reshape(described["original_shape"])
        elif hasattr(parameter, "cut") and described is None:
            dim, stride = parameter.cut
            chunks = zip(*(shard.chunk(stride, dim) for shard in shards), strict=True)
            tensors[key] = torch.cat([torch.cat(part, dim) for part in chunks], dim)
        else:
            tensors[key] = shards[0]
            assert all(torch.equal(shards[0], shard) for shard in shards), key
    return tensors
