"""How the parameters of a DeepSpeed engine are divided between ranks, before ZeRO partitions them.

Tensor parallelism cuts one dimension of some parameters. DeepSpeed's own (AutoTP) says of each parameter how, by a map
that has the elements of each rank as strided pieces of the whole parameter and of the local tensor. Megatron's way,
with an object ``mpu`` that knows the ranks, has three attributes on each parameter that is cut:
``tensor_model_parallel`` (older: ``model_parallel``, which DeepSpeed reads too), ``partition_dim`` and
``partition_stride``. With a stride of n, the dimension is n equal parts one after another, such as the gate and the up
projection of an MLP, and each of them is cut. If no parameter has these attributes, the module may describe the cuts as
DeepSpeed's Universal Checkpoint has it: by ``universal_checkpoint_info``, a dict of patterns of names. DeepSpeed's
folders have these maps and patterns too: ``tools/converting/deepspeed_cuts.py`` finds those of a parameter there, and
calls the functions in this file that make a ``Cut`` of them.
"""

from __future__ import annotations

import math
import re
import sys
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from zckpt.adapters.deepspeed.experts import divided_by_autoep, process_group_of_expert
from zckpt.adapters.deepspeed.group import process_group_of_owners
from zckpt.adapters.local_tensors import LocalTensor
from zckpt.engines.group import RankGroup, rank_group_of
from zckpt.engines.tensors import unwrapped
from zckpt.errors import UnsupportedError
from zckpt.geometry import all_of, section_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.adapters.deepspeed.experts import AutoExperts, Cut, Cuts, MoeExperts
    from zckpt.adapters.deepspeed.pipeline_stage import PipelineStage
    from zckpt.geometry import Section, Span

INTERVALS_MAX = 1 << 20
"""The most intervals into which one dimension of a parameter is cut. Each takes about 100 bytes of memory."""
_MAP = "ds_autotp_universal_checkpoint_meta"
"""The attribute in which AutoTP describes how it has cut a parameter."""
_PARALLEL = ("tensor_model_parallel", "model_parallel")
"""The attributes of which one says whether a parameter is cut in Megatron's way."""
_WHOLE = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_ROW, _TWO_PARTS = "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0"
_PARTS, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_OTHERS = (
    "vocabulary_parameter_patterns", "pipeline_replicated_parameter_patterns", "universal_checkpoint_version",
)  # fmt: skip
"""The keys of ``universal_checkpoint_info``. The others have no meaning here: a vocabulary is cut in its first
dimension, as is every parameter that no pattern describes."""


def local_tensors_of(
    engine: Any,
    parameters: Mapping[str, Any],
    shapes: Mapping[int, Sequence[int]],
    stage: PipelineStage,
    experts: MoeExperts,
    auto_experts: AutoExperts,
) -> dict[str, LocalTensor]:
    """Returns the local tensors of all parameters of an engine. ``shapes``: what ``Kind.shapes`` has returned. Raises
    UnsupportedError if nothing tells how the parameters are cut, and ValueError, with a phrase for an error, if a
    parameter is cut in a way that is not supported."""
    owners, tensor_ranks = rank_group_of(process_group_of_owners(engine)), tensor_parallel_ranks(engine)
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    of_experts = (*experts.unsupported(parameters, tensor_ranks.size), *auto_experts.unsupported(trained))
    for reason in (*stage.unsupported(parameters), *of_experts):
        raise ValueError(reason)
    # A stage of a pipeline, and a model that AutoTP does not know, may have no layer that is cut.
    patterns = _patterns_of(engine, parameters) if tensor_ranks.size > 1 else {}
    told = tensor_ranks.size == 1 or stage.divided or _autotp_describes(engine) or bool(patterns)
    if not told and not any(hasattr(each, _MAP) or _is_parallel(each) for each in parameters.values()):
        raise UnsupportedError(
            f"the engine has tensor parallelism over {tensor_ranks.size} ranks, of which no parameter tells how it is "
            "cut",
            hint="give each parameter that is cut the attributes tensor_model_parallel, partition_dim and "
            "partition_stride, or the model a dict universal_checkpoint_info, whose patterns of names tell how each "
            "parameter is cut (docs/parallelism.md has examples)",
        )
    local_tensors, group_of = {}, cache(rank_group_of)
    for name, parameter in parameters.items():
        shape = tuple(shapes.get(id(parameter), parameter.shape))
        expert_group, by_autoep = process_group_of_expert(engine, parameter), divided_by_autoep(parameter)
        if by_autoep is not None or expert_group is not None:
            own = owners if expert_group is None else group_of(expert_group)
            cuts = None if by_autoep is None else auto_experts.cuts(name, *by_autoep)
            span, same_borders = _span_of(name, shape, cuts)
            copies = f"whole experts of ranks {own.ranks}" if own.size > 1 else ""
            stored_as = auto_experts.stored_as(name)
            local_tensors[name] = LocalTensor(span, own, copies, stored_as=stored_as, same_borders=same_borders)
            continue
        cut = None
        if patterns:
            cut = _cut_by_patterns(name, shape, patterns, tensor_ranks)
        elif tensor_ranks.size > 1:
            cut = _cut_of(name, parameter, shape, tensor_ranks)
        cuts = None if cut is None else (cut[0], {cut[1]: (cut[2], tensor_ranks.rank)})
        span, same_borders = _span_of(name, shape, cuts)
        tied = stage.tied(name)
        copies = f"tied {tied}" if tied else "owners" if owners.size > 1 else ""
        beyond = copies if tied else ""
        if tensor_ranks.size > 1 and cut is None:
            beyond = f"every rank {copies}"
        # A rank may hold whole local tensors and partitions of others, and other ranks hold other partitions.
        local_tensors[name] = LocalTensor(
            span,
            owners,
            replicated=f"whole, {beyond or copies}" if beyond or copies else "",
            partition_replicated=f"partition, {beyond}" if beyond else "",
            # Of the stages that have a copy of a module, the first one writes it.
            writes_partition=not getattr(parameter, "ds_pipe_replicated", False)
            and (cut is not None or tensor_ranks.rank == 0),
            same_borders=same_borders and not tied,
        )
    return local_tensors


