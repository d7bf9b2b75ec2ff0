"""Access to host memory by its address, so that loaded bytes get straight into tensors, even into very many small ones.

Addresses serve two purposes. A plan compares the addresses of the targets, to find targets that are adjacent both in
memory and in a file, and targets that are aligned for direct I/O. And a slice of one view of the whole address space is
made faster than a view of each target, which takes longer than filling a small target. Loads of tensors of 4 KiB and of
40 KiB from the page cache are 1.3 times as fast this way.

Such a slice does not check bounds and keeps no memory alive. It is safe because of three rules:

- The targets are contiguous, and the user of ``HostMemory`` keeps them alive. ``Targets`` does both.
- ``check`` sees every range before the first byte is moved. ``run_reads`` calls it for all of its reads.
- The reads are planned with ``address``, so that each range that is read straight into its target has the right
  address.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from zckpt.storage.buffers import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from zckpt.plan.reads import Copies, StridedCopy
    from zckpt.storage.buffers import Bytes

    Ints = NDArray[np.int64]

_ALL: Bytes = np.frombuffer((ctypes.c_uint8 * (1 << 57)).from_address(PAGE_BYTES), np.uint8)
"""The address space of this process, without its first page, which is never used."""
LONG_BYTES_MIN = 64 << 10
"""The length in bytes from which other threads of Python run during a copy."""
_ALL_VIEW = memoryview(_ALL)
"""A memoryview of ``_ALL``. Its slices are made in half the time."""


def memory(address: int, nbytes: int) -> memoryview:
    """Returns a view of ``nbytes`` bytes of host memory from ``address`` on. Raises ValueError for an address in the
    first page, as that of a tensor without memory: a view from there would have other bytes or none."""
    if address < PAGE_BYTES:
        raise ValueError(f"there is no memory at the address {address}")
    return _ALL_VIEW[address - PAGE_BYTES : address - PAGE_BYTES + nbytes]


def memories(address: Ints, nbytes: Ints) -> list[memoryview]:
    """Returns what ``memory`` does for each of several ranges."""
    if (address < PAGE_BYTES).any():
        raise ValueError(f"there is no memory at the address {address.min()}")
    start = address - PAGE_BYTES
    return [_ALL_VIEW[first:stop] for first, stop in zip(start.tolist(), (start + nbytes).tolist(), strict=True)]


def copy_to(address: int, staged: Bytes | memoryview) -> None:
    """Copies ``staged`` to host memory at ``address``. Other threads of Python can run during a long copy. During a
    short one they cannot, because taking turns would take longer than the copy."""
    room = _ALL if len(staged) >= LONG_BYTES_MIN else _ALL_VIEW
    room[address - PAGE_BYTES : address - PAGE_BYTES + len(staged)] = staged


def gather(address: Ints, nbytes: Ints, start: Ints, staged: Bytes) -> None:
    """Copies ranges of host memory to ``staged``. The columns have the address of each range, its size in bytes, and
    the byte of ``staged`` with which its copy begins. Adjacent ranges are copied as one."""
    view = memoryview(staged)
    for from_, to, size in _joined(address, start, nbytes):
        room = staged if size >= LONG_BYTES_MIN else view
        room[to : to + size] = memory(from_, size)


def _joined(address: Ints, start: Ints, nbytes: Ints) -> Iterator[tuple[int, int, int]]:
    """Yields ``(address, start, nbytes)`` of the copies between memory and a buffer that are in these columns. Copies
    of adjacent bytes to adjacent bytes are joined into one."""
    begins = np.ones(len(address), bool)
    begins[1:] = (np.diff(address) != nbytes[:-1]) | (np.diff(start) != nbytes[:-1])
    first = np.flatnonzero(begins)
    columns = (address[first], start[first], np.add.reduceat(nbytes, first))
    return zip(*(column.tolist() for column in columns), strict=True)


def copy_spaced(address: int, copy: StridedCopy, staged: Bytes) -> None:
    """Carries out ``copy`` from ``staged``, which has the bytes of the source, to host memory. ``address``: that of the
    target."""
    place = address - PAGE_BYTES + copy.target_offset
    target = np.ndarray(copy.runs, f"V{copy.run_bytes}", _ALL, place, copy.target_stride)
    target[:] = np.ndarray(copy.runs, target.dtype, staged, copy.source, copy.source_stride)


class HostMemory:
    """The host memory of the targets of a load, as far as stored bytes can go there unconverted.

    A target is identified by its number, and a place in it by the number of its byte.
    """

    def __init__(self, targets: Sequence[torch.Tensor], stored: Sequence[torch.dtype]) -> None:
        """Records the addresses and sizes of the targets. ``stored`` has the dtype that the elements of each target
        have in their file."""
        self.address = np.array(
            [
                target.data_ptr() if target.is_cpu and target.dtype == dtype else -1
                for target, dtype in zip(targets, stored, strict=True)
            ],
            np.int64,
        )
        """The address of each target, or -1 if stored bytes cannot go there unconverted: the target is on a device, or
        has another dtype."""
        self._nbytes = np.array([t.numel() * d.itemsize for t, d in zip(targets, stored, strict=True)], np.int64)
        """The number of stored bytes that fill each target. This includes targets on devices."""

    def check(self, target: Ints, start: Ints, nbytes: Ints) -> None:
        """Raises ValueError unless all of these ranges of stored bytes are within their targets. The three arrays have
        one element for each range."""
        if (start < 0).any() or (start + nbytes > self._nbytes[target]).any():
            raise ValueError("a range is longer than the memory that it goes to")

    def put(self, copies: Copies, staged: Bytes) -> NDArray[np.bool_]:
        """Carries out those of ``copies`` whose bytes can go to their targets unconverted. ``staged`` has the bytes of
        the sources. Copies of adjacent bytes to adjacent memory are carried out as one, even if the memory is that of
        several targets. Returns which copies were carried out."""
        address = self.address[copies.target]
        fits = address >= 0
        single = fits & (copies.runs == 1)
        for copy in copies.take(fits & ~single).rows():
            copy_spaced(int(self.address[copy.target]), copy, staged)
        place, source, nbytes = (
            column[single] for column in (address + copies.target_offset, copies.source, copies.run_bytes)
        )
        view = memoryview(staged)
        for to, start, size in _joined(place, source, nbytes):
            copy_to(to, view[start : start + size])
        return fits
