"""Tensors that have no memory of their own, and an optimizer that keeps its momentum in them."""

from __future__ import annotations

from typing import Any

import torch

CODED_NUMEL_MIN = 1000
"""The number of elements from which on ``CodedMomentum`` codes the momentum of a tensor."""


class Opaque(torch.Tensor):
    """A tensor whose values are 8-bit codes, and a scale for each block of them. It does not say so to anybody."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.view.default, aten.slice.Tensor):
            return cls(func(args[0].codes, *args[1:]), args[0].scale)
        raise NotImplementedError(func)

    def decoded(self) -> torch.Tensor:
        return (self.codes.view(len(self.scale), -1) * self.scale[:, None]).view(self.codes.shape)

    def encode(self, values: torch.Tensor) -> None:
        blocks = values.view(len(self.scale), -1)
        self.scale.copy_(blocks.abs().amax(1).clamp(min=1e-12) / 127)
        self.codes.copy_((blocks / self.scale[:, None]).round().view(values.shape))


class Coded(Opaque):
    """An ``Opaque`` that can be taken apart."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"size": self.shape, "as": torch.float32}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Coded:
        assert tuple(context["size"]) == tuple(size)
        assert context["as"] is torch.float32
        return Coded(inner["codes"], inner["scale"])


class CodedMomentum(torch.optim.Optimizer):
    """SGD whose momentum is coded if it has many elements."""

    def __init__(self, params: Any, lr: float = 1e-2, kind: type[Opaque] = Coded, scales: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self._kind, self._scales = kind, scales

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p, requires_grad=False)
                    if p.numel() >= CODED_NUMEL_MIN:
                        codes = torch.zeros_like(p, dtype=torch.int8, requires_grad=False)
                        state["momentum"] = self._kind(codes, torch.ones(self._scales, device=p.device))
                state["step"] += 1
                momentum = state["momentum"]
                if isinstance(momentum, Opaque):
                    values = momentum.decoded().mul_(0.9).add_(p.grad)
                    momentum.encode(values)
                else:
                    values = momentum.mul_(0.9).add_(p.grad)
                p.sub_(values, alpha=group["lr"])


torch.serialization.add_safe_globals([Coded])
