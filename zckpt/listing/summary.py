"""What can be said about a checkpoint, or about all checkpoints of a run, without reading any tensor."""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import FormatError, StorageError, ZckptError
from zckpt.format import names
from zckpt.format.dtypes import ITEM_BYTES, TORCH_NAMES
from zckpt.listing.find import find, open_contents
from zckpt.listing.runs import (
    check_lengths,
    committed_at,
    directories,
    entries_of,
    is_begun,
    leftovers,
    read_latest,
    run_leftovers,
)
from zckpt.state.inventory import STATE
from zckpt.storage.lock import is_alive, is_lock, read_lock, who
from zckpt.storage.schemes import open_store
from zckpt.storage.scratch import left_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.format.manifest import Manifest, Part
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A part of a checkpoint."""

    name: str
    tensors: int
    numel: int
    nbytes: int
    """Of one copy of each tensor."""
    dtypes: tuple[str, ...]
    """By torch's names, those of the most bytes first."""


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint."""

    path: str
    step: int
    world_size: int
    """The number of ranks that wrote it."""
    save_id: str
    writer: Mapping[str, str]
    """Framework, mode, versions and time, as the manifest has them."""
    parts: tuple[PartSummary, ...]
    files: int
    """The number of files that hold tensors."""
    nbytes: int
    """Of these files."""
    age_seconds: float
    """Since its commit."""
    problem: str | None
    """The first file that is missing or does not have its length; None if the checkpoint is complete."""
    locked_by: str | None
    """The process that is writing there now."""
    leftovers: tuple[str, ...]
    """The names of what dead writers have left in it."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A checkpoint of a run, or what was begun in its place."""

    path: str
    """Relative to the run."""
    step: int | None
    """None where there is no manifest, or none that can be read."""
    world_size: int | None
    nbytes: int | None
    """Of the files that hold tensors."""
    age_seconds: float | None
    is_latest: bool
    problem: str | None
    """Why it is no checkpoint."""
    locked_by: str | None
    leftovers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """All checkpoints of a run, the one that was committed last first."""

    path: str
    latest: str | None
    """What the file ``latest`` names."""
    checkpoints: tuple[RunEntry, ...]
    leftovers: tuple[str, ...]
    """The names of what dead writers and dead offloads have left in the directory of the run itself."""


def summary(path: StrPath) -> CheckpointSummary | RunSummary:
    """Of the checkpoint at ``path``, or of the run in this directory. Raises what ``zckpt.open`` raises where there is
    neither."""
    store = open_store(path)
    if not store.exists(names.MANIFEST):
        found = _run(store)
        if found.checkpoints:
            return found
        find(path)  # it says what is there instead
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
    return CheckpointSummary(
        path=str(store.location),
        step=manifest.step,
        world_size=manifest.world_size,
        save_id=manifest.save_id,
        writer=manifest.writer,
        parts=tuple(_part(manifest, part) for part in manifest.parts if part.name != STATE),
        files=len(manifest.files),
        nbytes=sum(manifest.files.nbytes),
        age_seconds=_age(store),
        problem=problem,
        locked_by=_locked_by(store),
        leftovers=tuple(leftovers(store)),
    )


def _part(manifest: Manifest, part: Part) -> PartSummary:
    numels = [math.prod(manifest.shapes[shape]) for shape in part.shapes]
    nbytes: dict[str, int] = {}
    for numel, dtype in zip(numels, part.dtypes, strict=True):
        nbytes[dtype] = nbytes.get(dtype, 0) + numel * ITEM_BYTES[dtype]
    dtypes = sorted(nbytes, key=lambda dtype: -nbytes[dtype])
    return PartSummary(
        part.name, len(numels), sum(numels), sum(nbytes.values()), tuple(TORCH_NAMES[dtype] for dtype in dtypes)
    )


def _run(run: Store) -> RunSummary:
    entries = entries_of(run)
    latest = read_latest(run) if names.LATEST in entries else None
    found = [one for one, inside in directories(run) if is_begun(inside)]
    own = [_entry(one, one.location.path_from(run.location), latest) for one in found]
    own.sort(key=lambda one: (math.inf if one.age_seconds is None else one.age_seconds, one.path))
    left = (*run_leftovers(run), *left_over(entries))
    return RunSummary(str(run.location), latest, tuple(own), left)


def _entry(store: Store, path: str, latest: str | None) -> RunEntry:
    manifest, age, problem = None, None, None
    try:
        contents = open_contents(store)
        contents.reader.close()
        manifest, age = contents.manifest, _age(store)
    except ZckptError as error:
        problem = error.message
    return RunEntry(
        path=path,
        step=None if manifest is None else manifest.step,
        world_size=None if manifest is None else manifest.world_size,
        nbytes=None if manifest is None else sum(manifest.files.nbytes),
        age_seconds=age,
        is_latest=path == latest,
        problem=problem,
        locked_by=_locked_by(store),
        leftovers=tuple(leftovers(store)),
    )


def _age(store: Store) -> float:
    return max(time.time() - committed_at(store), 0.0)


def _locked_by(store: Store) -> str | None:
    holder = read_lock(store)
    if holder is None or not is_lock(holder):
        return None
    try:
        return who(holder) if is_alive(store, holder) else None
    except StorageError:  # to ask for the store's time, a file is made, which may not be allowed here
        return who(holder)
