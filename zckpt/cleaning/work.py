"""Removes leftovers, discarded data and pruned checkpoints, one checkpoint after the other, each under its lock."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from zckpt.cleaning.cleanup import Cleanup, Removed
from zckpt.errors import FormatError, LockedError, StorageError
from zckpt.format import names
from zckpt.listing.runs import is_of_trainer, leftovers, read_latest, read_manifest
from zckpt.storage.lock import WriteLock, is_alive, is_lock, read_lock
from zckpt.writing.leftovers import prepared_manifests, recoverable

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from zckpt.storage.contract import Store, StoredFile
    from zckpt.storage.location import Location


def is_latest(run: Store, checkpoint: Store) -> bool:
    """Whether the ``latest`` of a run names this checkpoint. Raises FormatError if ``latest`` cannot be read."""
    if not run.exists(names.LATEST):
        return False
    return run.location.child(read_latest(run)).resolved() == checkpoint.location.resolved()


class Work:
    """Removes things from several checkpoints and records what it has removed. With ``dry_run`` it only records what it
    would remove, and takes no lock."""

    def __init__(self, dry_run: bool, discarded: Collection[Location] = ()) -> None:
        """``discarded``: the directories of the checkpoints without a manifest that are to be removed although they
        could be repaired."""
        self.dry_run = dry_run
        self.discarded = discarded
        self.removed: list[Removed] = []
        self._links: dict[Hashable, int] = {}
        """How many paths lead to each file that was removed under one of them, but for those that were removed."""
        self.in_use: list[str] = []
        self.recoverable: list[str] = []

    def result(self, checkpoints: int, kept: Sequence[str] = (), unreadable: Sequence[str] = ()) -> Cleanup:
        """Returns what was done. ``checkpoints``, ``kept`` and ``unreadable`` are those of ``Cleanup``."""
        removed, in_use = tuple(self.removed), tuple(self.in_use)
        recoverable, dry_run = tuple(self.recoverable), self.dry_run
        return Cleanup(removed, in_use, dry_run, recoverable, checkpoints, tuple(kept), tuple(unreadable))

    def clean(self, store: Store, unwanted_in: Store | None = None, save_id: str = "") -> None:
        """Removes the leftovers of one checkpoint. With ``unwanted_in``, the run that the checkpoint belongs to, it
        removes the checkpoint itself too. Another checkpoint than that of ``save_id``, which somebody has committed
        there meanwhile, stays, and counts as in use."""
        path = str(store.location)
        found, holder = leftovers(store), read_lock(store)
        if unwanted_in is None and not found and (holder is None or not is_lock(holder)):
            return  # nothing is to be done, and taking the lock could get in the way of a write that is about to begin
        if holder is not None and is_alive(store, holder):
            self.in_use.append(path)
            return
        complete = recoverable(store) if store.location not in self.discarded else []
        if complete:
            self.recoverable.append(path)
            if complete == found:
                return
        if self.dry_run:
            self._clean(store, unwanted_in, save_id)
            return
        lock = WriteLock(store)
        try:
            with lock:
                self._clean(store, unwanted_in, save_id)
        except LockedError:
            self.in_use.append(path)
        else:
            store.remove_if_empty("")

    def _clean(self, store: Store, unwanted_in: Store | None, save_id: str) -> None:
        prepared = prepared_manifests(store)
        self.remove(store, prepared, "leftover")
        complete = recoverable(store)
        if store.location in self.discarded:
            self.remove(store, complete, "discarded")
        left = [name for name in leftovers(store) if name not in {*complete, *prepared}]
        self.remove(store, left, "leftover")
        if unwanted_in is None or is_latest(unwanted_in, store):
            return
        if _save_id(store) != save_id:
            self.in_use.append(str(store.location))
        else:
            above = store.parent
            if is_of_trainer(above.location.name) and is_latest(above, store):  # the directory is this checkpoint's run
                self.remove(above, [names.LATEST], "retention")
            own = [name for name in sorted(store.entries() or ()) if names.is_data_dir(name) or names.is_old(name)]
            self.remove(store, [names.MANIFEST, *(name for name in own if name not in left)], "retention")

    def remove(self, store: Store, found: Sequence[str], reason: str) -> None:
        """Removes these entries of a directory in the given order. The removal of a manifest is durable before
        anything that comes after it is removed."""
        for name in found:
            stored, file = store.files(name), str(store.location.child(name))
            if not self.dry_run:
                store.remove(name)
                if name == names.MANIFEST:
                    store.sync_names("")
                    if store.exists(name):
                        raise StorageError("cannot remove the manifest", file=file)
                elif store.exists(name):
                    continue  # it could not be removed, and a later clean-up will find it again
            freed, shared = self._freed(stored)
            self.removed.append(Removed(file, freed, shared, reason))

    def _freed(self, stored: Sequence[StoredFile]) -> tuple[int, int]:
        """The bytes of removed files whose space is free now, and the bytes of those that other paths lead to."""
        freed = shared = 0
        for one in stored:
            left = self._links.pop(one.identity, one.links) - 1
            if left > 0:
                self._links[one.identity] = left
                shared += one.nbytes
            else:
                freed += one.nbytes
        return freed, shared


def _save_id(store: Store) -> str | None:
    """Returns the save id of the checkpoint in this directory, or None if its manifest is missing or damaged."""
    try:
        with closing(store.reader()) as reader:
            return read_manifest(store, reader).save_id
    except FormatError:
        return None
