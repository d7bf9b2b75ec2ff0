"""A local or mounted file system: read so that nothing outside of a checkpoint is reached, written durably."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import threading
from collections import OrderedDict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import StorageError, from_os_error
from zckpt.format.rules import broken
from zckpt.storage import gpudirect
from zckpt.storage.buffers import PAGE_BYTES, after
from zckpt.storage.contract import IOCount
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from zckpt.state.inventory import FileSpan
    from zckpt.storage.buffers import Bytes

BINARY: int = getattr(os, "O_BINARY", 0)
"""The flag that keeps Windows from translating line ends."""
IDLE_FILES_MAX = 64 if linux.HAS_POSITIONAL_IO else 0
"""The most files that a reader keeps open between reads. It is 0 without positional reads, because a forked process
would move its parent's position, and because Windows cannot replace an open file."""
NAME_SURROGATE = 0x20000000
"""Of Windows: this bit of a reparse point's tag says that it leads elsewhere, as symbolic links and junctions do."""
CAN_OPEN_BY_COMPONENT = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Whether a file can be opened component by component, so that no link is followed whatever others do meanwhile."""
UNSUPPORTED = {errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors that say that the file system does not support a call."""
_REFUSED_LINK = {errno.ELOOP, errno.EMLINK, getattr(errno, "EFTYPE", errno.ELOOP), errno.ENOTDIR, errno.ENXIO}
"""The errors by which systems refuse a link, or something that is neither a file nor a directory: Linux and macOS
ELOOP, FreeBSD EMLINK, NetBSD EFTYPE; ENOTDIR for a component of a path; ENXIO for a socket."""
UNSYNCED_BYTES_MAX = 32 << 20
"""Of one file, where its writes go through the page cache."""


