"""Reads the files of one directory from several places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.contract import IOCount, read_portions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import DirectReads, Reader


class OverlayReader:
    """Reads each file by the reader of the place that it is in. Its count is that of all these readers."""

    def __init__(self, readers: Sequence[Reader], reader_of: Mapping[str, Reader]) -> None:
        """``reader_of``: the reader of each file, by the file's path. The first of ``readers`` reads all others."""
        self.count = IOCount()
        for reader in readers:
            reader.count = self.count
        self._readers, self._reader_of = readers, reader_of

    def _reader(self, path: str) -> Reader:
        return self._reader_of.get(path, self._readers[0])

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        return self._reader(path).read(path, offset, nbytes)

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        return self._reader(path).read_into(path, views, offset)

    def size(self, path: str) -> int:
        return self._reader(path).size(path)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    # A place whose reader has no faster reads is read by ``read_into``.

    @property
    def direct(self) -> DirectReads | None:
        return self if any(reader.direct is not None for reader in self._readers) else None

    def is_cached(self, path: str, offset: int, nbytes: int) -> bool:
        direct = self._reader(path).direct
        return direct is not None and direct.is_cached(path, offset, nbytes)

    def read_portions(
        self, path: str, portions: Sequence[Sequence[Bytes | memoryview]], offset: int, use: Callable[[int], None]
    ) -> int:
        return read_portions(self._reader(path), path, portions, offset, use)

    def alignment(self, path: str) -> tuple[int, int]:
        direct = self._reader(path).direct
        return (PAGE_BYTES, PAGE_BYTES) if direct is None else direct.alignment(path)

    def read_direct(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        direct = self._reader(path).direct
        return 0 if direct is None else direct.read_direct(path, views, offset)

    def read_to_device(self, path: str, target: torch.Tensor, offset: int) -> int:
        direct = self._reader(path).direct
        return 0 if direct is None else direct.read_to_device(path, target, offset)
