"""Raw direct I/O, which is the limit for zckpt and its peers, and the memory that it needs."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

RAW_THREADS, RAW_BATCH_BYTES = 4, 8 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
"""Parameters of mallopt(3)."""
REPORT_SECONDS, REPORT_GAP_SECONDS = 2.5, 0.2
"""Reports of free memory begin at most ``REPORT_SECONDS`` apart, if there is free memory to report. A report has many
parts, which are up to a tenth of a second apart. It has ended when no part has come for ``REPORT_GAP_SECONDS``."""


def fresh_memory(nbytes: int) -> np.ndarray:
    """Returns ``nbytes`` bytes that begin with a page and have not been touched.

    They are allocated by numpy, whose memory is in huge pages if the kernel has them. Without huge pages direct I/O is
    half as fast.
    """
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    return memory[first : first + nbytes]


def touched_memory(nbytes: int) -> np.ndarray:
    """Returns ``nbytes`` bytes that begin with a page and have all been touched."""
    array = fresh_memory(nbytes)
    array.fill(1)
    return array


def whole_pages(tensors: Iterable[torch.Tensor]) -> list[np.ndarray]:
    """Returns the memory of each tensor, without the parts of pages at both ends.

    A disk that is attached to a virtual machine may be twice as fast with one range of memory as with another.
    Therefore raw I/O uses the memory of the contestant that it is compared with.
    """
    memories = [tensor.detach().view(-1).view(torch.uint8).numpy() for tensor in tensors]
    from_a_page = [memory[-memory.ctypes.data % mmap.PAGESIZE :] for memory in memories]
    return [memory[: len(memory) // mmap.PAGESIZE * mmap.PAGESIZE] for memory in from_a_page]


class Raw:
    """Positional direct I/O from and to memory that begins with a page, in several threads. It is the limit."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(RAW_THREADS)
        self.buffers = touched_memory(RAW_THREADS * RAW_BATCH_BYTES)
        """Memory that is filled with random bytes."""
        self.buffers[:] = np.frombuffer(os.urandom(len(self.buffers)), np.uint8)

    def again(self, nbytes: int) -> list[np.ndarray]:
        """Returns views of ``buffers`` that have ``nbytes`` together, rounded up to whole pages, and may overlap."""
        return _batches(self.buffers, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def write(self, path: Path, memories: Sequence[np.ndarray], *, durable: bool = True) -> None:
        """Writes the bytes of ``memories``, which are whole pages each, to a new file.

        If ``durable`` is true, the file and its name are durable when the call returns.
        """
        views = [view for memory in memories for view in _batches(memory, len(memory))]
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        os.posix_fallocate(fd, 0, sum(map(len, views)))  # a file that grows is written by one thread at a time
        self._each(os.pwritev, fd, views)
        if durable:
            os.fsync(fd)
            directory = os.open(path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        os.close(fd)

    def read(self, path: Path, memory: np.ndarray | None = None) -> np.ndarray:
        """Reads all whole pages of a file into ``memory``, or into fresh memory, and returns that memory.

        If ``memory`` is smaller than the file, it is overwritten again and again.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        nbytes = os.fstat(fd).st_size // mmap.PAGESIZE * mmap.PAGESIZE
        memory = fresh_memory(nbytes) if memory is None else memory
        self._each(os.preadv, fd, _batches(memory, nbytes))
        os.close(fd)
        return memory

    def read_into(self, path: Path, memories: Sequence[np.ndarray]) -> None:
        """Reads the beginning of a file into ``memories``, which are whole pages each."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._each(os.preadv, fd, [view for memory in memories for view in _batches(memory, len(memory))])
        os.close(fd)

    def _each(
        self, action: Callable[[int, Sequence[np.ndarray], int], int], fd: int, views: Sequence[np.ndarray]
    ) -> None:
        """Reads or writes ``views``, which follow each other in the file."""
        offsets = itertools.accumulate(map(len, views), initial=0)
        # All threads share the iterator: a thread that is free takes the next view.
        places = iter(list(zip(offsets, views, strict=False)))

        def work(_: int) -> None:
            for offset, view in places:
                if action(fd, [view], offset) != len(view):
                    raise OSError("the disk took or gave less than it was asked to")

        list(self._pool.map(work, range(RAW_THREADS)))


def _batches(memory: np.ndarray, nbytes: int) -> list[np.ndarray]:
    """Returns views of ``memory`` that have ``nbytes`` together. They overlap if ``memory`` has fewer bytes."""
    starts = ((offset, offset % len(memory)) for offset in range(0, nbytes, RAW_BATCH_BYTES))
    return [memory[first : first + min(RAW_BATCH_BYTES, nbytes - offset)] for offset, first in starts]


def prepared_with_free_memory(prepare: Callable[[Path], None], nbytes: int) -> Callable[[Path], None]:
    """Returns a function that calls ``prepare`` with the path that a contestant reads, and then provides free memory:
    ``nbytes`` bytes for the tensors, and as many for the page cache. This memory has been in use until now, and no
    report of free memory to the host of a virtual machine comes within the next two seconds. A host takes the memory
    that is reported, and then a program that touches it again loses up to a second."""

    def before(path: Path) -> None:
        prepare(path)
        to_be_freed = touched_memory(2 * nbytes)
        wait_for_memory_reports()
        # After a report, the first access to each page may be slow. So the garbage collector accesses the memory of
        # Python before the contestant begins.
        gc.collect()
        del to_be_freed

    return before


def wait_for_memory_reports() -> None:
    """Returns when the kernel of a virtual machine has just reported free memory to its host, which then takes this
    memory. The kernel does so every two seconds as long as there is free memory to report. Memory that is freed now is
    not reported within these two seconds. Returns at once on a machine without such reports."""
    count, changed, start = _memory_reports(), None, time.perf_counter()
    while count is not None:
        time.sleep(0.02)
        now, (before, count) = time.perf_counter(), (count, _memory_reports())
        if count != before:
            changed = now
        if now - start > REPORT_SECONDS or (changed is not None and now - changed > REPORT_GAP_SECONDS):
            return


def _memory_reports() -> int | None:
    """Returns how many parts of reports the host has received, or None if the kernel sends no reports."""
    lines = Path("/proc/interrupts").read_text().splitlines()
    parts = [line.split() for line in lines if line.endswith("reporting_vq")]
    return sum(int(field) for line in parts for field in line[1:] if field.isdigit()) if parts else None


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory, so that the tensors that it allocates get memory that was touched before. zckpt
    allocates tensors of 4 MiB or more without malloc.

    To touch fresh memory in pages of 4 KiB takes longer than to read a cached file.
    """
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_TRIM_THRESHOLD, -1), (M_MMAP_MAX, 0), (M_ARENA_MAX, 1)):
        libc.mallopt(parameter, value)


def return_freed_memory() -> None:
    """Makes malloc return the memory of each allocation of 128 KiB or more to the system when it is freed. So each
    round gets fresh memory, like the only load of a user's process.

    By default, malloc does so only until the first large allocation is freed. From then on, it keeps freed memory of
    allocations of up to 32 MiB for later ones.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
