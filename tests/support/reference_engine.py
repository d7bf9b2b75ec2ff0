"""What a reference engine holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zckpt.testing import ReferenceEngine


def held(engine: ReferenceEngine) -> dict[str, torch.Tensor]:
    """All that this rank holds, in host memory."""
    tensors = {f"{part}/{name}": one for part, own in engine.tensors.items() for name, one in own.items()}
    tensors |= {"beta_powers": engine.beta_powers, "steps": torch.tensor(engine.steps)}
    tensors["learning_rate"] = torch.tensor(engine.learning_rate, dtype=torch.float64)
    return {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
