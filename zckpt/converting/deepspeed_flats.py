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

from zckpt.engines.deepspeed.flats import Flat, Slot

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
            _sub_group(number, names, shapes, ranks, rank)
            for number, group in enumerate(groups)
            for names in _sub_groups(group, shapes, setup, ranks)
        ]
    if setup.stage in (1, 2):
        return [
            _partition(number, group, shapes, setup, ranks, rank, bool(muon and muon[number]))
            for number, group in enumerate(groups)
        ]
    found = []
    for number, group in enumerate(groups):
        for names in [group] if flattened else [[name] for name in group]:
            slots, at = [], 0
            for name in names:
                numel = math.prod(shapes[name])
                slots.append(Slot(name, shapes[name], 0, numel, at))
                at += numel
            if names:
                shape = (at,) if flattened else shapes[names[0]]
                found.append(Flat(number, tuple(slots), torch.empty(shape, device="meta"), whole=len(names) == 1))
    return found


def partition(name: str, shape: Shape, ranks: int, rank: int, at: int = 0) -> tuple[Slot, int]:
    """Stage 3: returns the elements of a parameter that a rank has, which begin at element ``at`` of its flat tensor,
    and the number of elements of the rank's partition, padding included."""
    numel = math.prod(shape)
    length = -(-numel // ranks)
    start = min(rank * length, numel)
    return Slot(name, shape, start, min(start + length, numel), at), length


def _sub_groups(names: Sequence[str], shapes: Mapping[str, Shape], setup: Setup, ranks: int) -> list[list[str]]:
    """Returns the sub-groups of a param group, as DeepSpeed's ``_create_fp16_sub_groups`` makes them."""
    lengths = {name: -(-math.prod(shapes[name]) // ranks) for name in names}
    if setup.sub_group_size >= sum(lengths.values()):
        return [list(names)] if names else []
    found: list[list[str]] = [[]]
    length = 0
    for name in names:
        if length >= setup.sub_group_size:
            found.append([])
            length = 0
        found[-1].append(name)
        length += lengths[name]
    return found


def _sub_group(number: int, names: Sequence[str], shapes: Mapping[str, Shape], ranks: int, rank: int) -> Flat:
    slots, at = [], 0
    for name in names:
        slot, length = partition(name, shapes[name], ranks, rank, at)
        slots.append(slot)
        at += length
    return Flat(number, tuple(slots), torch.empty(at, device="meta"))


def _partition(
    number: int, names: Sequence[str], shapes: Mapping[str, Shape], setup: Setup, ranks: int, rank: int, by_muon: bool
) -> Flat:
    offsets, _, numel = offsets_of([shapes[name] for name in names], setup)
    length = -(-numel // (START_ALIGNMENT * ranks)) * START_ALIGNMENT
    begin, end = rank * length, (rank + 1) * length
    slots, whole, wider_at = [], [], 0
    for name, offset in zip(names, offsets, strict=True):
        own = math.prod(shapes[name])
        start = min(max(begin - offset, 0), own)
        stop = max(min(end - offset, own), start)
        slots.append(Slot(name, shapes[name], start, stop, offset + start - begin if start < stop else 0))
        if by_muon and start < stop:
            whole.append(Slot(name, shapes[name], 0, own, wider_at))
            wider_at += own
    wider = {"momentum_buffer": tuple(whole)} if whole else {}
    return Flat(number, tuple(slots), torch.empty(length, device="meta"), wider=wider)
