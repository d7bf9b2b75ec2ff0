"""Removes what was left over, discarded or pruned of one checkpoint after the other, each under its lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.cleaning.cleanup import Cleanup, Removed
from zckpt.errors import LockedError, StorageError
from zckpt.format import names
from zckpt.listing.runs import is_of_trainer, leftovers, read_latest
from zckpt.storage.lock import WriteLock, is_alive, is_lock, read_lock
from zckpt.writing.leftovers import prepared_manifests, recoverable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zckpt.storage.contract import Store
    from zckpt.storage.location import Location


def is_latest(run: Store, checkpoint: Store) -> bool:
    """Whether the ``latest`` of a run names the checkpoint. What it names need not exist. Raises FormatError."""
    if not run.exists(names.LATEST):
        return False
    return run.location.child(read_latest(run)).resolved() == checkpoint.location.resolved()


class Work:
    """What is removed from several checkpoints. With ``dry_run`` nothing is, and no lock is taken."""

    def __init__(self, dry_run: bool, discarded: Collection[Location] = ()) -> None:
        """``discarded``: where the checkpoints without a manifest are that go although they could be repaired."""
        self.dry_run = dry_run
        self.discarded = discarded
        self.removed: list[Removed] = []
        self.in_use: list[str] = []
        self.recoverable: list[str] = []

    def result(self, checkpoints: int, kept: Sequence[str] = (), unreadable: Sequence[str] = ()) -> Cleanup:
        """``checkpoints``, ``kept`` and ``unreadable`` as in ``Cleanup``."""
        removed, in_use = tuple(self.removed), tuple(self.in_use)
        recoverable, dry_run = tuple(self.recoverable), self.dry_run
        return Cleanup(removed, in_use, dry_run, recoverable, checkpoints, tuple(kept), tuple(unreadable))

    def clean(self, store: Store, unwanted_in: Store | None = None) -> None:
        """One checkpoint. ``unwanted_in``: the run that it is to be removed from."""
        path = str(store.location)
        found, holder = leftovers(store), read_lock(store)
        if unwanted_in is None and not found and (holder is None or not is_lock(holder)):
            return  # no lock is taken for nothing: a write may be about to begin
        if holder is not None and is_alive(store, holder):
            self.in_use.append(path)
            return
        complete = recoverable(store) if store.location not in self.discarded else []
        if complete:
            self.recoverable.append(path)
            if complete == found:
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
        left = [name for name in leftovers(store) if name not in {*complete, *prepared}]
        self.remove(store, left, "leftover")
        if unwanted_in is not None and not is_latest(unwanted_in, store):
            above = store.parent
            if is_of_trainer(above.location.name) and is_latest(above, store):  # of this checkpoint alone
                self.remove(above, [names.LATEST], "retention")
            own = [name for name in sorted(store.entries() or ()) if names.is_data_dir(name) or names.is_old(name)]
            self.remove(store, [names.MANIFEST, *(name for name in own if name not in left)], "retention")

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
