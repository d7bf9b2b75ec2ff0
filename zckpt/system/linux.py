"""Calls that only Linux has.

If the kernel or the file system refuses a call, the function returns a value that says so, or does nothing. The same is
true on other systems, except that `is_running` must not be called there.
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
"""The flag of open(2) for direct I/O, or 0 if the system has none."""
HAS_POSITIONAL_IO = sys.platform == "linux"
"""Whether preadv(2) and pwritev(2) are used."""
libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
CACHESTAT = 451
"""The number of the system call cachestat(2). It is the same on every processor that torch supports."""
FICLONERANGE = 0x4020940D
"""The request number of ioctl_ficlonerange(2)."""
MADV_DONTNEED, MADV_FREE, MADV_HUGEPAGE = 4, 8, 14
"""Advice for madvise(2)."""
HUGE_PAGE_BYTES = 2 << 20
"""The size of a huge page on most machines."""
HUGE_BYTES_MIN = 4 << 20
"""Numpy and zckpt ask the system for huge pages only for memory of this many bytes or more. Smaller memory may be a
part of the heap of malloc, whose pages have other users too."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Arguments of renameat2(2)."""
AT_EMPTY_PATH = 0x1000
STATX_DIOALIGN = 0x2000
"""Arguments of statx(2)."""
OVERLAYFS = 0x794C7630
"""The type that statfs(2) reports for an overlay file system, such as the root of a container."""
_STATFS_BYTES = 256
"""The size of a buffer for fstatfs(2), which writes fewer bytes."""


def processors() -> int:
    """Returns the number of processors on which this process may run. A container's quota of processor time is not
    taken into account."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cached_bytes(fd: int, offset: int, nbytes: int) -> int:
    """Returns how many of these bytes of a file are in the page cache, rounded up to whole pages. Returns 0 if the
    system does not report it."""
    if libc is None:
        return 0
    counts = (ctypes.c_uint64 * 5)()
    succeeded = libc.syscall(CACHESTAT, fd, (ctypes.c_uint64 * 2)(offset, nbytes), counts, 0) == 0
    # On an overlay, cachestat(2) finds nothing: the cached pages belong to the file in the layer below.
    if succeeded and (counts[0] or not _is_on_overlay(fd)):
        return int(counts[0]) * mmap.PAGESIZE
    # This is the way for an overlay, for a Linux before 6.5, and for a file that belongs to another user.
    start = offset - offset % mmap.PAGESIZE
    length = offset + nbytes - start
    try:
        mapped = mmap.mmap(fd, length, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):  # the file may have become too short, for instance; the next read reports the error
        return 0
    with mapped:
        # One byte for each page; its bit 0 says that the page is cached.
        resident = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_void_p(resident.ctypes.data))
        return int(np.count_nonzero(resident & 1)) * mmap.PAGESIZE


def _is_on_overlay(fd: int) -> bool:
    statfs = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    return libc is not None and libc.fstatfs(fd, statfs) == 0 and statfs[0] == OVERLAYFS


def direct_alignment(fd: int) -> tuple[int, int]:
    """Returns the two alignments, in bytes, that direct I/O needs for this file. Memory addresses have to be multiples
    of the first number, offsets and lengths multiples of the second one. Returns the size of a page twice if the system
    does not report it, or if there is no direct I/O."""
    words = (ctypes.c_uint32 * 64)()  # struct statx, whose first word is stx_mask
    if libc is not None and hasattr(libc, "statx") and not libc.statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, words):
        memory_bytes, offset_bytes = words[38], words[39]  # stx_dio_mem_align, stx_dio_offset_align
        if words[0] & STATX_DIOALIGN and memory_bytes and offset_bytes:
            return memory_bytes, offset_bytes
    return mmap.PAGESIZE, mmap.PAGESIZE


def uncache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Removes these bytes of a file from the page cache. If ``nbytes`` is 0, removes all bytes from ``offset`` on."""
    if sys.platform == "linux":
        with suppress(OSError):  # this is advice, which a file system may refuse
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def resident_bytes() -> int | None:
    """Returns how many bytes of physical memory this process uses, or None if the system does not report it."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return None


def read_ahead(fd: int, offset: int, nbytes: int) -> None:
    """Makes the system read these bytes of a file into the page cache. Mostly does not wait for this."""
    if sys.platform == "linux":
        with suppress(OSError):  # this is advice, which a file system may refuse
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)


def locked_ranges() -> list[tuple[int, int]]:
    """Returns the ranges of this process's memory that mlock(2) keeps from being swapped. Each is the address of its
    first byte and the address after its last byte. Returns an empty list if the system does not report it."""
    ranges: list[tuple[int, int]] = []
    with suppress(OSError):
        if re.search(r"^VmLck:\s+0 kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return []  # mostly nothing is locked, and the kernel takes long to make the file smaps
        first = last = ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0]:
                first, last = words[0].split("-")
            elif words[0] == "VmFlags:" and "lo" in words:
                ranges.append((int(first, 16), int(last, 16)))
    return ranges


def reserve(fd: int, nbytes: int) -> None:
    """Reserves blocks on the disk for the first ``nbytes`` bytes of a file, if the file system can. ``nbytes`` is at
    least 1. Raises OSError if there is no space for them."""
    if libc is not None and libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(number, os.strerror(number))


def share_blocks(fd: int, source_fd: int, source_offset: int, nbytes: int, offset: int) -> bool:
    """Makes ``nbytes`` bytes from byte ``offset`` of a file share the disk blocks of another file, without copying
    them. If ``nbytes`` is 0, shares all bytes up to the end of the other file. Returns False, and changes nothing, if
    the file system cannot share them, or if an offset or ``nbytes`` is not a multiple of its block size."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(fd, FICLONERANGE, struct.pack("qQQQ", source_fd, source_offset, nbytes, offset))
    except OSError:  # the caller then copies the bytes, and that raises the right error
        return False
    return True


