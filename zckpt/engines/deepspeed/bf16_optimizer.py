"""ZeRO stage 1 in bf16 with gradients in fp32, for which DeepSpeed uses its ``BF16_Optimizer``.

Its layout is that of ``DeepSpeedZeroOptimizer``, but it never reorders the parameters and never puts padding between
them. This file uses those private attributes that have other names than in ``DeepSpeedZeroOptimizer``; zero12.py uses
all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from zckpt.engines.deepspeed.zero12 import Zero12, ZeroGroup
from zckpt.engines.flats import consecutive
from zckpt.plan.inventory import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Bf16Optimizer(Zero12):
    """Reads and restores DeepSpeed's ``BF16_Optimizer``. ``Kind`` documents the members."""

    MEMORY: ClassVar = {GRADIENT: ("fp32_groups_gradients_flat",)}

    @classmethod
    def shapes(cls, wrapper: Any, parameters: Mapping[str, Any]) -> Mapping[int, Sequence[int]]:
        return {}

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
    def _groups(cls, wrapper: Any) -> Iterator[ZeroGroup]:
        columns = (wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, wrapper.real_dp_process_group)
        for parameters, master, process_group in zip(*columns, strict=True):
            yield ZeroGroup(parameters, consecutive(parameter.shape for parameter in parameters), master, process_group)
