"""Flat buffers: the tensors in which an engine keeps master weights and optimizer states.

A flat buffer belongs to one param group. With ZeRO it is mostly 1-D, and holds the partitions of parameters one after
another, with padding between or after them. Elsewhere it is what a rank holds of one parameter. What the optimizer
keeps for a flat buffer is divided by shape. A tensor with the shape of the flat buffer is a *moment*: its elements have
the same places as those of the master weights, so it can be cut anew for any other layout. Of all other values, single
numbers have the same meaning for every flat buffer. Other tensors and collections are *bound* to one flat buffer, and
have no meaning for a flat buffer that is cut in another way. So are tensors whose values are elsewhere, such as
quantized moments, even if they have the shape of the flat buffer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zckpt.engines.tensors import dtype_name
from zckpt.format.grids import packed_sections
from zckpt.format.names import Tier, is_part_name
from zckpt.plan.inventory import MASTER, RESERVED_PARTS, FileRange, Fragment
from zckpt.transfer.memory import has_own_operations

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from zckpt.geometry import Span


class ParameterRange(NamedTuple):
    """Elements of one parameter, which a flat buffer holds. There may be none."""

    name: str
    """The name of the parameter."""
    span: Span
    """The elements."""
    offset: int
    """The element of the flat buffer at which they begin."""
    replicated: str = ""
    """The value of ``Fragment.replicated`` for these elements."""
    written: bool = True
    """Whether this rank writes the elements. If not, another rank writes them, which holds them too."""
    stored_as: str = ""
    """The name that the whole parameter has in a checkpoint, if it is another one (``LocalTensor.stored_as``)."""

    @property
    def stored_name(self) -> str:
        """The name of the tensor in a checkpoint that has these elements."""
        return self.stored_as or self.name


def cut_together(named: Iterable[tuple[str, Span, int]], rank: int, length: int) -> tuple[ParameterRange, ...]:
    """Returns the ranges that ``rank`` holds of parameters which lie one after another in a buffer that is cut into
    partitions of ``length`` elements, one for each rank. ``named``: for each parameter its name, its elements, and the
    element of the buffer at which they begin."""
    begin, ranges = rank * length, []
    for name, held, offset in named:
        span = held.clip(begin - offset, begin + length - offset)
        ranges.append(ParameterRange(name, span, max(offset - begin, 0) if span.numel else 0))
    return tuple(ranges)


def cut_alone(name: str, held: Span, rank: int, ranks: int, offset: int = 0) -> ParameterRange:
    """Returns the range that ``rank`` holds of a parameter whose elements ``held`` are cut on their own into ``ranks``
    partitions of equal length, the last of which may be padded. ``offset``: the element of the rank's flat buffer at
    which the partition of the parameter begins."""
    length = partition_numel(held.numel, ranks)
    return ParameterRange(name, held.clip(rank * length, (rank + 1) * length), offset)


def partition_numel(numel: int, ranks: int) -> int:
    """Returns the number of elements in each partition of ``numel`` elements that are cut on their own, including the
    padding."""
    return -(-numel // ranks)


def cut_each(named: Iterable[tuple[str, Span]], rank: int, ranks: int) -> tuple[ParameterRange, ...]:
    """Returns the ranges that ``rank`` holds of parameters that are each cut on their own into ``ranks`` partitions.
    The partitions of the rank lie one after another in its flat buffer. ``named``: the name and the elements of each
    parameter."""
    ranges, offset = [], 0
    for name, held in named:
        ranges.append(cut_alone(name, held, rank, ranks, offset))
        offset += partition_numel(held.numel, ranks)
    return tuple(ranges)


def consecutive(shapes: Iterable[Sequence[int]]) -> list[int]:
    """Returns the element at which each of these tensors begins if they lie one after another without padding."""
    return list(accumulate(map(math.prod, shapes), initial=0))[:-1]


def momentum_of_muon(
    ranges: Iterable[ParameterRange], held: Mapping[str, Span]
) -> dict[str, tuple[ParameterRange, ...]]:
    """Returns the value of ``FlatBuffer.wider`` for a flat buffer that Muon updates. ``held``: the elements of each
    parameter before they are cut into partitions. Muon's momentum has these of each parameter of which the flat buffer
    has any elements, one parameter after another."""
    whole, offset = [], 0
    for part in (parameter_range for parameter_range in ranges if parameter_range.span.numel):
        whole.append(ParameterRange(part.name, held[part.name], offset, stored_as=part.stored_as))
        offset += held[part.name].numel
    return {"momentum_buffer": tuple(whole)} if whole else {}


_NONE: Mapping[str, Any] = {}
"""One object for all flat buffers, because there may be very many."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatBuffer:
    """One flat buffer of this rank. It is 1-D, or it is one whole parameter in the parameter's own shape."""

    group: int
    """The index of the optimizer's param group to which the flat buffer belongs."""
    ranges: tuple[ParameterRange, ...]
    """The ranges of all parameters of the flat buffer, in memory order. A parameter of which this rank holds no
    elements has an empty range."""
    master: torch.Tensor
    """The master weights. The optimizer's state has this tensor as its key. It has no elements while the values are in
    a swap file."""
    files: Mapping[str, FileRange] = field(default_factory=lambda: _NONE)
    """For each part of the flat buffer that is in a swap file now, the range of that file. While it is there, the
    tensor of the part has no elements."""
    whole: bool = False
    """Whether the flat buffer holds exactly one parameter, whole, in its own shape and equal on every rank that has
    it."""
    wider: Mapping[str, tuple[ParameterRange, ...]] = field(default_factory=lambda: _NONE)
    """For each moment that is 1-D and holds more elements than the flat buffer: the ranges of the parameters in that
    moment."""
    shares: tuple[ParameterRange, ...] | None = None
    """The ranges that this rank reads in a restore, if it reads less than it holds, because other ranks read the
    rest."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters of the flat buffer, in memory order."""
        return tuple(parameter_range.name for parameter_range in self.ranges)

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of these parameters in a checkpoint. Each name is there once."""
        if len(self.ranges) == 1:  # There may be very many flat buffers with one parameter.
            return (self.ranges[0].stored_name,)
        return tuple(dict.fromkeys([parameter_range.stored_name for parameter_range in self.ranges]))

    @property
    def numel(self) -> int:
        """The number of elements, including the padding."""
        file = self.files.get(MASTER)
        return self.master.numel() if file is None else file.nbytes // self.master.dtype.itemsize

    def moment_shape(self, part: str) -> tuple[int, ...]:
        """Returns the shape that a moment has in memory."""
        if part in self.wider:
            return (sum(parameter_range.span.numel for parameter_range in self.wider[part]),)
        return (self.numel,) if self.files else tuple(self.master.shape)

    def fragments(
        self, part: str, dtype: torch.dtype, data: torch.Tensor | FileRange | None = None, tier: Tier = Tier.DEVICE
    ) -> Iterator[Fragment]:
        """Yields the fragments that this rank writes of ``part``, in memory order. ``data``: the master weights or the
        moment, in a tensor or in a swap file. ``dtype``: the dtype of its elements."""
        ranges = self.ranges
        if part in self.wider:
            wider = {parameter_range.name: parameter_range for parameter_range in self.wider[part]}
            ranges = tuple(
                held._replace(offset=wider[held.name].offset + held.span.start - wider[held.name].span.start)
                for held in ranges
                if held.span.numel
            )
        return _fragments([held for held in ranges if held.written], part, dtype, data, tier)

    def wanted(self, part: str, names: Container[str], data: torch.Tensor) -> Iterator[Fragment]:
        """Yields the fragments that this rank reads of ``part``, for those of its tensors whose names in a checkpoint
        are in ``names``. Without ``shares``, these are all elements of them that its memory holds. ``data``: as in
        ``fragments``."""
        read = [parameter_range for parameter_range in self._read(part) if parameter_range.stored_name in names]
        return _fragments(read, part, data.dtype, data, Tier.DEVICE)

    def _read(self, part: str) -> tuple[ParameterRange, ...]:
        return self.wider.get(part, self.ranges if self.shares is None else self.shares)

    def expected(self, part: str, dtype: torch.dtype) -> Iterator[Fragment]:
        """Yields the fragments that this rank reads of ``part``, without data, in an order that is the same on every
        rank. A parameter of which this rank reads no elements has a fragment without elements."""
        read = self._read(part)
        spans = None if read is self.ranges else {of_read.name: of_read.span for of_read in read}
        for held in self.ranges:
            span = held.span if spans is None else spans.get(held.name) or held.span.narrow(0, 0)
            name = held.stored_name
            yield Fragment(part, name, dtype_name(dtype, part, name), span)


def _fragments(
    ranges: Sequence[ParameterRange],
    part: str,
    dtype: torch.dtype,
    data: torch.Tensor | FileRange | None,
    tier: Tier,
) -> Iterator[Fragment]:
    if isinstance(data, FileRange):
        tier = Tier.NVME
    elif data is not None and len(ranges) > 1:
        data = data.detach().view(-1)  # once for all of them
    for parameter_range in ranges:
        name, span = parameter_range.stored_name, parameter_range.span
        if span.numel:
            view = None if data is None else elements_of(data, parameter_range.offset, span.numel, dtype)
            stored_dtype = dtype_name(dtype, part, name)
            yield Fragment(part, name, stored_dtype, span, tier, 0, view, parameter_range.replicated)


def elements_of(data: torch.Tensor | FileRange, start: int, count: int, dtype: torch.dtype) -> torch.Tensor | FileRange:
    """Returns ``count`` elements of ``data`` from element ``start`` on, in row-major order: a tensor that shares the
    memory of ``data``, or a smaller range of a file."""
    if isinstance(data, FileRange):
        return data.narrow(start * dtype.itemsize, count * dtype.itemsize)
    return view_of(data, start, count)


def view_of(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Does what ``elements_of`` does for a tensor. The result keeps the memory, also if the engine gives ``tensor``
    another memory while a write in the background still reads it."""
    own = tensor.detach()
    return own if count == own.numel() else own.view(-1).narrow(0, start, count)