def exchange(first: str, second: str) -> bool:
    """Exchanges two names of files or directories in one step, so that neither name is ever missing. Returns False if
    the kernel or the file system cannot do this. Raises OSError for any other reason."""
    if libc is None or not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), first, None, second)


def free_lazily(address: int, nbytes: int) -> None:
    """Tells the system that the content of this memory, which is private to this process, is not needed any more. The
    system takes the memory when it runs short. Memory that it does not take stays as fast to write to as before."""
    _advise(address, nbytes, MADV_FREE)


def free(address: int, nbytes: int) -> None:
    """Gives the whole pages of this memory, which is private to this process, back to the system. Their content is
    lost. Nothing may use the memory any more, except for a later allocation."""
    _advise(address, nbytes, MADV_DONTNEED)


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Asks the system for huge pages for memory that has not been touched yet. Then touching the memory for the first
    time, and freeing it, takes a fraction of the time."""
    _advise(address, nbytes, MADV_HUGEPAGE)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Gives advice to the system about all whole pages of this memory."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if libc is not None and first < last:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def trim_heap() -> None:
    """Returns memory to the system that was freed, but that the C library has kept."""
    if libc is not None and hasattr(libc, "malloc_trim"):  # glibc has it
        libc.malloc_trim(0)


def huge_pages() -> str | None:
    """Returns for which memory the system uses huge pages: "always", "madvise" for memory whose program asks for them,
    or "never". Returns None if the system does not report it."""
    with suppress(OSError):
        chosen = re.search(r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text())
        return chosen[1] if chosen else None
    return None


def file_system(path: str) -> str | None:
    """Returns the type of the file system of a file or directory, such as ``ext4`` or ``nfs4``. Returns None if the
    system does not report it."""
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        fd = os.open(path, os.O_PATH)
        try:
            mount = re.search(r"^mnt_id:\s+(\d+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.MULTILINE)
        finally:
            os.close(fd)
        mounts = Path("/proc/self/mountinfo").read_text()
        line = re.search(rf"^{mount[1]} .* - (\S+) ", mounts, re.MULTILINE) if mount else None
        return line[1] if line else None
    return None


def boot_id() -> str | None:
    """Returns an id of the current boot of this machine, or None if the system does not report it. Host names would not
    suffice, because they may repeat."""
    if sys.platform != "linux":
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def pid_space() -> str | None:
    """Returns an id of the pid space of this process, which is the place where process ids have one meaning: this boot
    of this machine, and this container. Returns None if the system does not report it."""
    boot = boot_id()
    try:
        return boot and f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def started(pid: int) -> int | None:
    """Returns when the process ``pid`` of this pid space started, in the kernel's own unit. Returns None if there is no
    such process, or if it is hidden from this one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def is_running(pid: int, start: int | None) -> bool:
    """Returns whether the process ``pid`` of this pid space that started at ``start`` is still running. ``start`` is a
    value that ``started`` has returned. If it is None, returns whether any process has this ``pid``. Call this only if
    ``pid_space`` returns an id, because on another system the signal would end the process."""
    running_start = started(pid)
    if running_start is not None:
        return start is None or running_start == start
    try:
        # Signal 0 does nothing to the process. It finds another user's process that is hidden in /proc (hidepid).
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
