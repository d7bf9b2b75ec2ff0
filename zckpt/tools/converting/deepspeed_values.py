"""Reads DeepSpeed's flat buffers from its files: where each parameter lies in them, and their values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.flats import (
    FlatBuffer,
    ParameterRange,
    consecutive,
    cut_each,
    cut_together,
    moments,
    momentum_of_muon,
    partition_numel,
)
from zckpt.engines.group import RankGroup
from zckpt.errors import FormatError, MissingFileError, UnsupportedError
from zckpt.plan.inventory import MASTER, FileRange
from zckpt.plan.replicas import Share
from zckpt.tools.converting import stage_0_names
from zckpt.tools.converting.deepspeed_folder import of_type
from zckpt.tools.converting.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from zckpt.adapters.local_tensors import LocalTensor
    from zckpt.geometry import Span
    from zckpt.tools.converting.deepspeed_folder import DeepSpeedFolder

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
    master: torch.Tensor | Stacked = field(default_factory=lambda: torch.empty(0, device="cpu"))
    """The master weights. The tensor has no elements if they are in a swap file."""

    def data(self, part: str) -> torch.Tensor | Stacked | FileRange | None:
        """Returns the master weights or a moment, or None if there is no such part."""
        if part in self.flat.files:
            return self.flat.files[part]
        if part == MASTER:
            return self.master
        return moments(self.flat, self.state).get(part)

    def dtype(self, part: str) -> torch.dtype:
        """Returns the dtype of the master weights or of a moment."""
        tensor: torch.Tensor | Stacked = self.master if part == MASTER else self.state[part]
        return tensor.dtype


def stages_1_and_2(
    zero: Mapping[str, Any], shapes: Shapes, local_tensors: Mapping[str, LocalTensor], *, offload: bool
) -> Iterator[FlatValues]:
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
        held, owners = _held(group_shapes, local_tensors)
        ranges = _stored(
            cut_together(zip(held, held.values(), offsets, strict=False), owners.rank, length), local_tensors
        )
        if any(parameter_range.offset + parameter_range.span.numel > master.numel() for parameter_range in ranges):
            raise FormatError(f"the weights of param group {number} are too short for its parameters")
        by_muon = group.get("use_muon") and not offload
        flat = FlatBuffer(
            number, ranges, _key((length,), master), wider=momentum_of_muon(ranges, held) if by_muon else {}
        )
        yield FlatValues(flat, saved.get(group["params"][0], {}), master)


def stage_3(
    zero: Mapping[str, Any],
    shapes: Shapes,
    local_tensors: Mapping[str, LocalTensor],
    folder: DeepSpeedFolder,
    rank: int | None,
) -> Iterator[FlatValues]:
    """Yields the flat buffers of one rank of stage 3. Each sub-group has one flat buffer, which holds this rank's
    partitions of its parameters. ``rank``: the number of the rank in the run, or None if it is not known."""
    saved, groups = _saved(zero, "optimizer_state_dict")
    masters = of_type(zero, "fp32_flat_groups", list)
    used = [(number, key) for number, param_group in enumerate(groups) for key in param_group["params"]]
    if not len(used) == len(masters) == len(shapes):
        raise FormatError("its param groups, weights and shapes are not those of one optimizer")
    for index, ((number, key), parameter_shapes, master) in enumerate(zip(used, shapes, masters, strict=True)):
        held, owners = _held(parameter_shapes, local_tensors)
        ranges = _stored(cut_each(held.items(), owners.rank, owners.size), local_tensors)
        state = saved.get(key, {})
        numel = sum(partition_numel(span.numel, owners.size) for span in held.values())
        if numel and not master.numel():
            files = _swapped(index, master, state, numel, folder, rank)
            yield FlatValues(FlatBuffer(number, ranges, _key((0,), master), files), state, master)
        elif master.numel() == numel:
            yield FlatValues(FlatBuffer(number, ranges, _key(master.shape, master)), state, master)
        else:
            raise FormatError(f"the weights of sub-group {index} have the wrong length")


def names_at_stage_0(saved: Mapping[str, Any], module: Mapping[str, Any], experts: Collection[str]) -> list[list[str]]:
    """Returns the names of the parameters of each param group. ``saved`` and ``module``: as for ``stage_0``.
    ``experts``: the names of the parameters of experts, which have param groups of their own. If the master weights of
    a param group are one tensor, parameters and groups without elements are left out."""
    states, groups = _saved_at_stage_0(saved)
    if "fp32_groups_flat" in saved:
        masters = of_type(saved, "fp32_groups_flat", list)
        groups = [group for group in groups if group["params"]]
    else:
        masters = of_type(saved, "fp32_groups", list) if "fp32_groups" in saved else [None] * len(groups)
    named: dict[int, list[str]] = {}
    for of_experts in (False, True):
        weights = {name: weight for name, weight in module.items() if (name in experts) == of_experts}
        numbers = [number for number, group in enumerate(groups) if bool(group.get("moe")) == of_experts]
        here = [masters[number] for number in numbers]
        slices = {key: part for name, weight in weights.items() for key, part in _slices(name, weight, weight)}
        if "fp32_groups_flat" in saved:
            name_of = {key: name for name, weight in weights.items() for key, _ in _slices(name, weight, weight)}
            of_slices = stage_0_names.named_by_value(here, slices)
            names = [list(dict.fromkeys(name_of[key] for key in group)) for group in of_slices]
        elif "fp32_groups" in saved:
            shapes = [[tuple(master.shape) for master in group_masters] for group_masters in here]
            names = stage_0_names.named_by_shape(shapes, weights)
            pairs = zip(chain(*names), chain(*here), strict=True)
            of_masters = dict(chain(*(_slices(name, weights[name], master) for name, master in pairs)))
            stage_0_names.check_values(list(of_masters.values()), list(of_masters), slices)
        else:
            of_params = [[_shape(states.get(index, {})) for index in groups[number]["params"]] for number in numbers]
            names = stage_0_names.named_by_shape(of_params, weights)
        named |= zip(numbers, names, strict=True)
    return [named[number] for number in range(len(groups))]


def _slices(name: str, weight: Any, data: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the slices of a weight that is stacked, or any other one as a whole, with names. ``data``: the weight, or
    another tensor of the same shape, of which the same slices are yielded."""
    if not isinstance(weight, Stacked):
        yield name, data
        return
    for number, part in enumerate(data.slices if isinstance(data, Stacked) else data):
        yield f"{name}[{number}]", part


