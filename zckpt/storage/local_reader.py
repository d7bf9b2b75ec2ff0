"""Reads below one local directory, so that no link inside of it is followed."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import StorageError, from_os_error
from zckpt.format.rules import broken
from zckpt.storage import gpudirect
from zckpt.storage.buffers import after
from zckpt.storage.contract import IOCount
from zckpt.storage.files import BINARY, is_impossible_name, is_link, is_refused, read_at
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from zckpt.storage.buffers import Bytes

IDLE_FILES_MAX = 64 if linux.HAS_POSITIONAL_IO else 0
"""The most files that a reader keeps open between reads. It is 0 without positional reads, because a forked process
would move its parent's position, and because Windows cannot replace an open file."""
CAN_OPEN_BY_COMPONENT = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Whether a file can be opened component by component, so that no link is followed whatever others do meanwhile."""
_REFUSED_LINK = {errno.ELOOP, errno.EMLINK, getattr(errno, "EFTYPE", errno.ELOOP), errno.ENOTDIR, errno.ENXIO}
"""The errors by which systems refuse a link, or something that is neither a file nor a directory: Linux and macOS
ELOOP, FreeBSD EMLINK, NetBSD EFTYPE; ENOTDIR for a component of a path; ENXIO for a socket."""


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
        self.count.add(reads=reads, metadata_bytes=got)
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

    def alignment(self, path: str) -> tuple[int, int]:
        with self.file(path) as fd:
            return linux.direct_alignment(fd)

    def read_direct(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        total = sum(map(len, views))
        done = reads = 0
        try:
            with self.file(path, linux.O_DIRECT) as fd:
                while done < total:
                    got = read_at(fd, after(views, done), offset + done)
                    reads += 1
                    if got == 0:
                        break
                    done += got
        except OSError as error:
            if not is_refused(error):  # a read that has ended inside of a block cannot go on from there either
                if isinstance(error, StorageError):
                    raise
                raise from_os_error(error, "read", self._full(path), offset + done, offset + total) from error
        self.count.add(reads=reads, data_bytes=done)
        return done

    def read_to_device(self, path: str, target: torch.Tensor, offset: int) -> int:
        if not gpudirect.serves(target.device):
            return 0
        with self.file(path) as fd:
            got = gpudirect.read(fd, self._full(path), target, offset)
        self.count.add(reads=1, data_bytes=got)
        return got

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        with self.file(path) as fd:
            got, reads = self._fill(fd, views, offset, path)
        self.count.add(reads=reads, data_bytes=got)
        return got

    def _fill(self, fd: int, views: Sequence[Bytes | memoryview], offset: int, path: str) -> tuple[int, int]:
        """Bytes and calls."""
        total = sum(map(len, views))
        done = reads = 0
        try:
            while done < total:
                got = read_at(fd, after(views, done), offset + done)
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
