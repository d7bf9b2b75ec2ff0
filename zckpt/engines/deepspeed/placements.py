"""How the parameters of a DeepSpeed engine are divided between ranks, before ZeRO partitions them.

Tensor parallelism cuts one dimension of some parameters. DeepSpeed's own (AutoTP) says of each parameter how, by a map
that has the elements of each rank as strided pieces of the whole parameter and of the local tensor. This file has all
code that uses it. Megatron's way, with an object ``mpu`` that knows the ranks, has three attributes on each parameter
that is cut: ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``. With a stride of n, the dimension is
n equal parts one after another, such as the gate and the up projection of an MLP, and each of them is cut.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from zckpt.engines.deepspeed.experts import divided_by_autoep, owners_of_expert
from zckpt.engines.deepspeed.group import process_group_of_owners
from zckpt.engines.deepspeed.pipeline import Pipeline
from zckpt.engines.group import RankGroup, rank_group_of
from zckpt.engines.placement import Placement
from zckpt.geometry import all_of, section_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.geometry import Section

    Cut = tuple[tuple[int, ...], int, Sequence[Section]]
    """The shape of a whole parameter, the dimension that is cut, and the indices of each rank in it."""

_MAP = "ds_autotp_universal_checkpoint_meta"
"""The attribute in which AutoTP describes how it has cut a parameter."""


def placements_of(
    engine: Any, parameters: Mapping[str, Any], shapes: Mapping[int, Sequence[int]]
) -> dict[str, Placement]:
    """Returns the placements of all parameters of an engine. ``shapes``: by the id of a parameter, the shape of its
    local tensor, for those whose own shape does not tell it. Raises ValueError, with a phrase for an error, if it
    cannot be told how a parameter is cut."""
    owners, tensor_ranks = rank_group_of(process_group_of_owners(engine)), tensor_parallel_ranks(engine)
    pipeline = Pipeline(engine.module)
    for reason in pipeline.unsupported(parameters):
        raise ValueError(reason)
    # A stage of a pipeline may have no layer that is cut.
    if tensor_ranks.size > 1 and not pipeline.divided and not any(map(_is_cut, parameters.values())):
        raise ValueError(
            f"tensor parallelism over {tensor_ranks.size} ranks, of which no parameter tells how it is cut (by the "
            "attributes tensor_model_parallel, partition_dim and partition_stride)"
        )
    placements, group_of = {}, cache(rank_group_of)
    for name, parameter in parameters.items():
        shape = tuple(shapes.get(id(parameter), getattr(parameter, "ds_shape", parameter.shape)))
        expert_group, by_autoep = owners_of_expert(engine, parameter), divided_by_autoep(parameter)
        if by_autoep is not None or expert_group is not None:
            own = owners if expert_group is None else group_of(expert_group)
            placements[name] = _placement_of_expert(name, shape, own, by_autoep)
            continue
        tied = pipeline.tied(name)
        copies = f"tied {tied}" if tied else "owners" if owners.size > 1 else ""
        # Of the stages that have a copy of a module, the first one writes it.
        writes = not getattr(parameter, "ds_pipe_replicated", False)
        cut = _cut_of(name, parameter, shape, tensor_ranks) if tensor_ranks.size > 1 else None
        if cut is None:
            beyond = f"all {copies}" if tensor_ranks.size > 1 else ""
            writes &= tensor_ranks.rank == 0
            everywhere = not pipeline.divided
            placements[name] = Placement(
                all_of(shape), owners, beyond or copies, beyond, writes, everywhere, alike=not tied
            )
            continue
        whole, dim, sections = cut
        span = section_of(whole, dim, sections, tensor_ranks.rank)
        if span.numel != math.prod(shape):
            raise ValueError(f"{name}, which has the shape {list(shape)} and is not what its description says")
        alike = len({sum(count for _, count in section) for section in sections}) == 1 and not tied
        placements[name] = Placement(span, owners, copies, writes_partition=writes, everywhere=False, alike=alike)
    return placements


def _placement_of_expert(
    name: str, shape: tuple[int, ...], owners: RankGroup, by_autoep: tuple[tuple[int, ...], list[Section], int] | None
) -> Placement:
    copies = f"experts {owners.ranks}" if owners.size > 1 else ""
    if by_autoep is None:
        return Placement(all_of(shape), owners, copies, everywhere=False)
    whole, sections, number = by_autoep
    span = section_of(whole, 0, sections, number)
    if span.numel != math.prod(shape):
        raise ValueError(f"{name}, which has the shape {list(shape)} and is not what AutoEP says")
    alike = len({len(section) for section in sections}) == 1
    return Placement(span, owners, copies, everywhere=False, alike=alike)


def tensor_parallel_ranks(engine: Any) -> RankGroup:
    """Returns the ranks that have the other local tensors of the same parameters. Without tensor parallelism, it is
    this rank alone."""
    if getattr(engine, "mp_world_size", 1) > 1:
        # The model-parallel group of a pipeline has the ranks of all stages.
        methods = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
        for method in methods:
            if hasattr(engine.mpu, method):
                return rank_group_of(getattr(engine.mpu, method)())
    return RankGroup(None, 0, (0,))


def _is_cut(parameter: Any) -> bool:
    return hasattr(parameter, _MAP) or _is_parallel(parameter)


def _is_parallel(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False))


def _cut_of(name: str, parameter: Any, shape: tuple[int, ...], ranks: RankGroup) -> Cut | None:
    """Returns how a parameter is cut, or None if each of ``ranks`` holds all of it. ``shape``: that of the local
    tensor."""
    described = getattr(parameter, _MAP, None)
    if described is None:
        return _cut_evenly(name, parameter, shape, ranks.size) if _is_parallel(parameter) else None
    if described["replicated"]:
        return None
    conversion = described["conversion"]
    reason = conversion.get("unsupported_reason") or (
        None if conversion.get("affine_map") else "DeepSpeed does not describe how it is cut"
    )
    if reason:
        raise ValueError(f"{name}, which AutoTP has cut: {reason}")
    return _cut_by_map(
        name, tuple(described["original_shape"]), int(described["partition_dim"]), conversion["affine_map"]
    )


def _cut_evenly(name: str, parameter: Any, shape: tuple[int, ...], ranks: int) -> Cut:
    dim, parts = int(getattr(parameter, "partition_dim", 0)), int(getattr(parameter, "partition_stride", 1))
    if not (0 <= dim < len(shape) and parts > 0 and shape[dim] % parts == 0):
        raise ValueError(f"{name}, whose partition_dim {dim} or partition_stride {parts} does not fit {list(shape)}")
    width = shape[dim] // parts
    sections = [tuple((part * width * ranks + rank * width, width) for part in range(parts)) for rank in range(ranks)]
    return (*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :]), dim, sections


def _cut_by_map(name: str, shape: tuple[int, ...], dim: int, described: Mapping[str, Any]) -> Cut:
    """Returns the cut that a map of AutoTP describes. ``shape``: that of the whole parameter. In the map, the parameter
    may have a shape with more dimensions, of which ``dim`` is the one that is cut. Each piece in the map has the
    strides of that shape, and all indices of the other dimensions."""
    logical = tuple(described["logical_shape"])
    inner, before = math.prod(logical[dim + 1 :]), math.prod(logical[:dim])
    # If several dimensions of the map are one of the parameter, each index of those before ``dim`` has its own pieces.
    repeats = 1 if shape == logical else before
    if shape != logical:
        dim_of_shape = 0
        fits = math.prod(shape[1:]) == inner and math.prod(shape) == math.prod(logical)
    else:
        dim_of_shape, fits = dim, True
    strides, sections = _strides(logical), []
    for _, shard in sorted(described["ranks"].items()):
        pieces = sorted(shard["pieces"], key=lambda piece: piece["dest"][0])
        for piece in pieces:
            others = [size for at, size in enumerate(piece["shape"]) if at != dim]
            fits &= others == [size for at, size in enumerate(logical) if at != dim]
            fits &= tuple(piece["source"][1]) == strides and piece["source"][0] % inner == 0
            fits &= len(piece["locations"]) == 1 and piece.get("scale", 1.0) == 1.0
        intervals = [(piece["source"][0] // inner, piece["shape"][dim]) for piece in pieces]
        sections.append(
            tuple((repeat * logical[dim] + first, count) for repeat in range(repeats) for first, count in intervals)
        )
    indices = sorted(interval for section in sections for interval in section if interval[1])
    ends = list(accumulate((count for _, count in indices), initial=0))
    if not fits or [*(first for first, _ in indices), shape[dim_of_shape]] != ends:
        raise ValueError(f"{name}, which AutoTP has cut into pieces that are no sections of one dimension")
    return shape, dim_of_shape, sections


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
