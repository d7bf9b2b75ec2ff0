"""The wrappers that DeepSpeed puts around the optimizer, and the interface through which the adapter uses all kinds of
them."""

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

    from zckpt.engines.deepspeed.flats import FlatBuffer, ParameterRange
    from zckpt.engines.deepspeed.group import RankGroup
    from zckpt.format.names import Tier
    from zckpt.state.inventory import FileRange, Holding


class Wrapper(Protocol):
    """Reads and restores one kind of DeepSpeed's wrappers. If ``unsupported`` yields a reason for an engine, the
    behaviour of all other methods is undefined for it.

    If every rank holds the whole of a tensor (a replica), each rank writes and restores only its share of the elements,
    and ``after_restore`` makes every replica complete from the shares of all ranks.

    A restore calls ``before_restore``, ``after_masters``, ``flat_in_memory`` and ``weight_in_memory``, and
    ``after_fill``. Once these have returned on every rank, it calls ``after_restore``.
    """

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        """Changes nothing. ``wrapper``: DeepSpeed's object. ``parameters``: those of the module, by name. ``group``:
        the ranks of the engine."""

    @staticmethod
    def unsupported(wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
        """Yields the reasons why this layout of the parameters is not supported, with names of parameters. Changes
        nothing."""

    @staticmethod
    def has_gradients(wrapper: Any) -> bool:
        """Returns whether there are gradients that no optimizer step has used yet."""

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        """Returns whether master weights and moments change only in a step of the optimizer, and not in backward
        passes."""

    @property
    def flats(self) -> tuple[FlatBuffer, ...]:
        """All flat buffers of this rank, in the same order on every rank."""

    @property
    def optimizer(self) -> Any:
        """The optimizer inside the wrapper, whose state has the master weights of the flat buffers as its keys. It is
        None if the engine has no optimizer. Then there are no flat buffers either."""

    def tier(self, part: str) -> Tier:
        """Returns the tier on which the tensors of ``part`` are, except for those in swap files."""

    def weight(self, name: str) -> tuple[ParameterRange, torch.Tensor | FileRange]:
        """Returns this rank's share of a parameter, in the dtype that the model computes with: the range of the
        elements, and the elements themselves. They are 1-D and share the memory of the parameter, or they are a range
        of its swap file."""

    def memory(self) -> Iterator[Holding]:
        """Returns what ``EngineAdapter.memory`` returns, but without the buffers of the module."""

    def settle(self) -> None:
        """Waits until everything that is being read from files or written to files has been read or written."""

    def after_write(self) -> None:
        """Leaves exactly those weights gathered that DeepSpeed's own save leaves gathered. Collective."""

    def before_restore(self) -> None:
        """Brings back what offload_states() has moved, and gives up copies that the restore would make outdated. Not
        collective."""

    def after_masters(self) -> None:
        """Derives everything that depends only on those master weights of this rank that are in memory, and drops
        gradients. It is called in a thread of its own once these master weights are filled, while moments are being
        filled. Not collective."""

    def flat_in_memory(self, flat: FlatBuffer) -> AbstractContextManager[FlatBuffer]:
        """Returns a context in which a flat buffer that is in swap files is brought into memory, where the caller fills
        it. At the end, everything that depends on it is derived, and it is written back. If the context ends by an
        error, it is not written back."""

    def weight_in_memory(self, name: str) -> AbstractContextManager[torch.Tensor]:
        """Returns a context whose value is memory for this rank's part of a weight that is in a swap file. The caller
        fills the memory. At the end it is written to the file, unless the context ends by an error."""

    def after_fill(self, weights: Collection[str]) -> None:
        """Derives everything else that depends on this rank's master weights and moments, and allocates the memory that
        ``after_restore`` needs. ``weights``: the names of those parameters without master weights that were restored.
        They are the same on every rank. Not collective."""

    def after_restore(self) -> None:
        """Derives everything that depends on the master weights, moments and weights of other ranks. Collective. Before
        the last exchange between the ranks, nothing in it can fail on one rank alone."""


KINDS: dict[str, type[Wrapper]] = {
    "DeepSpeedZeRoOffload": Partitioned,
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
    "DeepSpeedZeroOptimizer": Zero12,
    "BF16_Optimizer": Bf16Optimizer,
    "FP16_Optimizer": Flattened,
    "FP16_UnfusedOptimizer": PerParameter,
}
"""The class that reads and restores each kind of wrapper, by the name of DeepSpeed's class."""


def kind_of(engine: Any) -> type[Wrapper] | None:
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
