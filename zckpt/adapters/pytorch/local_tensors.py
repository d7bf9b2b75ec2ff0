"""The local tensors of a model whose parameters may be DTensors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from zckpt.adapters.local_tensors import LocalTensor
from zckpt.engines.group import RankGroup
from zckpt.engines.shards import is_sharded, replica_set, span_of
from zckpt.geometry import all_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


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
