"""Uploads the files of an object store in parts."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, Any, BinaryIO
from weakref import finalize

import numpy as np

from zckpt.errors import StorageError, from_os_error

if TYPE_CHECKING:
    from zckpt.object_stores.store import ObjectStore
    from zckpt.storage.buffers import Bytes

PART_BYTES = 8 << 20
"""The size in bytes of the parts in which a large file is uploaded, if they are not too many."""
PARTS_MAX = 10_000
"""The largest number of parts that S3 accepts for one file."""
PARTS_IN_FLIGHT = 8
"""How many parts of one file are uploaded at a time."""


class _ByteLimit:
    """A limit for bytes of this process, which all files share."""

    def __init__(self, nbytes_max: int) -> None:
        self.nbytes_max = nbytes_max
        self._nbytes = 0
        self._changed = threading.Condition(threading.RLock())  # Bytes may be given back in any thread, at any time.

    def take(self, nbytes: int) -> bool:
        """Counts bytes unless they would be too many. Returns whether it has."""
        with self._changed:
            if self._nbytes + nbytes > self.nbytes_max:
                return False
            self._nbytes += nbytes
            return True

    def wait_and_take(self, nbytes: int) -> None:
        """Waits until there are few enough bytes, and counts these. If they alone are too many, it waits until there
        are no others."""
        with self._changed:
            while self._nbytes and self._nbytes + nbytes > self.nbytes_max:
                self._changed.wait()
            self._nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._changed:
            self._nbytes -= nbytes
            self._changed.notify_all()


_uploading = _ByteLimit(96 << 20)
"""The bytes that are being uploaded. They do not count as buffers of the budget."""
EARLY = _ByteLimit(64 << 20)
"""The bytes that wait in memory for the bytes in front of them in their files."""


class _Early:
    """Keeps bytes of a file that are written before the bytes in front of them. If those of all files of this process
    are more than ``EARLY`` allows, further ones are in a temporary file. One thread at a time uses an object."""

    def __init__(self) -> None:
        self._in_memory: dict[int, bytes] = {}
        self._in_file: dict[int, tuple[int, int]] = {}
        """For each offset, the place in the temporary file and the number of bytes."""
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._in_file)

    def keep(self, offset: int, data: memoryview) -> None:
        """Keeps bytes that begin at the byte ``offset`` of the file. Raises StorageError, which names the directory of
        the temporary file."""
        if EARLY.take(len(data)):
            self._in_memory[offset] = bytes(data)
            return
        try:
            if self._file is None:
                self._file = TemporaryFile(buffering=0, prefix="zckpt-")  # noqa: SIM115  ``clear`` closes it.
            place = self._file.seek(0, os.SEEK_END)
            while len(data):
                data = data[self._file.write(data) :]
            self._in_file[offset] = place, self._file.tell() - place
        except OSError as error:
            raise from_os_error(error, "keep bytes until their upload", gettempdir()) from error

    def take(self, offset: int) -> bytes | None:
        """Returns the bytes that begin at the byte ``offset`` of the file, and forgets them, or None if it has none.
        Raises StorageError."""
        if (data := self._in_memory.pop(offset, None)) is not None:
            EARLY.give_back(len(data))
            return data
        if offset not in self._in_file:
            return None
        assert self._file is not None
        place, nbytes = self._in_file.pop(offset)
        try:
            self._file.seek(place)
            return self._file.read(nbytes)
        except OSError as error:
            raise from_os_error(error, "read bytes for their upload", gettempdir()) from error

    def clear(self) -> None:
        """Forgets all bytes, and removes the temporary file."""
        EARLY.give_back(sum(map(len, self._in_memory.values())))
        self._in_memory.clear()
        self._in_file.clear()
        if self._file is not None:
            self._file.close()


class ObjectWriter:
    """Uploads one new file in parts, in the order of the file. The bytes are copied once, because obstore refers to
    them until their part is uploaded."""

    sharing = None

    def __init__(self, store: ObjectStore, path: str, nbytes: int) -> None:
        """``nbytes``: at least so many bytes will be written."""
        self._store, self._path = store, path
        self._part_bytes = max(PART_BYTES, -(-nbytes // PARTS_MAX))
        self._file: Any = None
        self._early = _Early()
        self._position = 0
        self._part: Bytes | None = None
        """The part that is being filled."""
        self._filled = 0
        """How many bytes of it are filled."""
        self._lock = threading.Lock()

    def write(self, data: Bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        with self._lock:
            if offset != self._position:
                self._early.keep(offset, view)
                return
            self._append(view)
            while (early := self._early.take(self._position)) is not None:
                self._append(memoryview(early))

    def is_next(self, offset: int) -> bool:
        return offset == self._position

    def _append(self, data: memoryview) -> None:
        """Copies bytes into parts, and uploads those that are full."""
        while len(data):
            if self._part is None:
                # Memory of its own, and not malloc's, goes back to the system as soon as the part is uploaded.
                self._part = np.frombuffer(mmap.mmap(-1, self._part_bytes), np.uint8)
            nbytes = min(len(data), self._part_bytes - self._filled)
            self._part[self._filled : self._filled + nbytes] = np.frombuffer(data[:nbytes], np.uint8)
            self._filled += nbytes
            self._position += nbytes
            data = data[nbytes:]
            if self._filled == self._part_bytes:
                self._upload()

    def _upload(self) -> None:
        """Uploads what is filled of the part."""
        start = self._position - self._filled
        part = np.empty(0, np.uint8) if self._part is None else self._part[: self._filled]
        self._part, self._filled = None, 0
        with self._store.errors("write", self._path, start, self._position):
            if self._file is None:
                self._file = self._store.call(
                    "open_writer", self._path, buffer_size=self._part_bytes, max_concurrency=PARTS_IN_FLIGHT
                )
            _uploading.wait_and_take(part.nbytes)
            finalize(part, _uploading.give_back, part.nbytes).atexit = False
            try:
                self._file.write(part)
            finally:
                del part  # Only obstore refers to it from here on, and no error does, for which others would wait.

    def sync(self) -> None:
        assert not self._early, "every byte of the file was written"
        self._upload()
        with self._store.errors("write", self._path, 0, self._position):
            try:
                self._file.close()
            except OSError as error:
                # If the answer to the last request is lost, it is sent again, and some servers have forgotten the
                # upload then.
                if "NoSuchUpload" not in str(error):
                    raise
                if self._store.call("head", self._path)["size"] != self._position:
                    raise
            self._file = None

    def close(self) -> None:
        self._early.clear()
        self._part = None
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(Exception):  # The upload that stays is never shown, and is removed by gc.
                file.__exit__(StorageError, StorageError("given up"), None)  # This is how obstore gives an upload up.
