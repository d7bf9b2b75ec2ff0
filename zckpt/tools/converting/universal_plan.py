"""Plans from a checkpoint, as trees, the files of a Universal Checkpoint in the layout of DeepSpeed 0.19.8.

    mp_rank_00_model_states.pt                 counters, scheduler, frozen weights and buffers: stages 1 and 2
    zero_pp_rank_0_mp_rank_00_model_states.pt  the same again, because engines of stage 3 look for this name
    zero/optimizer_state.pt                    param groups and loss scale
    zero/NAME/fp32.pt, exp_avg.pt, step.pt     a whole parameter by the name that it has in the engine, and its moments

DeepSpeed's loader takes from each tensor what its rank has. AutoTP and AutoEP know themselves what that is. For an
``mpu``, the file of a tensor says in which dimension it is cut, and of which parts this dimension consists. For experts
of ``deepspeed.moe``, whose names are the same on all ranks, it has the experts of all ranks, one after the other.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from zckpt.adapters.deepspeed.experts import EXPERT
from zckpt.checkpoint.writing.collect import fingerprint
from zckpt.errors import MismatchError, UnsupportedError, first_few
from zckpt.geometry import all_of, span_of
from zckpt.plan.inventory import BUFFER, MASTER
from zckpt.tools.converting.deepspeed_experts import EP_SIZE
from zckpt.tools.converting.deepspeed_flats import flats
from zckpt.tools.converting.deepspeed_plan import DEEPSPEED_VERSION, DeepSpeedFolderPlan
from zckpt.tools.converting.source import is_file_name
from zckpt.tools.exporting.plan import Extent
from zckpt.tools.exporting.torch_file import Instance, Storage, View, torch_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.adapters.deepspeed.setup import Setup
    from zckpt.adapters.flats import FlatBuffer
    from zckpt.geometry import Grid, Span
    from zckpt.tools.exporting.plan import OutputFile

_OF_AUTOEP = re.compile(r".*\.experts\.w[123]")
"""Matches the names that AutoEP gives to the weights of experts."""


class _Parameter(NamedTuple):
    """A parameter as the folder has it."""

    parts: Sequence[tuple[str, Span]]
    """The parameters of the checkpoint that it is made of, and which elements of each of them."""
    shape: tuple[int, ...]
    about: Mapping[str, Any]
    """What its files tell DeepSpeed's loader besides the values."""


