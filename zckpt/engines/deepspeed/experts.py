"""Experts that are divided between ranks: those of ``deepspeed.moe.layer.MoE``, and those of AutoEP.

A rank of ``MoE`` has some of the experts, each with its own parameters, and numbers them from 0. In a checkpoint they
have their numbers among all experts of the layer. AutoEP keeps each weight of all experts in one parameter, whose first
dimension is divided.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.engines.deepspeed.classes import is_a

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    from zckpt.geometry import Section

    Cut = tuple[tuple[int, ...], int, Sequence[Section]]
    """The shape of a whole parameter, the dimension that is cut, and the indices of each rank in it."""

EXPERT = re.compile(r"(.*?deepspeed_experts\.)(\d+)(\..*)")
"""Matches the name of a parameter or buffer of an expert."""
_AUTOEP = "ds_autoep_uc_meta"
"""The attribute in which AutoEP describes how it has divided a parameter."""


class _Layer(NamedTuple):
    """The experts that this rank has of one layer."""

    first: int
    """The number of the first one among all experts of the layer."""
    here: int
    """How many this rank has."""
    everywhere: int
    """How many all ranks have."""


class MoeExperts:
    """The experts of ``MoE`` that this rank has, by the layers of the model."""

    def __init__(self, engine: Any, module: nn.Module) -> None:
        groups = engine.expert_parallel_group or {}
        self._layers: dict[str, _Layer] = {}
        self._are_cut = False
        """Whether tensor parallelism may cut experts."""
        for name, layer in module.named_modules():
            if is_a(layer, "MoE"):
                self._are_cut |= bool(getattr(layer, "enable_expert_tensor_parallelism", False))
                count = int(layer.num_local_experts)
                rank = groups[layer.expert_group_name].rank() if layer.expert_group_name in groups else 0
                prefix = f"{name}.deepspeed_moe.experts.deepspeed_experts.".removeprefix(".")
                self._layers[prefix] = _Layer(rank * count, count, int(layer.num_experts))

    @property
    def divided(self) -> bool:
        """Whether other ranks have other experts."""
        return any(layer.here < layer.everywhere for layer in self._layers.values())

    def unsupported(self, parameters: Mapping[str, Any], tensor_ranks: int) -> Iterator[str]:
        """Yields phrases for errors about experts that cannot be told apart or put together. ``tensor_ranks``: the
        number of ranks of tensor parallelism."""
        if self._are_cut and tensor_ranks > 1:
            yield "experts that tensor parallelism cuts (enable_expert_tensor_parallelism)"
        for name, parameter in parameters.items():
            of_expert = not getattr(parameter, "allreduce", True) and not hasattr(parameter, _AUTOEP)
            if of_expert and self._expert(name)[1] is None:
                yield f"{name}, which belongs to an expert outside of deepspeed.moe.layer.MoE"
                return

    def has(self, name: str) -> bool:
        """Returns whether a tensor belongs to an expert of a layer whose experts are divided."""
        layer = self._expert(name)[1]
        return layer is not None and layer.here < layer.everywhere

    def global_name(self, name: str) -> str:
        """Returns the name that a parameter or buffer has in a checkpoint. ``name``: its name in the module."""
        match, layer = self._expert(name)
        return name if match is None or layer is None else f"{match[1]}{layer.first + int(match[2])}{match[3]}"

    def counterpart(self, name: str) -> str:
        """Returns the name of the same tensor of an expert that this rank has, if ``name`` is that of a tensor of an
        expert of another rank in a checkpoint. Otherwise returns ``name``."""
        match, layer = self._expert(name)
        if match is None or layer is None or not int(match[2]) < layer.everywhere:
            return name
        here = layer.first <= int(match[2]) < layer.first + layer.here
        return name if here else f"{match[1]}{layer.first}{match[3]}"

    def _expert(self, name: str) -> tuple[re.Match[str] | None, _Layer | None]:
        match = EXPERT.fullmatch(name)
        return match, self._layers.get(match[1]) if match else None


def process_group_of_expert(engine: Any, parameter: Any) -> ProcessGroup | None:
    """Returns the process group of the ranks that have the same expert, or None if a parameter belongs to no
    expert."""
    if getattr(parameter, "allreduce", True):
        return None
    groups: dict[str, ProcessGroup] = engine.expert_data_parallel_group or {}
    return groups.get(getattr(parameter, "group_name", ""))


def divided_by_autoep(parameter: Any) -> tuple[Cut, int] | None:
    """Returns how AutoEP has divided a parameter, and the number of this rank among those over which it is divided.
    Returns None for any other parameter."""
    described = getattr(parameter, _AUTOEP, None)
    if described is None:
        return None
    ranks = sorted(described["expert_placement"]["ranks"], key=lambda rank: rank["rank"])
    sections = [tuple((int(expert), 1) for expert in rank["experts"]) for rank in ranks]
    return (tuple(described["logical_shape"]), 0, sections), int(described["ep_rank"])
