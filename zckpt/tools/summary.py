"""A summary of a checkpoint, or of all checkpoints of a run, made without reading any tensor."""

from __future__ import annotations

import math
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zckpt.checkpoint.listing.find import find, open_contents
from zckpt.checkpoint.listing.leftovers import leftovers, run_leftovers
from zckpt.checkpoint.listing.runs import (
    check_lengths,
    committed_at,
    directories,
    entries_of,
    is_begun,
    read_latest,
)
from zckpt.errors import FormatError, StorageError, ZckptError
from zckpt.format import names
from zckpt.format.dtypes import DTYPES, ITEM_BYTES, TORCH_NAMES
from zckpt.plan.inventory import STATE
from zckpt.storage.lock import is_alive, is_lock, read_lock, who
from zckpt.storage.process_names import left_over
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.format.manifest import Manifest, Part
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A part of a checkpoint, such as the master weights."""

    name: str
    """The name of the part, such as ``"master"``."""
    tensors: int
    """The number of tensors in the part."""
    numel: int
    """The number of elements of all these tensors."""
    nbytes: int
    """The size in bytes of one copy of each of these tensors."""
    dtypes: tuple[str, ...]
    """Torch's names of the dtypes in the part. The dtype that takes the most bytes comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What is known about a directory in which a checkpoint is, or in which somebody has begun to write one."""

    path: str
    """The path of the directory."""
    step: int | None
    """The number of training steps that were done when the checkpoint was written. It is None if no manifest can be
    read, and then so are ``world_size``, ``nbytes`` and ``age_seconds``."""
    world_size: int | None
    """The number of ranks that wrote the checkpoint."""
    nbytes: int | None
    """The size in bytes of the files that hold tensors."""
    age_seconds: float | None
    """The number of seconds since the checkpoint was committed."""
    use: str | None
    """What the checkpoint can be used for: ``"resume"``, ``"weights"`` or ``"part"``. It is None if the manifest or its
    tree of state cannot be read."""
    run: str | None
    """The identity of the training run that the checkpoint belongs to. It is None if ``use`` is None."""
    problem: str | None
    """The reason why the directory is not a complete checkpoint, or None if it is one."""
    locked_by: str | None
    """The process that is writing to the checkpoint now, or None."""
    leftovers: tuple[str, ...]
    """The names of entries in the checkpoint's directory that dead writers have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary(Begun):
    """What is known about one checkpoint without reading its tensors. Its ``problem`` is the error about the first file
    that is missing or has another length than it should have."""

    save_id: str
    """The identifier of the save that wrote the checkpoint."""
    writer: Mapping[str, str]
    """What the manifest says about the writer: its framework, mode, versions and time."""
    parts: tuple[PartSummary, ...]
    """The parts of the checkpoint, such as master weights and optimizer states."""
    files: int
    """The number of files that hold tensors."""
    shared_bytes: int
    """The size in bytes of its files that have further names (hard links), such as in other checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry(Begun):
    """One checkpoint of a run, or a directory in which somebody has begun to write one. The path is relative to the
    run. The lengths of its files are not compared."""

    is_latest: bool
    """Whether the file ``latest`` names this checkpoint."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """All checkpoints of a run, the one that was committed last first."""

    path: str
    """The directory of the run."""
    latest: str | None
    """The path, relative to the run, that the file ``latest`` holds. It is None if there is no such file."""
    checkpoints: tuple[RunEntry, ...]
    """The checkpoints, and the directories in which one was begun."""
    leftovers: tuple[str, ...]
    """The names of entries in the directory of the run itself that dead writers and dead offloads have left."""


def summary(path: StrPath) -> CheckpointSummary | RunSummary:
    """Returns the summary of the checkpoint at ``path``, or, if ``path`` is the directory of a run, of all its
    checkpoints. If there is neither, it raises the error that ``zckpt.open`` raises."""
    store = open_store(path)
    if store.entry(names.MANIFEST) is None:
        of_run = _run(store)
        if of_run.checkpoints:
            return of_run
        find(path)  # raises the error that says what is there instead
    return _checkpoint(store)


def _checkpoint(store: Store) -> CheckpointSummary:
    contents = open_contents(store)
    with closing(contents.reader):
        manifest = contents.manifest
        problem = None
        try:
            check_lengths(contents)
        except FormatError as error:
            problem = str(error)
    parts = tuple(_part(manifest, part) for part in manifest.parts if part.name != STATE)
    ranks = (names.rank_dir(manifest.save_id, rank) for rank in range(manifest.world_size))
    data = [entry for directory in ranks for entry in store.entries(directory) or ()]
    return CheckpointSummary(
        **_begun(store, str(store.location), contents, problem, time.time()), save_id=manifest.save_id,
        writer=manifest.writer, parts=parts, files=len(manifest.files),
        shared_bytes=sum(entry.nbytes or 0 for entry in data if entry.links > 1),
    )  # fmt: skip


def _begun(store: Store, path: str, contents: Contents | None, problem: str | None, now: float) -> dict[str, Any]:
    """Returns the fields of ``Begun``, at the time ``now``. ``contents``: None if the manifest cannot be read."""
    manifest = lineage = None
    if contents is not None:
        manifest = contents.manifest
        with suppress(FormatError):  # the tree of state is damaged, which the summary does not look for
            lineage = contents.lineage
    return {
        "path": path,
        "step": None if manifest is None else manifest.step,
        "world_size": None if manifest is None else manifest.world_size,
        "nbytes": None if manifest is None else sum(manifest.files.nbytes),
        "age_seconds": None if manifest is None else max(now - committed_at(store), 0.0),
        "use": None if lineage is None else str(lineage.use),
        "run": None if lineage is None else lineage.run_id,
        "problem": problem,
        "locked_by": _locked_by(store),
        "leftovers": tuple(leftovers(store).own),
    }


def _part(manifest: Manifest, part: Part) -> PartSummary:
    numels = [math.prod(manifest.shapes[shape]) for shape in part.shape_ids.tolist()]
    nbytes: dict[str, int] = {}
    for numel, dtype_id in zip(numels, part.dtype_ids.tolist(), strict=True):
        dtype = DTYPES[dtype_id]
        nbytes[dtype] = nbytes.get(dtype, 0) + numel * ITEM_BYTES[dtype]
    dtypes = sorted(nbytes, key=lambda dtype: -nbytes[dtype])
    return PartSummary(
        part.name, len(numels), sum(numels), sum(nbytes.values()), tuple(TORCH_NAMES[dtype] for dtype in dtypes)
    )


def _run(run: Store) -> RunSummary:
    entries = entries_of(run)
    latest = read_latest(run) if names.LATEST in entries else None
    begun = [directory for directory, inside in directories(run) if is_begun(inside)]
    now = time.time()  # one time for all, because the ages decide the order
    run_entries = [_entry(directory, directory.location.path_from(run.location), latest, now) for directory in begun]
    run_entries.sort(key=lambda entry: (math.inf if entry.age_seconds is None else entry.age_seconds, entry.path))
    left = (*run_leftovers(run), *left_over(entries))
    return RunSummary(str(run.location), latest, tuple(run_entries), left)


def _entry(store: Store, path: str, latest: str | None, now: float) -> RunEntry:
    contents = problem = None
    try:
        contents = open_contents(store)
        contents.reader.close()
    except ZckptError as error:
        problem = error.message
    return RunEntry(**_begun(store, path, contents, problem, now), is_latest=path == latest)


def _locked_by(store: Store) -> str | None:
    holder = read_lock(store)
    if holder is None or not is_lock(holder):
        return None
    try:
        return who(holder) if is_alive(store, holder) else None
    except StorageError:  # to ask for the time of the store makes a file, which may not be allowed here
        return who(holder)
