"""Experts that are divided between ranks: those of ``deepspeed.moe.layer.MoE``, and those of AutoEP.

A rank of ``MoE`` has some of the experts, each with its own parameters, and numbers them from 0. In a checkpoint they
have their numbers among all experts of the layer.

AutoEP replaces layers of a model by its own. These keep each weight of all experts in one parameter, whose first
dimension is divided. In a checkpoint, the tensors have the names and shapes that they had before, where the gate and
the up projection mostly are one tensor.
"""

from __future__ import annotations

import re
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.adapters.deepspeed.classes import is_a
from zckpt.engines.tensors import plain_name

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    from zckpt.geometry import Section

    Cut = tuple[tuple[int, ...], int, Sequence[Section]]
    """The shape of a whole parameter, the dimension that is cut, and the indices of each rank in it."""
    Cuts = tuple[tuple[int, ...], Mapping[int, tuple[Sequence[Section], int]]]
    """The shape of a whole parameter, and the argument ``cuts`` of ``section_of`` for the local tensor of this rank."""

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


class AutoExperts:
    """The tensors of the layers of AutoEP, with the names that they had before."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """The name that each tensor of the layers has in a checkpoint, by its name in the module. The gate and the up
        projection have no name of their own in a checkpoint if they were one tensor."""
        self._halves: dict[str, tuple[str, int]] = {}
        """For these: the name of the one tensor, and the number of the half of its second dimension."""

    @property
    def any(self) -> bool:
        """Whether there are such layers."""
        return bool(self.names)

    def add(self, path: str, before: NamesBefore, tensors: Iterable[str]) -> None:
        """Adds the layer at ``path``. ``tensors``: the names of its tensors inside of the layer."""
        # The router may have a second name. Its own one comes last, so that ``own_names`` has it.
        for tensor in sorted(tensors, key=lambda tensor: tensor.startswith("router.")):
            name, half = f"{path}.{before.name(tensor)}", before.half(tensor)
            if half is None:
                self.names[f"{path}.{tensor}"] = name
            else:
                self._halves[f"{path}.{tensor}"] = name, half

    @property
    def own_names(self) -> dict[str, list[str]]:
        """The names in the module of the tensors that have other names in a checkpoint, by these names. A tensor of the
        checkpoint that has a gate and an up projection is two tensors of the module."""
        halves = sorted((whole, half, name) for name, (whole, half) in self._halves.items())
        own_names: dict[str, list[str]] = {whole: [] for whole, *_ in halves}
        for whole, _, name in halves:
            own_names[whole].append(name)
        own_names |= {stored: [name] for name, stored in self.names.items() if stored != name}
        return own_names

    def unsupported(self, trained: Container[str]) -> Iterator[str]:
        """Yields a phrase for an error if one half of a tensor has a master weight and the other one has none.
        ``trained``: the parameters that have master weights."""
        halves: dict[str, bool] = {}
        for name, (whole, _) in self._halves.items():
            if halves.setdefault(whole, name in trained) != (name in trained):
                yield f"{whole}, of which only one half is trained (experts.w1 or experts.w3)"
                return

    def cuts(self, name: str, shape: Sequence[int], sections: Sequence[Section], number: int) -> Cuts:
        """Returns how AutoEP has divided a parameter. ``shape``: that of all experts together. ``sections``: the
        experts of each rank. ``number``: that of this rank."""
        whole = shape
        if name in self._halves:
            experts, width, *others = shape
            whole = (experts, 2 * width, *others)
        return tuple(whole), {0: (sections, number), **self.cuts_of_half(name, whole)}

    def cuts_of_half(self, name: str, whole: Sequence[int]) -> dict[int, tuple[Sequence[Section], int]]:
        """Returns how a parameter is cut out of the one that a checkpoint has, beside the division of the experts.
        ``whole``: the shape in the checkpoint."""
        if name not in self._halves:
            return {}
        width = whole[1] // 2
        return {1: ([((0, width),), ((width, width),)], self._halves[name][1])}

    def stored_as(self, name: str) -> str:
        """Returns the value of ``LocalTensor.stored_as`` for a parameter."""
        return self._halves[name][0] if name in self._halves else ""


def auto_experts_of(engine: Any, module: nn.Module) -> AutoExperts:
    """Returns the tensors of the layers of AutoEP that an engine has."""
    experts = AutoExperts()
    for path, layer in module.named_modules():
        if is_a(layer, "AutoEPMoELayer"):
            presets = sys.modules["deepspeed.module_inject.auto_ep_config"].PRESET_MODELS
            before = names_before(vars(engine._config.expert_parallel_config), presets.get(layer.model_family))
            named = (layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False))
            experts.add(plain_name(path), before, (plain_name(name) for name, _ in chain(*named)))
    return experts


def divided_by_autoep(parameter: Any) -> tuple[tuple[int, ...], list[Section], int] | None:
    """Returns how AutoEP has divided a parameter, as arguments of ``AutoExperts.cuts``, or None for any other
    parameter."""
    described = getattr(parameter, _AUTOEP, None)
    if described is None:
        return None
    return tuple(described["logical_shape"]), sections_of(described["expert_placement"]), int(described["ep_rank"])


def sections_of(placement: Mapping[str, Any]) -> list[Section]:
    """Returns the experts that each rank has of a layer of AutoEP. ``placement``: AutoEP's description of it."""
    ranks = sorted(placement["ranks"], key=lambda rank: rank["rank"])
    return [tuple((int(expert), 1) for expert in rank["experts"]) for rank in ranks]


