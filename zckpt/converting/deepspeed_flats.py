"""Where DeepSpeed 0.19.8 keeps each parameter in its flat tensors, at any stage and on any number of ranks. These are
pure functions of names, shapes and settings, which need no engine. In the following, P is the number of ranks.

Stages 1 and 2 put the parameters of a group one behind the other, pad the end to a multiple of 2 P elements, and cut
that into P partitions. Stage 3 pads and cuts each parameter on its own; a flat tensor holds what one rank has of a
sub-group. Stage 0 cuts nothing: each flat tensor is a whole param group, or one parameter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from zckpt.engines.deepspeed.flats import Flat, consecutive, cut_each, cut_together, momentum_of_muon, partition_numel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.engines.deepspeed.setup import Setup

Shape = tuple[int, ...]
START_ALIGNMENT = 2
"""The number of elements in a partition of stages 1 and 2 is a multiple of this. DeepSpeed calls it
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


def round_robin(things: Sequence[int], ranks: int) -> list[int]:
    """Returns the order that DeepSpeed's ``_round_robin_reorder`` makes: every P-th thing, beginning with the first
    one, then every P-th one beginning with the second, and so on."""
    return [thing for first in range(ranks) for thing in things[first::ranks]]


def offsets_of(shapes: Sequence[Shape], setup: Setup) -> tuple[list[int], list[int], int]:
    """For stages 1 and 2, returns the element at which each parameter of a group begins, the number of elements of
    padding behind each, and the element at which the last one ends."""
    item = getattr(torch, setup.dtype).itemsize
    multiple = PARAMETER_ALIGNMENT_BYTES // math.gcd(PARAMETER_ALIGNMENT_BYTES, item)
    multiple = multiple if setup.aligns else 1
    offsets, paddings, at = [], [], 0
    for number, shape in enumerate(shapes):
        offsets.append(at)
        at += math.prod(shape)
        paddings.append(-at % multiple if number < len(shapes) - 1 else 0)
        at += paddings[-1]
    return offsets, paddings, at


def flats(
    groups: Sequence[Sequence[str]],
    shapes: Mapping[str, Shape],
    setup: Setup,
    ranks: int,
    rank: int,
    *,
    muon: Sequence[bool] = (),
    flattened: bool = False,
) -> list[Flat]:
    """Returns all flat tensors of one rank. ``groups``: for each param group, the names of its parameters in the order
    in which DeepSpeed keeps them. ``muon``: for each param group, whether the optimizer Muon updates it. ``flattened``:
    whether stage 0 has one flat tensor for each group."""
    if setup.stage == 3:
        return [
            Flat(number, cut_each(own, rank, ranks), torch.empty(_numel(own, ranks), device="meta"))
            for number, group in enumerate(groups)
            for own in _sub_groups([(name, shapes[name]) for name in group], setup.sub_group_size, ranks)
        ]
    if setup.stage in (1, 2):
        return [
            _partition(number, group, shapes, setup, ranks, rank, bool(muon and muon[number]))
            for number, group in enumerate(groups)
        ]
    found = []
    for number, group in enumerate(groups):
        for names in [group] if flattened else [[name] for name in group]:
            own = [shapes[name] for name in names]
            slots = cut_together(zip(names, own, consecutive(own), strict=True), 0, sum(map(math.prod, own)))
            if slots:
                shape = (sum(map(math.prod, own)),) if flattened else own[0]
                found.append(Flat(number, slots, torch.empty(shape, device="meta"), whole=len(names) == 1))
    return found


def _numel(named: Sequence[tuple[str, Shape]], ranks: int) -> int:
    """The elements that each rank has of parameters that are cut on their own."""
    return sum(partition_numel(shape, ranks) for _, shape in named)


def _sub_groups(named: Sequence[tuple[str, Shape]], numel_max: int, ranks: int) -> list[Sequence[tuple[str, Shape]]]:
    """Returns the sub-groups of a param group, as DeepSpeed's ``_create_fp16_sub_groups`` makes them. A sub-group is
    full once a rank has ``numel_max`` elements of it or more."""
    if not named or numel_max >= _numel(named, ranks):
        return [named] if named else []
    found: list[list[tuple[str, Shape]]] = [[]]
    numel = 0
    for one in named:
        if numel >= numel_max:
            found.append([])
            numel = 0
        found[-1].append(one)
        numel += partition_numel(one[1], ranks)
    return [*found]


def _partition(
    number: int, names: Sequence[str], shapes: Mapping[str, Shape], setup: Setup, ranks: int, rank: int, by_muon: bool
) -> Flat:
    own = [shapes[name] for name in names]
    offsets, _, numel = offsets_of(own, setup)
    length = -(-numel // (START_ALIGNMENT * ranks)) * START_ALIGNMENT
    slots = cut_together(zip(names, own, offsets, strict=True), rank, length)
    return Flat(number, slots, torch.empty(length, device="meta"), wider=momentum_of_muon(slots) if by_muon else {})
