"""Writes one new local file: past the page cache if possible, with blocks reserved ahead, and with pages shared."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import StorageError, from_os_error
from zckpt.progress import logger
from zckpt.storage.buffers import PAGE_BYTES, after, whole_pages
from zckpt.storage.files import BINARY, is_refused, read_from, sync_data
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.plan.inventory import FileRange
    from zckpt.storage.buffers import Bytes

UNSYNCED_BYTES_MAX = 32 << 20
"""After how many bytes a file that is written through the page cache is synced and removed from the cache."""


class LocalWriter:
    """Writes one new local file.

    With ``direct``, whole pages go past the page cache if the file system allows it. Otherwise, the written bytes are
    synced to the disk and removed from the page cache every ``UNSYNCED_BYTES_MAX`` bytes.

    The first ``reserved_bytes`` bytes have their blocks on the disk from the start, if the file system can reserve
    blocks. There are two reasons: a file whose blocks are not reserved grows, and only one thread at a time can write
    to a growing file; and a lack of space shows before a byte is written.
    """

    def __init__(
        self, path: str, reserved_bytes: int, direct: bool, flags: int = os.O_RDWR | os.O_CREAT | os.O_EXCL
    ) -> None:
        """Makes the file. ``flags`` are those by which it is opened. By default, the file must be new."""
        self.path = path
        self._unsynced_bytes = 0
        self._pages: dict[int, _Page] = {}
        """The pages of which only parts have been written, by the offset of the page in the file."""
        self._lock = threading.Lock()
        """Held while ``_pages`` changes. Without positional writes, it is also held while the file's position is moved
        and the bytes are written there."""
        self._direct_fd = -1
        try:
            self._fd = os.open(path, flags | BINARY, 0o666)
        except OSError as error:
            raise from_os_error(error, "create" if flags & os.O_CREAT else "open", path) from error
        try:
            if reserved_bytes:
                linux.reserve(self._fd, reserved_bytes)
        except OSError as error:
            self.close()
            raise from_os_error(error, "allocate", path, 0, reserved_bytes) from error
        if direct and linux.O_DIRECT:
            try:
                self._direct_fd = os.open(path, os.O_WRONLY | linux.O_DIRECT)
            except OSError as error:  # such as a file system without direct I/O
                logger.debug("%s: written through the page cache, not past it: %s", path, error)

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

    def share(self, source: FileRange, offset: int) -> bool:
        # Pages can be shared only if both ranges begin at the same place in a page, and have a whole page.
        first, last = whole_pages(offset, source.nbytes)
        if source.offset % PAGE_BYTES != offset % PAGE_BYTES or first >= last:
            return False
        try:
            fd = os.open(source.path, os.O_RDONLY | BINARY)
        except OSError:  # the caller then copies the range, and that raises the right error
            return False
        try:
            if linux.share_blocks(self._fd, fd, source.offset + first, last - first, offset + first):
                return True
            logger.debug(
                "%s: copied from %s, since the file system shares no blocks of these files", self.path, source.path
            )
            return False
        finally:
            os.close(fd)

    def read_back(self, room: Bytes, offset: int) -> None:
        first, last = whole_pages(offset, len(room))
        read_from(self.path, offset + first, room[first:last], direct=self._direct_fd >= 0)

    def write_edges(self, data: Bytes | memoryview, offset: int) -> None:
        first, last = whole_pages(offset, len(data))
        for part, start in ((data[:first], offset), (data[last:], offset + last)):
            if self._direct_fd < 0:
                self._put(self._fd, [part], start)
            else:
                self._put_pages(self._edge(part, start), start - start % PAGE_BYTES)

    def _edge(self, part: Bytes | memoryview, offset: int) -> list[Bytes]:
        """Keeps a part of a page. Returns the page once all of it is there. ``sync`` writes the pages that stay
        incomplete. Writing each part through the page cache at once would be slow, because each such write waits for
        all direct writes to the file that are under way."""
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
            logger.debug("%s: written through the page cache, not past it: %s", self.path, error)
            self._put_cached(views, offset)

    def _put_cached(self, views: Sequence[Bytes | memoryview], offset: int) -> None:
        self._put(self._fd, views, offset)
        self._unsynced_bytes += sum(map(len, views))
        if self._unsynced_bytes >= UNSYNCED_BYTES_MAX:
            self._unsynced_bytes = 0
            self._flush()
            linux.uncache(self._fd)

    def _put(self, fd: int, views: Sequence[Bytes | memoryview], offset: int) -> None:
        """Writes ``views`` one after the other from byte ``offset`` on."""
        stop = offset + sum(map(len, views))
        views = [view for view in views if len(view)]
        try:
            while views:
                nbytes = self._write_at(fd, views, offset)
                offset += nbytes
                views = after(views, nbytes)
        except OSError as error:
            raise from_os_error(error, "write", self.path, offset, stop) from error

    def _write_at(self, fd: int, views: Sequence[Bytes | memoryview], offset: int) -> int:
        if linux.HAS_POSITIONAL_IO:
            return os.pwritev(fd, views, offset)
        with self._lock:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, views[0])

    def is_next(self, offset: int) -> bool:
        return True

    def sync(self) -> None:
        self._complete()
        self._flush()

    def _complete(self) -> None:
        """Writes the parts of those pages that have stayed incomplete."""
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
    """A page of the file that is written in parts."""

    def __init__(self) -> None:
        # mmap returns memory that is aligned to a page.
        self.room: Bytes = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), np.uint8)
        self.start, self.stop, self._nbytes = PAGE_BYTES, 0, 0

    def add(self, part: Bytes | memoryview, start: int) -> bool:
        """Adds a part of the page at byte ``start`` of the page. Returns whether the page is complete now. No byte may
        be added twice."""
        stop = start + len(part)
        self.room[start:stop] = part
        self.start, self.stop = min(self.start, start), max(self.stop, stop)
        self._nbytes += len(part)
        return self._nbytes == PAGE_BYTES
