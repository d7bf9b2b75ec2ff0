"""What only Linux has, guarded in one place.

Where the kernel or the file system refuses, a function returns a value that says so, or does nothing. The same holds on
other systems, except that `is_running` must not be called there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import struct
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

if sys.platform == "linux":
    import fcntl

O_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
"""The flag of open(2) for direct I/O; 0 where there is none."""
HAS_POSITIONAL_IO = sys.platform == "linux"
"""Whether preadv(2) and pwritev(2) are used."""
libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
CACHESTAT = 451
"""The number of cachestat(2), the same on every processor that torch runs on."""
FICLONERANGE = 0x4020940D
"""ioctl_ficlonerange(2)."""
MADV_FREE, MADV_HUGEPAGE = 8, 14
"""madvise(2)."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""renameat2(2)."""
AT_EMPTY_PATH = 0x1000
STATX_DIOALIGN = 0x2000
"""statx(2)."""
OVERLAYFS = 0x794C7630
"""What statfs(2) calls an overlay, such as a container's root."""
_STATFS_BYTES = 256
"""More bytes than fstatfs(2) writes."""


def cached_bytes(fd: int, offset: int, nbytes: int) -> int:
    """How many of these bytes of a file are in the page cache, rounded up to whole pages of the kernel's. 0 where the
    system does not tell."""
    if libc is None:
        return 0
    statfs, found = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))(), (ctypes.c_uint64 * 5)()
    libc.fstatfs(fd, statfs)
    # Not of an overlay: the pages are the file's that lies below, and cachestat(2) does not look there.
    if statfs[0] != OVERLAYFS and libc.syscall(CACHESTAT, fd, (ctypes.c_uint64 * 2)(offset, nbytes), found, 0) == 0:
        return int(found[0]) * mmap.PAGESIZE
    start = offset - offset % mmap.PAGESIZE  # or a Linux before 6.5, or not our file
    length = offset + nbytes - start
    try:
        mapped = mmap.mmap(fd, length, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):  # such as a file that has become too short: reading will tell
        return 0
    with mapped:
        resident = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)  # bit 0 of a byte for each page
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_void_p(resident.ctypes.data))
        return int(np.count_nonzero(resident & 1)) * mmap.PAGESIZE


def direct_alignment(fd: int) -> tuple[int, int]:
    """Two numbers of bytes: for direct I/O on this file, addresses of memory have to be multiples of the first one,
    offsets and lengths multiples of the second one. Both are a page where the system does not tell, or where there is
    no direct I/O."""
    found = (ctypes.c_uint32 * 64)()  # of struct statx, stx_mask is the first word
    if libc is not None and hasattr(libc, "statx") and not libc.statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, found):
        memory_bytes, offset_bytes = found[38], found[39]  # stx_dio_mem_align, stx_dio_offset_align
        if found[0] & STATX_DIOALIGN and memory_bytes and offset_bytes:
            return memory_bytes, offset_bytes
    return mmap.PAGESIZE, mmap.PAGESIZE


def uncache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Takes these bytes of a file out of the page cache; all behind ``offset`` if ``nbytes`` is 0."""
    if sys.platform == "linux":
        with suppress(OSError):  # it is advice, and no file system has to take it
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def resident_bytes() -> int | None:
    """The bytes of memory that this process has; None where the system does not tell."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return None


def read_ahead(fd: int, offset: int, nbytes: int) -> None:
    """Has the system read these bytes of a file into the page cache, and mostly does not wait for it."""
    if sys.platform == "linux":
        with suppress(OSError):  # it is advice, as above
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)


def locked_ranges() -> list[tuple[int, int]]:
    """The ranges of this process's memory that mlock(2) keeps from being swapped: for each its first address, and the
    one behind its last byte. Empty where the system does not tell."""
    ranges: list[tuple[int, int]] = []
    with suppress(OSError):
        if re.search(r"^VmLck:\s+0 kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return []  # nothing is locked, as mostly; the kernel takes long to make the next file
        first = last = ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0]:
                first, last = words[0].split("-")
            elif words[0] == "VmFlags:" and "lo" in words:
                ranges.append((int(first, 16), int(last, 16)))
    return ranges


def reserve(fd: int, nbytes: int) -> None:
    """Gives the first ``nbytes`` of a file, 1 or more, their blocks on the disk, where the file system can. Raises
    OSError if there is no space for them."""
    if libc is not None and libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(number, os.strerror(number))


def share_blocks(fd: int, source_fd: int, source_offset: int, nbytes: int, offset: int) -> bool:
    """Makes ``nbytes`` from byte ``offset`` of a file share the disk blocks of another file, without copying them; 0
    stands for all bytes up to the end of the other file. Returns False, having changed nothing, where the file system
    cannot, or where ``offset``, ``source_offset`` or ``nbytes`` is not a multiple of its block size."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(fd, FICLONERANGE, struct.pack("qQQQ", source_fd, source_offset, nbytes, offset))
    except OSError:  # whatever the reason: what is wrong shows when the bytes are copied
        return False
    return True


def exchange(first: str, second: str) -> bool:
    """Exchanges two names of files or directories in one step; nobody sees one of them missing. False where the kernel
    or the file system cannot do it. Raises OSError for any other reason."""
    if libc is None or not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), first, None, second)


def free_lazily(address: int, nbytes: int) -> None:
    """The content of this memory, which is private to this process, is not needed any more: the system may take the
    memory, and does when it runs short. What it leaves is as quick to write to as it was."""
    _advise(address, nbytes, MADV_FREE)


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Asks for huge pages, for memory that nobody has touched yet. To touch it first, and to give it back, then takes a
    fraction of the time."""
    _advise(address, nbytes, MADV_HUGEPAGE)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Gives advice to the system about all whole pages of this memory."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if libc is not None and first < last:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def trim_heap() -> None:
    """Gives memory back to the system that was freed, and that the C library has kept."""
    if libc is not None and hasattr(libc, "malloc_trim"):  # glibc has it
        libc.malloc_trim(0)


def boot_id() -> str | None:
    """Identifies the current boot of this machine (host names may repeat); None where the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def pid_space() -> str | None:
    """Identifies the place where process ids have one meaning: this boot of this machine, and this container. None
    where the system does not tell."""
    boot = boot_id()
    try:
        return boot and f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def started(pid: int) -> int | None:
    """When the process ``pid`` of this pid space started, in the kernel's own unit; None if there is no such process,
    or if it is hidden from this one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def is_running(pid: int, start: int | None) -> bool:
    """Whether the process ``pid`` of this pid space that started at ``start``, as ``started`` tells it, is still
    there. For pid spaces alone: without one, another system would take the signal for an order to end the process."""
    now = started(pid)
    if now is not None:
        return now == start
    try:
        os.kill(pid, 0)  # which does nothing to it; another user's process may be hidden in /proc (hidepid)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