def _span_of(name: str, shape: tuple[int, ...], cuts: Cuts | None) -> tuple[Span, bool]:
    """Returns the elements of a local tensor of this shape, and whether the local tensors of all ranks have the same
    number of elements. ``cuts``: how the parameter is cut, or None if the local tensor is all of it."""
    if cuts is None:
        return all_of(shape), True
    whole, of_dims = cuts
    span = section_of(whole, of_dims)
    if span.numel != math.prod(shape):
        raise ValueError(f"{name}, whose shape {list(shape)} is not the one that its cut gives to this rank")
    sizes = ({sum(count for _, count in section) for section in sections} for sections, _ in of_dims.values())
    return span, all(len(of_dim) == 1 for of_dim in sizes)


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


def _autotp_describes(engine: Any) -> bool:
    """Returns whether AutoTP has cut the layers of an engine, and describes each parameter that it cuts. Older versions
    of DeepSpeed have AutoTP without these descriptions."""
    has_autotp = hasattr(engine, "autotp_size") and engine.autotp_size() > 1
    return has_autotp and hasattr(sys.modules.get("deepspeed.checkpoint.constants"), "DS_AUTOTP_UC_META")


def _is_parallel(parameter: Any) -> bool:
    return any(getattr(parameter, attribute, False) for attribute in _PARALLEL)


