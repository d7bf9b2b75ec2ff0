"""Tensors whose values are in a file, and are read only by those who use them.

Such a tensor is on the device "meta", so torch raises an error if it is used like one with values. Its storage knows
the range of the file. Views of the tensor have the same storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.format.digest import digest
from zckpt.storage.files import read_from
from zckpt.transfer.memory import host_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.plan.inventory import FileRange

PORTION_BYTES = 8 << 20
"""The most bytes that are read at a time for a digest, and that are in memory beside a tensor that is read."""
GAP_BYTES = 64 << 10
"""The most bytes that are read at a time of a tensor that has less than a fourth of the elements between its first and
its last one. Otherwise far more bytes might be read than it has."""
_FACTOR = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed number. Its first multiples, modulo 2^64, are spread evenly over all
numbers of 64 bits."""
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


def values_digest(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the values of a tensor, which may be on any device or in a file. It is made of the digests of
    its portions. Raises StorageError."""
    flat = in_order(tensor.detach()).view(-1)
    count = PORTION_BYTES // flat.itemsize
    portions = (with_values(flat[first : first + count]).cpu() for first in range(0, flat.numel(), count))
    return digest(b"".join(digest(host_bytes(portion)) for portion in portions))


def replica_digest(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the values of a contiguous tensor, to compare them with those of other ranks, whose
    tensors are on the same kind of device. On a GPU, it is computed there, so that the values are not copied."""
    if tensor.device.type != "cuda":
        return values_digest(tensor)
    return digest(host_bytes(weighted_sums(tensor).cpu()))


def weighted_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of each portion of a contiguous tensor, as int64 on the device of the tensor. The terms of a
    sum are the bytes of the portion, eight at a time as an int64, each multiplied by an odd number of its own. So if
    one of these terms changes, the sum changes; if several do, the sum stays the same only by chance, once in 2^64
    times."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    terms = -(-min(PORTION_BYTES, len(flat)) // 8)
    factors = torch.arange(terms, dtype=torch.int64, device=tensor.device) * _FACTOR | 1
    sums = []
    for first in range(0, len(flat), PORTION_BYTES):
        portion = flat[first : first + PORTION_BYTES]
        # The copy begins at an address at which an int64 may lie.
        words = torch.nn.functional.pad(portion, (0, -len(portion) % 8)).clone().view(torch.int64)
        sums.append((words * factors[: len(words)]).sum())
    return torch.stack(sums)
