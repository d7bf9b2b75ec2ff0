"""Experts that are divided between ranks: those of ``deepspeed.moe.layer.MoE``, and those of AutoEP.

A rank of ``MoE`` has some of the experts, each with its own parameters, and numbers them from 0. In a checkpoint they
have their numbers among all experts of the layer. AutoEP keeps each weight of all experts in one parameter, whose first
dimension is divided.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from zckpt.geometry import Section

_EXPERT = re.compile(r"(.*?deepspeed_experts\.)(\d+)(\..*)")
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


class Experts:
    """The experts of ``MoE`` that this rank has, by the layers of the model."""

    def __init__(self, engine: Any, module: nn.Module) -> None:
        groups = engine.expert_parallel_group or {}
        self._layers: dict[str, _Layer] = {}
        for name, layer in module.named_modules():
            if type(layer).__name__ == "MoE" and type(layer).__module__.startswith("deepspeed."):
                count = int(layer.num_local_experts)
                rank = groups[layer.expert_group_name].rank() if layer.expert_group_name in groups else 0
                prefix = f"{name}.deepspeed_moe.experts.deepspeed_experts.".removeprefix(".")
                self._layers[prefix] = _Layer(rank * count, count, int(layer.num_experts))

    @property
    def divided(self) -> bool:
        """Whether other ranks have other experts."""
        return any(layer.here < layer.everywhere for layer in self._layers.values())

    def global_name(self, name: str) -> str:
        """Returns the name that a parameter or buffer has in a checkpoint. ``name``: its name in the module."""
        match = _EXPERT.fullmatch(name)
        layer = self._layers.get(match[1]) if match else None
        return name if match is None or layer is None else f"{match[1]}{layer.first + int(match[2])}{match[3]}"

    def alike(self, name: str) -> str | None:
        """Returns the name of the same tensor of an expert that this rank has, if a tensor of a checkpoint belongs to
        an expert of another rank, and otherwise None."""
        match = _EXPERT.fullmatch(name)
        layer = self._layers.get(match[1]) if match else None
        if match is None or layer is None or not int(match[2]) < layer.everywhere:
            return None
        here = layer.first <= int(match[2]) < layer.first + layer.here
        return None if here else f"{match[1]}{layer.first}{match[3]}"


def owners_of_expert(engine: Any, parameter: Any) -> Any:
    """Returns the process group of the ranks that have the same expert, or None if a parameter belongs to no
    expert."""
    if getattr(parameter, "allreduce", True):
        return None
    return (engine.expert_data_parallel_group or {}).get(getattr(parameter, "group_name", ""))


def divided_by_autoep(parameter: Any) -> tuple[tuple[int, ...], list[Section], int] | None:
    """Returns how AutoEP has divided the first dimension of a parameter: the shape of the whole parameter, the indices
    of each rank, and the number of this rank. Returns None for any other parameter."""
    described = getattr(parameter, _AUTOEP, None)
    if described is None:
        return None
    ranks = sorted(described["expert_placement"]["ranks"], key=lambda rank: rank["rank"])
    sections = [tuple((int(expert), 1) for expert in rank["experts"]) for rank in ranks]
    return tuple(described["logical_shape"]), sections, int(described["ep_rank"])
