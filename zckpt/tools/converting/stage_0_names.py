"""Finds the names of the parameters in an optimizer of stage 0, for which DeepSpeed saves no names.

Such an optimizer numbers its parameters, group by group. If their shapes agree with the order of the parameters in the
module, they are assumed to be in that order. If there are master weights, their values decide: rounded to the dtype of
the model, they are equal to its weights. If more than one answer is possible, an error is raised.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError
from zckpt.format.digest import digest
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.stored import with_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

FIRST_NUMEL, COMPARED_NUMEL = 16, 65536
"""The most elements of a parameter that are compared to tell it from other parameters. A first comparison takes only
``FIRST_NUMEL`` of them, because most weights already differ there. If they do not, a second one takes
``COMPARED_NUMEL``."""
STEPS_MAX = 4_000_000
"""How many steps the search for the names takes at most. A step reads up to 4 KiB. A module with a thousand equal
weights, such as biases that are still zero, takes about two million."""
HINT = (
    "load the checkpoint into an engine after zckpt.attach(engine), which reads DeepSpeed's checkpoints too, and write "
    "it with zckpt.write"
)
"""What the errors of this module advise the user to do."""


def named_by_shape(
    groups: Sequence[Sequence[tuple[int, ...] | None]], module: Mapping[str, torch.Tensor]
) -> list[list[str]]:
    """Returns the names of the parameters of each group. ``groups``: the shapes of these parameters. None stands for a
    parameter without any state, whose shape is not known. Raises UnsupportedError if more than one order is
    possible."""
    all_shapes = [shape for group in groups for shape in group]
    shapes = {name: tuple(weight.shape) for name, weight in module.items()}
    if len(all_shapes) == len(shapes) and all(a in (None, b) for a, b in zip(all_shapes, shapes.values(), strict=True)):
        names = iter(shapes)
        return [[next(names) for _ in group] for group in groups]
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        for position, shape in enumerate(group):
            if shape is None:
                raise _unknown("some of them have no state yet")
            places.setdefault(shape, []).append((number, position))
    names_of_groups = [[""] * len(group) for group in groups]
    names_of_shapes: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        names_of_shapes.setdefault(shape, []).append(name)
    for shape, positions in places.items():
        fitting = names_of_shapes.get(shape, [])
        if len(fitting) != len(positions) or len({number for number, _ in positions}) > 1:
            counts = f"{len(fitting)} weights of the module and {len(positions)} of the optimizer"
            raise _unknown(f"{counts} are {list(shape)}")
        for (number, position), name in zip(positions, fitting, strict=True):
            names_of_groups[number][position] = name
    return names_of_groups


def named_by_value(flats: Sequence[torch.Tensor], module: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Returns the names of the parameters of each group. ``flats``: for each group, the flat buffer in which the master
    weights of its parameters lie one after another. Raises UnsupportedError if no answer is possible, or more than
    one."""
    unused = {name: weight for name, weight in module.items() if weight.numel()}
    search = _Search(unused)
    names_of_groups: dict[int, list[str]] = {}
    while len(names_of_groups) < len(flats):
        known = len(names_of_groups)
        for number, flat in enumerate(flats):
            names = None if number in names_of_groups else search.only_order(flat, unused)
            if names is not None:
                names_of_groups[number] = names
                unused = {name: weight for name, weight in unused.items() if name not in names}
        if len(names_of_groups) == known:
            raise _unknown("for one place in the optimizer, several weights of the module fit, or none does")
    return [names_of_groups[number] for number in range(len(flats))]


def check_values(masters: Sequence[torch.Tensor], names: Sequence[str], module: Mapping[str, torch.Tensor]) -> None:
    """Raises UnsupportedError unless each master weight, after rounding, equals the weight of this name. At most
    ``COMPARED_NUMEL`` elements of each are compared."""
    for master, name in zip(masters, names, strict=True):
        weight = module[name]
        compared = 0, min(weight.numel(), COMPARED_NUMEL), weight.dtype
        if weight.numel() > master.numel() or rounded_bytes(master, *compared) != rounded_bytes(weight, *compared):
            raise _unknown(f"the weight {name} does not fit its place in the optimizer")