def stage_0(
    saved: Mapping[str, Any],
    module: Mapping[str, Any],
    names_of_groups: list[list[str]],
    local_tensors: Mapping[str, LocalTensor],
) -> Iterator[FlatValues]:
    """Yields the flat buffers of stage 0. If the master weights of a param group are one tensor, each param group has
    one flat buffer. In fp32, and where each parameter has its own master weight, each parameter has one. ``saved``: the
    state of the optimizer. ``module``: the weights by name. ``names_of_groups``: what ``names_at_stage_0`` returns."""
    states, groups = _saved_at_stage_0(saved)
    if "fp32_groups_flat" in saved:
        masters = of_type(saved, "fp32_groups_flat", list)
        used = [
            (number, param_group["params"][0]) for number, param_group in enumerate(groups) if param_group["params"]
        ]
        for (number, index), master, names in zip(used, masters, names_of_groups, strict=True):
            offsets = consecutive(module[name].shape for name in names)
            ranges = [_shared(name, local_tensors[name], offset) for name, offset in zip(names, offsets, strict=True)]
            whole = len(names) == 1 and _is_whole(local_tensors[names[0]])
            flat = FlatBuffer(number, tuple(ranges), _key(master.shape, master), whole=whole)
            yield FlatValues(flat, states.get(index, {}), master)
        return
    indices = [(number, index) for number, param_group in enumerate(groups) for index in param_group["params"]]
    named = list(chain(*names_of_groups))
    masters = list(chain(*saved["fp32_groups"])) if "fp32_groups" in saved else [module[name] for name in named]
    for (number, index), name, master in zip(indices, named, masters, strict=True):
        if master.numel():
            local = local_tensors[name]
            flat = FlatBuffer(
                number, (_shared(name, local, 0),), _key(module[name].shape, master), whole=_is_whole(local)
            )
            yield FlatValues(flat, states.get(index, {}), master)


