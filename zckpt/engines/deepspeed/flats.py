"""Flat partitions: the 1-D buffers in which every ZeRO stage keeps master weights and optimizer states.

A flat belongs to one param group. Its parameters' partitions lie in it one after another, padding between or behind
them; an optimizer state of the same shape (a moment) lies exactly alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.tensors import dtype_name
from zckpt.state.inventory import FileSpan, Fragment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements ``[start, stop)`` of one parameter, kept from element ``offset`` of a flat on. May be empty."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    def fragments(
        self, part: str, dtype: torch.dtype, data: torch.Tensor | FileSpan | None = None, tier: str = "device"
    ) -> Iterator[Fragment]:
        """What this rank holds of ``part``, in memory order; ``data`` is the master or a moment of its shape."""
        tier = "nvme" if isinstance(data, FileSpan) else tier
        for slot in self.slots:
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
    """The tensors of a flat's optimizer state that lie like the flat itself, by torch name."""
    return {key: value for key, value in state.items() if _is_moment(flat, key, value)}


def scalars(flat: Flat, state: Mapping[str, Any]) -> dict[str, Any]:
    """All else in a flat's optimizer state, such as ``step``."""
    return {key: value for key, value in state.items() if not _is_moment(flat, key, value) and not _is_leftover(key)}


def _is_moment(flat: Flat, key: str, value: Any) -> bool:
    # torch keeps `step` as a tensor of shape (), which is also that of a parameter with no dimensions.
    alike = isinstance(value, torch.Tensor) and value.shape == flat.master.shape
    return alike and key != "step" and not _is_leftover(key)


def _is_leftover(key: str) -> bool:
    # DeepSpeed's offload_states() leaves its staging buffers in the optimizer state for good.
    return key.endswith("_offload_buffer")
