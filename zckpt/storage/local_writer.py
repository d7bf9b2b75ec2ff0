"""Writes one new local file: past the page cache where that can be, with blocks reserved, with pages shared."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import StorageError, from_os_error
from zckpt.storage.buffers import PAGE_BYTES, after, whole_pages
from zckpt.storage.files import BINARY, is_refused, read_from, sync_data
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        self._pages: dict[int, _Page] = {}
        """The pages of which a part is there, by the byte of the file at which they begin."""
        self._lock = threading.Lock()
        """Held to change ``_pages``, and without positional writes to move the file's position and write there."""
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

    def write(self, data: Bytes | memoryview, offset: int) -> None:
        if self._direct_fd < 0:
            self._put_cached([data], offset)
            return
        first, last = whole_pages(offset, len(data))
        head, tail = self._edge(data[:first], offset), self._edge(data[last:], offset + last)
        self._put_pages([*head, data[first:last], *tail], offset - offset % PAGE_BYTES if head else offset + first)

    def share(self, source: FileSpan, offset: int) -> bool:
        # Not where the file system cannot, or `source` lies otherwise in its pages
        first, last = whole_pages(offset, source.nbytes)
        if source.offset % PAGE_BYTES != offset % PAGE_BYTES or first >= last:
            return False
        try:
            fd = os.open(source.path, os.O_RDONLY | BINARY)
        except OSError:  # whatever the reason: what is wrong shows when it is copied
            return False
        try:
            return linux.share_blocks(self._fd, fd, source.offset + first, last - first, offset + first)
        finally:
            os.close(fd)

    def read_back(self, room: Bytes, offset: int) -> None:
        first, last = whole_pages(offset, len(room))
        read_from(self.path, offset + first, room[first:last], direct=self._direct_fd >= 0)

    def write_edges(self, data: Bytes | memoryview, offset: int) -> None:
        first, last = whole_pages(offset, len(data))
        for part, at in ((data[:first], offset), (data[last:], offset + last)):
            if self._direct_fd < 0:
                self._put(self._fd, [part], at)
            else:
                self._put_pages(self._edge(part, at), at - at % PAGE_BYTES)

    def _edge(self, part: Bytes | memoryview, offset: int) -> list[Bytes]:
        """Keeps a part of a page. Returns the page once all of it is there; ``sync`` writes what stays in parts.
        Through the page cache, each part would wait for all direct writes to the file that are under way."""
        if not len(part):
            return []
        start = offset % PAGE_BYTES
        with self._lock:
            page = self._pages.pop(offset - start, None) or _Page()
            if page.add(part, start):
                return [page.room]
            self._pages[offset - start] = page
            return []

    def _put_pages(self, views: Sequence[Bytes | memoryview], offset: int) -> None:
        try:
            self._put(self._direct_fd, views, offset)
        except StorageError as error:
            if not is_refused(error):
                raise
            self._put_cached(views, offset)

    def _put_cached(self, views: Sequence[Bytes | memoryview], offset: int) -> None:
        self._put(self._fd, views, offset)
        self._unsynced_bytes += sum(map(len, views))
        if self._unsynced_bytes >= UNSYNCED_BYTES_MAX:
            self._unsynced_bytes = 0
            self._flush()
            linux.uncache(self._fd)

    def _put(self, fd: int, views: Sequence[Bytes | memoryview], offset: int) -> None:
        """Writes ``views`` one after the other."""
        stop = offset + sum(map(len, views))
        views = [view for view in views if len(view)]
        try:
            while views:
                done = self._write_at(fd, views, offset)
                offset += done
                views = after(views, done)
        except OSError as error:
            raise from_os_error(error, "write", self.path, offset, stop) from error

    def _write_at(self, fd: int, views: Sequence[Bytes | memoryview], offset: int) -> int:
        if linux.HAS_POSITIONAL_IO:
            return os.pwritev(fd, views, offset)
        with self._lock:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, views[0])

    def sync(self) -> None:
        self._complete()
        self._flush()

    def _complete(self) -> None:
        """Writes what there is of the pages of which the rest never came."""
        for offset, page in self._pages.items():
            self._put(self._fd, [page.room[page.start : page.stop]], offset + page.start)

    def _flush(self) -> None:
        try:
            sync_data(self._fd)
        except OSError as error:
            raise from_os_error(error, "fsync", self.path) from error

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)


class _Page:
    """A page of a file that is written in parts."""

    def __init__(self) -> None:
        self.room: Bytes = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), np.uint8)  # itself a page of memory
        self.start, self.stop, self._nbytes = PAGE_BYTES, 0, 0

    def add(self, part: Bytes | memoryview, start: int) -> bool:
        """Returns whether the page is whole now. No byte is added twice."""
        stop = start + len(part)
        self.room[start:stop] = part
        self.start, self.stop = min(self.start, start), max(self.stop, stop)
        self._nbytes += len(part)
        return self._nbytes == PAGE_BYTES
