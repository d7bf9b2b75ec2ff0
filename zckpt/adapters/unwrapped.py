"""Engines in which every rank holds all weights, and in which each of the model's parameters has a master weight of its
own, or is its own master weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.adapters.flats import FlatBuffer, ParameterRange, foreign, moments
from zckpt.adapters.replicas import Replicated
from zckpt.engines.tensors import is_zero, local_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from zckpt.adapters.local_tensors import LocalTensors


class Unwrapped(Replicated):
    """Reads and restores an optimizer that updates the model's own parameters. ``Kind`` documents the members."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> None:
        super().__init__(wrapper, parameters, local_tensors)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.flats = tuple(
            self._flat(group, [names[id(parameter)] for parameter in of_flat], master)
            for group, of_flat, master in self._updated(wrapper)
        )

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> Iterator[str]:
        flats = list(cls._updated(wrapper))
        yield from super().unsupported(wrapper, parameters, local_tensors)
        yield from foreign(parameters, (parameter for _, of_flat, _ in flats for parameter in of_flat))
        # torch's Adagrad makes a state for each parameter when it is created. Those that were made before the wrapper
        # replaced the parameters by master weights are still there, but nobody reads them.
        known = {id(tensor) for _, of_flat, master in flats for tensor in (master, *of_flat)}
        if any(state and id(key) not in known for key, state in cls._inner(wrapper).state.items()):
            yield "optimizer state of a parameter that has no elements or is in no param group"

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        gradients = [parameter.grad for _, of_flat, _ in cls._updated(wrapper) for parameter in of_flat]
        return any(gradient is not None and not is_zero(gradient) for gradient in gradients)

    @property
    def optimizer(self) -> Any:
        return self._inner(self._wrapper)

    def after_restore(self) -> None:
        self._gather()
        for flat in self.flats:
            if local_of(self._parameters[flat.ranges[0].name]) is not flat.master:
                for name, master in self._whole(flat, flat.master):
                    self._parameters[name].detach().copy_(master)
            for held in flat.ranges:
                self._parameters[held.name].grad = None

    def _replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        # These are views of the master weight and of each moment of each parameter.
        for flat in self.flats:
            if flat.shares is not None:
                state = moments(flat, self.optimizer.state.get(flat.master, {}))
                for data in (flat.master, *(state[key] for key in sorted(state))):
                    yield from self._whole(flat, data)

    def _whole(self, flat: FlatBuffer, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name of each parameter, and a view of its elements in ``data``, which is the master weights or a
        moment."""
        for held in flat.ranges:
            shape = self._parameters[held.name].shape
            yield held.name, data.detach().view(-1).narrow(0, held.offset, shape.numel()).view(shape)

    def _flat(self, group: int, names: Sequence[str], master: torch.Tensor) -> FlatBuffer:
        ranges: list[ParameterRange] = []
        offset = 0
        for name in names:
            local = self._local_tensors[name]
            ranges.append(ParameterRange(name, local.span, offset, local.replicated, stored_as=local.stored_as))
            offset += local.span.numel
        whole = len(ranges) == 1 and ranges[0].span.numel == ranges[0].span.grid.numel
        shares = None
        if any(self._local_tensors[held.name].owners.size > 1 for held in ranges):
            shares = tuple(self._share_of(held) for held in ranges)
        return FlatBuffer(group, tuple(ranges), master, whole=whole, shares=shares)

    def _share_of(self, held: ParameterRange) -> ParameterRange:
        """Returns the elements of a range that this rank reads."""
        span = self._share(held.name)
        return held._replace(span=span, offset=held.offset + span.start - held.span.start)

    @staticmethod
    def _inner(wrapper: Any) -> Any:
        """Returns the optimizer that has the state."""
        return wrapper

    @classmethod
    def _updated(cls, wrapper: Any) -> Iterator[tuple[int, Sequence[Any], torch.Tensor]]:
        """Yields for each flat buffer the index of its param group, the parameters that the optimizer updates, in the
        order in which they lie in it, and its master weights."""
        for index, group in enumerate(wrapper.param_groups):
            for parameter in group["params"]:
                if parameter.numel() and (parameter.requires_grad or wrapper.state.get(parameter)):
                    yield index, [parameter], parameter
