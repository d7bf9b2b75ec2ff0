"""Reads DeepSpeed's flat buffers from its files: where each parameter lies in them, and their values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch

from zckpt.converting import stage_0_names
from zckpt.converting.deepspeed_folder import of_type
from zckpt.engines.flats import (
    FlatBuffer,
    ParameterRange,
    consecutive,
    cut_each,
    cut_together,
    moments,
    momentum_of_muon,
    partition_numel,
)
from zckpt.errors import FormatError, MissingFileError, UnsupportedError
from zckpt.geometry import all_of
from zckpt.plan.replicas import Share
from zckpt.state.inventory import MASTER, FileRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.converting.deepspeed_folder import DeepSpeedFolder
    from zckpt.engines.group import RankGroup

Shapes = list[dict[str, tuple[int, ...]]]
"""For each flat buffer, the shapes of its parameters by name."""
_SWAP_NAME = re.compile(r"(?:\w+-)?\d+_\d+", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class FlatValues:
    """One flat buffer of a rank, and its state. The tensor ``flat.master`` has no memory. It only serves as the key of
    the state."""

    flat: FlatBuffer
    """The place of each parameter in the flat buffer."""
    state: Mapping[str, Any]
    """The optimizer's state of the flat buffer."""
    master: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    """The master weights. The tensor has no elements if they are in a swap file."""

    def data(self, part: str) -> torch.Tensor | FileRange | None:
        """Returns the master weights or a moment, or None if there is no such part."""
        if part in self.flat.files:
            return self.flat.files[part]
        if part == MASTER:
            return self.master
        return moments(self.flat, self.state).get(part)

    def dtype(self, part: str) -> torch.dtype:
        """Returns the dtype of the master weights or of a moment."""
        tensor: torch.Tensor = self.master if part == MASTER else self.state[part]
        return tensor.dtype


def stages_1_and_2(zero: Mapping[str, Any], shapes: Shapes, rank: int, *, offload: bool) -> Iterator[FlatValues]:
    """Yields the flat buffers of one rank of stage 1 or 2. Each param group has one flat buffer, which holds this
    rank's partition of all its parameters. ``offload``: whether the optimizer was offloaded."""
    if isinstance(zero.get("base_optimizer_state"), list):
        raise UnsupportedError("it was saved with zero_optimization.elastic_checkpoint, which saves no param groups")
    saved, groups = _saved(zero, "base_optimizer_state")
    masters = of_type(zero, "single_partition_of_fp32_groups", list)
    paddings = of_type(zero, "group_paddings", list)
    between = zero.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    padded = "zero_stage" not in zero  # Only BF16_Optimizer saves the padding too, and it does not save its stage.
    used = [(number, group) for number, group in enumerate(groups) if group["params"]]
    if not len(used) == len(masters) == len(shapes) == len(paddings) == len(between):
        raise FormatError("its param groups, weights and shapes are not those of one optimizer")
    columns = zip(used, masters, shapes, paddings, between, strict=True)
    for (number, group), master, group_shapes, padding, gaps in columns:
        length = master.numel() + (0 if padded else padding)
        sizes = [math.prod(shape) + gap for shape, gap in zip(group_shapes.values(), gaps, strict=True)]
        offsets = accumulate(sizes, initial=0)
        held = {name: all_of(shape) for name, shape in group_shapes.items()}
        ranges = cut_together(zip(held, held.values(), offsets, strict=False), rank, length)
        if any(parameter_range.offset + parameter_range.span.numel > master.numel() for parameter_range in ranges):
            raise FormatError(f"the weights of param group {number} are too short for its parameters")
        by_muon = group.get("use_muon") and not offload
        flat = FlatBuffer(
            number, ranges, _key((length,), master), wider=momentum_of_muon(ranges, held) if by_muon else {}
        )
        yield FlatValues(flat, saved.get(group["params"][0], {}), master)


