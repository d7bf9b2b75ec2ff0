"""What DeepSpeed wraps around the optimizer, and the one interface through which the adapter sees each kind of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from zckpt.engines.deepspeed import replicas
from zckpt.engines.deepspeed.bf16_optimizer import Bf16Optimizer
from zckpt.engines.deepspeed.stage0 import Flattened, PerParameter, Unwrapped
from zckpt.engines.deepspeed.zero3 import Partitioned, Zero3
from zckpt.engines.deepspeed.zero12 import Zero12

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from contextlib import AbstractContextManager

    from zckpt.engines.deepspeed.flats import Flat, Slot
    from zckpt.engines.deepspeed.group import RankGroup
    from zckpt.state.inventory import FileSpan, Holding


class Wrapper(Protocol):
    """Where one kind of wrapper keeps the state. What it does with an engine for which ``unsupported`` finds something
    is undefined.

    What every rank holds whole (replicas) is dealt out: each rank writes and restores its share alone, and
    ``after_restore`` makes every replica whole from all ranks' shares.

    A restore calls ``before_restore``, ``flat_in_memory`` and ``weight_in_memory``, ``after_fill``, then, once that has
    returned on every rank, ``after_restore``.
    """

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        """``parameters`` are the module's by name; ``group`` has the engine's ranks."""

    @staticmethod
    def unsupported(wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
        """The reasons why the layout of the parameters is not supported, by name. Changes nothing."""

    @staticmethod
    def has_gradients(wrapper: Any) -> bool:
        """Whether there are gradients that no optimizer step has used yet."""

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        """Whether backward passes leave masters and moments alone."""

    @property
    def flats(self) -> tuple[Flat, ...]:
        """All flats, in the same order on every rank."""

    @property
    def optimizer(self) -> Any:
        """The optimizer inside the wrapper; its state is keyed by the flats' masters. None if there is none: there are
        no flats then."""

    def tier(self, part: str) -> str:
        """Where ``part`` lives, if not in files."""

    def weight(self, name: str) -> tuple[Slot, torch.Tensor | FileSpan]:
        """What this rank speaks for of a parameter in its compute dtype: where it belongs, and the 1-D elements, which
        share the parameter's memory, or its file.
        """

    def memory(self) -> Iterator[Holding]:
        """As ``EngineAdapter.memory``, without the module's buffers."""

    def settle(self) -> None:
        """Has all that is under way to or from files done."""

    def after_write(self) -> None:
        """Leaves exactly those weights gathered that DeepSpeed's own save leaves gathered. Collective."""

    def before_restore(self) -> None:
        """Brings back what offload_states() has moved, and gives up what would go stale. Not collective."""

    def flat_in_memory(self, flat: Flat) -> AbstractContextManager[Flat]:
        """Brings a flat that lies in files into memory, to be filled. At the end, what hangs on it is derived and
        it is written back, unless an error has ended it.
        """

    def weight_in_memory(self, name: str) -> AbstractContextManager[torch.Tensor]:
        """Memory for this rank's part of a weight that lies in a file, to be filled; written back at the end, unless an
        error has ended it.
        """

    def after_fill(self, weights: Collection[str]) -> None:
        """Derives what hangs on this rank's masters and moments, drops gradients, and takes the memory that
        ``after_restore`` needs. ``weights``, equal on every rank: the parameters without a master whose weight was
        restored. Not collective.
        """

    def after_restore(self) -> None:
        """Derives what hangs on other ranks' masters, moments and weights. Collective; nothing in it can fail on one
        rank alone before the last exchange.
        """


KINDS: dict[str, type[Wrapper]] = {
    "DeepSpeedZeRoOffload": Partitioned,
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
    "DeepSpeedZeroOptimizer": Zero12,
    "BF16_Optimizer": Bf16Optimizer,
    "FP16_Optimizer": Flattened,
    "FP16_UnfusedOptimizer": PerParameter,
}


def kind_of(engine: Any) -> type[Wrapper] | None:
    """The kind of the engine's wrapper; None for one that is not known."""
    kind = type(engine.optimizer)
    if engine.optimizer is None or type(getattr(engine.optimizer, "optimizer", None)).__name__ == "DummyOptim":
        return replicas.Replicated
    # By the exact class: whoever derives from one of these keeps state elsewhere too.
    if kind.__module__.startswith("deepspeed.runtime.") and kind.__name__ in KINDS:
        return KINDS[kind.__name__]
    if engine.zero_optimization_stage() == 0 and isinstance(engine.optimizer, torch.optim.Optimizer):
        return Unwrapped
    return None
