"""Writes one new local file: past the page cache where that can be, with blocks reserved, with pages shared."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from zckpt.errors import StorageError, from_os_error
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.files import BINARY, is_refused, read_from, sync_data
from zckpt.system import linux

if TYPE_CHECKING:
    from zckpt.state.inventory import FileSpan
    from zckpt.storage.buffers import Bytes

UNSYNCED_BYTES_MAX = 32 << 20
"""Of one file, where its writes go through the page cache."""


class LocalWriter:
    """With ``direct``, whole pages go past the page cache where the file system allows it; else what is written goes to
    disk and out of the cache every now and then.

    The first ``reserved_bytes`` have their blocks on the disk from the start, where the file system can: a file that
    grows is written by one thread at a time, and a full disk shows before a byte is written.
    """

    def __init__(
        self, path: str, reserved_bytes: int, direct: bool, flags: int = os.O_RDWR | os.O_CREAT | os.O_EXCL
    ) -> None:
        """``flags``: how the file is opened; by default it is new."""
        self.path = path
        self._unsynced_bytes = 0
        self._position = threading.Lock()
        """Without positional writes, a thread holds this lock while it moves the file's position and writes there."""
        self._direct_fd = -1
        try:
            self._fd = os.open(path, flags | BINARY, 0o666)
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
    def sharing(self) -> LocalWriter:
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
            self._flush()
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
        self._flush()

    def _flush(self) -> None:
        try:
            sync_data(self._fd)
        except OSError as error:
            raise from_os_error(error, "fsync", self.path) from error

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)


def _whole_pages(start: int, stop: int) -> tuple[int, int]:
    """Where the first whole page between two bytes of a file begins, and the last one ends; no more than the former if
    there is none."""
    return -(-start // PAGE_BYTES) * PAGE_BYTES, stop - stop % PAGE_BYTES
