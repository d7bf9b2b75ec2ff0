"""Looks into a reference engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zckpt.testing import ReferenceEngine


def tensors_of(engine: ReferenceEngine) -> dict[str, torch.Tensor]:
    """Returns copies of all tensors and counters that this rank holds, in host memory."""
    tensors = {f"{part}/{name}": tensor for part, by_name in engine.tensors.items() for name, tensor in by_name.items()}
    tensors |= {"beta_powers": engine.beta_powers, "steps": torch.tensor(engine.steps)}
    tensors["learning_rate"] = torch.tensor(engine.learning_rate, dtype=torch.float64)
    return {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
