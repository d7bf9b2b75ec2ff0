"""Removes leftovers, discarded data and pruned checkpoints, one checkpoint after another, each under its lock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zckpt.checkpoint.cleaning.cleanup import Cleanup, Removed
from zckpt.checkpoint.listing.doubt import in_doubt
from zckpt.checkpoint.listing.files import lengths
from zckpt.checkpoint.listing.leftovers import is_file, leftovers, look
from zckpt.checkpoint.listing.runs import is_of_trainer, names_in, read_latest
from zckpt.checkpoint.writing.removal import prepared_manifests, recoverable, remove_found
from zckpt.errors import LockedError, StorageError
from zckpt.format import names
from zckpt.storage.lock import WriteLock, is_alive, is_lock, read_lock, removed_by

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from zckpt.storage.contract import Entry, Store
    from zckpt.storage.location import Location


OLD_SECONDS = 24 * 3600.0
"""After so many seconds, a writer that was taken for dead does not commit any more, and no upload is finished."""


def is_latest(run: Store, checkpoint: Store) -> bool:
    """Returns whether the file ``latest`` of a run names this checkpoint. Raises FormatError if it cannot be read."""
    if run.entry(names.LATEST) is None:
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
        self.foreign: list[str] = []

    def result(
        self, checkpoints: int, reasons: Mapping[str, str] | None = None, unreadable: Sequence[str] = ()
    ) -> Cleanup:
        """Returns the result of the clean-up. The arguments are the fields of ``Cleanup`` of the same names."""
        return Cleanup(
            tuple(self.removed), tuple(self.in_use), self.dry_run, tuple(self.recoverable), checkpoints, reasons or {},
            tuple(unreadable), tuple(dict.fromkeys(self.foreign)),
        )  # fmt: skip

    def clean(self, store: Store, unwanted_in: Store | None = None, save_id: str = "") -> None:
        """Removes the leftovers of one checkpoint. If ``unwanted_in`` is given, removes the checkpoint itself too.
        ``unwanted_in``: the run of the checkpoint. ``save_id``: the save id of the checkpoint. If another process has
        committed another checkpoint there meanwhile, that one stays, and is recorded as in use."""
        path = str(store.location)
        # All of an unwanted checkpoint is removed, with what repairs have left in it.
        left, holder = leftovers(store, deep=unwanted_in is None), read_lock(store)
        is_discarded = store.location in self.discarded
        # If there is nothing to do, no lock is taken, because that could make a write fail that is about to begin.
        is_held = store.entry(names.LOCK) is not None if holder is None else is_lock(holder)
        idle = not (unwanted_in or left.own or is_discarded or is_held)
        if idle and not left.foreign:
            return
        if not idle and holder is not None and is_alive(store, holder):
            self._leave(store)
            return
        self.foreign += [str(store.location.child(name)) for name in left.foreign]
        if in_doubt(store) and not is_discarded:
            self.recoverable.append(path)
            return
        # A process that died while it removed a checkpoint may have left all of its data.
        removed_before = removed_by(holder or b"")
        complete = [] if is_discarded else recoverable(store, removed_before)
        if complete:
            self.recoverable.append(path)
        if idle or (complete and {*left.own} <= {*complete}):
            return
        if self.dry_run:
            self._clean(store, unwanted_in, save_id, removed_before)
            return
        lock = WriteLock(store, removed=save_id or removed_before, frees=True)
        try:
            with lock:
                self._clean(store, unwanted_in, save_id, removed_before)
        except LockedError:
            self._leave(store)
        else:
            store.remove("")

    def _leave(self, store: Store) -> None:
        """Notes that another process has the lock. If that process has removed all of the checkpoint meanwhile, a file
        by which this one asked for the lock may have kept the directory, which is removed then."""
        self.in_use.append(str(store.location))
        if not self.dry_run:
            store.remove("")

    def _clean(self, store: Store, unwanted_in: Store | None, save_id: str, removed_before: str) -> None:
        prepared = prepared_manifests(store)
        self.remove(store, prepared, "leftover")
        complete = recoverable(store, removed_before)
        if store.location in self.discarded:
            self.remove(store, complete, "discarded", ())
        left = leftovers(store, deep=unwanted_in is None)
        remains = [name for name in left.own if name not in {*complete, *prepared}]
        young = self._young(store, remains)
        self.in_use += [str(store.location.child(name)) for name in young]
        self.remove(store, [name for name in remains if name not in young], "leftover")
        if unwanted_in is None or is_latest(unwanted_in, store):
            return
        if left.manifest is None or left.manifest.save_id != save_id:
            self.in_use.append(str(store.location))
        else:
            parent = store.parent
            # Trainer gives each checkpoint a directory ``checkpoint-<N>`` of its own, which has its own ``latest``.
            if is_of_trainer(parent.location.name) and is_latest(parent, store):
                self.remove(parent, [names.LATEST], "retention")
            self.remove(store, [names.MANIFEST], "retention")
            self.remove(store, [names.data_dir(save_id)], "retention", lengths(left.manifest))
            old = [name for name in names_in(store) if names.is_old(name)]
            self.remove(store, [name for name in old if is_file(store, name)], "retention")

    def _young(self, store: Store, leftovers: Sequence[str]) -> list[str]:
        """Returns those leftovers of a checkpoint that may still be used: if the store does not stop commits, a writer
        that was taken for dead may commit until its data are ``OLD_SECONDS`` old."""
        if store.stops_commits or not leftovers:
            return []
        # To ask a store for its time makes a small file, and a dry run makes nothing.
        since = (time.time() if self.dry_run else store.now()) - OLD_SECONDS
        return [name for name in leftovers if any(entry.changed_at > since for entry in _files(store, name).values())]

    def remove(self, store: Store, entries: Sequence[str], reason: str, named: Collection[str] | None = None) -> None:
        """Removes these entries of a directory in the given order, except what is foreign in them. ``named``: the
        argument of ``look``. The removal of a manifest is durable before the entries after it are removed."""
        for name in entries:
            found, path = look(store, name, named), str(store.location.child(name))
            files = _files(store, name)
            stored = [files[own] for own in found.files if own in files]
            self.foreign += [str(store.location.child(foreign)) for foreign in found.foreign]
            if not self.dry_run:
                remove_found(store, found)
                if name == names.MANIFEST:
                    store.sync_names("")
                    if store.entry(name) is not None:
                        raise StorageError("cannot remove the manifest", file=path)
                elif store.entry(name) is not None and look(store, name, named).files:
                    continue  # It could not be removed. A later clean-up will find it again.
            if found.files or not found.foreign:
                freed, shared = self._freed(stored)
                self.removed.append(Removed(path, freed, shared, reason))

    def _freed(self, stored: Sequence[Entry]) -> tuple[int, int]:
        """Returns the number of bytes of removed files whose disk space is freed, and the number of bytes of removed
        files that still have other hard links."""
        freed = shared = 0
        for file in stored:
            links = self._links.pop(file.identity, file.links) - 1
            if links > 0:
                self._links[file.identity] = links
                shared += file.nbytes or 0
            else:
                freed += file.nbytes or 0
        return freed, shared


def _files(store: Store, name: str) -> dict[str, Entry]:
    """Returns the file of this name, or all files below the directory of this name, by their paths."""
    below = store.entries(name, deep=True)
    if below is not None:
        return {f"{name}/{entry.path}": entry for entry in below}
    entry = store.entry(name)
    return {} if entry is None else {name: entry}
