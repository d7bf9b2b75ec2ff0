"""From a path to a Checkpoint."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

from zckpt.checkpoint import Checkpoint
from zckpt.errors import (
    CheckpointNotFoundError,
    FormatError,
    MissingFileError,
    UnfinishedWriteError,
)
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.limits import LATEST_BYTES_MAX, MANIFEST_BYTES_MAX
from zckpt.io.store import open_store

if TYPE_CHECKING:
    from zckpt.io.budget import Budget
    from zckpt.io.store import Store

StrPath = str | os.PathLike[str]


def open(path: StrPath, *, budget: Budget | None = None) -> Checkpoint:  # noqa: A001  reads like the builtin on purpose
    """Opens the checkpoint at ``path``, or, in the directory of a run, the one that ``latest`` names.

    ``budget``: memory, threads and kind of I/O of all reads; None: ``Budget.from_environment()``.

    Reads the manifest and nothing else. Needs neither the framework that wrote it nor torch.distributed. Raises
    CheckpointNotFoundError, UnfinishedWriteError, VersionError, FeatureError, FormatError, StorageError.
    """
    return open_checkpoint(find(os.fspath(path)), budget)


def open_checkpoint(path: str, budget: Budget | None = None) -> Checkpoint:
    """The checkpoint in exactly this directory."""
    store = open_store(path)
    if not store.exists(names.MANIFEST):
        raise CheckpointNotFoundError("there is no manifest", file=path)
    reader = store.reader()
    raw = reader.read(names.MANIFEST, 0, min(reader.size(names.MANIFEST), MANIFEST_BYTES_MAX + 1))
    try:
        return Checkpoint(path, manifest_format.decode(raw), reader, budget)
    except FormatError as error:
        error.file = os.path.join(path, names.MANIFEST)
        raise


def find(path: str) -> str:
    """The checkpoint's directory. Raises CheckpointNotFoundError, UnfinishedWriteError, FormatError (L001)."""
    store = open_store(path)
    if store.exists(names.MANIFEST):
        return path
    entries = store.entries()
    if entries is None:
        what = "is a file" if store.exists("") else "does not exist"
        raise CheckpointNotFoundError(f"the path {what}", file=path, hint="give the directory of a checkpoint or run")
    if names.LATEST in entries:
        name = read_latest(store)
        if _has_manifest(store, name):
            return os.path.join(path, name)
        raise CheckpointNotFoundError(
            "`latest` names a checkpoint that is not there", file=os.path.join(path, name), rule="L001"
        )
    if any(names.is_data_dir(entry) for entry in entries):
        raise UnfinishedWriteError(
            "a write was begun here and never committed",
            file=path,
            hint="open an older checkpoint; this one is not whole",
        )
    hint = "give the directory of a checkpoint or run"
    if any(entry.endswith("_states.pt") for entry in entries):
        hint = "this looks like a checkpoint in DeepSpeed's own format"
    raise CheckpointNotFoundError("there is no manifest", file=path, hint=hint)


def read_latest(run: Store) -> str:
    """The path, relative to the run, that its ``latest`` holds. Raises FormatError (L001, F001, F002), StorageError."""
    with closing(run.reader()) as reader:
        raw = reader.read(names.LATEST, 0, LATEST_BYTES_MAX + 1)
    return names.decode_latest(raw, os.path.join(run.root, names.LATEST))


def _has_manifest(run: Store, name: str) -> bool:
    """Whether a checkpoint is at this path in the run. Raises FormatError (F002) for a path of several components if
    one of them is a link."""
    if "/" not in name:  # a single component may be a link
        return open_store(os.path.join(run.root, name)).exists(names.MANIFEST)
    with closing(run.reader()) as reader:
        try:
            reader.size(f"{name}/{names.MANIFEST}")
        except MissingFileError:
            return False
    return True
