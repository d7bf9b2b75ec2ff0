"""Flat partitions: the 1-D buffers in which every ZeRO stage keeps master weights and optimizer states.

A flat belongs to one param group. Its parameters' partitions lie in it one after another, padding between or behind
them. What the optimizer keeps for it is told apart by shape. A tensor of the flat's own shape is a *moment*: it lies
exactly alike, and can be cut anew for any other layout. Of the rest, single numbers mean the same for every flat; other
tensors and collections are *bound* to this one and mean nothing for one that is cut otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.tensors import dtype_name
from zckpt.state.inventory import MASTER, RESERVED_PARTS, FileSpan, Fragment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements ``[start, stop)`` of one parameter, kept from element ``offset`` of a flat on. May be empty."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


def cut_together(named: Iterable[tuple[str, Sequence[int], int]], rank: int, length: int) -> tuple[Slot, ...]:
    """Returns what rank ``rank`` holds of parameters that lie one behind the other in a buffer. Each rank has
    ``length`` elements of the buffer. ``named``: for each parameter its name, its shape, and the element of the buffer
    at which it begins."""
    begin, end, slots = rank * length, (rank + 1) * length, []
    for name, shape, offset in named:
        numel = math.prod(shape)
        # Of a parameter that lies wholly in other partitions, this is an empty span at one end or the other.
        start = min(max(begin - offset, 0), numel)
        stop = max(min(end - offset, numel), start)
        slots.append(Slot(name, tuple(shape), start, stop, offset + start - begin if start < stop else 0))
    return tuple(slots)


def cut_alone(name: str, shape: Sequence[int], rank: int, ranks: int, offset: int = 0) -> Slot:
    """Returns what rank ``rank`` holds of a parameter that is cut on its own into ``ranks`` partitions of equal length,
    the last of which are padded. ``offset``: the element of the rank's flat at which its partition begins."""
    numel, length = math.prod(shape), partition_numel(shape, ranks)
    start = min(rank * length, numel)
    return Slot(name, tuple(shape), start, min(start + length, numel), offset)


