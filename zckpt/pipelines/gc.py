"""What dead writers have left, and checkpoints that are not wanted any more: found, and removed safely."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import CheckpointNotFoundError, FormatError, LockedError, StorageError, ZckptError
from zckpt.format import names
from zckpt.io.lock import DEAD_SECONDS, WriteLock, is_alive, read_lock
from zckpt.io.store import open_store
from zckpt.pipelines.open import StrPath, find, open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.io.store import Store


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that ``zckpt.gc`` has removed, or would remove."""

    path: str
    nbytes: int
    reason: str
    """``leftover``: of a write that died, failed or was replaced. ``retention``: of an older checkpoint."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What ``zckpt.gc`` did, or with ``dry_run`` would do."""

    removed: tuple[Removed, ...]
    in_use: tuple[str, ...]
    """Checkpoints that were left alone because somebody writes there now."""
    dry_run: bool

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.removed)

    def __str__(self) -> str:
        lines = [f"{one.reason:9}  {one.nbytes:>15,}  {one.path}" for one in self.removed]
        lines += [f"in use                      {path}" for path in self.in_use]
        verb = "would remove" if self.dry_run else "removed"
        return "\n".join([*lines, f"{verb} {len(self.removed)} files and directories, {self.nbytes:,} bytes"])


def gc(path: StrPath, *, keep: int | None = None, dry_run: bool = False) -> Cleanup:
    """Removes what dead writers have left in a run, or in one checkpoint: data that no manifest names, temporary files,
    checkpoints that were never committed. What somebody writes at this moment is left alone.

    ``keep``: remove checkpoints of the run too, all but this many, those that were committed last, and the one that
    ``latest`` names. ``dry_run``: only say what would be removed. Call it on one rank.

    Raises CheckpointNotFoundError if there is no such directory, FormatError if ``latest`` cannot be read, and
    StorageError. ValueError for ``keep`` below 1.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be 1 or more, got {keep}")
    root = os.fspath(path)
    run = open_store(root)
    if run.entries() is None:
        raise CheckpointNotFoundError("there is no such directory", file=root)
    checkpoints = [name for name in run.directories() if _is_checkpoint(open_store(os.path.join(root, name)))]
    unwanted = set() if keep is None else _unwanted(root, checkpoints, keep)
    work = _Work(dry_run)
    if _is_checkpoint(run):
        work.clean(root)
    for name in checkpoints:
        work.clean(os.path.join(root, name), root if name in unwanted else None)
    work.remove(run, run_leftovers(root), "leftover")
    return Cleanup(tuple(work.removed), tuple(work.in_use), dry_run)


def leftovers(path: str) -> list[str]:
    """The names in a checkpoint's directory that no manifest names, or may name: of writes that died, failed or were
    replaced, and of the one under way. Whoever removes them holds the lock."""
    named = None
    try:
        named = names.data_dir(open_checkpoint(path).manifest.save_id)
    except CheckpointNotFoundError:
        pass
    except ZckptError:  # it may name any of them
        return []
    return [name for name in _entries(open_store(path)) if _is_leftover(name) and name != named]


def run_leftovers(path: str) -> list[str]:
    """The same of a run, which has no lock: a commit needs its file for an instant, that of a dead writer grows old."""
    run = open_store(path)
    found = [name for name in _entries(run) if names.is_temporary(name, names.LATEST)]
    changed_at = {name: run.changed_at(name) for name in found}
    now = run.now() if found else 0.0
    return [name for name, at in changed_at.items() if at is not None and now - at > DEAD_SECONDS]


def remove_leftovers(path: str) -> None:
    """Of a checkpoint, whose lock the caller holds. What cannot be removed stays."""
    store = open_store(path)
    for found in (prepared_manifests, leftovers):
        for name in found(path):
            store.remove(name)


def remove_run_leftovers(path: str) -> None:
    """Of a run. What cannot be removed stays."""
    for name in run_leftovers(path):
        open_store(path).remove(name)


def prepared_manifests(path: str) -> list[str]:
    """Of writers that died, or were taken for dead. Once these are gone, none of them can commit any more, so that what
    ``leftovers`` finds then is not named by a manifest that comes later."""
    return [name for name in _entries(open_store(path)) if names.is_temporary(name, names.MANIFEST)]


def _entries(store: Store) -> list[str]:
    """None where they cannot be listed: what cannot be cleaned up stays."""
    try:
        return sorted(store.entries() or ())
    except StorageError:
        return []


def _is_leftover(name: str) -> bool:
    temporary = any(names.is_temporary(name, of) for of in (names.MANIFEST, names.LOCK))
    return temporary or names.is_data_dir(name)


def _is_checkpoint(store: Store) -> bool:
    """Whether somebody has written one here, or begun to."""
    return any(name in (names.MANIFEST, names.LOCK) or _is_leftover(name) for name in store.entries() or ())


def _unwanted(root: str, checkpoints: Sequence[str], keep: int) -> set[str]:
    """All committed checkpoints but the newest, whatever ``latest`` names. One whose manifest is damaged does not
    count, and stays."""
    committed: list[tuple[float, int, str]] = []
    for name in checkpoints:
        path = os.path.join(root, name)
        try:
            step = open_checkpoint(path).step
        except (CheckpointNotFoundError, FormatError):
            continue
        changed_at = open_store(path).changed_at(names.MANIFEST)
        if changed_at is not None:
            committed.append((changed_at, step, name))
    return {name for *_, name in sorted(committed)[:-keep]}


def _latest(root: str) -> str | None:
    if not open_store(root).exists(names.LATEST):
        return None
    return os.path.basename(find(root))


class _Work:
    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.removed: list[Removed] = []
        self.in_use: list[str] = []

    def clean(self, path: str, unwanted_in: str | None = None) -> None:
        """One checkpoint. ``unwanted_in``: the run that it is to be removed from."""
        store = open_store(path)
        if unwanted_in is None and not leftovers(path) and read_lock(store) is None:
            return  # no lock is taken for nothing: a write may be about to begin
        if self.dry_run:
            holder = read_lock(store)
            if holder is not None and is_alive(store, holder):
                self.in_use.append(path)
            else:
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

    def _clean(self, store: Store, unwanted_in: str | None) -> None:
        prepared = prepared_manifests(store.root)
        self.remove(store, prepared, "leftover")
        self.remove(store, [name for name in leftovers(store.root) if name not in prepared], "leftover")
        if unwanted_in is not None and _latest(unwanted_in) != os.path.basename(store.root):
            kept = [name for name in sorted(store.entries() or ()) if names.is_data_dir(name) or names.is_old(name)]
            self.remove(store, [names.MANIFEST, *kept], "retention")

    def remove(self, store: Store, found: Sequence[str], reason: str) -> None:
        """The manifest goes first, for good, before any of its data."""
        for name in found:
            nbytes = store.nbytes(name)
            if not self.dry_run:
                store.remove(name)
                if name == names.MANIFEST:
                    store.sync_names("")
                    if store.exists(name):
                        raise StorageError("cannot remove the manifest", file=os.path.join(store.root, name))
                elif store.exists(name):
                    continue  # it stays, and is a leftover still
            self.removed.append(Removed(os.path.join(store.root, name), nbytes, reason))
