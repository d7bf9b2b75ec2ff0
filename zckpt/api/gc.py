"""Removes what dead writers have left, and checkpoints that are not wanted any more, safely."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.api.open import open_checkpoint
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    LockedError,
    StorageError,
)
from zckpt.format import names
from zckpt.listing.runs import directories, is_begun, is_of_trainer, leftovers, nothing_at, read_latest, run_leftovers
from zckpt.storage.location import Location, StrPath
from zckpt.storage.lock import WriteLock, is_alive, is_lock, read_lock
from zckpt.storage.schemes import open_store
from zckpt.storage.scratch import left_over
from zckpt.writing.leftovers import prepared_manifests, recoverable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zckpt.storage.contract import Store


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that ``zckpt.gc`` has removed, or would remove."""

    path: str
    nbytes: int
    reason: str
    """``leftover``: of a write that died, failed or was replaced. ``retention``: of an older checkpoint. ``discarded``:
    of a checkpoint without a manifest, which ``discard`` has named."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What ``zckpt.gc`` did, or with ``dry_run`` would do."""

    removed: tuple[Removed, ...]
    in_use: tuple[str, ...]
    """Checkpoints that were left alone because somebody writes there now."""
    dry_run: bool
    recoverable: tuple[str, ...] = ()
    """Checkpoints without a manifest that were left alone because all of their data are there: ``zckpt.repair`` can
    make a checkpoint of each."""
    checkpoints: int = 0
    """How many checkpoints, committed or only begun, were found in the directory."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.removed)

    def __str__(self) -> str:
        lines = [f"{one.reason:9}  {one.nbytes:>15,}  {one.path}" for one in self.removed]
        lines += [f"in use                      {path}" for path in self.in_use]
        lines += [f"recoverable                 {path}" for path in self.recoverable]
        if self.recoverable:
            lines.append("recoverable: the manifest is lost, or was never written, and all data are there")
            lines.append("  `zckpt repair DIR` makes a checkpoint of it, `zckpt gc --discard DIR` removes it")
        if not self.checkpoints:
            lines.append("no checkpoint was found there; to clean up one, give its directory or that of its run")
        verb = "would remove" if self.dry_run else "removed"
        return "\n".join([*lines, f"{verb} {len(self.removed)} files and directories, {self.nbytes:,} bytes"])


def gc(
    path: StrPath, *, keep: int | None = None, dry_run: bool = False, discard: StrPath | Collection[StrPath] = ()
) -> Cleanup:
    """Removes what dead writers have left in a run, or in one checkpoint: data that no manifest names, temporary files,
    checkpoints that were never committed, and scratch files of ``zckpt.offload``. What somebody writes at this moment
    is left alone, and so is what ``zckpt.repair`` could make a checkpoint of: there is no manifest, but all data of a
    save.

    The checkpoints of a run are those directly in it, those in directories of it where ``latest`` may name them, and
    those in the ``checkpoint-<N>`` of Hugging Face's Trainer. Another run inside of it is left alone.

    ``keep``: remove checkpoints of the run too, all but this many, those that were committed last, and the one that
    ``latest`` names. ``dry_run``: only say what would be removed. ``discard``: the directory of
    a checkpoint without a manifest, or several, relative to ``path`` or not, that are to be removed although they could
    be repaired. Call it on one rank.

    Raises CheckpointNotFoundError if there is no such directory, of the run or of ``discard``; CheckpointExistsError if
    one of ``discard`` has a manifest; FormatError if ``latest`` cannot be read; StorageError; UnsupportedError for the
    URL of a store that does not exist; ValueError for ``keep`` below 1.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be 1 or more, got {keep}")
    run = open_store(path)
    entries = run.entries()
    if entries is None:
        raise nothing_at(run)
    checkpoints = [one for one, entries in directories(run) if is_begun(entries)]
    unwanted = set() if keep is None else _unwanted(checkpoints, keep)
    found = [run] * is_begun(entries) + checkpoints
    work = _Work(dry_run, _discarded(run, found, discard))
    for one in found:
        work.clean(one, run if one.location in unwanted else None)
    work.remove(run, [*run_leftovers(run), *left_over(entries)], "leftover")
    return Cleanup(tuple(work.removed), tuple(work.in_use), dry_run, tuple(work.recoverable), len(found))


