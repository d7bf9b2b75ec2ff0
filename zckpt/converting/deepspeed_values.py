"""Reads from DeepSpeed's files what each flat tensor is: which parameters lie where in it, and its values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from zckpt.converting import stage_0_names
from zckpt.converting.deepspeed_folder import of_type
from zckpt.engines.deepspeed.flats import (
    Flat,
    Slot,
    consecutive,
    cut_each,
    cut_together,
    moments,
    momentum_of_muon,
    partition_numel,
)
from zckpt.engines.deepspeed.replicas import share
from zckpt.errors import FormatError, MissingFileError, UnsupportedError
from zckpt.state.inventory import MASTER, FileSpan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.converting.deepspeed_folder import DeepSpeedFolder
    from zckpt.converting.restricted_pickle import TorchFiles
    from zckpt.engines.deepspeed.group import RankGroup

Shapes = list[dict[str, tuple[int, ...]]]
"""For each flat tensor the shapes of its parameters, by their names."""
_SWAP_NAME = re.compile(r"(?:\w+-)?\d+_\d+", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class FlatValues:
    """One flat tensor of a rank, and its state. The tensor ``flat.master`` has no memory: it only serves as the key of
    the state."""

    flat: Flat
    """Which parameters lie where in the flat tensor."""
    state: Mapping[str, Any]
    """What the optimizer keeps for the flat tensor."""
    master: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The master weights."""

    def data(self, part: str) -> torch.Tensor | FileSpan | None:
        """Returns the master weights or a moment, or None if there is no such part."""
        if part in self.flat.files:
            return self.flat.files[part]
        if part == MASTER:
            return self.master
        return moments(self.flat, self.state).get(part)

    def dtype(self, part: str) -> torch.dtype:
        found: torch.Tensor = self.master if part == MASTER else self.state[part]
        return found.dtype


def stages_1_and_2(zero: Mapping[str, Any], shapes: Shapes, rank: int, *, offload: bool) -> Iterator[FlatValues]:
    """Yields the flat tensors of one rank of stage 1 or 2. Each param group has one, which holds this rank's partition
    of all its parameters."""
    if isinstance(zero.get("base_optimizer_state"), list):
        raise UnsupportedError("it was saved with zero_optimization.elastic_checkpoint, which saves no param groups")
    saved, groups = _saved(zero, "base_optimizer_state")
    masters = of_type(zero, "single_partition_of_fp32_groups", list)
    paddings = of_type(zero, "group_paddings", list)
    between = zero.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    padded = "zero_stage" not in zero  # BF16_Optimizer saves the padding too
    used = [(number, group) for number, group in enumerate(groups) if group["params"]]
    if not len(used) == len(masters) == len(shapes) == len(paddings) == len(between):
        raise FormatError("its param groups, weights and shapes are not those of one optimizer")
    for (number, group), master, own, padding, gaps in zip(used, masters, shapes, paddings, between, strict=True):
        length = master.numel() + (0 if padded else padding)
        sizes = [math.prod(shape) + gap for shape, gap in zip(own.values(), gaps, strict=True)]
        offsets = accumulate(sizes, initial=0)
        slots = cut_together(zip(own, own.values(), offsets, strict=False), rank, length)
        if any(slot.offset + slot.stop - slot.start > master.numel() for slot in slots):
            raise FormatError(f"the weights of param group {number} are too short for its parameters")
        by_muon = group.get("use_muon") and not offload
        flat = Flat(number, slots, _key((length,), master), wider=momentum_of_muon(slots) if by_muon else {})
        yield FlatValues(flat, saved.get(group["params"][0], {}), master)


def stage_3(zero: Mapping[str, Any], shapes: Shapes, group: RankGroup, folder: DeepSpeedFolder) -> Iterator[FlatValues]:
    """Yields the flat tensors of one rank of stage 3. Each sub-group has one, which holds this rank's partitions of its
    parameters."""
    saved, groups = _saved(zero, "optimizer_state_dict")
    masters = of_type(zero, "fp32_flat_groups", list)
    used = [(number, index) for number, one in enumerate(groups) for index in one["params"]]
    if not len(used) == len(masters) == len(shapes):
        raise FormatError("its param groups, weights and shapes are not those of one optimizer")
    for index, ((number, at), own, master) in enumerate(zip(used, shapes, masters, strict=True)):
        slots, state = cut_each(own.items(), group.rank, group.size), saved.get(at, {})
        numel = sum(partition_numel(shape, group.size) for shape in own.values())
        if numel and not master.numel():
            files = _swapped(index, master, state, numel, folder, group.rank)
            yield FlatValues(Flat(number, slots, _key((0,), master), files), state, master)
        elif master.numel() == numel:
            yield FlatValues(Flat(number, slots, _key(master.shape, master)), state, master)
        else:
            raise FormatError(f"the weights of sub-group {index} have the wrong length")


