"""Engines in which every rank holds all weights, and in which each of the model's parameters has a master weight of its
own, or is its own master weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.engines import replicas
from zckpt.engines.flats import FlatBuffer, ParameterRange, foreign, moments
from zckpt.engines.tensors import is_zero, local_of
from zckpt.geometry import all_of
from zckpt.plan.replicas import WHOLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch

    from zckpt.engines.group import RankGroup
    from zckpt.plan.replicas import Share


class ParamGroup(NamedTuple):
    """Parameters of one param group, and the master weights in which they lie one after another."""

    group: int
    """The index of the param group."""
    parameters: Sequence[Any]
    """The parameters, in the order in which they lie in the master weights."""
    master: torch.Tensor
    """The master weights of all these parameters."""

    def whole(self, data: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yields each parameter, and a view of its elements in ``data``, which is the master weights or a moment."""
        offset = 0
        for parameter in self.parameters:
            yield parameter, data.detach().view(-1).narrow(0, offset, parameter.numel()).view(parameter.shape)
            offset += parameter.numel()


class Unwrapped(replicas.Replicated):
    """Reads and restores an optimizer that updates the model's own parameters. ``Kind`` documents the members."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        super().__init__(wrapper, parameters, group)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._groups = tuple(self._param_groups(wrapper))
        self.flats = tuple(map(self._flat, self._groups))

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
        param_groups = list(cls._param_groups(wrapper))
        yield from replicas.unsupported(parameters)
        yield from foreign(
            parameters, (parameter for param_group in param_groups for parameter in param_group.parameters)
        )
        # torch's Adagrad makes a state for each parameter when it is created. Those that were made before the wrapper
        # replaced the parameters by master weights are still there, but nobody reads them.
        known = {id(tensor) for param_group in param_groups for tensor in (param_group.master, *param_group.parameters)}
        if any(state and id(key) not in known for key, state in cls._inner(wrapper).state.items()):
            yield "optimizer state of a parameter that has no elements or is in no param group"

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        gradients = [
            parameter.grad for param_group in cls._param_groups(wrapper) for parameter in param_group.parameters
        ]
        return any(gradient is not None and not is_zero(gradient) for gradient in gradients)

    @property
    def optimizer(self) -> Any:
        return self._inner(self._wrapper)

    def after_fill(self, weights: Collection[str]) -> None:
        # Weights that were not restored are already equal on every rank.
        self._gather = replicas.gathering([*self._weights(weights), *self._replicas()], self._group)

    def after_restore(self) -> None:
        self._gather()
        for param_group in self._groups:
            if local_of(param_group.parameters[0]) is not param_group.master:
                for parameter, master in param_group.whole(param_group.master):
                    parameter.detach().copy_(master)
            for parameter in param_group.parameters:
                parameter.grad = None

    def _replicas(self) -> Iterator[torch.Tensor]:
        """Yields views of the master weight and of each moment of each parameter, in the same order on every rank."""
        for param_group, flat in zip(self._groups, self.flats, strict=True):
            if flat.shares is None:
                continue
            state = moments(flat, self.optimizer.state.get(flat.master, {}))
            for data in (param_group.master, *(state[key] for key in sorted(state))):
                for _, view in param_group.whole(data):
                    yield view

    def _flat(self, param_group: ParamGroup) -> FlatBuffer:
        return FlatBuffer(
            param_group.group,
            tuple(self._ranges(param_group, WHOLE)),
            param_group.master,
            whole=len(param_group.parameters) == 1,
            replicated=replicas.EVERY_RANK if self._group.size > 1 else "",
            shares=tuple(self._ranges(param_group, self._share)),
        )

    def _ranges(self, param_group: ParamGroup, share: Share) -> Iterator[ParameterRange]:
        """Yields the range of each parameter that belongs to a share."""
        offset = 0
        for parameter in param_group.parameters:
            span = share.of(all_of(parameter.shape))
            yield ParameterRange(self._names[id(parameter)], span, offset + span.start)
            offset += parameter.numel()

    @staticmethod
    def _inner(wrapper: Any) -> Any:
        """Returns the optimizer that has the state."""
        return wrapper

    @classmethod
    def _param_groups(cls, wrapper: Any) -> Iterator[ParamGroup]:
        """Yields the parameters that the optimizer updates. Each flat buffer has one entry."""
        for index, group in enumerate(wrapper.param_groups):
            for parameter in group["params"]:
                if parameter.numel() and (parameter.requires_grad or wrapper.state.get(parameter)):
                    yield ParamGroup(index, [parameter], parameter)
