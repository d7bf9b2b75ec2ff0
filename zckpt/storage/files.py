"""Files of this machine's file systems: what a local store reads and writes by, and files outside of checkpoints."""

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
"""Errors that say that the file system does not support a call."""
NAME_SURROGATE = 0x20000000
"""Of Windows: this bit of a reparse point's tag says that it leads elsewhere, as symbolic links and junctions do."""


def is_link(status: os.stat_result) -> bool:
    """Whether the result of ``os.lstat`` is a symbolic link or a junction."""
    return stat.S_ISLNK(status.st_mode) or bool(getattr(status, "st_reparse_tag", 0) & NAME_SURROGATE)


def is_impossible_name(error: OSError) -> bool:
    """Whether it says that no file can have this name: one that is too long, is not in the file system's encoding, or
    has a character that Windows does not allow."""
    return error.errno in (errno.ENAMETOOLONG, errno.EILSEQ) or getattr(error, "winerror", None) == 123


def free_bytes(path: str) -> int | None:
    """How many more bytes this process may store in a directory: without the blocks that are reserved for root, and
    within a quota where the file system takes it into account, as XFS does for projects, and NFS. None where the system
    does not say, as for a tmpfs without a limit. Raises nothing."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free if usage.total else None


def read_at(fd: int, views: Sequence[Bytes | memoryview], offset: int) -> int:
    """Reads from byte ``offset`` into ``views``, one after the other. Returns the number of bytes read: perhaps fewer
    than asked for, 0 only at the end of the file. No other thread may use ``fd``, because its position may move."""
    if linux.HAS_POSITIONAL_IO:
        return os.preadv(fd, views, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    done = 0
    with io.FileIO(fd, closefd=False) as file:
        for view in views:
            got = file.readinto(view)
            done += got
            if got < len(view):
                break
    return done


def is_refused(error: OSError) -> bool:
    """Whether it says that there is no direct I/O here."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def read_from(path: str, offset: int, room: Bytes, *, direct: bool = False) -> None:
    """Fills ``room`` from byte ``offset`` of ``path``, a file outside of any checkpoint, and leaves nothing of it in
    the page cache. ``direct``: whole pages go past the page cache where the file system allows it; then ``room`` lies
    as far behind the start of a page of memory as ``offset`` behind that of a page of the file. Raises StorageError,
    also where the file is too short."""
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
    """``flags``: with which the file is opened."""
    done = 0
    try:
        fd = os.open(path, os.O_RDONLY | BINARY | flags)
        try:
            while done < len(room):
                got = read_at(fd, [room[done:]], offset + done)
                if got == 0:
                    raise StorageError(
                        "the file ends too early", file=path, start=offset + done, stop=offset + len(room)
                    )
                done += got
            linux.uncache(fd, offset, len(room))
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise from_os_error(error, "read", path, offset + done, offset + len(room)) from error


def put_in_place(prepared: str, path: str) -> None:
    """Renames ``prepared`` to ``path``. What was at ``path`` before has the name ``prepared`` afterwards. Where the
    system can exchange two names, one of the two is at ``path`` at any time. Where it cannot, a file at ``path`` is
    replaced, and a directory is missing for an instant. Raises OSError; then both have the names that they had
    before."""
    if os.path.lexists(path) and linux.exchange(prepared, path):
        return
    if not os.path.isdir(path):
        os.replace(prepared, path)
        return
    aside = f"{prepared}.old"
    os.rename(path, aside)
    try:
        os.rename(prepared, path)
    except OSError:
        os.rename(aside, path)
        raise
    os.rename(aside, prepared)


def take_back(prepared: str, path: str) -> None:
    """Undoes what ``put_in_place`` has done. Raises OSError."""
    if os.path.lexists(prepared):
        put_in_place(prepared, path)
    else:
        os.rename(path, prepared)


def sync_data(fd: int) -> None:
    """Until what was written to a file is on the disk for good. Raises OSError."""
    if sys.platform == "darwin":  # whose fsync(2) leaves it in the disk's own cache
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    os.fsync(fd)
