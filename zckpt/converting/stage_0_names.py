"""Finds the names of the parameters in an optimizer of stage 0, for which DeepSpeed saves no names.

Such an optimizer numbers its parameters, group by group. They are taken to be in the order of the module, if their
shapes agree with that. If there are master weights, these decide: rounded to the dtype of the model, they are equal to
its weights. If more than one answer is possible, an error is raised.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import torch

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMPARED_NUMEL = 65536
"""The number of elements of a parameter that are compared to tell it from others."""
HINT = (
    "load the checkpoint into an engine after zckpt.attach(engine), which reads DeepSpeed's checkpoints too, and write "
    "it with zckpt.write"
)


def named_by_shape(
    groups: Sequence[Sequence[tuple[int, ...] | None]], module: Mapping[str, torch.Tensor]
) -> list[list[str]]:
    """Returns the names of the parameters of each group. ``groups``: the shapes of these parameters; None stands for a
    parameter without any state, whose shape is not known. Raises UnsupportedError where more than one order is
    possible."""
    slots = [shape for group in groups for shape in group]
    shapes = {name: tuple(weight.shape) for name, weight in module.items()}
    if len(slots) == len(shapes) and all(a in (None, b) for a, b in zip(slots, shapes.values(), strict=True)):
        names = iter(shapes)
        return [[next(names) for _ in group] for group in groups]
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        for at, shape in enumerate(group):
            if shape is None:
                raise _unknown("some of them have no state yet")
            places.setdefault(shape, []).append((number, at))
    found = [[""] * len(group) for group in groups]
    for shape, own in places.items():
        called = [name for name, other in shapes.items() if other == shape]
        if len(called) != len(own) or len({number for number, _ in own}) > 1:
            raise _unknown(f"{len(called)} weights of the module and {len(own)} of the optimizer are {list(shape)}")
        for (number, at), name in zip(own, called, strict=True):
            found[number][at] = name
    return found


def named_by_value(flats: Sequence[torch.Tensor], module: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Returns the names of the parameters of each group. ``flats``: for each group the flat tensor in which the master
    weights of its parameters lie one behind the other. Raises UnsupportedError where more than one answer is possible,
    or none."""
    left = {name: weight for name, weight in module.items() if weight.numel()}
    found: dict[int, list[str]] = {}
    while len(found) < len(flats):
        known = len(found)
        for number, flat in enumerate(flats):
            names = None if number in found else _only_order(flat, left)
            if names is not None:
                found[number] = names
                left = {name: weight for name, weight in left.items() if name not in names}
        if len(found) == known:
            raise _unknown("for one place in the optimizer, several weights of the module fit, or none does")
    return [found[number] for number in range(len(flats))]


def check_values(masters: Sequence[torch.Tensor], names: Sequence[str], module: Mapping[str, torch.Tensor]) -> None:
    """Raises UnsupportedError unless each master weight, rounded, equals the weight of this name."""
    for master, name in zip(masters, names, strict=True):
        if not _same(master, 0, module[name]):
            raise _unknown(f"the weight {name} does not fit its place in the optimizer")


def _only_order(flat: torch.Tensor, module: Mapping[str, torch.Tensor]) -> list[str] | None:
    """Returns the only choice of weights, in the order of ``module``, that fills ``flat``. Returns None if there is
    more than one such choice, or none."""
    names, weights = list(module), list(module.values())
    ways: dict[int, dict[int, tuple[int, int]]] = {0: {-1: (1, -1)}}
    """For each element at which a weight can end, the numbers of the weights that can end there. Each has the number of
    ways in which it can, and a weight that may come before it."""
    ends = [0]
    while ends and ends[0] < flat.numel():
        offset = heapq.heappop(ends)
        fitting = [number for number, weight in enumerate(weights) if _same(flat, offset, weight)]
        for last, (count, _) in ways[offset].items():
            for number in fitting:
                if number > last:
                    end = offset + weights[number].numel()
                    if end not in ways:
                        heapq.heappush(ends, end)
                    before = ways.setdefault(end, {}).get(number, (0, 0))[0]
                    ways[end][number] = before + count, last
    last_ones = ways.get(flat.numel(), {})
    if sum(count for count, _ in last_ones.values()) != 1:
        return None
    offset, (last,) = flat.numel(), last_ones
    found = []
    while offset:
        found.append(names[last])
        offset, last = offset - weights[last].numel(), ways[offset][last][1]
    return found[::-1]


def _same(flat: torch.Tensor, offset: int, weight: torch.Tensor) -> bool:
    if offset + weight.numel() > flat.numel():
        return False
    for count in (16, COMPARED_NUMEL):  # most weights differ in their first elements
        count = min(weight.numel(), count)
        rounded = flat.detach().view(-1).narrow(0, offset, count).to(weight.dtype)
        if not torch.equal(_bits(rounded), _bits(weight.detach().view(-1)[:count])):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _unknown(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"at stage 0, DeepSpeed saves the optimizer's state without names, which cannot be found out here: {why}",
        hint=HINT,
    )
