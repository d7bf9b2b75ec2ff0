"""Tiny models, DeepSpeed engines over them, and their training, which is the same in every run because it is seeded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.coded import CodedMomentum, Opaque

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ADAMW = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}


class Factored(torch.optim.Optimizer):
    """An optimizer whose states have other shapes than the weights.

    The states are the means over the rows and over the columns of the squared gradient, and a list of the sizes of the
    last two gradients. A 1-D gradient is taken as a matrix of up to 16 columns, without the elements that do not fill
    a row.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                columns = p.shape[-1] if p.dim() > 1 else min(p.numel(), 16)
                matrix = p.grad.float().flatten()[: p.numel() // columns * columns].view(-1, columns)
                means = {"rows": matrix.square().mean(1), "columns": matrix.square().mean(0)}
                state = self.state[p]
                if not state:
                    state.update(step=0, sizes=[], **{name: torch.zeros_like(mean) for name, mean in means.items()})
                state["step"] += 1
                state["sizes"] = [*state["sizes"], matrix.abs().sum()][-2:]
                for name, mean in means.items():
                    state[name].lerp_(mean, 1 - group["decay"])
                scale = (state["rows"].mean() + state["columns"].mean()).sqrt() + sum(state["sizes"]) + 1e-8
                p.add_(p.grad / scale, alpha=-group["lr"])
                p.view(-1)[: matrix.numel()].view_as(matrix).mul_(1 - 1e-2 * state["rows"][:, None] / scale)


def low_bit_adam(kind: str, params: Any) -> torch.optim.Optimizer:
    """Returns an AdamW of torchao, whose moments are quantized in blocks of 32 values. ``kind`` is a part of its
    name."""
    import torchao.optim

    torch.compiler.set_stance("force_eager")  # compiling takes longer than training here
    optimizer: torch.optim.Optimizer = getattr(torchao.optim, f"AdamW{kind}")(params, lr=1e-2, block_size=32)
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "adamw": {"type": "AdamW", "params": ADAMW},  # that of DeepSpeed in C++
    "torch_adamw": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
    "slow_adamw": {"type": "AdamW", "params": {**ADAMW, "lr": 3e-3, "betas": [0.8, 0.9]}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.01}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "muon": {"type": "Muon", "params": {**ADAMW, "momentum": 0.9, "ns_method": "standard"}},
    "factored": Factored,
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "coded": CodedMomentum,
    "coded in four": partial(CodedMomentum, scales=4),
    "opaque": partial(CodedMomentum, kind=Opaque),
    **{f"torchao {kind}": partial(low_bit_adam, kind) for kind in ("8bit", "4bit", "Fp8")},
    "none": None,  # for an engine that only evaluates
}
"""For each optimizer by name, its DeepSpeed configuration, or a function that makes it from the parameters."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


class Odd(nn.Module):
    """A model with state that is hard to lay out.

    It has odd shapes, parameters of one, two and no elements, shared and frozen weights, and state that differs between
    ranks.
    """

    running_mean: torch.Tensor
    batches: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 63)
        self.first = nn.Linear(63, 63)
        self.frozen = nn.Linear(63, 63).requires_grad_(False)
        self.dropout = nn.Dropout(0.1)  # makes the losses depend on the random state
        self.head = nn.Linear(63, 7)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.ones(1))
        self.two = nn.Parameter(torch.ones(2))
        self.unused = nn.ParameterDict({"empty": torch.empty(0, 3)})  # ZeRO-3 would fail if it were used
        self.register_buffer("running_mean", torch.zeros(63))  # differs between ranks, as their batches do
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(63), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        hidden = self.dropout(self.first(x).relu()) + self.frozen(x)
        self.running_mean.lerp_(hidden.detach().mean(0).to(self.running_mean), 0.1)
        logits = self.head(hidden * self.one) * self.two.sum()
        return logits.float().square().mean() + self.embed(self.batches % 7).square().mean()


class ResizedMlp(Mlp):
    """``Mlp`` with another shape of the last weight and bias, and one more parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Linear(64, 65)
        self.more = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.more.sum()


class ResizedOdd(Odd):
    """``Odd`` with another shape of the shared weight and of the head's bias, and one more parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 63)
        self.head = nn.Linear(63, 8)
        self.head.weight = self.embed.weight
        self.more = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.more.sum()


class Wide(nn.Module):
    """A model that is large enough for NVMe offload. Each of two ranks holds 1 MiB of every weight in bf16, but less of
    the biases.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 1025)
        self.second = nn.Linear(1025, 1023)
        self.frozen = nn.Linear(1023, 1025).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.second(self.first(x).relu())).float().square().mean()