class LocalReader:
    """Reads the files below one directory, and keeps the last ones open for a while."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.count = IOCount()
        self._lock = threading.Lock()
        self._idle: OrderedDict[tuple[str, int], int] = OrderedDict()

    @property
    def direct(self) -> LocalReader:
        return self

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        buffer = np.empty(nbytes, np.uint8)
        with self.file(path) as fd:
            got, reads = self._fill(fd, [buffer], offset, path)
        with self._lock:
            self.count.reads += reads
            self.count.metadata_bytes += got
        return buffer[:got].tobytes()

    def size(self, path: str) -> int:
        with self.file(path) as fd:
            return os.fstat(fd).st_size

    def is_cached(self, path: str, offset: int, nbytes: int) -> bool:
        # In the page cache, that is. Even a read with RWF_NOWAIT would start I/O.
        if not linux.O_DIRECT:
            return True  # there is no way past it
        with self.file(path) as fd:
            return 2 * linux.cached_bytes(fd, offset, nbytes) > nbytes

    def read_direct(self, path: str, pages: Bytes, offset: int) -> int:
        done = reads = 0
        try:
            with self.file(path, linux.O_DIRECT) as fd:
                while done < len(pages) and done % PAGE_BYTES == 0:
                    got = _read_at(fd, [pages[done:]], offset + done)
                    reads += 1
                    if got == 0:
                        break
                    done += got
        except OSError as error:
            if not is_refused(error):
                if isinstance(error, StorageError):
                    raise
                raise from_os_error(error, "read", self._full(path), offset + done, offset + len(pages)) from error
        self._add(reads, done)
        return done

    def read_to_device(self, path: str, target: torch.Tensor, offset: int) -> int:
        if not gpudirect.serves(target.device):
            return 0
        with self.file(path) as fd:
            got = gpudirect.read(fd, self._full(path), target, offset)
        self._add(1, got)
        return got

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        with self.file(path) as fd:
            got, reads = self._fill(fd, views, offset, path)
        self._add(reads, got)
        return got

    def _add(self, reads: int, data_bytes: int) -> None:
        with self._lock:
            self.count.reads += reads
            self.count.data_bytes += data_bytes

    def _fill(self, fd: int, views: Sequence[Bytes | memoryview], offset: int, path: str) -> tuple[int, int]:
        """Bytes and calls."""
        total = sum(map(len, views))
        done = reads = 0
        try:
            while done < total:
                got = _read_at(fd, after(views, done), offset + done)
                reads += 1
                if got == 0:
                    break
                done += got
        except OSError as error:
            raise from_os_error(error, "read", self._full(path), offset + done, offset + total) from error
        return done, reads

    @contextmanager
    def file(self, path: str, flags: int = 0) -> Iterator[int]:
        """A file descriptor of ``path``, opened for reading; kept open for a while after use."""
        with self._lock:
            fd = self._idle.pop((path, flags), -1)
        if fd < 0:
            fd = self._open(path, flags)
        try:
            yield fd
        finally:
            with self._lock:
                if (path, flags) in self._idle:
                    os.close(fd)
                else:
                    self._idle[path, flags] = fd
                    if len(self._idle) > IDLE_FILES_MAX:
                        os.close(self._idle.popitem(last=False)[1])

    def close(self) -> None:
        with self._lock:
            while self._idle:
                os.close(self._idle.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _open(self, path: str, more_flags: int) -> int:
        """So that no link inside the checkpoint is followed."""
        opened = _open_by_steps if CAN_OPEN_BY_COMPONENT else _open_after_a_look
        try:
            fd = opened(self.root, path.split("/"), os.O_RDONLY | BINARY | more_flags)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise broken("F002", "not a regular file", file=self._full(path))
        except FileNotFoundError as error:
            raise broken("F001", "the file is missing", file=self._full(path)) from error
        except OSError as error:
            if is_impossible_name(error):
                raise broken("F001", "no file can have this name", file=self._full(path)) from error
            if error.errno in _REFUSED_LINK or (error.errno == errno.EOPNOTSUPP and not more_flags):  # a socket, on BSD
                raise broken("F002", "a link or not a regular file", file=self._full(path)) from error
            raise from_os_error(error, "open", self._full(path)) from error
        return fd

    def _full(self, path: str) -> str:
        return os.path.join(self.root, path)


def _open_by_steps(root: str, names: Sequence[str], flags: int) -> int:
    *directories, name = names
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for directory in directories:
        fd = _step(fd, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    return _step(fd, name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO must not block


def _step(parent: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)


def _open_after_a_look(root: str, names: Sequence[str], flags: int) -> int:
    path = root
    for number, name in enumerate(names, 1):
        path = os.path.join(path, name)
        status = os.lstat(path)
        is_right = stat.S_ISREG if number == len(names) else stat.S_ISDIR
        if is_link(status) or not is_right(status.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return os.open(path, flags)


def is_link(status: os.stat_result) -> bool:
    """Whether the result of ``os.lstat`` is a symbolic link or a junction."""
    return stat.S_ISLNK(status.st_mode) or bool(getattr(status, "st_reparse_tag", 0) & NAME_SURROGATE)


def is_impossible_name(error: OSError) -> bool:
    """Whether it says that no file can have this name: one that is too long, is not in the file system's encoding, or
    has a character that Windows does not allow."""
    return error.errno in (errno.ENAMETOOLONG, errno.EILSEQ) or getattr(error, "winerror", None) == 123


def _read_at(fd: int, views: Sequence[Bytes | memoryview], offset: int) -> int:
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


class NewFile:
    """With ``direct``, whole pages go past the page cache where the file system allows it; else what is written goes to
    disk and out of the cache every now and then.

    The first ``reserved_bytes`` have their blocks on the disk from the start, where the file system can: a file that
    grows is written by one thread at a time, and a full disk shows before a byte is written.
    """

    def __init__(self, path: str, reserved_bytes: int, direct: bool) -> None:
        self.path = path
        self._unsynced_bytes = 0
        self._position = threading.Lock()
        """Without positional writes, a thread holds this lock while it moves the file's position and writes there."""
        self._direct_fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        except OSError as error:
            raise from_os_error(error, "create", path) from error
        try:
            if reserved_bytes:
                linux.reserve(self._fd, reserved_bytes)
        except OSError as error:
            self.close()
            raise from_os_error(error, "allocate", path, 0, reserved_bytes) from error
        if direct and linux.O_DIRECT:
            with suppress(OSError):  # such as a file system without direct I/O
                self._direct_fd = os.open(path, os.O_WRONLY | linux.O_DIRECT)

    @property
    def sharing(self) -> NewFile:
        return self

    def write(self, stage: Bytes, offset: int, nbytes: int) -> None:
        base, stop = offset - offset % PAGE_BYTES, offset + nbytes
        first, last = _whole_pages(offset, stop)
        if self._direct_fd >= 0 and first < last:
            try:
                self._put(self._direct_fd, stage[first - base : last - base], first)
            except StorageError as error:
                if not is_refused(error):
                    raise
            else:
                self.write_edges(stage, offset, nbytes)
                return
        self._put(self._fd, stage[offset - base : stop - base], offset)
        self._unsynced_bytes += nbytes
        if self._unsynced_bytes >= UNSYNCED_BYTES_MAX:
            self._unsynced_bytes = 0
            self.sync()
            linux.uncache(self._fd)

    def share(self, source: FileSpan, offset: int) -> bool:
        # Not where the file system cannot, or `source` lies otherwise in its pages
        first, last = _whole_pages(offset, offset + source.nbytes)
        if source.offset % PAGE_BYTES != offset % PAGE_BYTES or first >= last:
            return False
        try:
            fd = os.open(source.path, os.O_RDONLY | BINARY)
        except OSError:  # whatever the reason: what is wrong shows when it is copied
            return False
        try:
            return linux.share_blocks(self._fd, fd, source.offset + first - offset, last - first, first)
        finally:
            os.close(fd)

    def read_back(self, stage: Bytes, offset: int, nbytes: int) -> None:
        base = offset - offset % PAGE_BYTES
        first, last = _whole_pages(offset, offset + nbytes)
        read_from(self.path, first, stage[first - base : last - base])

    def write_edges(self, stage: Bytes, offset: int, nbytes: int) -> None:
        base, stop = offset - offset % PAGE_BYTES, offset + nbytes
        first, last = _whole_pages(offset, stop)
        self._put(self._fd, stage[offset - base : first - base], offset)
        self._put(self._fd, stage[last - base : stop - base], last)

    def _put(self, fd: int, view: Bytes, offset: int) -> None:
        done = 0
        try:
            while done < len(view):
                done += self._write_at(fd, view[done:], offset + done)
        except OSError as error:
            raise from_os_error(error, "write", self.path, offset + done, offset + len(view)) from error

    def _write_at(self, fd: int, view: Bytes, offset: int) -> int:
        if linux.HAS_POSITIONAL_IO:
            return os.pwritev(fd, [view], offset)
        with self._position:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, view)

    def sync(self) -> None:
        fsync(self._fd, self.path)

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)


def _whole_pages(start: int, stop: int) -> tuple[int, int]:
    """Where the first whole page between two bytes of a file begins, and the last one ends; no more than the former if
    there is none."""
    return -(-start // PAGE_BYTES) * PAGE_BYTES, stop - stop % PAGE_BYTES


def read_from(path: str, offset: int, room: Bytes) -> None:
    """Fills ``room`` from byte ``offset`` of ``path``, a file outside of any checkpoint, and leaves nothing of it in
    the page cache. Raises StorageError, also where the file is too short."""
    done = 0
    try:
        fd = os.open(path, os.O_RDONLY | BINARY)
        try:
            while done < len(room):
                got = _read_at(fd, [room[done:]], offset + done)
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


def fsync(fd: int, path: str) -> None:
    """Raises StorageError."""
    try:
        sync_data(fd)
    except OSError as error:
        raise from_os_error(error, "fsync", path) from error


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
