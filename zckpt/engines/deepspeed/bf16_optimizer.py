"""ZeRO stage 1 in bf16 with fp32 gradients: every private attribute of ``BF16_Optimizer`` that is read or written.

Its layout is that of ``DeepSpeedZeroOptimizer`` under other names, but never reordered or padded inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from zckpt.engines.deepspeed.flats import consecutive
from zckpt.engines.deepspeed.zero12 import Group, Zero12
from zckpt.state.inventory import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bf16Optimizer(Zero12):
    """The wrapper around the optimizer; ``wrapper.Wrapper`` says what each member is for."""

    MEMORY: ClassVar = {GRADIENT: ("fp32_groups_gradients_flat",)}

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        return True

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        return any(used for group in wrapper.fp32_groups_has_gradients for used in group)

    def _drop_gradients(self) -> None:
        self._wrapper.clear_hp_grads()
        self._wrapper.clear_lp_grads()

    @classmethod
    def _groups(cls, wrapper: Any) -> Iterator[Group]:
        for parameters, master in zip(wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, strict=True):
            shapes = [parameter.shape for parameter in parameters]
            yield Group(parameters, shapes, consecutive(shapes), master)
