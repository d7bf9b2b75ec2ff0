"""A checkpoint's files on a local or mounted file system, read so that nothing outside of its directory is reached."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import StorageError, from_os_error
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IDLE_FILES_MAX = 64


@dataclass
class IOCount:
    """What was asked of the operating system: read calls, and the bytes that they returned."""

    reads: int = 0
    metadata_bytes: int = 0
    """Of the manifest, the index, digest tables and headers."""
    data_bytes: int = 0
    """Of tensors."""

    @property
    def bytes_read(self) -> int:
        return self.metadata_bytes + self.data_bytes


class LocalReader:
    """Reads the files of one checkpoint directory by their paths relative to it. Safe to use from several threads.

    Raises FormatError (F001, F002) for a file that is missing, a link or no regular file, and StorageError for what the
    operating system refuses.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.count = IOCount()
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` from byte ``offset``, or fewer at the end of the file."""
        buffer = bytearray(nbytes)
        with self.file(path) as fd:
            got, reads = self._fill(fd, [memoryview(buffer)], offset, path)
        with self._lock:
            self.count.reads += reads
            self.count.metadata_bytes += got
        return bytes(memoryview(buffer)[:got])

    def size(self, path: str) -> int:
        """In bytes."""
        with self.file(path) as fd:
            return os.fstat(fd).st_size

    def read_into(self, fd: int, views: Sequence[memoryview], offset: int, path: str) -> int:
        """Fills ``views`` one after the other with tensor data from byte ``offset`` of the open file ``path``; returns
        the bytes read, fewer only at its end."""
        got, reads = self._fill(fd, views, offset, path)
        with self._lock:
            self.count.reads += reads
            self.count.data_bytes += got
        return got

    def _fill(self, fd: int, views: Sequence[memoryview], offset: int, path: str) -> tuple[int, int]:
        """Bytes and calls."""
        total = sum(view.nbytes for view in views)
        left = [view for view in views if view.nbytes]
        done = reads = 0
        try:
            while left:
                got = os.preadv(fd, left, offset + done)
                reads += 1
                if got == 0:
                    break
                done += got
                left = _advance(left, got)
        except OSError as error:
            raise from_os_error(error, "read", self._full(path), offset + done, offset + total) from error
        return done, reads

    @contextmanager
    def file(self, path: str) -> Iterator[int]:
        """A file descriptor of ``path``, opened for reading; kept open for a while after use."""
        with self._lock:
            fd = self._idle.pop(path, -1)
        if fd < 0:
            fd = self._open(path)
        try:
            yield fd
        finally:
            with self._lock:
                if path in self._idle:
                    os.close(fd)
                else:
                    self._idle[path] = fd
                    if len(self._idle) > IDLE_FILES_MAX:
                        os.close(self._idle.popitem(last=False)[1])

    def close(self) -> None:
        with self._lock:
            while self._idle:
                os.close(self._idle.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _open(self, path: str) -> int:
        """Opens component by component, so that no symbolic link inside the checkpoint is followed."""
        *directories, name = path.split("/")
        flags = os.O_RDONLY | os.O_CLOEXEC
        fd = -1
        try:
            fd = os.open(self.root, flags | os.O_DIRECTORY)
            for directory in directories:
                fd = _step(fd, directory, flags | os.O_DIRECTORY | os.O_NOFOLLOW)
            fd = _step(fd, name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO must not block
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise broken("F002", "not a regular file", file=self._full(path))
        except FileNotFoundError as error:
            raise broken("F001", "the file is missing", file=self._full(path)) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise broken("F002", "a link or not a regular file", file=self._full(path)) from error
            raise from_os_error(error, "open", self._full(path)) from error
        return fd

    def _full(self, path: str) -> str:
        return os.path.join(self.root, path)


def _step(parent: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)


def _advance(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``views`` after the first ``nbytes``."""
    for i, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= view.nbytes
    return []


def write_from(fd: int, views: Sequence[memoryview], offset: int, path: str) -> None:
    """Writes ``views`` one after the other from byte ``offset`` of ``path``. Raises StorageError, NoSpaceError."""
    total = sum(view.nbytes for view in views)
    left: Sequence[memoryview] = views
    done = 0
    try:
        while left:
            put = os.pwritev(fd, left, offset + done)
            done += put
            left = _advance(left, put)
    except OSError as error:
        raise from_os_error(error, "write", path, offset + done, offset + total) from error


def read_from(path: str, reads: Sequence[tuple[int, memoryview]]) -> None:
    """Fills each view from its byte offset of ``path``, a file outside of any checkpoint, and leaves nothing of it in
    the page cache. Raises StorageError, also where the file is too short."""
    offset = stop = 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start, view in reads:
                offset, stop = start, start + view.nbytes
                while offset < stop:
                    got = os.preadv(fd, [view[offset - start :]], offset)
                    if got == 0:
                        raise StorageError("the file ends too early", file=path, start=offset, stop=stop)
                    offset += got
                os.posix_fadvise(fd, start, view.nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise from_os_error(error, "read", path, offset, stop) from error