def foreign(parameters: Mapping[str, Any], optimized: Iterable[Any]) -> Iterator[str]:
    """Yields a phrase for an error if the optimizer has parameters that are not the module's, because these have no
    name. ``parameters``: the parameters of the module by name. ``optimized``: those of the optimizer."""
    known = {id(parameter) for parameter in parameters.values()}
    if any(id(parameter) not in known for parameter in optimized):
        yield "an optimizer with parameters that are not the model's: make it after the model is wrapped or sharded"


class Divided(NamedTuple):
    """The optimizer's state of a flat buffer, without leftovers."""

    moments: dict[str, torch.Tensor]
    """The moments, by the names that torch gives them."""
    numbers: dict[str, Any]
    """The values that have the same meaning for any flat buffer, such as ``step``."""
    bound: dict[str, Any]
    """The values that have a meaning only for a flat buffer with the same ``geometry``."""


def divided(flat: FlatBuffer, state: Mapping[str, Any]) -> Divided:
    """Divides the optimizer's state of a flat buffer."""
    parts = Divided({}, {}, {})
    for key, value in state.items():
        if _is_moment(flat, key, value):
            parts.moments[key] = value
        elif not _is_leftover(key):
            (parts.bound if is_bound(value) else parts.numbers)[key] = value
    return parts


