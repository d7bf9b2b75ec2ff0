"""Host memory by its address: how loaded bytes get straight into tensors, also into very many small ones.

By the addresses of the targets, a plan finds those that are neighbours both in memory and in a file, and those that are
aligned for direct I/O. Also, to make a view of each target takes longer than to fill a small one: loads of tensors of
4 KiB and of 40 KiB from the page cache are 1.3 times as fast by address. So there
is one view of the whole address space, and what is read into is a slice of it.

Such a slice has no bounds of its own and keeps no memory alive. It is safe as long as this holds:

- The targets are contiguous, and whoever uses ``HostMemory`` keeps them alive meanwhile. ``Sinks`` does both.
- ``check`` has seen every span before the first byte is moved. ``run_reads`` calls it for all of its reads.
- The reads were planned with ``address``, which gives each span that goes straight to its place its own address.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from zckpt.storage.buffers import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from zckpt.storage.buffers import Bytes

    Ints = NDArray[np.int64]

_ALL: Bytes = np.frombuffer((ctypes.c_uint8 * (1 << 57)).from_address(PAGE_BYTES), np.uint8)
"""The address space of this process, without its first page, in which nothing lies."""
_ALL_VIEW = memoryview(_ALL)
"""The same; slices of it are made in half the time."""


def memory(address: int, nbytes: int) -> memoryview:
    """``nbytes`` of host memory from ``address`` on."""
    return _ALL_VIEW[address - PAGE_BYTES : address - PAGE_BYTES + nbytes]


def copy_to(address: int, staged: Bytes) -> None:
    """Copies ``staged`` to host memory. Other threads run meanwhile, as they do not for a copy to a memoryview."""
    _ALL[address - PAGE_BYTES : address - PAGE_BYTES + len(staged)] = staged


class HostMemory:
    """The memory of the targets of a load that stored bytes can go into as they are: on the host, of the stored dtype.

    A target is given by its number, and a place in it by its byte."""

    def __init__(self, targets: Sequence[torch.Tensor], stored: Sequence[torch.dtype]) -> None:
        """``stored``: the dtypes of the elements in the files."""
        self.address = np.array(
            [
                target.data_ptr() if target.is_cpu and target.dtype == dtype else -1
                for target, dtype in zip(targets, stored, strict=True)
            ],
            np.int64,
        )
        """Of each target; -1 for those that stored bytes cannot go into as they are."""
        self._nbytes = np.array([t.numel() * d.itemsize for t, d in zip(targets, stored, strict=True)], np.int64)
        """What each target holds, counted in stored bytes; also of those on devices."""

    def check(self, target: Ints, start: Ints, nbytes: Ints) -> None:
        """Raises ValueError unless all of these spans of stored bytes lie within their targets."""
        if (start < 0).any() or (start + nbytes > self._nbytes[target]).any():
            raise ValueError("a span is longer than the memory that it goes to")

    def put(self, target: int, start: int, staged: Bytes) -> bool:
        """Copies stored bytes to byte ``start`` of a target. Returns False, and copies nothing, if they cannot go there
        as they are."""
        address = int(self.address[target])
        if address >= 0:
            copy_to(address + start, staged)
        return address >= 0
