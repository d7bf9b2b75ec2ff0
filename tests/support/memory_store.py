"""A store in this process's memory, for paths such as ``memory://run/step1``."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

from zckpt.errors import StorageError
from zckpt.format.names import temporary
from zckpt.format.rules import broken
from zckpt.storage.contract import Entry, IOCount
from zckpt.storage.location import Location
from zckpt.storage.schemes import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.storage.buffers import Bytes


@dataclass
class File:
    data: bytes
    changed_at: float = field(default_factory=time.time)


Disk = dict[str, File | None]
"""The files by their paths. A directory is None."""
_LOCK = threading.Lock()


class MemoryReader:
    direct = None

    def __init__(self, store: MemoryStore) -> None:
        self.count = IOCount()
        self._store = store

    def size(self, path: str) -> int:
        return len(self._data(path))

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        data = self._data(path)[offset : offset + nbytes]
        self.count.add(reads=1, metadata_bytes=len(data))
        return data

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        rest, bytes_read = np.frombuffer(self._data(path), np.uint8)[offset:], 0
        for view in views:
            nbytes = min(len(view), len(rest) - bytes_read)
            np.asarray(view)[:nbytes] = rest[bytes_read : bytes_read + nbytes]
            bytes_read += nbytes
        self.count.add(reads=1, data_bytes=bytes_read)
        return bytes_read

    def close(self) -> None: ...

    def _data(self, path: str) -> bytes:
        file = self._store.disk.get(self._store.full(path))
        if file is None:
            rule, what = ("F002", "a directory") if self._store.is_directory(path) else ("F001", "the file is missing")
            raise broken(rule, what, file=str(self._store.location.child(path)))
        return file.data


class MemoryWriter:
    sharing = None

    def __init__(self, file: File) -> None:
        self._file = file
        self._parts: dict[int, bytes] = {}

    def write(self, data: Bytes | memoryview, offset: int) -> None:
        self._parts[offset] = bytes(data)

    def sync(self) -> None:
        self._file.data = b"".join(self._parts[offset] for offset in sorted(self._parts))

    def close(self) -> None: ...


class MemoryStore:
    free: int | None = None
    """The value that ``free_bytes`` returns."""

    def __init__(self, location: Location, disk: Disk) -> None:
        self.location, self.disk = location, disk

    @property
    def parent(self) -> MemoryStore:
        return MemoryStore(self.location.parent, self.disk)

    def child(self, path: str) -> MemoryStore:
        return MemoryStore(self.location.child(path), self.disk)

    def full(self, path: str) -> str:
        return self.location.child(path).path.strip("/")

    def _below(self, path: str) -> list[str]:
        above = f"{self.full(path)}/".lstrip("/")
        return [key.removeprefix(above) for key in list(self.disk) if key and key.startswith(above)]

    def _error(self, message: str, path: str) -> StorageError:
        return StorageError(message, file=str(self.location.child(path)))

    def reader(self) -> MemoryReader:
        return MemoryReader(self)

    def entry(self, path: str) -> Entry | None:
        if self.full(path) not in self.disk:
            return None
        file = self._file(path)
        if file is None:
            return Entry(path, None, 0.0, is_directory=True)
        links = sum(other is file for other in list(self.disk.values()))
        return Entry(path, len(file.data), file.changed_at, False, links, id(file))

    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        if not self.is_directory(path):
            return None
        entries = [self.child(path).entry(below) for below in self._below(path) if deep or "/" not in below]
        return [entry for entry in entries if entry is not None and not (deep and entry.is_directory)]

    def free_bytes(self) -> int | None:
        return self.free

    def _file(self, path: str) -> File | None:
        return self.disk.get(self.full(path))

    def is_directory(self, path: str) -> bool:
        return self.disk.get(self.full(path), path) is None

    def _put(self, path: str, file: File) -> bool:
        """Puts ``file`` at ``path`` if the directory exists and nothing is at ``path``. Returns whether it did so."""
        full = self.full(path)
        with _LOCK:
            above = self.disk.get(full.rpartition("/")[0], file)
            return above is None and self.disk.setdefault(full, file) is file

    def make_directories(self, path: str) -> list[Location]:
        parts = self.full(path).split("/")
        made: list[Location] = []
        for number in range(len(parts) + 1):
            above = "/".join(parts[:number])
            with _LOCK:
                if above not in self.disk:
                    self.disk[above] = None
                    made.insert(0, Location(self.location.scheme, above))
            if self.disk[above] is not None:
                raise self._error("a file is in the way", path)
        return made

    def create(self, path: str, reserved_bytes: int, *, direct: bool) -> MemoryWriter:
        file = File(b"")
        if not self._put(path, file):
            raise self._error("it is there already, or its directory is not", path)
        return MemoryWriter(file)

    def share(self, path: str, source: Location) -> bool:
        file = self.disk.get(source.path.strip("/"))
        if source.scheme != self.location.scheme or file is None or self.entry(path) is not None:
            return False
        return self._put(path, file)

    def may_share(self, directory: Location) -> bool:
        return directory.scheme == self.location.scheme

    def put(self, path: str, data: bytes) -> None:
        if not self.claim(path, data):
            raise self._error("it is there already, or its directory is not", path)

    def sync_names(self, path: str) -> None: ...

    def prepare(self, path: str, data: bytes, digits: str = "") -> str:
        prepared = temporary(path, digits or secrets.token_hex(4))
        self.put(prepared, data)
        return prepared

    def commit(self, path: str, prepared: str) -> None:
        with _LOCK:  # so that no other thread removes the file in between
            file = self._file(prepared)
            if file is None or self.is_directory(path):
                raise self._error("somebody has removed it, or a directory is in the way", prepared)
            self.disk[self.full(path)] = file
            del self.disk[self.full(prepared)]

    def remove(self, path: str) -> None:
        with _LOCK:
            for key in [self.full(path), *map(self.child(path).full, self._below(path))]:
                self.disk.pop(key, None)

    def remove_if_empty(self, path: str) -> None:
        with _LOCK:
            if self.is_directory(path) and not self._below(path):
                del self.disk[self.full(path)]

    def claim(self, path: str, data: bytes) -> bool:
        return self._put(path, File(data))

    def withdraw(self, path: str, data: bytes) -> bool:
        with _LOCK:
            file = self._file(path)
            return file is not None and file.data == data and self.disk.pop(self.full(path)) is file

    def touch(self, path: str) -> None:
        file = self._file(path)
        if file is None:
            raise self._error("it is not there", path)
        file.changed_at = time.time()

    def now(self) -> float:
        return time.time()


@contextmanager
def in_memory() -> Iterator[Disk]:
    """Makes paths that begin with ``memory://`` those of a new, empty disk, and yields this disk."""
    disk: Disk = {}
    with mock.patch.dict(SCHEMES, memory=lambda location: MemoryStore(location, disk)):
        yield disk
