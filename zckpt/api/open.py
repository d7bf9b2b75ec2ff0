"""From a path to a Checkpoint."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from zckpt.errors import (
    CheckpointNotFoundError,
    FeatureError,
    FormatError,
    UnfinishedWriteError,
    VersionError,
)
from zckpt.format import names
from zckpt.reading.checkpoint import Checkpoint
from zckpt.reading.deepspeed_files import deepspeed_files
from zckpt.reading.runs import (
    DEEPSPEED_HINT,
    NOTHING_CHANGED,
    has_manifest,
    not_a_checkpoint,
    nothing_at,
    read_latest,
    read_manifest,
    what_is_here,
    what_is_whole,
)
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget

__all__ = ["find", "open", "open_checkpoint"]


def open(path: StrPath, *, budget: Budget | None = None) -> Checkpoint:  # noqa: A001  reads like the builtin on purpose
    """Opens the checkpoint at ``path``, or, in the directory of a run, the one that ``latest`` names.

    ``budget``: memory, threads and kind of I/O of all reads; None: ``Budget.from_environment()``.

    Reads the manifest and nothing else. Needs neither the framework that wrote it nor torch.distributed. Raises
    CheckpointNotFoundError, which says what is there instead, UnfinishedWriteError, VersionError, FeatureError,
    FormatError, StorageError, and UnsupportedError for the URL of a store that does not exist. Where something is
    damaged or missing, the error, and so that of every load, names the newest other checkpoints of the run that are
    whole.
    """
    found = find(path)
    with advised(found):
        return open_checkpoint(found, budget, partial(advised, found))


def open_checkpoint(
    store: Store, budget: Budget | None = None, advised: Callable[..., AbstractContextManager[None]] = nullcontext
) -> Checkpoint:
    """The checkpoint in exactly this directory. ``advised`` adds to the hints of its errors."""
    if not store.exists(names.MANIFEST):
        raise CheckpointNotFoundError("there is no manifest", file=str(store.location))
    reader = store.reader()
    return Checkpoint(str(store.location), read_manifest(store, reader), reader, budget, advised)


def find(path: StrPath) -> Store:
    """The checkpoint's directory. Raises CheckpointNotFoundError, UnfinishedWriteError, FormatError (L001)."""
    store = open_store(path)
    if store.exists(names.MANIFEST):
        return store
    entries = store.entries()
    if entries is None:
        raise nothing_at(store)
    if names.LATEST in entries:
        try:
            name = read_latest(store)
            found = store.child(name)
            if has_manifest(store, name):
                return found
        except FormatError as error:
            error.hint = what_is_here(store)
            raise
        if deepspeed_files(found.entries() or ()):
            what, hint = "in DeepSpeed's own format", DEEPSPEED_HINT
        else:
            what, hint = "that is not there", what_is_here(store)
        message = f"`latest` names a checkpoint {what}"
        raise CheckpointNotFoundError(message, file=str(found.location), rule="L001", hint=hint)
    if any(names.is_data_dir(entry) for entry in entries):
        raise UnfinishedWriteError(
            "a write was begun here and never committed, or the manifest was lost",
            file=str(store.location),
            hint=f"if the manifest was lost, zckpt.repair may rebuild it; {NOTHING_CHANGED}; {what_is_whole(store)}",
        )
    raise not_a_checkpoint(store, entries, "there is no manifest, and no `latest`")


@contextmanager
def advised(checkpoint: Store, left: str = NOTHING_CHANGED) -> Iterator[None]:
    """If an error says that something of the checkpoint is damaged or missing, adds to its hint what the error leaves
    behind (``left``) and which other checkpoints of the run are whole."""
    try:
        yield
    except (VersionError, FeatureError):
        raise  # the checkpoint may be whole; this reader cannot tell
    except FormatError as error:
        advice = f"{left}; {what_is_whole(checkpoint)}"
        error.hint = f"{error.hint}; {advice}" if error.hint else advice
        raise
