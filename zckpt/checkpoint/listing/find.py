"""Finds the directory of the checkpoint that a path means, and opens its contents."""

from __future__ import annotations

from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from zckpt.checkpoint.listing.contents import Contents, plain_root
from zckpt.checkpoint.listing.other_formats import other_format
from zckpt.checkpoint.listing.runs import (
    NOTHING_CHANGED,
    is_of_trainer,
    names_in,
    not_a_checkpoint,
    nothing_at,
    ours_in,
    read_latest,
    read_manifest,
    refuse_links,
    what_is_here,
    what_is_whole,
)
from zckpt.errors import (
    CheckpointNotFoundError,
    FeatureError,
    FormatError,
    MissingFileError,
    UnfinishedWriteError,
    VersionError,
    ZckptError,
    printable,
)
from zckpt.format import names
from zckpt.plan.machines import machines_in
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Entry, Store
    from zckpt.storage.location import StrPath


T = TypeVar("T")


def find(path: StrPath) -> Store:
    """Returns the directory of the checkpoint at ``path``, or, in the directory of a run, of the one that ``latest``
    names. In the output directory of a Trainer, ``latest`` is that of a ``save_model``, so there it is the checkpoint
    with the most steps. Raises CheckpointNotFoundError, UnfinishedWriteError and FormatError (L001)."""
    return _find(path, lambda checkpoint: checkpoint.entry(names.MANIFEST))[0]


def find_and_open(path: StrPath) -> tuple[Store, Contents]:
    """Returns what ``find`` returns, and what that checkpoint holds. If ``path`` is the directory of a checkpoint, only
    one request is made: it reads the manifest. Whoever calls it closes the reader of the result. Raises the errors of
    ``find`` and ``open_contents``."""

    def opened(checkpoint: Store) -> Contents | None:
        try:
            with advised(checkpoint):
                return open_contents(checkpoint)
        except CheckpointNotFoundError:
            return None

    return _find(path, opened)


def _find(path: StrPath, look: Callable[[Store], T | None]) -> tuple[Store, T]:
    """Returns the directory of the checkpoint that ``path`` means, and what ``look`` returns for it. ``look`` returns
    None if there is no manifest in exactly the directory that it is given."""
    store = open_store(path)
    if (seen := look(store)) is not None:
        return store, seen
    listed = store.entries()
    if listed is None:
        raise nothing_at(store)
    entries = sorted(entry.path for entry in listed)
    if names.LATEST in entries:
        try:
            name = read_latest(store)
            refuse_links(store, name)
        except FormatError as error:
            error.hint = f"{error.hint}; {what_is_here(store)}" if error.hint else what_is_here(store)
            raise
        checkpoint = store.child(name)
        checkpoint = _newer_of_trainer(store, listed, checkpoint) or checkpoint
        if (seen := look(checkpoint)) is not None:
            return checkpoint, seen
        other = other_format(names_in(checkpoint))
        if other is not None:
            message, hint = f"`latest` names {other.what}", "; or ".join(filter(None, [other.hint, ours_in(store)]))
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


def _newer_of_trainer(run: Store, entries: Sequence[Entry], checkpoint: Store) -> Store | None:
    """Returns the newest checkpoint in the directories ``checkpoint-<N>`` of a Trainer, if it has more steps than
    ``checkpoint``. ``entries`` are those of the run."""
    of_trainer = [entry.path for entry in entries if entry.is_directory and is_of_trainer(entry.path)]
    for name in sorted(of_trainer, key=lambda name: int(name.rpartition("-")[2]), reverse=True):
        with suppress(ZckptError):
            newest = find(str(run.location.child(name)))
            return newest if manifest_of(newest).step > manifest_of(checkpoint).step else None
    return None


def open_contents(store: Store) -> Contents:
    """Returns what the checkpoint in exactly this directory holds. Whoever calls it closes the reader of the result.
    Raises CheckpointNotFoundError, FormatError and StorageError."""
    reader = store.reader()
    return Contents(read_manifest(store, reader), reader, store)


def manifest_of(store: Store) -> Manifest:
    """Returns the manifest in exactly this directory. Raises CheckpointNotFoundError, FormatError and StorageError."""
    with closing(store.reader()) as reader:
        return read_manifest(store, reader)


@contextmanager
def advised(checkpoint: Store, left: str = NOTHING_CHANGED) -> Iterator[None]:
    """Extends the hint of an error that says that something of the checkpoint is damaged or missing. It adds ``left``,
    which says what the error has left behind, which other checkpoints of the run are whole, and which machines have the
    files that are missing."""
    try:
        yield
    except Exception as error:  # not FormatError: that name is None if Python's end closes a generator
        # If the error is a VersionError or FeatureError, the checkpoint may be whole, but this version cannot read it.
        if isinstance(error, FormatError) and not isinstance(error, (VersionError, FeatureError)):
            spread = on_machines(checkpoint)
            clauses = [error.hint, left, spread if isinstance(error, MissingFileError) else ""]
            clauses.append(what_is_whole(checkpoint, here=bool(spread)))
            error.hint = "; ".join(filter(None, clauses))
        raise


def on_machines(checkpoint: Store) -> str:
    """Returns a clause for the hint of an error about a missing file. It names the machines that have the files of a
    checkpoint, and is empty if they are not known, or if it was written to one directory."""
    with suppress(ZckptError):
        machines = machines_in(plain_root(manifest_of(checkpoint)))
        if machines:
            few = [printable(str(machine)) for machine in machines[:8]] + ["others"] * (len(machines) > 8)
            return (
                f"each machine has the files of its own ranks ({' and '.join(few)}): zckpt cp on all of them gathers "
                "the files"
            )
    return ""
