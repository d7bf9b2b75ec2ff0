"""A small training engine of plain tensors, on any device, for tests that need no framework."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from zckpt.plan.inventory import BUFFER, MASTER, PARAM
from zckpt.ranks.job import job

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch.distributed as dist

SHAPES = {
    "embedding": (7, 63),
    "weight": (63, 65),
    "bias": (65,),
    "one": (1,),
    "scalar": (),
    "empty": (0, 3),
    "frozen": (63, 63),
}
MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS = (0.9, 0.95)
EPSILON = 1e-8


class ReferenceEngine:
    """Trains parameters of given shapes by Adam, with gradients that are computed without a model.

    The state is divided among the ranks as in ZeRO stage 3. Each of P ranks holds ``ceil(N / P)`` elements of a
    parameter with N elements, in the order of the ranks. The last ranks hold fewer or none.

    A step works on each element separately, and no two of its operations can be fused into one operation that rounds
    only once. So the values after a step are the same, bit for bit, at any number of ranks. The buffer ``running_mean``
    differs from rank to rank, like that of a model whose ranks see different data.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]] = SHAPES,
        *,
        frozen: Collection[str] = ("frozen",),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``shapes`` has the shapes of the parameters by name. ``frozen`` names the parameters that are not trained.
        ``dtype`` is the dtype of the weights with which a model computes. Masters and moments are float32. ``seed``
        decides all values. ``group`` has the ranks that train together. None stands for all ranks of
        ``torch.distributed``, or for this process alone."""
        self.group = group
        here = job()
        members = (0,) if here is None else here.members(group)
        self.rank, self.ranks = 0 if here is None else members.index(here.rank), len(members)
        self.device = torch.empty(0, device=device).device
        """The device, with its index."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.ranges = {name: self._range_of_rank(math.prod(shape)) for name, shape in self.shapes.items()}
        """The range of elements ``[start, stop)`` of each parameter that this rank holds, counted in row-major
        order."""
        weights = torch.Generator().manual_seed(seed)
        whole = {name: torch.randn(math.prod(shape), generator=weights) for name, shape in self.shapes.items()}
        shares = {name: whole[name][start:stop].to(self.device) for name, (start, stop) in self.ranges.items()}
        trained = [name for name in shares if name not in frozen]
        self.tensors: dict[str, dict[str, torch.Tensor]] = {
            MASTER: {name: shares[name].clone() for name in trained},
            **{part: {name: torch.zeros_like(shares[name]) for name in trained} for part in MOMENTS},
            PARAM: {name: values.to(dtype) for name, values in shares.items()},
            BUFFER: {
                "running_mean": torch.zeros(63, device=self.device),
                "batches": torch.zeros((), dtype=torch.int64, device=self.device),
            },
        }
        """The state by part and name. Each parameter's elements of this rank are a 1-D tensor. Each buffer is whole on
        every rank."""
        self.seed = seed
        self.steps = 0
        self.learning_rate = 1e-2
        self.beta_powers = torch.ones(len(BETAS), device=self.device)
        """Each of Adam's betas to the power of ``steps``, float32."""
        self.gradients: dict[str, torch.Tensor] = {}
        """The gradients of the trained parameters, between a backward pass and the step that uses them. Otherwise
        empty."""
        self.generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        """Decides which data this rank sees."""

    def train(self, steps: int) -> None:
        """Does ``steps`` steps, on the current stream."""
        for _ in range(steps):
            self.backward()
            self.step()

    def backward(self) -> None:
        """Does a forward and a backward pass, which change the buffers and make the gradients for ``step``."""
        buffers = self.tensors[BUFFER]
        data_mean = torch.randn(buffers["running_mean"].shape, generator=self.generator)
        buffers["running_mean"].mul_(0.9).add_(data_mean.to(self.device))
        buffers["batches"].add_(1)
        for name in self.tensors[MASTER]:
            batch = (torch.arange(*self.ranges[name]) * 31 + self.steps * 17) % 64
            self.gradients[name] = self.tensors[PARAM][name].float() * 0.1 + (batch / 64 - 0.5).to(self.device)

    def step(self) -> None:
        """Does a step of Adam, which changes all trained tensors in place and drops the gradients."""
        self.beta_powers.mul_(torch.tensor(BETAS).to(self.device))
        for name, master in self.tensors[MASTER].items():
            unbiased = []
            powers = (self.gradients[name], self.gradients[name].square())
            for part, power, beta, beta_power in zip(MOMENTS, powers, BETAS, self.beta_powers, strict=True):
                moment = self.tensors[part][name].mul_(beta).add_(power * (1 - beta))
                unbiased.append(moment / (1 - beta_power))
            master.sub_(unbiased[0] / (unbiased[1].sqrt() + EPSILON) * self.learning_rate)
        self.derive_weights()
        self.gradients = {}
        self.learning_rate *= 0.9
        self.steps += 1

    def derive_weights(self) -> None:
        """Computes the weights that the model computes with from the masters."""
        for name, master in self.tensors[MASTER].items():
            self.tensors[PARAM][name].copy_(master)

    def _range_of_rank(self, numel: int) -> tuple[int, int]:
        share = -(-numel // self.ranks)
        return min(self.rank * share, numel), min((self.rank + 1) * share, numel)
