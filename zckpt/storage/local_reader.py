"""Reads the files below one local directory. Below it, no link is followed, except those of the Hugging Face Hub's
cache."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections import OrderedDict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zckpt.errors import StorageError, from_os_error
from zckpt.format.rules import broken
from zckpt.progress import logger
from zckpt.storage import gpudirect
from zckpt.storage.buffers import after
from zckpt.storage.contract import IOCount
from zckpt.storage.files import BINARY, is_impossible_name, is_link, is_refused, read_at, read_bytes_at
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from zckpt.storage.buffers import Bytes

IDLE_FILES_MAX = 64 if linux.HAS_POSITIONAL_IO else 0
"""The most files that a reader keeps open between reads. It is 0 without positional reads, because a forked process
would move its parent's position, and because Windows cannot replace an open file."""
SAMPLES, SAMPLE_BYTES = 4, 64 << 10
"""How many samples of a range show whether it is in the page cache, and the size of a sample in bytes. If the range is
no longer than all samples together, the system is asked about all of its pages. For a range of 16 MiB this would take
5 % of the time that it takes to read it from the cache."""
CAN_OPEN_BY_COMPONENT = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Whether the system can open a file component by component. Then no link is followed, whatever other processes do to
the path at the same time."""
_REFUSED_LINK = {errno.ELOOP, errno.EMLINK, getattr(errno, "EFTYPE", errno.ELOOP), errno.ENOTDIR, errno.ENXIO}
"""The error numbers by which systems refuse to open a link, or something that is neither a file nor a directory: ELOOP
on Linux and macOS, EMLINK on FreeBSD, EFTYPE on NetBSD, ENOTDIR for a component of the path, and ENXIO for a socket."""
_HUB_REPOSITORY = re.compile(r"(?:models|datasets|spaces)--.+")
"""The name of a repository's directory in the cache of the Hugging Face Hub."""
_NO_LINKS = (
    "zckpt follows links to a checkpoint, but not inside of it: copy it with `cp -rL`, which copies what they lead to, "
    "or download it with snapshot_download(..., local_dir=...)"
)


