"""A tiny model whose modules add state to their ``state_dict`` by themselves, in each of the ways that torch has."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn


class Scaled(nn.Module):
    """A frozen int8 weight, whose scale is an attribute that the methods of the class save and load, as the classes of
    bitsandbytes do. It expects its weight and its scale together."""

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        weight = torch.randn(48, 32) * size
        self.scale = weight.abs().amax(1) / 127
        self.weight = nn.Parameter((weight / self.scale[:, None]).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)[:, None]).T

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        assert state_dict[f"{prefix}weight"].dtype == torch.int8
        self.scale = state_dict.pop(f"{prefix}scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(nn.Module):
    """A factor that hooks save and load. It is made in the first forward pass, and differs between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: torch.Tensor | None = None
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.factor is None:
            self.factor = 1 + x.detach().float().square().mean(0)
        return x * self.factor.to(x.dtype)

    @staticmethod
    def _save(module: Hooked, state_dict: Any, prefix: str, metadata: object) -> None:
        if module.factor is not None:
            state_dict[f"{prefix}factor"] = module.factor

    @staticmethod
    def _load(module: Hooked, state_dict: Any, prefix: str, *args: object) -> None:
        module.factor = state_dict.pop(f"{prefix}factor", module.factor)


class Counting(nn.Module):
    """The mean of the input in each forward pass, as ``get_extra_state`` returns it: a tensor that becomes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.means.append(x.detach().float().mean().item())
        return x + sum(self.means)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.means, dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        self.means = state.tolist()


class Model(nn.Module):
    seen: torch.Tensor

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.scaled, self.hooked, self.counting = Scaled(size), Hooked(), Counting()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden: torch.Tensor = self.counting(self.hooked(self.scaled(self.first(x))))
        return hidden


EXTRA = ["counting._extra_state", "hooked.factor", "scaled.scale"]
"""The names of the extra state of ``Model`` after its first forward pass."""


def make_engine(stage: int, seed: int = 0, model: nn.Module | None = None, **config: Any) -> Any:
    torch.manual_seed(seed)
    module = Model(size=1 + seed) if model is None else model
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **config,
    }
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=module, model_parameters=trained, config=settings)[0]


def batch(engine: Any, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + engine.global_rank)
    return torch.randn(4, 32, generator=random).to(engine.device, torch.bfloat16)


def train(engine: Any, steps: int) -> list[float]:
    """Trains some steps and returns their losses."""
    losses = []
    for step in range(engine.global_steps, engine.global_steps + steps):
        loss = engine(batch(engine, step)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
