"""Finds the directory of the checkpoint that a path means, and opens its contents."""

from __future__ import annotations

from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from zckpt.errors import (
    CheckpointNotFoundError,
    FeatureError,
    FormatError,
    UnfinishedWriteError,
    VersionError,
    ZckptError,
)
from zckpt.format import names
from zckpt.listing.contents import Contents
from zckpt.listing.other_formats import other_format
from zckpt.listing.runs import (
    NOTHING_CHANGED,
    directories_of,
    has_manifest,
    is_of_trainer,
    names_at,
    names_in,
    not_a_checkpoint,
    read_latest,
    read_manifest,
    what_is_here,
    what_is_whole,
)
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Reader, Store
    from zckpt.storage.location import StrPath


def find(path: StrPath) -> Store:
    """Returns the directory of the checkpoint at ``path``, or, in the directory of a run, of the one that ``latest``
    names. In the output directory of a Trainer, ``latest`` is that of a ``save_model``, so there it is the checkpoint
    with the most steps. Raises CheckpointNotFoundError, UnfinishedWriteError and FormatError (L001)."""
    store = open_store(path)
    if store.entry(names.MANIFEST) is not None:
        return store
    entries = names_at(store)
    if names.LATEST in entries:
        try:
            name = read_latest(store)
            checkpoint = store.child(name)
            if has_manifest(store, name):
                return _newer_of_trainer(store, checkpoint) or checkpoint
        except FormatError as error:
            error.hint = f"{error.hint}; {what_is_here(store)}" if error.hint else what_is_here(store)
            raise
        other = other_format(names_in(checkpoint))
        if other is not None:
            message, hint = f"`latest` names {other.what}", other.hint
        else:
            message, hint = "`latest` names a checkpoint that is not there", what_is_here(store)
        raise CheckpointNotFoundError(message, file=str(checkpoint.location), rule="L001", hint=hint)
    if any(names.is_data_dir(entry) for entry in entries):
        raise UnfinishedWriteError(
            "a write was begun here and never committed, or the manifest was lost",
            file=str(store.location),
            hint=f"if the manifest was lost, zckpt.repair may rebuild it; {NOTHING_CHANGED}; {what_is_whole(store)}",
        )
    raise not_a_checkpoint(store, entries, "there is no manifest, and no `latest`")


def _newer_of_trainer(run: Store, checkpoint: Store) -> Store | None:
    """Returns the newest checkpoint in the directories ``checkpoint-<N>`` of a Trainer, if it has more steps than
    ``checkpoint``."""
    of_trainer = [name for name in directories_of(run) if is_of_trainer(name)]
    for name in sorted(of_trainer, key=lambda name: int(name.rpartition("-")[2]), reverse=True):
        with suppress(ZckptError):
            newest = find(str(run.location.child(name)))
            return newest if manifest_of(newest).step > manifest_of(checkpoint).step else None
    return None


def open_contents(store: Store) -> Contents:
    """Returns what the checkpoint in exactly this directory holds. Whoever calls it closes the reader of the result.
    Raises CheckpointNotFoundError, FormatError and StorageError."""
    reader = _reader(store)
    return Contents(read_manifest(store, reader), reader)


def manifest_of(store: Store) -> Manifest:
    """Returns the manifest of the checkpoint in exactly this directory. Raises CheckpointNotFoundError, FormatError and
    StorageError."""
    with closing(_reader(store)) as reader:
        return read_manifest(store, reader)


def _reader(store: Store) -> Reader:
    if store.entry(names.MANIFEST) is None:
        raise CheckpointNotFoundError("there is no manifest", file=str(store.location))
    return store.reader()


@contextmanager
def advised(checkpoint: Store, left: str = NOTHING_CHANGED) -> Iterator[None]:
    """Extends the hint of an error that says that something of the checkpoint is damaged or missing. It adds ``left``,
    which says what the error has left behind, and which other checkpoints of the run are whole."""
    try:
        yield
    except Exception as error:  # not FormatError: that name is None if Python's end closes a generator
        # If the error is a VersionError or FeatureError, the checkpoint may be whole, but this version cannot read it.
        if isinstance(error, FormatError) and not isinstance(error, (VersionError, FeatureError)):
            advice = f"{left}; {what_is_whole(checkpoint)}"
            error.hint = f"{error.hint}; {advice}" if error.hint else advice
        raise
