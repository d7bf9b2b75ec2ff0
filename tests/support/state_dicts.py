"""State dicts for tests, and what is in them."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from zckpt.engines.state_dict import leaves_of

WEIGHT = torch.arange(15.0).reshape(5, 3)


def nested() -> dict[str, Any]:
    """Returns a state dict with a leaf of every kind."""
    return {
        "model": {"a.weight": WEIGHT, "tied": WEIGHT, "turned": WEIGHT.t(), "empty": torch.empty(0, 3)},
        "optim": {
            "state": {0: {"step": torch.tensor(4.0), "exp_avg": WEIGHT.bfloat16(), "seen": torch.tensor([True])}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0], "found": None}],
        },
        "list": [{"x": WEIGHT + 1}, 5, [WEIGHT + 2, "text"]],
        "plain": [1, 2, "x"],
        "array": np.arange(4),
        "epoch": 3,
        "stream": BytesIO(b"losses"),
        "nothing": {},
    }


def blank(value: Any) -> Any:
    """Returns the same containers with zeros and without plain values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else None


def gathered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of each leaf by its name, and of DTensors the whole tensor."""
    leaves = {name: leaf.value for name, leaf in leaves_of(state_dict).items()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in leaves.items()}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in whole.items()}
