"""Calls on files of this machine's file systems, for local stores and for files outside of checkpoints."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import sys
from typing import TYPE_CHECKING

from zckpt.errors import StorageError, from_os_error
from zckpt.storage.buffers import whole_pages
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.storage.buffers import Bytes

BINARY: int = getattr(os, "O_BINARY", 0)
"""The flag that keeps Windows from translating line ends."""
UNSUPPORTED = {errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""The error numbers by which a file system says that it does not support a call."""
NAME_SURROGATE = 0x20000000
"""The bit in the tag of a Windows reparse point that marks it as a link to another path, such as a symbolic link or a
junction."""


def is_link(status: os.stat_result) -> bool:
    """Returns whether ``status``, which ``os.lstat`` has returned, is that of a symbolic link or a junction."""
    return stat.S_ISLNK(status.st_mode) or bool(getattr(status, "st_reparse_tag", 0) & NAME_SURROGATE)


def is_impossible_name(error: OSError) -> bool:
    """Returns whether the error says that no file can have this name, because it is too long, is not in the file
    system's encoding, or has a character that Windows does not allow."""
    return error.errno in (errno.ENAMETOOLONG, errno.EILSEQ) or getattr(error, "winerror", None) == 123


def free_bytes(path: str) -> int | None:
    """Returns how many more bytes this process may store in a directory. Blocks that are reserved for root do not
    count. A quota counts if the file system takes it into account, as XFS does for projects, and NFS. Returns None if
    the system does not know, for instance for a tmpfs without a limit. Raises nothing."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free if usage.total else None


def read_bytes_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Returns up to ``nbytes`` bytes from byte ``offset`` on. They are none only at the end of the file. No other
    thread may use ``fd`` during the call, because its position may change."""
    if linux.HAS_POSITIONAL_IO:
        return os.pread(fd, nbytes, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, nbytes)


def read_at(fd: int, views: Sequence[Bytes | memoryview], offset: int) -> int:
    """Reads from byte ``offset`` into ``views``, one after the other. Returns the number of bytes read. It may be
    smaller than asked for, and is 0 only at the end of the file. No other thread may use ``fd`` during the call,
    because its position may change."""
    if linux.HAS_POSITIONAL_IO:
        return os.preadv(fd, views, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    total_bytes = 0
    with io.FileIO(fd, closefd=False) as file:
        for view in views:
            nbytes = file.readinto(view)
            total_bytes += nbytes
            if nbytes < len(view):
                break
    return total_bytes


def is_refused(error: OSError) -> bool:
    """Returns whether the error says that this file does not support direct I/O."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def read_from(path: str, offset: int, room: Bytes, *, direct: bool = False) -> None:
    """Fills ``room`` from byte ``offset`` of the file ``path``, which is outside of any checkpoint. Leaves nothing of
    it in the page cache. With ``direct``, whole pages are read past the page cache if the file system allows it. Then
    the address of ``room`` must have the same remainder, divided by ``PAGE_BYTES``, as ``offset``. Raises StorageError,
    also if the file is too short."""
    first, last = whole_pages(offset, len(room))
    if direct and linux.O_DIRECT and first < last:
        try:
            _fill(path, offset + first, room[first:last], linux.O_DIRECT)
        except StorageError as error:
            if not is_refused(error):
                raise
        else:
            _fill(path, offset, room[:first])
            _fill(path, offset + last, room[last:])
            return
    _fill(path, offset, room)


def _fill(path: str, offset: int, room: Bytes, flags: int = 0) -> None:
    """Fills ``room`` from byte ``offset`` on. ``flags`` are added to those by which the file is opened."""
    filled = 0
    try:
        fd = os.open(path, os.O_RDONLY | BINARY | flags)
        try:
            while filled < len(room):
                nbytes = read_at(fd, [room[filled:]], offset + filled)
                if nbytes == 0:
                    raise StorageError(
                        "the file ends too early", file=path, start=offset + filled, stop=offset + len(room)
                    )
                filled += nbytes
            linux.uncache(fd, offset, len(room))
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise from_os_error(error, "read", path, offset + filled, offset + len(room)) from error


def sync_data(fd: int) -> None:
    """Waits until everything that was written to a file is durable on the disk. Raises OSError."""
    if sys.platform == "darwin":  # fsync(2) of macOS leaves the data in the disk's own cache
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    os.fsync(fd)


def sync_file(path: str) -> None:
    """Makes the content of a file durable. Raises StorageError."""
    try:
        fd = os.open(path, os.O_RDWR)
        try:
            sync_data(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, "fsync", path) from error
