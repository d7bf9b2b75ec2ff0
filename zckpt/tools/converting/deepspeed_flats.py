"""Where DeepSpeed 0.19.8 keeps each parameter in its flat buffers, at any stage and on any number of ranks. These are
pure functions of names, shapes and settings, which need no engine. In the following, P is the number of ranks.

Stages 1 and 2 put the parameters of a group one after another, pad the end to a multiple of 2 P elements, and cut the
result into P partitions. Stage 3 pads and cuts each parameter on its own. A flat buffer holds what one rank has of a
sub-group. Stage 0 cuts nothing: each flat buffer is a whole param group, or one parameter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from zckpt.adapters.flats import (
    FlatBuffer,
    consecutive,
    cut_each,
    cut_together,
    momentum_of_muon,
    partition_numel,
)
from zckpt.geometry import all_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.adapters.deepspeed.setup import Setup
    from zckpt.geometry import Span

Shape = tuple[int, ...]
START_ALIGNMENT = 2
"""The number of elements in a partition of stages 1 and 2 is a multiple of this number. DeepSpeed calls it
``nccl_start_alignment_factor``."""
PARAMETER_ALIGNMENT_BYTES = 16
"""With ``parameter_alignment``, each parameter begins at a multiple of this many bytes."""


def natural_order(names: Sequence[str], setup: Setup, ranks: int) -> list[str]:
    """Returns the parameters of a group in the order in which the optimizer was given them. ``names``: the parameters
    in the order in which a checkpoint has them."""
    if not setup.reorders:
        return list(names)
    order = round_robin(range(len(names)), ranks)
    return [name for _, name in sorted(zip(order, names, strict=True))]


def round_robin(indices: Sequence[int], ranks: int) -> list[int]:
    """Returns ``indices`` in the order that DeepSpeed's ``_round_robin_reorder`` gives them: first every P-th index,
    beginning with the first one, then every P-th index, beginning with the second one, and so on."""
    return [index for first in range(ranks) for index in indices[first::ranks]]


def offsets_of(shapes: Sequence[Shape], setup: Setup) -> tuple[list[int], list[int], int]:
    """Returns, for a param group of stage 1 or 2, the element at which each parameter begins, the number of elements of
    padding after each parameter, and the element at which the last parameter ends."""
    itemsize = getattr(torch, setup.dtype).itemsize
    multiple = PARAMETER_ALIGNMENT_BYTES // math.gcd(PARAMETER_ALIGNMENT_BYTES, itemsize)
    multiple = multiple if setup.aligns else 1
    offsets, paddings, offset = [], [], 0
    for number, shape in enumerate(shapes):
        offsets.append(offset)
        offset += math.prod(shape)
        paddings.append(-offset % multiple if number < len(shapes) - 1 else 0)
        offset += paddings[-1]
    return offsets, paddings, offset


def flats(
    groups: Sequence[Sequence[str]],
    shapes: Mapping[str, Shape],
    setup: Setup,
    ranks: int,
    rank: int,
    *,
    muon: Sequence[bool] = (),
    flattened: bool = False,
) -> list[FlatBuffer]:
    """Returns all flat buffers of one rank. ``groups``: for each param group, the names of its parameters in the order
    in which DeepSpeed keeps them. ``muon``: for each param group, whether the optimizer Muon updates it. ``flattened``:
    whether stage 0 has one flat buffer for each group."""
    if setup.stage == 3:
        return [
            FlatBuffer(number, cut_each(sub_group, rank, ranks), torch.empty(_numel(sub_group, ranks), device="meta"))
            for number, group in enumerate(groups)
            for sub_group in _sub_groups([(name, all_of(shapes[name])) for name in group], setup.sub_group_size, ranks)
        ]
    if setup.stage in (1, 2):
        return [
            _partition(number, group, shapes, setup, ranks, rank, bool(muon and muon[number]))
            for number, group in enumerate(groups)
        ]
    flat_buffers = []
    for number, group in enumerate(groups):
        for names in [group] if flattened else [[name] for name in group]:
            own_shapes = [shapes[name] for name in names]
            numel = sum(map(math.prod, own_shapes))
            ranges = cut_together(zip(names, map(all_of, own_shapes), consecutive(own_shapes), strict=True), 0, numel)
            if ranges:
                shape = (numel,) if flattened else own_shapes[0]
                master = torch.empty(shape, device="meta")
                flat_buffers.append(FlatBuffer(number, ranges, master, whole=len(names) == 1))
    return flat_buffers


def _numel(named: Sequence[tuple[str, Span]], ranks: int) -> int:
    """Returns the number of elements that each rank has of parameters that are each cut on their own, including the
    padding."""
    return sum(partition_numel(held.numel, ranks) for _, held in named)


def _sub_groups(named: Sequence[tuple[str, Span]], numel_max: int, ranks: int) -> list[Sequence[tuple[str, Span]]]:
    """Returns the sub-groups of a param group, as DeepSpeed's ``_create_fp16_sub_groups`` makes them. A sub-group is
    full once a rank has ``numel_max`` elements of it, or more."""
    if not named or numel_max >= _numel(named, ranks):
        return [named] if named else []
    sub_groups: list[list[tuple[str, Span]]] = [[]]
    numel = 0
    for name, held in named:
        if numel >= numel_max:
            sub_groups.append([])
            numel = 0
        sub_groups[-1].append((name, held))
        numel += partition_numel(held.numel, ranks)
    return [*sub_groups]


def _partition(
    number: int, names: Sequence[str], shapes: Mapping[str, Shape], setup: Setup, ranks: int, rank: int, by_muon: bool
) -> FlatBuffer:
    """Returns the flat buffer with the partition that a rank has of one param group at stage 1 or 2."""
    group_shapes = [shapes[name] for name in names]
    offsets, _, numel = offsets_of(group_shapes, setup)
    length = -(-numel // (START_ALIGNMENT * ranks)) * START_ALIGNMENT
    held = {name: all_of(shapes[name]) for name in names}
    ranges = cut_together(zip(names, held.values(), offsets, strict=True), rank, length)
    wider = momentum_of_muon(ranges, held) if by_muon else {}
    return FlatBuffer(number, ranges, torch.empty(length, device="meta"), wider=wider)