def partition_numel(shape: Sequence[int], ranks: int) -> int:
    """The elements of each partition of a parameter that is cut on its own, padding included."""
    return -(-math.prod(shape) // ranks)


def cut_each(named: Iterable[tuple[str, Sequence[int]]], rank: int, ranks: int) -> tuple[Slot, ...]:
    """What rank ``rank`` holds of parameters that are each cut on their own: its partitions lie one behind the other.
    ``named``: their names and shapes."""
    slots, offset = [], 0
    for name, shape in named:
        slots.append(cut_alone(name, shape, rank, ranks, offset))
        offset += partition_numel(shape, ranks)
    return tuple(slots)


def consecutive(shapes: Iterable[Sequence[int]]) -> list[int]:
    """Where tensors of these shapes begin when they lie one behind the other."""
    return list(accumulate(map(math.prod, shapes), initial=0))[:-1]


def momentum_of_muon(slots: Iterable[Slot]) -> dict[str, tuple[Slot, ...]]:
    """``Flat.wider`` of a flat that Muon updates: its momentum has the whole of each parameter of which the flat holds
    any elements, one behind the other."""
    held = [slot for slot in slots if slot.start < slot.stop]
    offsets = consecutive(slot.shape for slot in held)
    whole = [replace(s, start=0, stop=math.prod(s.shape), offset=at) for s, at in zip(held, offsets, strict=True)]
    return {"momentum_buffer": tuple(whole)} if whole else {}


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """One flat of this rank: fp32 ``master``, the key of the optimizer's state. 1-D, or one whole parameter."""

    group: int
    """Index of the optimizer's param group."""
    slots: tuple[Slot, ...]
    """All parameters of the flat in memory order, also those of which this rank holds nothing."""
    master: torch.Tensor
    files: Mapping[str, FileSpan] = field(default_factory=dict)
    """Where master and moments are, by part, while they lie in swap files; their tensors have no elements then."""
    whole: bool = False
    """The one parameter that it holds is whole, in its own shape and the same on every rank."""
    wider: Mapping[str, tuple[Slot, ...]] = field(default_factory=dict)
    """Moments that are 1-D and hold more than the flat, by part: where the parameters lie in each."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    @property
    def numel(self) -> int:
        file = self.files.get(MASTER)
        return self.master.numel() if file is None else file.nbytes // self.master.dtype.itemsize

    def moment_shape(self, part: str) -> tuple[int, ...]:
        """The shape of a moment in memory."""
        if part in self.wider:
            return (sum(slot.stop - slot.start for slot in self.wider[part]),)
        return (self.numel,) if self.files else tuple(self.master.shape)

    def fragments(
        self, part: str, dtype: torch.dtype, data: torch.Tensor | FileSpan | None = None, tier: str = "device"
    ) -> Iterator[Fragment]:
        """What this rank writes of ``part``, in memory order; ``data`` is the master or a moment."""
        slots = self.slots
        if part in self.wider:
            starts = {slot.name: slot.offset for slot in self.wider[part]}
            slots = tuple(replace(s, offset=starts[s.name] + s.start) for s in slots if s.start < s.stop)
        return _fragments(slots, part, dtype, data, tier)

    def wanted(self, part: str, dtype: torch.dtype, data: torch.Tensor | None = None) -> Iterator[Fragment]:
        """What this rank reads of ``part``: all that its memory holds, though other ranks may write some of it."""
        return _fragments(self.wider.get(part, self.slots), part, dtype, data, "device")

    def expected(self, part: str, dtype: torch.dtype) -> Iterator[Fragment]:
        """The same fragments without data, in the same order on every rank. For a parameter of which this rank reads
        nothing, a fragment of no elements."""
        read = {slot.name: slot for slot in self.wider.get(part, self.slots)}
        for own in self.slots:
            slot = read.get(own.name, replace(own, stop=own.start))
            name = dtype_name(dtype, f"{part}/{slot.name}")
            yield Fragment(part, slot.name, slot.shape, name, slot.start, slot.stop)


def _fragments(
    slots: Iterable[Slot], part: str, dtype: torch.dtype, data: torch.Tensor | FileSpan | None, tier: str
) -> Iterator[Fragment]:
    tier = "nvme" if isinstance(data, FileSpan) else tier
    for slot in slots:
        if slot.start < slot.stop:
            view = None if data is None else part_of(data, slot.offset, slot.stop - slot.start, dtype)
            name = dtype_name(dtype, f"{part}/{slot.name}")
            yield Fragment(part, slot.name, slot.shape, name, slot.start, slot.stop, tier, data=view)


def part_of(data: torch.Tensor | FileSpan, start: int, count: int, dtype: torch.dtype) -> torch.Tensor | FileSpan:
    """``count`` elements of ``data`` in row-major order from ``start`` on, 1-D; shares its memory or file."""
    if isinstance(data, FileSpan):
        return data.narrow(start * dtype.itemsize, count * dtype.itemsize)
    return data.detach().view(-1).narrow(0, start, count)


def foreign(parameters: Mapping[str, Any], optimized: Iterable[Any]) -> Iterator[str]:
    """What to say where the optimizer has parameters that are not among the module's, which have no name."""
    known = {id(parameter) for parameter in parameters.values()}
    if any(id(parameter) not in known for parameter in optimized):
        yield "an optimizer with parameters that are not the module's"


def moments(flat: Flat, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The moments in a flat's optimizer state, by torch name."""
    return {key: value for key, value in state.items() if _is_moment(flat, key, value)}


def numbers(flat: Flat, state: Mapping[str, Any]) -> dict[str, Any]:
    """What means the same for any flat, such as ``step``."""
    return {key: value for key, value in _rest(flat, state) if not is_collective(value)}


def bound(flat: Flat, state: Mapping[str, Any]) -> dict[str, Any]:
    """What means nothing but for a flat of the same ``geometry``."""
    return {key: value for key, value in _rest(flat, state) if is_collective(value)}


def geometry(flat: Flat) -> dict[str, Any]:
    """All that the optimizer's view of a flat depends on, as a plain tree."""
    slots = [[slot.name, list(slot.shape), slot.start, slot.stop, slot.offset] for slot in flat.slots]
    return {"numel": flat.numel, "slots": slots}


def _rest(flat: Flat, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if not _is_moment(flat, key, value) and not _is_leftover(key):
            yield key, value


def is_collective(value: Any) -> bool:
    """Whether ``value``, if it is no moment, is bound to its flat."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    return isinstance(value, Collection) and not isinstance(value, (str, bytes))


def _is_moment(flat: Flat, key: str, value: Any) -> bool:
    # torch keeps `step` as a tensor of shape (), which is also that of a parameter with no dimensions.
    if not isinstance(value, torch.Tensor) or key == "step" or key in RESERVED_PARTS or _is_leftover(key):
        return False
    if flat.files and value.shape == flat.master.shape:
        return True  # in a file as well
    return tuple(value.shape) == flat.moment_shape(key)


_LEFTOVER = "_offload_buffer"
"""DeepSpeed's offload_states() leaves its staging buffers in the optimizer state for good, with this after the key."""


def _is_leftover(key: str) -> bool:
    return key.endswith(_LEFTOVER)


def part_of_state(key: str) -> str:
    """The part to which a key of the optimizer's state belongs, of a moment or not."""
    return key.removesuffix(_LEFTOVER)
