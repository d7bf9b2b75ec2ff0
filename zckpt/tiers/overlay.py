"""Reads a checkpoint that is in several directories: each file from the nearest one that has it whole."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from zckpt.errors import CheckpointNotFoundError, FormatError
from zckpt.format import names
from zckpt.listing.contents import Contents
from zckpt.listing.files import files_in, lengths
from zckpt.listing.find import manifest_of
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.contract import IOCount

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from zckpt.format.manifest import Manifest
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import DirectReads, Reader, Store


class OverlayReader:
    """Reads each file by the reader of the directory that it is in. Its count is that of all these readers."""

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

    # A directory whose reader has no faster reads is read by ``read_into``.

    @property
    def direct(self) -> DirectReads | None:
        return self if any(reader.direct is not None for reader in self._readers) else None

    def is_cached(self, path: str, offset: int, nbytes: int) -> bool:
        direct = self._reader(path).direct
        return direct is not None and direct.is_cached(path, offset, nbytes)

    def read_portions(
        self, path: str, portions: Sequence[Sequence[Bytes | memoryview]], offset: int, use: Callable[[int], None]
    ) -> int:
        direct = self._reader(path).direct
        if direct is not None:
            return direct.read_portions(path, portions, offset, use)
        filled = self.read_into(path, [view for views in portions for view in views], offset)
        if filled == sum(len(view) for views in portions for view in views):
            for number in range(len(portions)):
                use(number)
        return filled

    def alignment(self, path: str) -> tuple[int, int]:
        direct = self._reader(path).direct
        return (PAGE_BYTES, PAGE_BYTES) if direct is None else direct.alignment(path)

    def read_direct(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        direct = self._reader(path).direct
        return 0 if direct is None else direct.read_direct(path, views, offset)

    def read_to_device(self, path: str, target: torch.Tensor, offset: int) -> int:
        direct = self._reader(path).direct
        return 0 if direct is None else direct.read_to_device(path, target, offset)


def holds(store: Store, save_id: str) -> bool:
    """Returns whether a directory has files of the save with this id. Its manifest may be missing. Raises
    StorageError."""
    if store.entry(names.data_dir(save_id)) is not None:
        return True
    with suppress(CheckpointNotFoundError, FormatError):  # A web server does not tell that there is a directory.
        return manifest_of(store).save_id == save_id
    return False


def overlay(stores: Sequence[Store], manifest: Manifest) -> Contents:
    """Returns what a checkpoint holds that is in several directories, the nearest of which is the first. Each file is
    read from the nearest directory in which it has the right length. If there is none, a read of the file raises the
    error of the first directory that has anything of the checkpoint. Nothing is asked of a directory if nearer ones
    have everything. Raises StorageError."""
    missing = dict.fromkeys(lengths(manifest))
    used: list[Store] = []
    reader_of: dict[str, Reader] = {}
    readers: list[Reader] = []
    for store in stores:
        if missing and holds(store, manifest.save_id):
            used.append(store)
            readers.append(store.reader())
            for path in files_in(store, manifest, missing):
                reader_of[path] = readers[-1]
                del missing[path]
    farthest = max(used or stores, key=lambda store: store.requests_in_flight)
    return Contents(manifest, OverlayReader(readers, reader_of), farthest)
