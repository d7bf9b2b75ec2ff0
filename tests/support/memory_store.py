"""A store in this process's memory, for paths such as ``memory://run/step1``. It is as simple as a store can be."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from unittest import mock

import numpy as np

from zckpt.format.rules import broken
from zckpt.storage.contract import ANYTHING, Entry, IOCount, Store
from zckpt.storage.schemes import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Condition


class File(NamedTuple):
    data: bytes
    changed_at: float


Disk = dict[str, File]
"""The files by their paths."""
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
            raise broken("F001", "the file is missing", file=str(self._store.location.child(path)))
        return file.data


class MemoryWriter:
    sharing = None

    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store, self._path = store, path
        self._parts: dict[int, bytes] = {}

    def write(self, data: Bytes | memoryview, offset: int) -> None:
        self._parts[offset] = bytes(data)

    def is_next(self, offset: int) -> bool:
        return True

    def sync(self) -> None:
        self._store.put(self._path, b"".join(self._parts[offset] for offset in sorted(self._parts)), ANYTHING)

    def close(self) -> None: ...


class MemoryStore(Store):
    disk: ClassVar[Disk] = {}

    def full(self, path: str) -> str:
        return self.location.child(path).path.strip("/")

    def reader(self) -> MemoryReader:
        return MemoryReader(self)

    def entry(self, path: str) -> Entry | None:
        file = self.disk.get(self.full(path))
        if file is not None:
            return Entry(path, len(file.data), file.changed_at)
        return None if self.entries(path) is None else Entry(path, None, 0.0, is_directory=True)

    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        above = f"{self.full(path)}/".lstrip("/")
        found: dict[str, Entry] = {}
        for key, file in list(self.disk.items()):
            if key.startswith(above):
                below = key.removeprefix(above)
                name = below if deep else below.split("/")[0]
                is_file = name == below
                found[name] = Entry(name, len(file.data) if is_file else None, file.changed_at, not is_file)
        return list(found.values()) or None

    def put(self, path: str, data: bytes, over: Condition = None) -> bool:
        full = self.full(path)
        with _LOCK:
            file = self.disk.get(full)
            if over is not ANYTHING and over != (None if file is None else file.data):
                return False
            self.disk[full] = File(data, time.time())
        return True

    def create(self, path: str, nbytes: int, *, direct: bool, reserve: bool = True) -> MemoryWriter:
        return MemoryWriter(self, path)

    def remove(self, *paths: str) -> None:
        for path in paths:
            self.disk.pop(self.full(path), None)

    def remove_if(self, path: str, data: bytes) -> bool:
        with _LOCK:
            file = self.disk.get(self.full(path))
            return file is not None and file.data == data and self.disk.pop(self.full(path)) is file

    def now(self) -> float:
        return time.time()


@contextmanager
def in_memory() -> Iterator[Disk]:
    """Makes paths that begin with ``memory://`` those of a new, empty disk, and yields this disk."""
    disk: Disk = {}
    with mock.patch.dict(SCHEMES, memory=type("Memory", (MemoryStore,), {"disk": disk})):
        yield disk