def stage_3(zero: Mapping[str, Any], shapes: Shapes, group: RankGroup, folder: DeepSpeedFolder) -> Iterator[FlatValues]:
    """Yields the flat buffers of one rank of stage 3. Each sub-group has one flat buffer, which holds this rank's
    partitions of its parameters."""
    saved, groups = _saved(zero, "optimizer_state_dict")
    masters = of_type(zero, "fp32_flat_groups", list)
    used = [(number, key) for number, param_group in enumerate(groups) for key in param_group["params"]]
    if not len(used) == len(masters) == len(shapes):
        raise FormatError("its param groups, weights and shapes are not those of one optimizer")
    for index, ((number, key), parameter_shapes, master) in enumerate(zip(used, shapes, masters, strict=True)):
        held = {name: all_of(shape) for name, shape in parameter_shapes.items()}
        ranges, state = cut_each(held.items(), group.rank, group.size), saved.get(key, {})
        numel = sum(partition_numel(span.numel, group.size) for span in held.values())
        if numel and not master.numel():
            files = _swapped(index, master, state, numel, folder, group.rank)
            yield FlatValues(FlatBuffer(number, ranges, _key((0,), master), files), state, master)
        elif master.numel() == numel:
            yield FlatValues(FlatBuffer(number, ranges, _key(master.shape, master)), state, master)
        else:
            raise FormatError(f"the weights of sub-group {index} have the wrong length")


def names_at_stage_0(saved: Mapping[str, Any], module: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Returns the names of the parameters of each param group. ``saved`` and ``module``: as for ``stage_0``. If the
    master weights of a param group are one tensor, parameters and groups without elements are left out."""
    if "fp32_groups_flat" in saved:
        return stage_0_names.named_by_value(of_type(saved, "fp32_groups_flat", list), module)
    masters = of_type(saved, "fp32_groups", list) if "fp32_groups" in saved else None
    if masters is None:
        return stage_0_names.named_by_shape(_shapes_of(*_saved_at_stage_0(saved)), module)
    shapes = [[tuple(master.shape) for master in group_masters] for group_masters in masters]
    names = stage_0_names.named_by_shape(shapes, module)
    stage_0_names.check_values(list(chain(*masters)), list(chain(*names)), module)
    return names


def stage_0(
    saved: Mapping[str, Any], module: Mapping[str, torch.Tensor], names_of_groups: list[list[str]], group: RankGroup
) -> Iterator[FlatValues]:
    """Yields the flat buffers of stage 0. If the master weights of a param group are one tensor, each param group has
    one flat buffer. In fp32, and if each parameter has its own master weight, each parameter has one. ``saved``: the
    state of the optimizer. ``module``: the weights by name. ``names_of_groups``: what ``names_at_stage_0`` returns."""
    states, groups = _saved_at_stage_0(saved)
    if "fp32_groups_flat" in saved:
        masters = of_type(saved, "fp32_groups_flat", list)
        used = [
            (number, param_group["params"][0]) for number, param_group in enumerate(groups) if param_group["params"]
        ]
        for (number, index), master, names in zip(used, masters, names_of_groups, strict=True):
            weights = [module[name] for name in names]
            offsets = consecutive(weight.shape for weight in weights)
            placed = zip(names, weights, offsets, strict=True)
            ranges = [_shared(name, weight, group, offset) for name, weight, offset in placed]
            flat = FlatBuffer(number, tuple(ranges), _key(master.shape, master), whole=len(names) == 1)
            yield FlatValues(flat, states.get(index, {}), master)
        return
    indices = [(number, index) for number, param_group in enumerate(groups) for index in param_group["params"]]
    named = list(chain(*names_of_groups))
    masters = list(chain(*saved["fp32_groups"])) if "fp32_groups" in saved else [module[name] for name in named]
    for (number, index), name, master in zip(indices, named, masters, strict=True):
        if master.numel():
            parameter_range = _shared(name, master, group, 0)
            flat = FlatBuffer(number, (parameter_range,), _key(module[name].shape, master), whole=True)
            yield FlatValues(flat, states.get(index, {}), master)


def universal(
    folder: DeepSpeedFolder, groups: Sequence[Mapping[str, Any]], shapes: Shapes, group: RankGroup, step: Any
) -> Iterator[FlatValues]:
    """Yields one flat buffer for each parameter of a Universal Checkpoint. Each rank has its share of it. ``shapes``:
    those of the parameters of each param group or sub-group. ``step``: the optimizer's step for all parameters. None
    means that each parameter has its own."""
    if len(shapes) == len(groups):
        numbers = list(range(len(groups)))
    else:
        numbers = [number for number, param_group in enumerate(groups) for _ in param_group["params"]]
    for number, parameter_shapes in zip(numbers, shapes, strict=True):
        for name, shape in parameter_shapes.items():
            saved = {key: folder.universal_file(name, f"{key}.pt") for key in ("fp32", "exp_avg", "exp_avg_sq")}
            data = {
                key: _whole(value["param"] if isinstance(value, dict) else value, name, shape)
                for key, value in saved.items() if value is not None
            }  # fmt: skip
            if "fp32" not in data:
                raise MissingFileError("a parameter has no weights", file=f"{folder.path}/zero/{name}/fp32.pt")
            master = data.pop("fp32")
            step_here = folder.universal_file(name, "step.pt") if step is None else step
            state = {} if not data else {**({} if step_here is None else {"step": step_here}), **data}
            if master.numel():
                parameter_range = _shared(name, master, group, 0)
                yield FlatValues(FlatBuffer(number, (parameter_range,), _key(shape, master), whole=True), state, master)


def _whole(value: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of a Universal Checkpoint in the shape of its parameter. Raises FormatError if it has another
    number of elements."""
    if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape) or not value.is_contiguous():
        raise FormatError("a tensor of a Universal Checkpoint has another shape than the model", key=name)
    return value.view(shape)


