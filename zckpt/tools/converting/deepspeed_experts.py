"""Experts that were divided between ranks: those of ``deepspeed.moe.layer.MoE``, and those of AutoEP.

layer_L_expert_E_mp_rank_M_model_states.pt   stages 0 to 2: the weights and buffers of expert E, which has its number
                                             among all experts of the layer; L counts the layers with experts
expp_rank_R_mp_rank_M_optim_states.pt        stage 0: the optimizer's state of a rank with the experts of rank R

All other files have the names of a rank, which numbers its experts of ``MoE`` from 0. AutoEP keeps each weight of all
experts of a rank in one parameter, and describes the experts of each rank in the entry ``ds_autoep_layers``. The names
that the tensors had before are not in the files, unless the settings of AutoEP have them. The others are those of
AutoEP's table of models ("presets"): all of them have the same names for the router and the experts.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.deepspeed.experts import EXPERT, AutoExperts, names_before, sections_of
from zckpt.engines.group import RankGroup
from zckpt.engines.tensors import plain_name
from zckpt.errors import FormatError, UnsupportedError
from zckpt.tools.converting import stage_0_names
from zckpt.tools.converting.deepspeed_folder import of_type
from zckpt.tools.converting.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from zckpt.adapters.deepspeed.experts import Cuts, NamesBefore
    from zckpt.adapters.local_tensors import LocalTensor
    from zckpt.tools.converting.deepspeed_folder import DeepSpeedFolder
    from zckpt.tools.converting.deepspeed_values import FlatValues

EP_SIZE = re.compile(r"ep_size_(\d{1,7})", re.ASCII)
"""Matches the name that DeepSpeed gives to a param group of experts. It has the number of ranks over which these are
divided."""
_AUTOEP_WEIGHTS = ("w1", "w2", "w3")
"""The parameters of a layer of AutoEP."""
_PRESETS = {"mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"}
"""The presets of DeepSpeed 0.19.8. None of them changes the default of ``names_before`` for the router and the experts.
The name of the shared experts is "shared_expert" with a gate, and "shared_experts" without one."""


class Experts:
    """The experts of one run, and the ranks that have each of them.

    Args:
        folder: the folder.
        saved: the model states of rank 0.
        groups: the param groups of the optimizer.
        stage_ranks: the number of ranks in each stage of the pipeline.
    """

    def __init__(
        self,
        folder: DeepSpeedFolder,
        saved: Mapping[str, Any],
        groups: Iterable[Mapping[str, Any]],
        stage_ranks: int,
    ) -> None:
        self._folder = folder
        self.auto = AutoExperts()
        """The tensors of the layers of AutoEP, with the names that they had before."""
        self._own: dict[str, str] = {}
        """The name that each of these tensors has on a rank, by its name in a checkpoint."""
        self._autoep: dict[str, Mapping[str, Any]] = {}
        """The description of its layer for each parameter of AutoEP's experts."""
        self._here: dict[str, int] = {}
        """How many experts a rank has of each layer of ``MoE``, by the beginning of the names of its parameters."""
        matches = (EP_SIZE.fullmatch(str(group.get("name"))) for group in groups if group.get("moe"))
        sizes = {int(match[1]) for match in matches if match}
        if len(sizes) != 1:
            raise UnsupportedError(
                f"its experts are divided over several numbers of ranks: {sorted(sizes)}"
                if sizes
                else "no param group tells over how many ranks its experts are divided"
            )
        self.ranks = sizes.pop()
        """The number of ranks over which the experts of each layer are divided."""
        if not 1 <= self.ranks <= stage_ranks or stage_ranks % self.ranks:
            raise FormatError(f"its experts are divided over {self.ranks} of {stage_ranks} ranks")
        config = saved.get("ds_config")
        config = config if isinstance(config, dict) else {}
        self._strided = config.get("use_data_before_expert_parallelism") is True
        settings = config.get("expert_parallel")
        self._settings: Mapping[str, Any] = settings if isinstance(settings, dict) else {}
        """The settings of AutoEP."""
        self._copies = stage_ranks // self.ranks

    @property
    def names_differ(self) -> bool:
        """Whether ranks have experts of different names."""
        return self.ranks > 1 and bool(self._here)

    def add(self, model: int, saved: Mapping[str, Any]) -> None:
        """Adds the layers of a rank of model parallelism. ``saved``: its model states."""
        layers = {
            plain_name(layer["expert_key_prefix"]).rpartition(".")[0]: layer
            for layer in saved.get("ds_autoep_layers") or ()
        }
        of_module = sorted(map(plain_name, of_type(saved, "module", dict))) if layers else []
        for path, layer in layers.items():
            inside = [f"experts.{weight}" for weight in _AUTOEP_WEIGHTS]
            weights = [f"{path}.{weight}" for weight in inside]
            # All names from "path." on, up to the first one that comes after them: "/" is the character after ".".
            for name in of_module[bisect_left(of_module, f"{path}.") : bisect_left(of_module, f"{path}/")]:
                inside.append(name.removeprefix(f"{path}."))
            self.auto.add(path, self._names_before(path, inside), inside)
            self._autoep |= {self.auto.names.get(weight, weight): layer for weight in weights}
        self._own = {name: own for own, name in self.auto.names.items()}
        for layer, count in enumerate(() if layers else of_type(saved, "num_experts", list)):
            if type(count) is not int or count < 1 or count % self.ranks:
                raise FormatError(f"a layer with {count} experts cannot be divided over {self.ranks} ranks")
            names = (plain_name(name) for name in self._folder.expert(layer, 0, model))
            self._here |= {match[1]: count // self.ranks for match in map(EXPERT.fullmatch, names) if match}

    def _names_before(self, path: str, inside: Iterable[str]) -> NamesBefore:
        """Returns the names that the tensors of a layer of AutoEP had before. ``inside``: their names in AutoEP's
        layer."""
        children = {name.partition(".")[0] for name in inside}
        preset, settings = self._settings.get("preset_model"), self._settings
        gate_alone = settings.get("shared_experts_gate_pattern") and not settings.get("shared_experts_pattern")
        unknown = f"the preset_model {preset!r} of expert_parallel" if preset not in {None, *_PRESETS} else ""
        if "shared_experts" in children and gate_alone:
            unknown = "the shared_experts_gate_pattern of expert_parallel, without shared_experts_pattern"
        if unknown:
            raise UnsupportedError(
                f"{unknown} does not tell which names its tensors had before AutoEP has replaced this layer",
                key=path, hint=stage_0_names.HINT,
            )  # fmt: skip
        gated = "shared_experts_gate" in children
        shared = SimpleNamespace(
            shared_experts_pattern="shared_expert" if gated else "shared_experts",
            shared_experts_gate_pattern="shared_expert_gate",
        )
        return names_before(settings, shared)

    def tensors(self, number: int, model: int, saved: Mapping[str, Any]) -> dict[str, torch.Tensor | Stacked]:
        """Returns those weights and buffers of the experts of a rank that the files of its optimizer do not have, by
        their names in a checkpoint. ``number``: that of the rank among those over which the experts are divided.
        ``saved``: the model states of the rank."""
        if saved.get("ds_autoep_layers"):
            return dict(self._of_autoep(number, model, saved))
        tensors: dict[str, torch.Tensor | Stacked] = {}
        for layer, count in enumerate(of_type(saved, "num_experts", list)):
            here = count // self.ranks
            for expert in range(number * here, (number + 1) * here):
                for name, tensor in self._folder.expert(layer, expert, model).items():
                    match = EXPERT.fullmatch(plain_name(name))
                    if match is None or int(match[2]) != expert or not isinstance(tensor, torch.Tensor):
                        path = self._folder.expert_path(layer, expert, model)
                        raise FormatError("it has something else than tensors of this expert", file=path, key=name)
                    tensors[match[0]] = tensor
        return tensors

    def _of_autoep(self, number: int, model: int, saved: Mapping[str, Any]) -> Iterator[tuple[str, Stacked]]:
        """Yields those weights of AutoEP that are not trained, or that are their own master weights at stage 0."""
        trained = {name for shapes in saved.get("param_shapes") or () for name in shapes}
        for layer in saved["ds_autoep_layers"]:
            names = [f"{layer['expert_key_prefix']}.{name}" for name in _AUTOEP_WEIGHTS]
            count = len(sections_of(layer["expert_placement"])[number])
            experts = range(number * count, (number + 1) * count) if not trained.issuperset(names) else ()
            files = [(expert, self._folder.expert(layer["moe_layer_id"], expert, model)) for expert in experts]
            for name in names:
                if name not in trained:
                    slices = [of_type(file, f"{name}.{expert}", torch.Tensor) for expert, file in files]
                    yield self.global_name(plain_name(name), number), Stacked(tuple(slices))

    def expert_rank(self, rank: int) -> int:
        """Returns the number of a rank among those over which the experts are divided. ``rank``: its number in its
        stage of the pipeline."""
        return rank // self._copies if self._strided else rank % self.ranks

    def holders(self, rank: int) -> RankGroup:
        """Returns the ranks that have the same experts as a rank. ``rank``: as for ``expert_rank``."""
        number = self.expert_rank(rank)
        step, first = (1, number * self._copies) if self._strided else (self.ranks, number)
        return RankGroup(None, (rank - first) // step, tuple(range(first, first + self._copies * step, step)))

    def is_expert(self, name: str) -> bool:
        """Returns whether a parameter belongs to experts."""
        return EXPERT.fullmatch(name) is not None or name in self._autoep

    def global_name(self, name: str, number: int) -> str:
        """Returns the name that a tensor has in a checkpoint, unless it has another one there as a part of another
        tensor. ``name``: its name on a rank. ``number``: that of the rank among those over which the experts are
        divided."""
        match = EXPERT.fullmatch(name)
        if match is None or match[1] not in self._here:
            return self.auto.names.get(name, name)
        return f"{match[1]}{number * self._here[match[1]] + int(match[2])}{match[3]}"

    def own_name(self, name: str) -> str:
        """Returns the name that a tensor has on a rank and in the folder, if AutoEP has given it another one.
        ``name``: what ``global_name`` returns."""
        return self._own.get(name, name)

    def cuts(self, name: str, shape: tuple[int, ...], number: int) -> Cuts | None:
        """Returns how AutoEP has divided a parameter, or None for any other parameter. ``shape``: that of the local
        tensor. ``number``: that of the rank among those over which the experts are divided."""
        if name not in self._autoep:
            return None
        sections = sections_of(self._autoep[name]["expert_placement"])
        numbers = sorted(first for section in sections for first, _ in section)
        if len(sections) != self.ranks or numbers != [*range(len(numbers))] or not shape:
            raise FormatError("ds_autoep_layers does not have each expert once", key=name)
        return self.auto.cuts(name, (len(numbers), *shape[1:]), sections, number)

    def check_ep_rank(self, saved: Mapping[str, Any], rank: int) -> None:
        """Raises FormatError if the file of a rank says that it has other experts. ``saved``: its model states.
        ``rank``: its number in its stage of the pipeline."""
        for layer in saved.get("ds_autoep_layers") or ():
            if self._folder.partitions_weights and layer["ep_rank"] != self.expert_rank(rank):
                raise FormatError(f"it has the experts of rank {layer['ep_rank']}", key=layer["expert_key_prefix"])

    def check_values(
        self,
        flat_values: Iterable[FlatValues],
        weights: Mapping[str, Any],
        local_tensors: Mapping[str, LocalTensor],
        number: int,
        model: int,
    ) -> None:
        """Raises FormatError if the master weights of an expert, after rounding, do not have the values of its weight:
        then they are those of another expert. A few values of each flat buffer are compared.

        Args:
            flat_values: the flat buffers of a rank.
            weights: the weights of the rank by name.
            local_tensors: what the rank holds of each parameter.
            number: the number of the rank among those over which the experts are divided.
            model: its number among the ranks of model parallelism.
        """
        for values in flat_values:
            held = next((held for held in values.flat.ranges if held.span.numel and self.is_expert(held.name)), None)
            if held is None or not isinstance(values.master, torch.Tensor):
                continue
            start = held.span.start - local_tensors[held.name].span.start
            layer, weight = self._autoep.get(held.name), weights.get(held.name)
            if layer is not None and not self._folder.partitions_weights and not self._folder.universal:
                here = len(sections_of(layer["expert_placement"])[number])
                expert, start = divmod(start, local_tensors[held.name].span.numel // here)
                expert += number * here
                file = self._folder.expert(layer["moe_layer_id"], expert, model)
                key = f"{self.own_name(held.name)}.{expert}"
                weight = of_type({plain_name(name): file[name] for name in file}, key, torch.Tensor)
            if isinstance(weight, torch.Tensor):
                count = min(held.span.numel, stage_0_names.FIRST_NUMEL, weight.numel() - start)
                master = stage_0_names.rounded_bytes(values.master, held.offset, count, weight.dtype)
                if master != stage_0_names.rounded_bytes(weight, start, count, weight.dtype):
                    raise FormatError("its master weights are not those of this expert", key=held.name)