class NamesBefore(NamedTuple):
    """The names of the tensors and modules of a layer before AutoEP has replaced it."""

    router: str
    experts: str
    gate: str
    """The gate projections of all experts. Without ``up``, this tensor has the up projections too."""
    down: str
    up: str | None
    shared_experts: str
    shared_gate: str

    def name(self, inside: str) -> str:
        """Returns the name that a tensor had inside of the layer. ``inside``: its name in AutoEP's layer, which may
        have the router under a second name too."""
        child, _, rest = inside.partition(".")
        if child == "experts":
            weights = {"w1": self.gate, "w2": self.down, "w3": self.up or self.gate}
            return f"{self.experts}.{weights.get(rest, rest)}"
        if child in ("shared_experts", "shared_experts_gate"):
            return f"{self.shared_experts if child == 'shared_experts' else self.shared_gate}.{rest}"
        if rest.startswith("gate.") or rest == "e_score_correction_bias":
            # The router was one module, and is now a module with another one in it.
            return f"{self.router}.{rest.removeprefix('gate.')}"
        return inside

    def half(self, inside: str) -> int | None:
        """Returns the number of the half that a tensor was of a tensor before, or None if it was a tensor of its
        own."""
        return {"experts.w1": 0, "experts.w3": 1}.get(inside) if self.up is None else None


def names_before(settings: Mapping[str, Any], preset: Any) -> NamesBefore:
    """Returns the names that AutoEP has looked for in a model. ``settings``: those of ``expert_parallel``. ``preset``:
    AutoEP's description of the kind of model, or None if the settings describe it alone."""

    def name(of_settings: str, default: str, of_preset: str = "") -> str:
        return str(settings.get(of_settings) or getattr(preset, of_preset or of_settings, default))

    up = settings.get("expert_w3", 0)  # neither a text nor None if the settings do not have it
    return NamesBefore(
        name("router_pattern", "gate"), name("expert_pattern", "experts", "experts_pattern"),
        name("expert_w1", "gate_up_proj"), name("expert_w2", "down_proj"),
        up if up is None or isinstance(up, str) else getattr(preset, "expert_w3", None),
        name("shared_experts_pattern", ""), name("shared_experts_gate_pattern", ""),
    )  # fmt: skip