class UniversalPlan(DeepSpeedFolderPlan):
    """Plans the files of a folder that engines of stages 1 to 3 can load, with any number of ranks. The members raise
    what ``to_deepspeed`` raises for a checkpoint that does not fit."""

    otherwise: ClassVar[str] = "restore it into an engine of the run with zckpt.restore"
    target: ClassVar[str] = "a Universal Checkpoint"

    @cached_property
    def setup(self) -> Setup:
        return replace(self.source, stage=1, round_robin_gradients=False)

    def files(self) -> Iterator[OutputFile]:
        model_states = self._model_states(0)
        for prefix in ("", "zero_pp_rank_0_"):
            yield torch_file(f"{prefix}mp_rank_00_model_states.pt", model_states)
        yield torch_file("zero/optimizer_state.pt", self._settings())
        for name, parameter in self._parameters():
            states = [self._states[stored] for stored, _ in parameter.parts]
            values = [{key: value for key, value in state.items() if not isinstance(value, View)} for state in states]
            unknown = sorted(values[0].keys() - {"step"})
            if unknown or any(fingerprint(of_part) != fingerprint(values[0]) for of_part in values):
                why = f"has {', '.join(unknown)}" if unknown else "counts the steps of experts differently"
                raise UnsupportedError(
                    f"the optimizer {why}, which a Universal Checkpoint cannot hold", key=name, hint=self.otherwise
                )
            for key, value in values[0].items():
                yield torch_file(f"zero/{name}/{key}.pt", value)
            for key in ("fp32", *(key for key in states[0] if key not in values[0])):
                view = self._view(MASTER if key == "fp32" else key, parameter)
                yield torch_file(f"zero/{name}/{key}.pt", {"param": view, **parameter.about})

    def missing(self) -> tuple[str, ...]:
        ignored = [*self._masterless, *self._named(BUFFER)]
        phrase = (
            f"{first_few(ignored, 3)}: DeepSpeed loads neither frozen weights nor buffers from a Universal Checkpoint; "
            "`module` in its file of model states has them"
        )
        return (*super().missing(), *([phrase] if ignored else ()))

    def _settings(self) -> dict[str, Any]:
        """Returns the tree of ``optimizer_state.pt``: what stages 1 and 2 look for, and what stage 3 looks for."""
        groups = self._state_dict["param_groups"]
        steps = (state["step"] for state in self._states.values() if "step" in state)
        # Stage 3 gives the settings of the first group to all groups. So it gets only those that all groups share.
        shared = {
            key: value
            for key, value in groups[0].items()
            if key == "params"
            or all(fingerprint({key: group.get(key)}) == fingerprint({key: value}) for group in groups)
        }
        return {
            **self._scaler.in_zero(), "zero_stage": self.setup.stage, "clip_grad": self.setup.gradient_clipping,
            "ds_version": DEEPSPEED_VERSION, "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {"step": next(steps, 0)}}, "param_groups": [shared]},
        }  # fmt: skip

    def _view(self, part: str, parameter: _Parameter) -> View:
        """Returns the master weights of a parameter, or one of its moments."""
        extents, numel = {}, 0
        for name, span in parameter.parts:
            if f"{part}/{name}" not in self.checkpoint.contents:
                raise MismatchError("the checkpoint does not have all of the optimizer's state", key=f"{part}/{name}")
            extents[numel] = Extent(f"{part}/{name}", span)
            numel += span.numel
        dtype = self.checkpoint.contents[extents[0].source].dtype
        return View(Storage(dtype, numel, extents if numel else {}), parameter.shape)

    def _parameters(self) -> Iterator[tuple[str, _Parameter]]:
        """Yields the names that the trained parameters have in the engines that load the folder, and the parameters."""
        experts: dict[str, dict[int, str]] = {}
        """For the name of an expert's parameter in the engine, the names in the checkpoint by the rank that has it."""
        for name in self._states:
            shape, own_names = self._shapes[name], self.setup.own_names.get(name) or [name]
            match, ranks = EXPERT.fullmatch(name), self._expert_ranks.get(name, 1)
            if match is not None and ranks > 1:
                of_each_rank, number = self._experts[match[1], match[3]] // ranks, int(match[2])
                own = f"{match[1]}{number % of_each_rank}{match[3]}"
                experts.setdefault(own, {})[number // of_each_rank] = name
                continue
            for number, own in enumerate(own_names):
                span, own_shape, about = all_of(shape), shape, self._cut(name)
                if self.setup.own_names and _OF_AUTOEP.fullmatch(own):
                    about = _of_experts(shape[0])
                if len(own_names) > 1:
                    width = shape[1] // len(own_names)
                    own_shape = (shape[0], width, *shape[2:])
                    bounds = [(0, size) for size in shape]
                    bounds[1] = number * width, width
                    span = span_of(shape, bounds)
                yield self._checked(own), _Parameter([(name, span)], own_shape, about)
        for own, of_ranks in experts.items():
            names = [of_ranks[rank] for rank in sorted(of_ranks)]
            shape = self._shapes[names[0]]
            parts = [(name, all_of(shape)) for name in names]
            yield self._checked(own), _Parameter(parts, (len(names), *shape), _of_experts(len(names)))

    def _checked(self, name: str) -> str:
        """Returns the name of a parameter, which becomes that of a directory."""
        if not is_file_name(name):
            raise UnsupportedError(
                f"a parameter of the name {name!r} cannot have a directory", file=self.checkpoint.path
            )
        return name

    def _cut(self, name: str) -> dict[str, Any]:
        """Returns what tells DeepSpeed's loader how an ``mpu`` cuts a parameter, if the ranks of the run had boxes of
        it that are cut in one dimension. A parameter of which nothing is told is cut in its first dimension."""
        grid: Grid = self.checkpoint.contents.grid(self.checkpoint.contents[f"{MASTER}/{name}"])
        cut_dims = [dim for dim, sections in enumerate(grid.sections) if sections]
        if len(cut_dims) != 1:
            return {}
        (dim,) = cut_dims
        _, *starts = (first for first, _ in grid.sections[dim][0])  # The first rank has the beginning of each part.
        sizes = tuple(stop - start for start, stop in pairwise([0, *starts, grid.shape[dim]]))
        shape = (*grid.shape[:dim], sizes, *grid.shape[dim + 1 :])
        attributes = {"patterns": [], "shape": shape, "partition_dim": dim}
        return {"sub_param_shape": Instance("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", attributes)}

    @cached_property
    def _state_dict(self) -> dict[str, Any]:
        """The state of the optimizer as if each parameter was a flat buffer."""
        if any(group.get("use_muon") for group in self._saved.groups):
            raise UnsupportedError(
                "DeepSpeed does not load the momentum of Muon from a Universal Checkpoint", file=self.checkpoint.path,
                hint=self.otherwise,
            )  # fmt: skip
        return self._optimizer_state(self._flats(0), 0)

    @cached_property
    def _states(self) -> dict[str, dict[str, Any]]:
        """For each trained parameter by name, its moments, which are of the class View, and other values."""
        state = self._state_dict["state"]
        return {flat.names[0]: state.get(number, {}) for number, flat in enumerate(self._flats(0))}

    @cached_property
    def _expert_ranks(self) -> dict[str, int]:
        """For each parameter of experts of ``deepspeed.moe``, the number of ranks over which the experts are divided.
        DeepSpeed puts it into the name of the param group."""
        ranks = {}
        for group in self._saved.groups:
            match = EP_SIZE.fullmatch(str(group.get("name"))) if group.get("moe") else None
            if match is not None:
                ranks.update(dict.fromkeys(group["params"], int(match[1])))
        return ranks

    @cached_property
    def _experts(self) -> Counter[tuple[str, str]]:
        """The number of experts that have a parameter, by its name before and after the number of the expert."""
        matches = filter(None, map(EXPERT.fullmatch, self._states))
        return Counter((match[1], match[3]) for match in matches)

    def _module(self, rank: int) -> Iterator[tuple[str, View]]:
        trained = set(self._named(MASTER))
        return (
            (name, view)
            for name, view in super()._module(rank)
            if self.checkpoint.manifest.aliases.get(name, name) not in trained
        )

    def _flats(self, rank: int) -> list[FlatBuffer]:
        return flats(self._groups, self._shapes, replace(self.setup, stage=0), 1, 0)


def _of_experts(count: int) -> dict[str, Any]:
    """Returns what tells DeepSpeed's loader that the first dimension of a tensor has this number of experts, which are
    divided evenly."""
    return {"is_expert_param": True, "ep_num_experts": count}
