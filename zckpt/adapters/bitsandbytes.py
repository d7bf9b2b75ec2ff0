"""Gives quantized modules of bitsandbytes what they have added to a state dict. Their own ``load_state_dict`` does not
take the tensors of 4-bit weights, nor those of 8-bit weights after the first forward pass. bitsandbytes is not imported
here, because it has been imported already if there is such a module."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch

    Gathered = Callable[[list[torch.nn.Parameter]], AbstractContextManager[Any]]


def is_quantized(module: Any) -> bool:
    """Returns whether the module is a linear layer of bitsandbytes whose weight is quantized."""
    bnb = sys.modules.get("bitsandbytes")
    if bnb is None or not isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
        return False
    return getattr(module.weight, "quant_state", None) is not None or _holder(module) is not None


def complete(module: Any, gathered: Gathered) -> None:
    """Gives a quantized module the values of its weight. An 8-bit module has them in another tensor too, which is not
    the memory of the weight if ZeRO-3 has partitioned it. Collective. ``gathered``: as for ``ExtraState.load``."""
    holder = _holder(module)
    if holder is not None and holder.CB.data_ptr() != module.weight.data_ptr():
        with gathered([module.weight]):
            holder.CB.copy_(module.weight)


def load(module: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Gives a quantized module the tensors that belong to its weight, by the names that they have in the state dict of
    the module alone."""
    holder, weight = _holder(module), module.weight
    if holder is not None:
        holder.SCB = values.get("SCB", holder.SCB)
        return
    state = weight.quant_state
    named = {name.removeprefix("weight."): tensor for name, tensor in values.items()}
    state = type(state).from_dict({**state.as_dict(packed=True), **named}, state.absmax.device)
    weight.quant_state = module.quant_state = state
    weight.blocksize, weight.quant_type, weight.compress_statistics = state.blocksize, state.quant_type, state.nested


def _holder(module: Any) -> Any:
    """Returns the object that has the tensors of an 8-bit weight. It is the weight itself until the first forward pass,
    and the state of the module after it. Returns None if the module has no 8-bit weight."""
    places = (module.weight, getattr(module, "state", None))
    return next((place for place in places if getattr(place, "SCB", None) is not None), None)