def _saved(tree: Mapping[str, Any], key: str | None) -> tuple[Mapping[Any, Any], list[dict[str, Any]]]:
    """Returns the state and the param groups of the ``state_dict`` of a torch optimizer, which ``tree`` has at ``key``.
    If ``key`` is None, ``tree`` itself is the ``state_dict``."""
    state_dict = tree if key is None else of_type(tree, key, dict)
    groups = of_type(state_dict, "param_groups", list)
    for group in groups:
        of_type(group, "params", list)
    return of_type(state_dict, "state", dict), groups


def _saved_at_stage_0(saved: Mapping[str, Any]) -> tuple[Mapping[Any, Any], list[dict[str, Any]]]:
    """Returns the same for the state of an optimizer of stage 0, which may be wrapped."""
    return _saved(saved, "optimizer_state_dict" if "optimizer_state_dict" in saved else None)


def _shared(name: str, tensor: torch.Tensor, group: RankGroup, offset: int) -> ParameterRange:
    """Returns this rank's share of a parameter whose elements begin at ``offset`` of its flat buffer."""
    span = Share(group.rank, group.size).of(all_of(tensor.shape))
    return ParameterRange(name, span, offset + span.start)


def _key(shape: Sequence[int], master: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without memory, which serves as the key of a flat buffer's state."""
    return torch.empty(tuple(shape), dtype=master.dtype, device="meta")


def _shapes_of(states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> list[list[tuple[int, ...] | None]]:
    """Returns the shapes of the parameters of each param group, as ``_shape`` finds them."""
    return [[_shape(states.get(index, {})) for index in group["params"]] for group in groups]


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the shape that the moments of a parameter have, or None if they do not agree on one."""
    shapes = {tuple(value.shape) for key, value in state.items() if isinstance(value, torch.Tensor) and key != "step"}
    return shapes.pop() if len(shapes) == 1 else None


def _swapped(
    number: int, master: torch.Tensor, state: Mapping[str, Any], numel: int, folder: DeepSpeedFolder, rank: int
) -> dict[str, FileRange]:
    """Returns the swap files of a sub-group by part. Each tensor has the name of its file as an attribute."""
    tensors = {MASTER: master}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and not value.numel():
            tensors[key] = value
    files = {}
    for part, tensor in tensors.items():
        name = getattr(tensor, "ds_id", None)
        if name is None and isinstance(getattr(master, "ds_id", None), str):
            name = f"{part}-{master.ds_id}"  # type: ignore[attr-defined]
        if not isinstance(name, str) or not _SWAP_NAME.fullmatch(name):
            raise FormatError(
                f"sub-group {number} was offloaded to NVMe, and the checkpoint does not name the file", file=folder.path
            )
        files[part] = FileRange(folder.swap_file(rank, name), 0, numel * master.element_size())
    return files