def _discarded(run: Store, checkpoints: Sequence[Store], discard: StrPath | Collection[StrPath]) -> set[Location]:
    """Where those of the checkpoints are that ``discard`` names."""
    found = set()
    for given in (discard,) if isinstance(discard, (str, os.PathLike)) else discard:
        one = os.fspath(given)
        named = {Location.of(one).absolute(), run.location.child(one).absolute()}
        matching = [checkpoint for checkpoint in checkpoints if checkpoint.location.absolute() in named]
        if not matching:
            raise CheckpointNotFoundError(
                f"no checkpoint was begun in {one!r}, which discard names", file=str(run.location)
            )
        for checkpoint in matching:
            if checkpoint.exists(names.MANIFEST):
                raise CheckpointExistsError(
                    "discard names a checkpoint that has a manifest", file=str(checkpoint.location),
                    hint="keep=N removes older checkpoints",
                )  # fmt: skip
            found.add(checkpoint.location)
    return found


def _unwanted(checkpoints: Sequence[Store], keep: int) -> set[Location]:
    """Where all committed checkpoints but the newest are, whatever ``latest`` names. One whose manifest is damaged does
    not count, and stays."""
    committed: list[tuple[float, int, str, Location]] = []
    for checkpoint in checkpoints:
        try:
            step = open_checkpoint(checkpoint).step
        except (CheckpointNotFoundError, FormatError):
            continue
        changed_at, location = checkpoint.changed_at(names.MANIFEST), checkpoint.location
        if changed_at is not None:
            committed.append((changed_at, step, str(location), location))
    return {location for *_, location in sorted(committed)[:-keep]}


def _is_latest(run: Store, checkpoint: Store) -> bool:
    """Whether the ``latest`` of a run names the checkpoint. What it names need not exist."""
    if not run.exists(names.LATEST):
        return False
    return run.location.child(read_latest(run)).resolved() == checkpoint.location.resolved()


class _Work:
    def __init__(self, dry_run: bool, discarded: Collection[Location]) -> None:
        self.dry_run = dry_run
        self.discarded = discarded
        self.removed: list[Removed] = []
        self.in_use: list[str] = []
        self.recoverable: list[str] = []

    def clean(self, store: Store, unwanted_in: Store | None = None) -> None:
        """One checkpoint. ``unwanted_in``: the run that it is to be removed from."""
        path = str(store.location)
        found, holder = leftovers(store), read_lock(store)
        if unwanted_in is None and not found and (holder is None or not is_lock(holder)):
            return  # no lock is taken for nothing: a write may be about to begin
        if holder is not None and is_alive(store, holder):
            self.in_use.append(path)
            return
        kept = recoverable(store) if store.location not in self.discarded else []
        if kept:
            self.recoverable.append(path)
            if kept == found:
                return
        if self.dry_run:
            self._clean(store, unwanted_in)
            return
        lock = WriteLock(store)
        try:
            with lock:
                self._clean(store, unwanted_in)
        except LockedError:
            self.in_use.append(path)
        else:
            store.remove_if_empty("")

    def _clean(self, store: Store, unwanted_in: Store | None) -> None:
        prepared = prepared_manifests(store)
        self.remove(store, prepared, "leftover")
        complete = recoverable(store)
        if store.location in self.discarded:
            self.remove(store, complete, "discarded")
        spared = {*complete, *prepared}
        self.remove(store, [name for name in leftovers(store) if name not in spared], "leftover")
        if unwanted_in is not None and not _is_latest(unwanted_in, store):
            above = store.parent
            if is_of_trainer(above.location.name) and _is_latest(above, store):  # of this checkpoint alone
                self.remove(above, [names.LATEST], "retention")
            kept = [name for name in sorted(store.entries() or ()) if names.is_data_dir(name) or names.is_old(name)]
            self.remove(store, [names.MANIFEST, *kept], "retention")

    def remove(self, store: Store, found: Sequence[str], reason: str) -> None:
        """The manifest goes first, for good, before any of its data."""
        for name in found:
            nbytes, file = store.nbytes(name), str(store.location.child(name))
            if not self.dry_run:
                store.remove(name)
                if name == names.MANIFEST:
                    store.sync_names("")
                    if store.exists(name):
                        raise StorageError("cannot remove the manifest", file=file)
                elif store.exists(name):
                    continue  # it stays, and is a leftover still
            self.removed.append(Removed(file, nbytes, reason))
