"""The wrappers that DeepSpeed puts around the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters import replicas
from zckpt.adapters.deepspeed.stage0 import Flattened, PerParameter
from zckpt.adapters.deepspeed.zero3 import Partitioned, Zero3
from zckpt.adapters.deepspeed.zero12 import Bf16Optimizer, Zero12
from zckpt.adapters.unwrapped import Unwrapped

if TYPE_CHECKING:
    from zckpt.adapters.kind import Kind

KINDS: dict[str, type[Kind]] = {
    "DeepSpeedZeRoOffload": Partitioned,
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
    "DeepSpeedZeroOptimizer": Zero12,
    "BF16_Optimizer": Bf16Optimizer,
    "FP16_Optimizer": Flattened,
    "FP16_UnfusedOptimizer": PerParameter,
}
"""The class that reads and restores each kind of wrapper, by the name of DeepSpeed's class."""


def kind_of(engine: Any) -> type[Kind] | None:
    """Returns the class that reads and restores the engine's wrapper, or None for a wrapper that zckpt does not
    know."""
    kind = type(engine.optimizer)
    if engine.optimizer is None or type(getattr(engine.optimizer, "optimizer", None)).__name__ == "DummyOptim":
        return replicas.Replicated
    # The class must be exactly one of these, because a class that derives from it may keep state elsewhere too.
    if kind.__module__.startswith("deepspeed.runtime.") and kind.__name__ in KINDS:
        return KINDS[kind.__name__]
    if engine.zero_optimization_stage() == 0 and isinstance(engine.optimizer, torch.optim.Optimizer):
        return Unwrapped
    return None
