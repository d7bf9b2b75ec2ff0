"""Removes leftovers, discarded data and pruned checkpoints, one checkpoint after another, each under its lock."""

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
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from zckpt.storage.contract import Store, StoredFile
    from zckpt.storage.location import Location


def is_latest(run: Store, checkpoint: Store) -> bool:
    """Returns whether the file ``latest`` of a run names this checkpoint. Raises FormatError if ``latest`` cannot be
    read."""
    if not run.exists(names.LATEST):
        return False
    return run.location.child(read_latest(run)).resolved() == checkpoint.location.resolved()


class Work:
    """Removes files and directories from several checkpoints, and records them. With ``dry_run`` it only records what
    it would remove, and takes no lock."""

    def __init__(self, dry_run: bool, discarded: Collection[Location] = ()) -> None:
        """``discarded``: the directories of checkpoints without a manifest that are removed although they could be
        repaired."""
        self.dry_run = dry_run
        self.discarded = discarded
        self.removed: list[Removed] = []
        self._links: dict[Hashable, int] = {}
        """The number of hard links that are left of each file of which one was removed."""
        self.in_use: list[str] = []
        self.recoverable: list[str] = []

    def result(
        self, checkpoints: int, reasons: Mapping[str, str] | None = None, unreadable: Sequence[str] = ()
    ) -> Cleanup:
        """Returns the result of the clean-up. The arguments are the fields of ``Cleanup`` of the same names."""
        removed, in_use = tuple(self.removed), tuple(self.in_use)
        recoverable, dry_run = tuple(self.recoverable), self.dry_run
        return Cleanup(removed, in_use, dry_run, recoverable, checkpoints, reasons or {}, tuple(unreadable))

    def clean(self, store: Store, unwanted_in: Store | None = None, save_id: str = "") -> None:
        """Removes the leftovers of one checkpoint. If ``unwanted_in`` is given, removes the checkpoint itself too.
        ``unwanted_in``: the run of the checkpoint. ``save_id``: the save id of the checkpoint. If another process has
        committed another checkpoint there meanwhile, that one stays, and is recorded as in use."""
        path = str(store.location)
        remains, holder = leftovers(store), read_lock(store)
        if unwanted_in is None and not remains and (holder is None or not is_lock(holder)):
            return  # There is nothing to do, and taking the lock could make a write fail that is about to begin.
        if holder is not None and is_alive(store, holder):
            self.in_use.append(path)
            return
        complete = recoverable(store) if store.location not in self.discarded else []
        if complete:
            self.recoverable.append(path)
            if complete == remains:
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
        remains = [name for name in leftovers(store) if name not in {*complete, *prepared}]
        self.remove(store, remains, "leftover")
        if unwanted_in is None or is_latest(unwanted_in, store):
            return
        if _save_id(store) != save_id:
            self.in_use.append(str(store.location))
        else:
            parent = store.parent
            # Trainer gives each checkpoint a directory ``checkpoint-<N>`` of its own, which has its own ``latest``.
            if is_of_trainer(parent.location.name) and is_latest(parent, store):
                self.remove(parent, [names.LATEST], "retention")
            data = [name for name in sorted(store.entries() or ()) if names.is_data_dir(name) or names.is_old(name)]
            self.remove(store, [names.MANIFEST, *(name for name in data if name not in remains)], "retention")

    def remove(self, store: Store, entries: Sequence[str], reason: str) -> None:
        """Removes these entries of a directory in the given order. The removal of a manifest is durable before the
        entries after it are removed."""
        for name in entries:
            stored, path = store.files(name), str(store.location.child(name))
            if not self.dry_run:
                store.remove(name)
                if name == names.MANIFEST:
                    store.sync_names("")
                    if store.exists(name):
                        raise StorageError("cannot remove the manifest", file=path)
                elif store.exists(name):
                    continue  # It could not be removed. A later clean-up will find it again.
            freed, shared = self._freed(stored)
            self.removed.append(Removed(path, freed, shared, reason))

    def _freed(self, stored: Sequence[StoredFile]) -> tuple[int, int]:
        """Returns the number of bytes of removed files whose disk space is freed, and the number of bytes of removed
        files that still have other hard links."""
        freed = shared = 0
        for file in stored:
            links = self._links.pop(file.identity, file.links) - 1
            if links > 0:
                self._links[file.identity] = links
                shared += file.nbytes
            else:
                freed += file.nbytes
        return freed, shared


def _save_id(store: Store) -> str | None:
    """Returns the save id of the checkpoint in this directory, or None if its manifest is missing or damaged."""
    try:
        with closing(store.reader()) as reader:
            return read_manifest(store, reader).save_id
    except FormatError:
        return None