class _Search:
    """Searches for the weights that fill flat buffers, in at most ``STEPS_MAX`` steps for all of them."""

    def __init__(self, module: Mapping[str, torch.Tensor]) -> None:
        self._by_beginning: dict[tuple[torch.dtype, bytes], list[str]] = {}
        """The names of the weights by their dtype and the bytes of their first elements."""
        for name, weight in module.items():
            key = weight.dtype, rounded_bytes(weight, 0, FIRST_NUMEL, weight.dtype)
            self._by_beginning.setdefault(key, []).append(name)
        self._digests: dict[str, bytes] = {}
        """The digests of weights by name, as far as they are known."""
        self._steps = 0

    def only_order(self, flat: torch.Tensor, module: Mapping[str, torch.Tensor]) -> list[str] | None:
        """Returns the only choice of weights that fills ``flat`` in the order of ``module``. Returns None if there is
        no such choice, or more than one."""
        names, weights = list(module), list(module.values())
        numbers = {name: number for number, name in enumerate(names)}
        dtypes = {weight.dtype for weight in weights}
        ways: dict[int, dict[int, tuple[int, int]]] = {0: {-1: (1, -1)}}
        """For each element of ``flat`` at which a weight can end, the numbers of the weights that can end there. For
        each of these weights, the value has the number of ways that lead to it, and a weight that can come before
        it."""
        ends = [0]
        while ends and ends[0] < flat.numel():
            offset = heapq.heappop(ends)
            fitting = [numbers[name] for dtype in dtypes for name in self._fitting(flat, offset, dtype, module)]
            for last, (count, _) in ways[offset].items():
                self._step(len(fitting))
                for number in fitting:
                    if number > last:
                        end = offset + weights[number].numel()
                        if end not in ways:
                            heapq.heappush(ends, end)
                        ways_before = ways.setdefault(end, {}).get(number, (0, 0))[0]
                        ways[end][number] = ways_before + count, last
        last_ones = ways.get(flat.numel(), {})
        if sum(count for count, _ in last_ones.values()) != 1:
            return None
        offset, (last,) = flat.numel(), last_ones
        chosen = []
        while offset:
            chosen.append(names[last])
            offset, last = offset - weights[last].numel(), ways[offset][last][1]
        return chosen[::-1]

    def _fitting(
        self, flat: torch.Tensor, offset: int, dtype: torch.dtype, module: Mapping[str, torch.Tensor]
    ) -> Iterator[str]:
        """Yields the names of the weights of a dtype that can begin at element ``offset`` of ``flat``."""
        here = rounded_bytes(flat, offset, FIRST_NUMEL, dtype)
        digests: dict[int, bytes] = {}
        for beginning in {here[:nbytes] for nbytes in range(dtype.itemsize, len(here) + 1, dtype.itemsize)}:
            for name in self._by_beginning.get((dtype, beginning), ()):
                if name in module:
                    numel = module[name].numel()
                    if numel not in digests:
                        digests[numel] = self._digest(flat, offset, numel, dtype)
                    if name not in self._digests:
                        self._digests[name] = self._digest(module[name], 0, numel, dtype)
                    self._step(1)
                    if digests[numel] == self._digests[name]:
                        yield name

    def _digest(self, tensor: torch.Tensor, start: int, numel: int, dtype: torch.dtype) -> bytes:
        """Returns a digest of the elements that are compared of a weight of ``numel`` elements, which may begin at
        element ``start`` of ``tensor``. Returns no bytes if it cannot."""
        count = min(numel, COMPARED_NUMEL)
        self._step(1 + count * dtype.itemsize // 4096)
        return digest(rounded_bytes(tensor, start, count, dtype)) if start + numel <= tensor.numel() else b""

    def _step(self, count: int) -> None:
        """Counts steps. Raises UnsupportedError if there are too many."""
        self._steps += count
        if self._steps > STEPS_MAX:
            raise _unknown("too many weights of the module are equal")


def rounded_bytes(tensor: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> bytes:
    """Returns the bytes of up to ``count`` elements from element ``start`` on, rounded to ``dtype``. Compared as bytes,
    NaN is equal to the same NaN."""
    return host_bytes(with_values(tensor.detach().view(-1)[start : start + count]).to(dtype)).tobytes()


def _unknown(why: str) -> UnsupportedError:
    """Returns the error for an optimizer whose parameters cannot be named."""
    return UnsupportedError(
        f"at stage 0, DeepSpeed saves the optimizer's state without names, which cannot be found out here: {why}",
        hint=HINT,
    )
