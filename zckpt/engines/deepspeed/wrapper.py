"""What DeepSpeed wraps around the optimizer, and the one interface through which the adapter sees each kind of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from zckpt.engines.deepspeed.bf16_optimizer import Bf16Optimizer
from zckpt.engines.deepspeed.stage0 import Flattened, PerParameter, Unwrapped
from zckpt.engines.deepspeed.zero3 import Zero3
from zckpt.engines.deepspeed.zero12 import Zero12

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zckpt.engines.deepspeed.flats import Flat, Slot


class Wrapper(Protocol):
    """Where one kind of wrapper keeps the state. What it does with an engine for which ``unsupported`` finds something
    is undefined.

    What every rank holds whole (replicas) is dealt out: each rank writes and restores its share alone, and
    ``after_restore`` makes every replica whole from all ranks' shares.
    """

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """``parameters`` are the module's by name."""

    @staticmethod
    def unsupported(wrapper: Any, parameters: Mapping[str, Any]) -> Iterator[str]:
        """What stands against the parameters' layout, by name. Changes nothing."""

    @staticmethod
    def has_gradients(wrapper: Any) -> bool:
        """Whether there are gradients that no optimizer step has used yet."""

    @property
    def flats(self) -> tuple[Flat, ...]:
        """All flats, in the same order on every rank."""

    @property
    def optimizer(self) -> Any:
        """The optimizer inside the wrapper; its state is keyed by the flats' masters."""

    def weight(self, name: str) -> tuple[Slot, torch.Tensor]:
        """What this rank speaks for of a parameter in its compute dtype: where it belongs, and the 1-D elements, which
        share memory with the parameter.
        """

    def before_restore(self) -> None:
        """Makes sure that what is restored is not overwritten by other copies. Not collective."""

    def after_restore(self, weights_from_param: frozenset[str]) -> None:
        """Derives what hangs on masters, moments and weights. ``weights_from_param``, equal on every rank: parameters
        whose weight in the compute dtype was restored; their master, if they have one, is derived from it. Collective.
        """


KINDS: dict[str, type[Wrapper]] = {
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
    "DeepSpeedZeroOptimizer": Zero12,
    "BF16_Optimizer": Bf16Optimizer,
    "FP16_Optimizer": Flattened,
    "FP16_UnfusedOptimizer": PerParameter,
}


def kind_of(engine: Any) -> type[Wrapper] | None:
    """The kind of the engine's wrapper; None for one that is not known."""
    kind = type(engine.optimizer)
    # By the exact class: whoever derives from one of these keeps state elsewhere too.
    if kind.__module__.startswith("deepspeed.runtime.") and kind.__name__ in KINDS:
        return KINDS[kind.__name__]
    if engine.zero_optimization_stage() == 0 and isinstance(engine.optimizer, torch.optim.Optimizer):
        return Unwrapped
    return None
