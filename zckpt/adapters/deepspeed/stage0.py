"""ZeRO stage 0, in which every rank holds everything, either with a wrapper that keeps master weights or without one.

``FP16_Optimizer``, which is also used in bf16, keeps the master weights of a param group in one flat buffer.
``FP16_UnfusedOptimizer`` keeps one master weight for each parameter. In fp32 the parameters themselves are the master
weights, and there is no wrapper around the optimizer. This file has all code that uses private attributes of these two
wrappers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.adapters.unwrapped import Unwrapped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import torch


class PerParameter(Unwrapped):
    """Reads and restores ``FP16_UnfusedOptimizer``, which has one master weight for each parameter."""

    def after_fill(self, weights: Collection[str]) -> None:
        super().after_fill(weights)
        self._wrapper.overflow = False

    @staticmethod
    def _inner(wrapper: Any) -> Any:
        return wrapper.optimizer

    @classmethod
    def _updated(cls, wrapper: Any) -> Iterator[tuple[int, Sequence[Any], torch.Tensor]]:
        for index, (parameters, masters) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)):
            for parameter, master in zip(parameters, masters, strict=True):
                yield index, [parameter], master


class Flattened(PerParameter):
    """Reads and restores ``FP16_Optimizer``, which has one tensor with the master weights of all parameters of a param
    group."""

    @classmethod
    def _updated(cls, wrapper: Any) -> Iterator[tuple[int, Sequence[Any], torch.Tensor]]:
        for index, (parameters, master) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True)):
            if parameters:
                yield index, parameters, master