def moments(flat: FlatBuffer, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the moments in the optimizer's state of a flat buffer, by the names that torch gives them."""
    return {key: value for key, value in state.items() if _is_moment(flat, key, value)}


def geometry(flat: FlatBuffer) -> dict[str, Any]:
    """Returns, as a plain tree, everything that describes how a flat buffer is cut from the parameters."""
    own = flat.ranges if flat.shares is None else flat.shares
    ranges: list[list[Any]] = [[r.stored_name, list(r.span.grid.shape), *r.span[1:], r.offset] for r in own]
    for row, r in zip(ranges, own, strict=True):
        if r.span.grid.sections:
            row.append(packed_sections(r.span.grid.sections))
    return {"numel": flat.numel, "slots": ranges}


def is_bound(value: Any) -> bool:
    """Returns whether a value of the optimizer's state that is not a moment is bound to its flat buffer."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1 or has_own_operations(value)
    return isinstance(value, Collection) and not isinstance(value, (str, bytes))


def _is_moment(flat: FlatBuffer, key: str, value: Any) -> bool:
    # With operations of its own, it has the shape of the weights, but its values are elsewhere.
    if not isinstance(value, torch.Tensor) or not _names_moment(key) or has_own_operations(value):
        return False
    if value.shape == flat.master.shape and (flat.files or key not in flat.wider):
        return True  # If both are in swap files now, both tensors have no elements.
    return tuple(value.shape) == flat.moment_shape(key)


@cache  # There may be very many parameters, with few keys.
def _names_moment(key: object) -> bool:
    """Returns whether a moment may have this key in the optimizer's state."""
    # torch keeps `step` as a tensor of shape (), which is also the shape of a parameter without dimensions.
    return is_part_name(key) and key != "step" and key not in RESERVED_PARTS and not _is_leftover(key)


_LEFTOVER = "_offload_buffer"
"""DeepSpeed's offload_states() adds its staging buffers to the optimizer's state and never removes them. It names each
one by the key of the tensor that it stages, followed by this suffix."""


def _is_leftover(key: object) -> bool:
    return isinstance(key, str) and key.endswith(_LEFTOVER)


def part_of_state(key: object) -> str:
    """Returns the part to which an entry of the optimizer's state belongs, whether it is a moment or not."""
    return str(key).removesuffix(_LEFTOVER)
