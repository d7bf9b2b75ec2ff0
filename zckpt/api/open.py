"""From a path to a Checkpoint."""

from __future__ import annotations

import os
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

    from zckpt.transfer.budget import Budget

__all__ = ["StrPath", "find", "open", "open_checkpoint"]

StrPath = str | os.PathLike[str]


def open(path: StrPath, *, budget: Budget | None = None) -> Checkpoint:  # noqa: A001  reads like the builtin on purpose
    """Opens the checkpoint at ``path``, or, in the directory of a run, the one that ``latest`` names.

    ``budget``: memory, threads and kind of I/O of all reads; None: ``Budget.from_environment()``.

    Reads the manifest and nothing else. Needs neither the framework that wrote it nor torch.distributed. Raises
    CheckpointNotFoundError, which says what is there instead, UnfinishedWriteError, VersionError, FeatureError,
    FormatError, StorageError. Where something is damaged or missing, the error, and so that of every load, names the
    newest other checkpoints of the run that are whole.
    """
    found = find(os.fspath(path))
    with advised(found):
        return open_checkpoint(found, budget, partial(advised, found))


def open_checkpoint(
    path: str, budget: Budget | None = None, advised: Callable[..., AbstractContextManager[None]] = nullcontext
) -> Checkpoint:
    """The checkpoint in exactly this directory. ``advised`` adds to the hints of its errors."""
    store = open_store(path)
    if not store.exists(names.MANIFEST):
        raise CheckpointNotFoundError("there is no manifest", file=path)
    reader = store.reader()
    return Checkpoint(path, read_manifest(path, reader), reader, budget, advised)


def find(path: str) -> str:
    """The checkpoint's directory. Raises CheckpointNotFoundError, UnfinishedWriteError, FormatError (L001)."""
    store = open_store(path)
    if store.exists(names.MANIFEST):
        return path
    entries = store.entries()
    if entries is None:
        raise nothing_at(path)
    if names.LATEST in entries:
        try:
            name = read_latest(store)
            found = os.path.join(path, name)
            if has_manifest(store, name):
                return found
        except FormatError as error:
            error.hint = what_is_here(path)
            raise
        if deepspeed_files(open_store(found).entries() or ()):
            raise CheckpointNotFoundError(
                "`latest` names a checkpoint in DeepSpeed's own format", file=found, rule="L001", hint=DEEPSPEED_HINT
            )
        raise CheckpointNotFoundError(
            "`latest` names a checkpoint that is not there", file=found, rule="L001", hint=what_is_here(path)
        )
    if any(names.is_data_dir(entry) for entry in entries):
        raise UnfinishedWriteError(
            "a write was begun here and never committed, or the manifest was lost",
            file=path,
            hint=f"if the manifest was lost, zckpt.repair may rebuild it; {NOTHING_CHANGED}; {what_is_whole(path)}",
        )
    raise not_a_checkpoint(path, entries, "there is no manifest, and no `latest`")


@contextmanager
def advised(path: str, left: str = NOTHING_CHANGED) -> Iterator[None]:
    """If an error says that something of the checkpoint at ``path`` is damaged or missing, adds to its hint what the
    error leaves behind (``left``) and which other checkpoints of the run are whole."""
    try:
        yield
    except (VersionError, FeatureError):
        raise  # the checkpoint may be whole; this reader cannot tell
    except FormatError as error:
        advice = f"{left}; {what_is_whole(path)}"
        error.hint = f"{error.hint}; {advice}" if error.hint else advice
        raise
