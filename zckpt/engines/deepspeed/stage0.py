"""ZeRO stage 0, where every rank holds everything: with a wrapper that keeps master weights, and without any.

``FP16_Optimizer`` (also in bf16) keeps the masters of a param group in one flat, ``FP16_UnfusedOptimizer`` one master
for each parameter. In fp32 the parameters are the masters, and the engine's optimizer is the user's own. No other
private attribute of theirs is read or written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.engines.deepspeed import replicas
from zckpt.engines.deepspeed.flats import Flat, Slot, foreign, moments
from zckpt.engines.tensors import is_zero

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch

    from zckpt.engines.deepspeed.group import RankGroup


class Held(NamedTuple):
    """A param group's parameters, one behind the other, and the ``master`` that holds them so."""

    group: int
    parameters: Sequence[Any]
    master: torch.Tensor

    def whole(self, data: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
        """Each parameter and all that ``data``, the master or a moment, holds of it, a view."""
        offset = 0
        for parameter in self.parameters:
            yield parameter, data.detach().view(-1).narrow(0, offset, parameter.numel()).view(parameter.shape)
            offset += parameter.numel()


class Unwrapped(replicas.Replicated):
    """No wrapper: an optimizer over the model's own parameters, in fp32. ``wrapper.Wrapper`` documents the members."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        super().__init__(wrapper, parameters, group)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._all_held = tuple(self._held(wrapper))
        self.flats = tuple(
            Flat(held.group, tuple(self._slots(held)), held.master, whole=len(held.parameters) == 1)
            for held in self._all_held
        )

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
        held = list(cls._held(wrapper))
        yield from replicas.unsupported(parameters)
        yield from foreign(parameters, (p for one in held for p in one.parameters))
        # torch's Adagrad, made before there were masters, has a state for each parameter too, which nobody reads.
        known = {id(tensor) for one in held for tensor in (one.master, *one.parameters)}
        if any(state and id(key) not in known for key, state in cls._inner(wrapper).state.items()):
            yield "optimizer state of a parameter that has no elements or is in no param group"

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        gradients = [parameter.grad for held in cls._held(wrapper) for parameter in held.parameters]
        return any(gradient is not None and not is_zero(gradient) for gradient in gradients)

    @property
    def optimizer(self) -> Any:
        return self._inner(self._wrapper)

    def after_fill(self, weights: Collection[str]) -> None:
        # What was not restored is equal on every rank already.
        self._gather = replicas.gathering([*self._weights(weights), *self._replicas()], self._group)

    def after_restore(self) -> None:
        self._gather()
        for held in self._all_held:
            for parameter, master in held.whole(held.master):
                parameter.detach().copy_(master)
                parameter.grad = None

    def _replicas(self) -> Iterator[torch.Tensor]:
        for held, flat in zip(self._all_held, self.flats, strict=True):
            state = moments(flat, self.optimizer.state.get(flat.master, {}))
            for data in (held.master, *(state[key] for key in sorted(state))):
                for _, whole in held.whole(data):
                    yield whole

    def _slots(self, held: Held) -> Iterator[Slot]:
        offset = 0
        for parameter in held.parameters:
            start, stop = replicas.share(parameter.numel(), self._group)
            yield Slot(self._names[id(parameter)], tuple(parameter.shape), start, stop, offset + start)
            offset += parameter.numel()

    @staticmethod
    def _inner(wrapper: Any) -> Any:
        return wrapper

    @classmethod
    def _held(cls, wrapper: Any) -> Iterator[Held]:
        for index, group in enumerate(wrapper.param_groups):
            for parameter in group["params"]:
                if parameter.numel() and (parameter.requires_grad or wrapper.state.get(parameter)):
                    yield Held(index, [parameter], parameter)


class PerParameter(Unwrapped):
    """``FP16_UnfusedOptimizer``: a master of its own for each parameter."""

    def after_fill(self, weights: Collection[str]) -> None:
        super().after_fill(weights)
        self._wrapper.overflow = False

    @staticmethod
    def _inner(wrapper: Any) -> Any:
        return wrapper.optimizer

    @classmethod
    def _held(cls, wrapper: Any) -> Iterator[Held]:
        for index, (parameters, masters) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)):
            for parameter, master in zip(parameters, masters, strict=True):
                yield Held(index, [parameter], master)


class Flattened(PerParameter):
    """``FP16_Optimizer``: one master for all parameters of a param group."""

    @classmethod
    def _held(cls, wrapper: Any) -> Iterator[Held]:
        for index, (parameters, master) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True)):
            if parameters:
                yield Held(index, parameters, master)