def _patterns_of(engine: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the ``universal_checkpoint_info`` of the model if it has one and nothing else describes the cuts. Raises
    ValueError if it has what zckpt does not know."""
    info = getattr(unwrapped(engine.module), "universal_checkpoint_info", None)
    attributes = any(hasattr(parameter, name) for parameter in parameters.values() for name in (_MAP, *_PARALLEL))
    if info is None or attributes or _autotp_describes(engine):
        return {}
    patterns: Mapping[str, Any] = info() if callable(info) else info
    unknown = sorted(patterns.keys() - {*_WHOLE, _ROW, _TWO_PARTS, _PARTS, _WIDTHS, *_OTHERS})
    if unknown:
        raise ValueError(f"universal_checkpoint_info with {', '.join(unknown)}, which zckpt does not know")
    return patterns


def _cut_of(name: str, parameter: Any, shape: tuple[int, ...], ranks: RankGroup) -> Cut | None:
    """Returns how a parameter is cut, or None if each of ``ranks`` holds all of it. ``shape``: that of the local
    tensor."""
    described = getattr(parameter, _MAP, None)
    if described is None:
        if not _is_parallel(parameter):
            return None
        dim, parts = int(getattr(parameter, "partition_dim", 0)), int(getattr(parameter, "partition_stride", 1))
        return cut_evenly(name, shape, dim, parts, ranks.size)
    conversion = described["conversion"]
    reason, cut_map = conversion.get("unsupported_reason"), conversion.get("affine_map")
    if reason is None and cut_map is None and not described["replicated"]:
        reason = "DeepSpeed does not describe how it is cut"
    pieces = [piece for shard in (cut_map or {"ranks": {}})["ranks"].values() for piece in shard["pieces"]]
    if reason is None and any(piece.get("scale", 1.0) != 1.0 for piece in pieces):
        reason = "its values are scaled by the number of ranks"
    if reason is not None:
        raise ValueError(f"{name}, which AutoTP has cut: {reason}")
    if described["replicated"]:
        return None
    return cut_by_map(name, tuple(described["original_shape"]), int(described["partition_dim"]), cut_map)


def _cut_by_patterns(name: str, shape: tuple[int, ...], patterns: Mapping[str, Any], ranks: RankGroup) -> Cut | None:
    """Returns how a parameter is cut by ``universal_checkpoint_info``, or None if each rank holds all of it."""

    def described(key: str) -> bool:
        return any(re.match(pattern, name) for pattern in patterns.get(key, ()))

    if any(map(described, _WHOLE)):
        return None
    if described(_TWO_PARTS):
        return cut_evenly(name, shape, 0, 2, ranks.size)
    for entry in patterns.get(_PARTS, ()):
        pattern = next((pattern for pattern in entry["patterns"] if re.match(pattern, name)), None)
        if pattern is not None:
            dim, sizes = int(entry["partition_dim"]), entry["shape"][entry["partition_dim"]]
            widths = patterns.get(_WIDTHS, {}).get(pattern)
            if isinstance(sizes, int):
                return cut_evenly(name, shape, dim, sizes, ranks.size)
            if widths is None and any(size % ranks.size for size in sizes):
                raise ValueError(f"{name}, whose parts of {list(sizes)} are not said to be cut unevenly ({_WIDTHS})")
            return _cut_parts(shape, dim, widths or [[size // ranks.size] * ranks.size for size in sizes])
    return cut_evenly(name, shape, int(described(_ROW)), 1, ranks.size)


def cut_evenly(name: str, shape: tuple[int, ...], dim: int, parts: int, ranks: int) -> Cut:
    """Returns the cut of a parameter of which dimension ``dim`` is ``parts`` equal parts one after another, each of
    them cut evenly. ``shape``: that of the local tensor. ``ranks``: the number of ranks. Raises ValueError, with a
    phrase for an error, if the shape does not fit."""
    if not (0 <= dim < len(shape) and parts > 0 and shape[dim] % parts == 0):
        raise ValueError(f"{name}, whose partition_dim {dim} or partition_stride {parts} does not fit {list(shape)}")
    return _cut_parts(shape, dim, [[shape[dim] // parts] * ranks] * parts)


def _cut_parts(shape: tuple[int, ...], dim: int, widths: Sequence[Sequence[int]]) -> Cut:
    """Returns the cut of a dimension that is several parts one after another. ``shape``: that of the local tensor.
    ``widths``: for each part, the number of indices that each rank has of it."""
    starts = list(accumulate(map(sum, widths), initial=0))
    sections = [
        tuple((start + sum(part[:rank]), part[rank]) for start, part in zip(starts, widths, strict=False))
        for rank in range(len(widths[0]))
    ]
    return (*shape[:dim], starts[-1], *shape[dim + 1 :]), dim, sections


def cut_by_map(name: str, shape: tuple[int, ...], dim: int, cut_map: Mapping[str, Any]) -> Cut:
    """Returns the cut that a map of AutoTP describes. ``shape``: that of the whole parameter. In the map, the parameter
    may have a shape with more dimensions, of which ``dim`` is the one that is cut. Each piece in the map has the
    strides of that shape, and all indices of the other dimensions. Raises ValueError, with a phrase for an error, if
    the map does not describe such a cut."""
    logical = tuple(cut_map["logical_shape"])
    inner, fits = math.prod(logical[dim + 1 :]), True
    strides = tuple(math.prod(logical[at + 1 :]) for at in range(len(logical)))
    sections = []
    for _, shard in sorted(cut_map["ranks"].items()):
        pieces = sorted(shard["pieces"], key=lambda piece: piece["dest"][0])
        for piece in pieces:
            others = [piece["shape"][at] == size for at, size in enumerate(logical) if at != dim]
            fits &= all(others) and tuple(piece["source"][1]) == strides
            fits &= piece["source"][0] % inner == 0 and len(piece["locations"]) == 1
        sections.append(tuple((piece["source"][0] // inner, piece["shape"][dim]) for piece in pieces))
    if not fits:
        raise ValueError(f"{name}, which AutoTP has cut into pieces that are no sections of one dimension")
    return cut_of_view(name, shape, logical, dim, sections)


def cut_of_view(name: str, shape: tuple[int, ...], view: tuple[int, ...], dim: int, sections: Sequence[Section]) -> Cut:
    """Returns the cut of a parameter of the given shape, of which a view is cut. ``view``: the shape of the view.
    ``dim``, ``sections``: the dimension of the view that is cut, and the indices of each rank in it. The view has the
    same dimensions as the parameter, or its first dimension is divided into several ones up to ``dim``. Raises
    ValueError, with a phrase for an error, if the sections do not have each index once."""
    same = shape == view
    fits = same or (math.prod(shape[1:]) == math.prod(view[dim + 1 :]) and math.prod(shape) == math.prod(view))
    # If the first dimension of the parameter is several dimensions of the view, each index of those before ``dim`` has
    # its own sections.
    dim_of_shape, repeats = (dim, 1) if same else (0, math.prod(view[:dim]))
    if fits and repeats * sum(map(len, sections)) <= INTERVALS_MAX:
        sections = [
            tuple((repeat * view[dim] + first, count) for repeat in range(repeats) for first, count in section)
            for section in sections
        ]
        indices = sorted(interval for section in sections for interval in section if interval[1])
        ends = list(accumulate((count for _, count in indices), initial=0))
        if [*(first for first, _ in indices), shape[dim_of_shape]] == ends:
            return shape, dim_of_shape, sections
    raise ValueError(f"{name}, whose sections do not fit its shape {list(shape)}")