class LocalReader:
    """Reads the files below one directory. Keeps the files that were used last open between reads."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.count = IOCount()
        self._lock = threading.Lock()
        self._idle: OrderedDict[tuple[str, int], int] = OrderedDict()

    @property
    def direct(self) -> LocalReader:
        return self

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        parts: list[bytes] = []
        start, stop = offset, offset + nbytes
        with self.file(path) as fd:
            stop = min(stop, os.fstat(fd).st_size)
            try:
                while start < stop and (part := read_bytes_at(fd, stop - start, start)):
                    parts.append(part)
                    start += len(part)
            except OSError as error:
                raise from_os_error(error, "read", self._full(path), start, stop) from error
        self.count.add(reads=len(parts), metadata_bytes=start - offset)
        return b"".join(parts)  # This makes no copy of a single part.

    def size(self, path: str) -> int:
        with self.file(path) as fd:
            return os.fstat(fd).st_size

    def is_cached(self, path: str, offset: int, nbytes: int) -> bool:
        # The cache is the page cache. preadv2 with RWF_NOWAIT would not do, because even that starts I/O.
        if not linux.O_DIRECT:
            return True  # without direct I/O, all reads go through the page cache
        ranges = [(offset, nbytes)]
        if nbytes > SAMPLES * SAMPLE_BYTES:
            step = (nbytes - SAMPLE_BYTES) // (SAMPLES - 1)
            ranges = [(offset + number * step, SAMPLE_BYTES) for number in range(SAMPLES)]
        cached_bytes, unknown_bytes = 0, sum(length for _, length in ranges)
        enough_bytes = unknown_bytes // 2 + 1
        with self.file(path) as fd:
            for start, length in ranges:
                cached_bytes += linux.cached_bytes(fd, start, length)
                unknown_bytes -= length
                if cached_bytes >= enough_bytes or cached_bytes + unknown_bytes < enough_bytes:
                    break  # the other samples cannot change the answer
        return cached_bytes >= enough_bytes

    def alignment(self, path: str) -> tuple[int, int]:
        with self.file(path) as fd:
            return linux.direct_alignment(fd)

    def read_direct(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        try:
            with self.file(path, linux.O_DIRECT) as fd:
                return self._fill(fd, views, offset, path)
        except StorageError as error:
            if not is_refused(error):
                raise
            # Direct I/O also refuses to continue a read that has ended inside of a block. Then the bytes that were read
            # before are returned. The error of ``_fill`` begins where they end.
            filled = 0 if error.start is None else error.start - offset
            if not filled:
                logger.debug("%s: read through the page cache, not past it: %s", self._full(path), error)
            return filled

    def read_to_device(self, path: str, target: torch.Tensor, offset: int) -> int:
        if not gpudirect.serves(target.device):
            return 0
        with self.file(path) as fd:
            nbytes = gpudirect.read(fd, self._full(path), target, offset)
        self.count.add(reads=1, data_bytes=nbytes)
        return nbytes

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        with self.file(path) as fd:
            return self._fill(fd, views, offset, path)

    def read_portions(
        self, path: str, portions: Sequence[Sequence[Bytes | memoryview]], offset: int, use: Callable[[int], None]
    ) -> int:
        filled = 0
        with self.file(path) as fd:
            for number, views in enumerate(portions):
                nbytes = self._fill(fd, views, offset + filled, path)
                filled += nbytes
                if nbytes < sum(map(len, views)):
                    break
                use(number)
        return filled

    def _fill(self, fd: int, views: Sequence[Bytes | memoryview], offset: int, path: str) -> int:
        """Fills ``views`` from byte ``offset`` on. Returns the number of bytes read, and counts them."""
        total = sum(map(len, views))
        filled = reads = 0
        try:
            while filled < total:
                nbytes = read_at(fd, after(views, filled), offset + filled)
                reads += 1
                if nbytes == 0:
                    break
                filled += nbytes
        except OSError as error:
            raise from_os_error(error, "read", self._full(path), offset + filled, offset + total) from error
        finally:
            self.count.add(reads=reads, data_bytes=filled)
        return filled

    @contextmanager
    def file(self, path: str, flags: int = 0) -> Iterator[int]:
        """Lends a file descriptor of ``path`` that is open for reading. It stays open for a while after use."""
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
            # Compiled code makes all these calls, so Ctrl-C never comes between taking a file and closing it.
            deque(map(os.close, map(self._idle.pop, [*self._idle])), maxlen=0)

    def __del__(self) -> None:
        if os is not None:  # At its end, Python sets a module's names to None. The system closes the files then.
            self.close()

    def _open(self, path: str, more_flags: int) -> int:
        """Opens a file below the root without following a link below the root, except one of the Hub's cache.
        ``more_flags`` are added to those of ``os.open``."""
        open_file = _open_by_component if CAN_OPEN_BY_COMPONENT else _open_after_checks
        names, flags = path.split("/"), os.O_RDONLY | BINARY | more_flags
        try:
            try:
                fd = open_file(self.root, names, flags)
            except OSError as error:
                blob = _hub_blob(self.root, names) if error.errno in _REFUSED_LINK else None
                if blob is None:
                    raise
                fd = open_file(*blob, flags)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise broken("F002", "not a regular file", file=self._full(path))
        except FileNotFoundError as error:
            raise broken("F001", "the file is missing", file=self._full(path)) from error
        except OSError as error:
            if is_impossible_name(error):
                raise broken("F001", "no file can have this name", file=self._full(path)) from error
            if error.errno in _REFUSED_LINK or (error.errno == errno.EOPNOTSUPP and not more_flags):  # a socket on BSD
                above = (os.path.join(self.root, *names[:count]) for count in range(1, len(names) + 1))
                hint = _NO_LINKS if any(map(os.path.islink, above)) else None
                raise broken("F002", "a link or not a regular file", file=self._full(path), hint=hint) from error
            raise from_os_error(error, "open", self._full(path)) from error
        return fd

    def _full(self, path: str) -> str:
        return os.path.join(self.root, path)


def _hub_blob(root: str, names: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Returns the file that a link of the Hub's cache stands for, as a directory and the names of the components below
    it. Returns None for every other path.

    In this cache, ``<repository>/snapshots/<revision>/<path>`` is a link to ``<repository>/blobs/<digest>``. The caller
    follows no further link, so nothing outside of the repository's directory is read.
    """
    directory = os.path.join(os.path.realpath(root), *names[:-1])
    repository = directory.rpartition(f"{os.sep}snapshots{os.sep}")[0]
    if not _HUB_REPOSITORY.fullmatch(os.path.basename(repository)) or os.path.realpath(directory) != directory:
        return None
    try:
        target = os.path.join(directory, os.readlink(os.path.join(directory, names[-1])))
    except OSError:  # It is not a link.
        return None
    blobs, name = os.path.split(os.path.normpath(target))
    return (repository, ["blobs", name]) if blobs == os.path.join(repository, "blobs") else None


def _open_by_component(root: str, names: Sequence[str], flags: int) -> int:
    *directories, name = names
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for directory in directories:
        fd = _open_below(fd, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    return _open_below(fd, name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO must not block


def _open_below(parent: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)


def _open_after_checks(root: str, names: Sequence[str], flags: int) -> int:
    path = root
    for number, name in enumerate(names, 1):
        path = os.path.join(path, name)
        status = os.lstat(path)
        is_right = stat.S_ISREG if number == len(names) else stat.S_ISDIR
        if is_link(status) or not is_right(status.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return os.open(path, flags)