def stage_0(saved: Mapping[str, Any], module: Mapping[str, torch.Tensor], group: RankGroup) -> Iterator[FlatValues]:
    """Yields the flat tensors of stage 0. With flat master weights each param group has one. In fp32, and where each
    parameter has its own master weight, each parameter has one. ``module``: the weights by their names."""
    whole = {name: weight for name, weight in module.items() if weight.numel()}
    states, groups = _saved(saved, "optimizer_state_dict" if "optimizer_state_dict" in saved else None)
    if "fp32_groups_flat" in saved:
        masters = of_type(saved, "fp32_groups_flat", list)
        used = [(number, one["params"][0]) for number, one in enumerate(groups) if one["params"]]
        for (number, index), master, names in zip(
            used, masters, stage_0_names.named_by_value(masters, whole), strict=True
        ):
            offsets = consecutive(whole[name].shape for name in names)
            slots = [_shared(name, whole[name], group, at) for name, at in zip(names, offsets, strict=True)]
            flat = Flat(number, tuple(slots), _key(master.shape, master), whole=len(names) == 1)
            yield FlatValues(flat, states.get(index, {}), master)
        return
    indices = [(number, index) for number, one in enumerate(groups) for index in one["params"]]
    in_groups = of_type(saved, "fp32_groups", list) if "fp32_groups" in saved else None
    known: list[list[tuple[int, ...] | None]]
    if in_groups is not None:
        known = [[tuple(master.shape) for master in one] for one in in_groups]
    else:
        known = _shapes_of(states, groups)
    named = [name for one in stage_0_names.named_by_shape(known, module) for name in one]
    masters = [module[name] for name in named] if in_groups is None else [master for one in in_groups for master in one]
    if in_groups is not None:
        stage_0_names.check_values(masters, named, module)
    for (number, index), name, master in zip(indices, named, masters, strict=True):
        if master.numel():
            slot = _shared(name, master, group, 0)
            yield FlatValues(
                Flat(number, (slot,), _key(module[name].shape, master), whole=True), states.get(index, {}), master
            )


def groups_without_masters(saved: Mapping[str, Any], module: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Returns the names of all parameters of each param group, at stage 0 in fp32."""
    return stage_0_names.named_by_shape(_shapes_of(*_saved(saved, None)), module)


def universal(folder: DeepSpeedFolder, files: TorchFiles, groups: Sequence[Mapping[str, Any]], shapes: Shapes,
              group: RankGroup, step: Any) -> Iterator[FlatValues]:  # fmt: skip
    """Yields one flat tensor for each parameter of a Universal Checkpoint, of which each rank has its share.
    ``shapes``: those of the parameters of each param group or sub-group. ``step``: the optimizer's step of all
    parameters. None means that each parameter has its own."""
    if len(shapes) == len(groups):
        numbers = list(range(len(groups)))
    else:
        numbers = [number for number, one in enumerate(groups) for _ in one["params"]]
    for number, own in zip(numbers, shapes, strict=True):
        for name, shape in own.items():
            found = {key: folder.universal_file(files, name, f"{key}.pt") for key in ("fp32", "exp_avg", "exp_avg_sq")}
            data = {
                key: _whole(value["param"] if isinstance(value, dict) else value, name, shape)
                for key, value in found.items() if value is not None
            }  # fmt: skip
            if "fp32" not in data:
                raise MissingFileError("a parameter has no weights", file=f"{folder.path}/zero/{name}/fp32.pt")
            master = data.pop("fp32")
            own_step = folder.universal_file(files, name, "step.pt") if step is None else step
            state = {} if not data else {**({} if own_step is None else {"step": own_step}), **data}
            if master.numel():
                slot = _shared(name, master, group, 0)
                yield FlatValues(Flat(number, (slot,), _key(shape, master), whole=True), state, master)


def _whole(value: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape) or not value.is_contiguous():
        raise FormatError("a tensor of a Universal Checkpoint has another shape than the model", key=name)
    return value.view(shape)


def _saved(tree: Mapping[str, Any], key: str | None) -> tuple[Mapping[Any, Any], list[dict[str, Any]]]:
    """Returns the state and the param groups of the ``state_dict`` of a torch optimizer."""
    found = tree if key is None else of_type(tree, key, dict)
    groups = of_type(found, "param_groups", list)
    for group in groups:
        of_type(group, "params", list)
    return of_type(found, "state", dict), groups


def _shared(name: str, whole: torch.Tensor, group: RankGroup, offset: int) -> Slot:
    start, stop = share(whole.numel(), group)
    return Slot(name, tuple(whole.shape), start, stop, offset + start)


def _key(shape: Sequence[int], master: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=master.dtype, device="meta")


def _shapes_of(states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> list[list[tuple[int, ...] | None]]:
    return [[_shape(states.get(index, {})) for index in one["params"]] for one in groups]


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the shape of a parameter as its moments have it, or None if they do not say it."""
    found = {tuple(value.shape) for key, value in state.items() if isinstance(value, torch.Tensor) and key != "step"}
    return found.pop() if len(found) == 1 else None


def _swapped(
    number: int, master: torch.Tensor, state: Mapping[str, Any], numel: int, folder: DeepSpeedFolder, rank: int
) -> dict[str, FileSpan]:
    """Returns the swap files of a sub-group by part. Each tensor has the name of its file as an attribute."""
    parts = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 1 and not v.numel()}
    found = {}
    for part, tensor in {MASTER: master, **parts}.items():
        name = getattr(tensor, "ds_id", None)
        if name is None and isinstance(getattr(master, "ds_id", None), str):
            name = f"{part}-{master.ds_id}"  # type: ignore[attr-defined]
        if not isinstance(name, str) or not _SWAP_NAME.fullmatch(name):
            raise FormatError(
                f"sub-group {number} was offloaded to NVMe, and the checkpoint does not name the file", file=folder.path
            )
        found[part] = FileSpan(folder.swap_file(rank, name), 0, numel * master.element_size())
    return found