def universal(
    folder: DeepSpeedFolder,
    groups: Sequence[Mapping[str, Any]],
    shapes: Shapes,
    whole_tensors: Mapping[str, LocalTensor],
    own_name: Callable[[str], str],
    step: Any,
) -> Iterator[FlatValues]:
    """Yields one flat buffer for each parameter of a Universal Checkpoint. Each rank has its share of it. ``shapes``:
    those of the parameters of each param group or sub-group. ``whole_tensors``: the whole parameters, and the ranks
    that share each of them. ``own_name``: a function that returns the name that a parameter has in the folder.
    ``step``: the optimizer's step for all parameters. None means that each parameter has its own."""
    if len(shapes) == len(groups):
        numbers = list(range(len(groups)))
    else:
        numbers = [number for number, param_group in enumerate(groups) for _ in param_group["params"]]
    for number, parameter_shapes in zip(numbers, shapes, strict=True):
        for name in parameter_shapes:
            own = own_name(name)
            saved = {key: folder.universal_file(own, f"{key}.pt") for key in ("fp32", "exp_avg", "exp_avg_sq")}
            (span,) = _held({name: parameter_shapes[name]}, whole_tensors)[0].values()
            whole = _is_whole(whole_tensors[name])
            shape = span.grid.shape if whole else (span.numel,)
            data = {
                key: _whole(value["param"] if isinstance(value, dict) else value, name, shape)
                for key, value in saved.items() if value is not None
            }  # fmt: skip
            if "fp32" not in data:
                raise MissingFileError("a parameter has no weights", file=f"{folder.path}/zero/{own}/fp32.pt")
            master = data.pop("fp32")
            step_here = folder.universal_file(own, "step.pt") if step is None else step
            state = {} if not data else {**({} if step_here is None else {"step": step_here}), **data}
            if master.numel():
                flat = FlatBuffer(number, (_shared(name, whole_tensors[name], 0),), _key(shape, master), whole=whole)
                yield FlatValues(flat, state, master)


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


def _held(
    shapes: Mapping[str, tuple[int, ...]], local_tensors: Mapping[str, LocalTensor]
) -> tuple[dict[str, Span], RankGroup]:
    """Returns what a rank holds of each parameter of a flat buffer before ZeRO partitions it, and the ranks over which
    all of them are partitioned. Raises FormatError for a name that the model does not have."""
    unknown = next((name for name in shapes if name not in local_tensors), None)
    if unknown is not None:
        raise FormatError("the optimizer has a parameter that the model does not have", key=unknown)
    owners = {local_tensors[name].owners.ranks: local_tensors[name].owners for name in shapes}
    if len(owners) > 1:
        raise FormatError("a flat buffer has parameters that are partitioned over other ranks than others")
    alone = RankGroup(None, 0, (0,))
    return {name: local_tensors[name].span for name in shapes}, next(iter(owners.values()), alone)


def _is_whole(local: LocalTensor) -> bool:
    return local.span.numel == local.span.grid.numel


def _shared(name: str, local: LocalTensor, offset: int) -> ParameterRange:
    """Returns this rank's share of a parameter whose local tensor begins at ``offset`` of its flat buffer."""
    span = Share(local.owners.rank, local.owners.size).of(local.span)
    return ParameterRange(name, span, offset + span.start - local.span.start, stored_as=local.stored_as)


def _stored(ranges: Iterable[ParameterRange], local_tensors: Mapping[str, LocalTensor]) -> tuple[ParameterRange, ...]:
    """Returns the same ranges with the names that the parameters have in a checkpoint."""
    return tuple(held._replace(stored_as=local_tensors[held.name].stored_as) for held in ranges)


def _key(shape: Sequence[int], master: torch.Tensor | Stacked) -> torch.Tensor:
    """Returns a tensor without memory, which serves as the key of a flat buffer's state."""
    return torch.empty(tuple(shape), dtype=master.dtype, device="meta")


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the shape that the moments of a parameter have, or None if they do not agree on one."""
    shapes = {tuple(value.shape) for key, value in state.items() if isinstance(value, torch.Tensor) and key != "step"}
    return shapes.pop() if len(shapes) == 1 else None


def _swapped(
    number: int, master: torch.Tensor, state: Mapping[str, Any], numel: int, folder: DeepSpeedFolder, rank: int | None
) -> dict[str, FileRange]:
    """Returns the swap files of a sub-group by part. Each tensor has the name of its file as an attribute."""
    if rank is None:
        raise UnsupportedError(
            f"sub-group {number} was offloaded to NVMe, and the folder does not tell the order of the ranks of an mpu",
            file=folder.path, hint=stage_0_names.HINT,
        )  # fmt: skip
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
