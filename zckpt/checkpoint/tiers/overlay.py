"""Reads a checkpoint that is in several directories: each file from the nearest one that has it whole."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.contents import Contents
from zckpt.checkpoint.listing.files import files_in, lengths
from zckpt.checkpoint.listing.find import manifest_of
from zckpt.errors import CheckpointNotFoundError, FormatError
from zckpt.format import names
from zckpt.storage.overlay import OverlayReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Reader, Store


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
