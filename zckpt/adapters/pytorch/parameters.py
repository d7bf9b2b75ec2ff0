"""The state of a model whose parameters are whole tensors on every rank, DTensors, or both. This file has all code that
uses private attributes of FSDP2."""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.flats import foreign
from zckpt.adapters.local_tensors import LocalTensor
from zckpt.adapters.unwrapped import Unwrapped
from zckpt.engines.group import RankGroup
from zckpt.engines.shards import is_sharded, replica_set, span_of
from zckpt.engines.tensors import local_of
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.transfer.memory import lies_in_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.adapters.local_tensors import LocalTensors


class Parameters(Unwrapped):
    """Reads and restores parameters, and the ``Optimizers`` that update them. ``Kind`` documents the members."""

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> Iterator[str]:
        for name, parameter in parameters.items():
            if not lies_in_order(local_of(parameter)):
                yield f"{name}, which is not contiguous"
                return
        if wrapper is not None:
            yield from foreign(parameters, (p for param_group in wrapper.param_groups for p in param_group["params"]))

    def tier(self, part: str) -> Tier:
        return self._tier

    @cached_property
    def _tier(self) -> Tier:
        on_host = all(local_of(parameter).is_cpu for parameter in self._parameters.values())
        return Tier.HOST if on_host and torch.accelerator.is_available() else Tier.DEVICE

    def after_restore(self) -> None:
        super().after_restore()
        for parameter in self._parameters.values():
            parameter.grad = None

    @classmethod
    def _updated(cls, wrapper: Any) -> Iterator[tuple[int, Sequence[Any], torch.Tensor]]:
        for index, group in enumerate(() if wrapper is None else wrapper.param_groups):
            for parameter in group["params"]:
                if parameter.numel() and (parameter.requires_grad or wrapper.state_of(parameter)):
                    yield index, [parameter], wrapper.state.local(parameter)


def local_tensors_of(parameters: Mapping[str, torch.Tensor], group: RankGroup) -> dict[str, LocalTensor]:
    """Returns the local tensors of all parameters of a model. ``group``: the ranks of the engine. Raises ValueError,
    with the name of the parameter in a phrase, as ``span_of`` does."""
    local_tensors, alone = {}, RankGroup(None, 0, (group.ranks[group.rank],))
    replicated = "every rank" if group.size > 1 else ""
    # There may be very many tensors of the same shape.
    equal, whole = cache(LocalTensor), cache(lambda shape: LocalTensor(all_of(shape), group, replicated))
    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            local_tensors[name] = whole(parameter.shape)
            continue
        try:
            # Each rank reads all of its local tensor, because others may hold it only in part.
            local_tensors[name] = equal(span_of(parameter), alone, replica_set(parameter, group.size))
        except ValueError as error:
            raise ValueError(f"{name}, which {error}") from error
    return local_tensors


def reshard(model: torch.nn.Module) -> None:
    """Lets the modules of an FSDP2 model have their sharded parameters. Between a forward pass and the next one, a
    module may have whole tensors in their place, which would hide the sharded ones."""
    for module in _fsdp_modules(model):
        module.reshard()


def drop_unsharded_gradients(model: torch.nn.Module) -> None:
    """Drops the gradients that FSDP2 has accumulated on this rank and not reduced yet."""
    for parameter in _fsdp_params(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def unsharded_gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the gradients that FSDP2 has accumulated on this rank and not reduced yet, because of
    ``set_requires_gradient_sync(False)``. Meanwhile the gradients of the parameters are None."""
    for parameter in _fsdp_params(model):
        unsharded = getattr(parameter, "_unsharded_param", None)
        for gradient in (parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
            if gradient is not None:
                yield gradient


def _fsdp_params(model: torch.nn.Module) -> Iterator[Any]:
    """Yields FSDP2's object for each parameter that it has sharded."""
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        # Before torch 2.13, a module has only one group.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            yield from () if group is None else group.fsdp_params


def _fsdp_modules(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
