"""Tensors whose values are in a file, and are read only by those who use them.

Such a tensor is on the device "meta", so torch raises an error if it is used like one with values. Its storage knows
the range of the file. Views of the tensor have the same storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.storage.files import read_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.plan.inventory import FileRange

PORTION_BYTES = 8 << 20
"""The most bytes that are in memory beside a tensor that is read."""
GAP_BYTES = 64 << 10
"""The most bytes that are read at a time of a tensor that has less than a fourth of the elements between its first and
its last one. Otherwise far more bytes might be read than it has."""
_PLACE = "_zckpt_place"
"""The attribute of a storage that has its ``FileRange``."""


def stored_storage(place: FileRange) -> torch.UntypedStorage:
    """Returns a storage without memory, whose bytes are in a range of a file."""
    storage = torch.empty(place.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    setattr(storage, _PLACE, place)
    return storage


def stored_range(tensor: torch.Tensor) -> FileRange | None:
    """Returns the range of the file that has the values of a contiguous tensor. Returns None if the tensor is in
    memory, or has no values."""
    place = _place(tensor)
    if place is None:
        return None
    return place.narrow(int(tensor.storage_offset()) * tensor.itemsize, tensor.numel() * tensor.itemsize)


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` itself if it is contiguous, and otherwise a contiguous copy in memory. Raises StorageError."""
    return tensor if tensor.is_contiguous() else with_values(tensor).contiguous()


def with_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` itself, or if its values are in a file, a contiguous tensor in host memory with these values.
    Raises StorageError, also if the file is too short."""
    place = _place(tensor)
    if place is None:
        return tensor
    return read_strided(place, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def _place(tensor: torch.Tensor) -> FileRange | None:
    """Returns the range of the file that has the storage of a tensor, if there is one."""
    return getattr(tensor.untyped_storage(), _PLACE, None) if tensor.is_meta else None


def read_strided(
    place: FileRange, dtype: torch.dtype, offset: int, sizes: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Returns a contiguous tensor in host memory with values of a file. ``place`` is the range of the file with the
    elements of a storage. The other arguments are those of a view of this storage, counted in elements. Raises
    StorageError, also if the file is too short."""
    distinct = [size if stride else min(size, 1) for size, stride in zip(sizes, strides, strict=True)]
    values = torch.empty(distinct, dtype=dtype, device="cpu")
    _fill(values, place, offset, strides)
    return values.expand(tuple(sizes)).contiguous()


def _fill(values: torch.Tensor, place: FileRange, offset: int, strides: Sequence[int]) -> None:
    """Fills ``values`` portion by portion. What is read also has the elements between those that are wanted."""
    if not values.numel():
        return
    lengths = [(size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)]
    span, item = 1 + sum(lengths), values.itemsize
    span_max = (PORTION_BYTES if span <= 4 * values.numel() else GAP_BYTES) // item
    if span <= span_max or not any(lengths):
        room = np.empty(span * item, np.uint8)
        read_from(place.path, place.offset + offset * item, room)
        values.copy_(torch.from_numpy(room).view(values.dtype).as_strided(values.shape, strides))
        return
    widest = max((dim for dim, length in enumerate(lengths) if length), key=strides.__getitem__)
    inner = span - lengths[widest]
    count = max((span_max - inner) // strides[widest] + 1, 1)
    for first in range(0, values.shape[widest], count):
        portion = values.narrow(widest, first, min(count, values.shape[widest] - first))
        _fill(portion, place, offset + first * strides[widest], strides)
