"""Access to host memory by its address, so that loaded bytes get straight into tensors, even into very many small ones.

Addresses serve two purposes. A plan compares the addresses of the targets, to find targets that are adjacent both in
memory and in a file, and targets that are aligned for direct I/O. And a slice of one view of the whole address space is
made faster than a view of each target, which takes longer than filling a small target. Loads of tensors of 4 KiB and of
40 KiB from the page cache are 1.3 times as fast this way.

Such a slice does not check bounds and keeps no memory alive. It is safe because of three rules:

- The targets are contiguous, and stay alive. ``Targets`` checks the first and does the second.
- ``Targets.check`` sees every range before the first byte is moved. ``run_reads`` calls it for all of its reads.
- The reads are planned with ``Targets.address``, so that each range that is read straight into its target has the right
  address.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from zckpt.storage.buffers import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from zckpt.plan.reads import StridedCopy
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


def put(address: Ints, nbytes: Ints, start: Ints, staged: Bytes) -> None:
    """Copies ranges of ``staged`` to host memory. The columns are those of ``gather``. Adjacent ranges are copied as
    one, even if their memory is that of several targets."""
    view = memoryview(staged)
    for to, from_, size in _joined(address, start, nbytes):
        copy_to(to, view[from_ : from_ + size])


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