class Uneven(nn.Module):
    """A model of two matrices, of 63 and 64 elements. The second of two ranks holds the last 63 elements of the second
    matrix, and then padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(63, 1))
        self.second = nn.Parameter(torch.randn(1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :63] @ self.first @ self.second).float().square().mean()


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


def make_model(model: str) -> nn.Module:
    if model == "gpt2":
        sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    if model == "thawed":
        return Wide().requires_grad_()
    resized = {"resized mlp": ResizedMlp, "resized odd": ResizedOdd}
    return {"mlp": Mlp, "odd": Odd, "wide": Wide, "uneven": Uneven, **resized}[model]()


def make_engine(
    stage: int = 3,
    dtype: str = "bf16",
    model: str = "mlp",
    groups: bool = False,
    frozen: bool = False,
    seed: int = 0,
    optimizer: str = "adamw",
    scheduler: bool | Callable[[Any], Any] = False,
    config: Mapping[str, Any] | None = None,
    swap: str = "",
    mpu: Any = None,
    training_data: Any = None,
    **zero: Any,
) -> deepspeed.DeepSpeedEngine:
    """Returns an engine over a new model, whose weights depend on ``seed``.

    Args:
        stage: the stage of ZeRO.
        dtype: "bf16", "fp16" or "fp32".
        model: the name of the model, one that ``make_model`` knows.
        groups: whether weights and one-dimensional parameters are in two param groups with different settings.
        frozen: whether the first quarter of the parameters is frozen.
        seed: the seed of the weights and of the random state of each rank.
        optimizer: a name in ``OPTIMIZERS``.
        scheduler: whether there is a scheduler of the learning rate, or a function that makes it from the optimizer.
        config: more settings of DeepSpeed's configuration. They replace those of the same names.
        swap: the folder for the files of NVMe offload.
        mpu: an object that names the engine's ranks, if the engine does not have all ranks.
        training_data: the data that the engine loads by itself.
        zero: more settings of ``zero_optimization``.
    """
    torch.manual_seed(seed)
    module = make_model(model)
    parameters = list(module.parameters())
    if frozen:
        for parameter in parameters[: len(parameters) // 4]:
            parameter.requires_grad_(False)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    split: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-2},
    ]
    for offload in ("offload_optimizer", "offload_param"):
        if zero.get(offload, {}).get("device") == "nvme":
            zero[offload] = {**zero[offload], "nvme_path": swap}
    chosen = OPTIMIZERS[optimizer]
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 9, "loss_scale_window": 3, "hysteresis": 1},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **(config or {}),
    }
    if dtype == "fp16":  # DeepSpeed allows it only on GPUs, though it works on the CPU
        type(get_accelerator()).is_fp16_supported = lambda self: True
    if isinstance(chosen, dict):
        settings["optimizer"] = chosen
    if optimizer == "muon":
        torch.compiler.set_stance("force_eager")  # compiling takes longer than training here
    if scheduler is True:
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=split if groups else trained,
        optimizer=None if isinstance(chosen, dict) else chosen,
        lr_scheduler=None if isinstance(scheduler, bool) else scheduler,
        config=settings,
        mpu=mpu,
        training_data=training_data,
    )
    torch.manual_seed(1000 * seed + engine.global_rank)
    return engine


def train(engine: deepspeed.DeepSpeedEngine, steps: int, start_step: int = 0) -> list[float]:
    """Trains ``steps`` steps and returns their losses. The batch of a step depends only on its number and the rank."""
    losses = []
    for step in range(start_step, start_step + steps):
        loss = engine(**batch(engine, step))
        loss = getattr(loss, "loss", loss)
        engine.backward(loss)
        with torch.no_grad():  # without no_grad, DeepSpeed 0.18 cannot step on torch 2.13 at stages 1 and 2
            engine.step()
        losses.append(loss.item())
    return losses


def batch(engine: deepspeed.DeepSpeedEngine, step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + engine.global_rank)
    if isinstance(engine.module, GPT2LMHeadModel):
        tokens = torch.randint(64, (4, 16), generator=random).to(engine.device)
        return {"input_ids": tokens, "labels": tokens}
    features = {Odd: 63, ResizedOdd: 63, Wide: 1024}.get(type(engine.module), 64)
    x = torch.randn(4, features, generator=random)
    return {"x": x.to(engine.device, next(engine.module.parameters()).dtype)}
