"""The optimizers of a ``TrainState`` as one optimizer, whose state has the local tensors of DTensors.

``adapters/optimizer`` reads and sets the state of an optimizer by its flat buffers. Here a flat buffer is what this
rank holds of one parameter. Torch keeps the state under the parameter itself, and if that is a DTensor, its moments are
DTensors too."""

from __future__ import annotations

from collections import UserDict
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.tensors import local_of

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence


class Optimizers:
    """One or several optimizers of torch. It has the attributes of an optimizer that ``adapters/optimizer`` uses."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.all = optimizers
        self.param_groups: list[dict[str, Any]] = [group for each in optimizers for group in each.param_groups]
        self.state = States(optimizers)

    @property
    def class_name(self) -> str:
        """The name of the class of the optimizer, or the names of all of them."""
        return ", ".join(type(each).__name__ for each in self.all)

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Returns the state of a parameter, as torch keeps it."""
        return next((each.state[parameter] for each in self.all if parameter in each.state), {})


class States:
    """The state of several optimizers, by the local tensor of each parameter. That of a DTensor is a ``LocalState``."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._first = optimizers[0]
        self._others: dict[int, torch.optim.Optimizer] = {}
        """The optimizers of those parameters that the first one does not update, by the ``id`` of their local
        tensors."""
        self._sharded: dict[int, torch.Tensor] = {}
        """The DTensors, by the ``id`` of their local tensors."""
        self._locals: dict[int, torch.Tensor] = {}
        """The local tensors of the DTensors, by the ``id`` of these."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    local = local_of(parameter)
                    if optimizer is not self._first:
                        self._others[id(local)] = optimizer
                    if local is not parameter:
                        self._sharded[id(local)], self._locals[id(parameter)] = parameter, local

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns what this rank holds of a parameter. This is always the same object, which is a key here."""
        return self._locals.get(id(parameter), parameter)

    def get(self, local: torch.Tensor, default: Any = None) -> Any:
        """Returns the state under a key, or ``default`` if there is none yet."""
        parameter = self._sharded.get(id(local), local)
        state = self._others.get(id(local), self._first).state.get(parameter)
        return default if state is None else state if parameter is local else LocalState(state, parameter)

    def __getitem__(self, local: torch.Tensor) -> MutableMapping[str, Any]:
        parameter = self._sharded.get(id(local), local)
        state: dict[str, Any] = self._others.get(id(local), self._first).state[parameter]
        return state if parameter is local else LocalState(state, parameter)


class LocalState(UserDict[str, Any]):
    """Shows what an optimizer keeps for a parameter that is a DTensor, and changes it. A DTensor is read as its local
    tensor. A tensor that is added with the shape of the parameter's local tensor becomes a DTensor."""

    def __init__(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        self.data, self._parameter = state, parameter  # UserDict.__init__ would make a copy of the state.

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        return local_of(value) if isinstance(value, torch.Tensor) else value

    def __setitem__(self, key: str, value: Any) -> None:
        parameter: Any = self._parameter
        if isinstance(value, torch.Tensor) and value.shape == local_of(parameter).shape:
            value = type(parameter.data).from_local(
                value,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        self.data[key] = value
