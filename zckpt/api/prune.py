"""Removes whole checkpoints of a run, except for those that are to be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zckpt.cleaning.work import Work, is_latest
from zckpt.errors import CheckpointNotFoundError, FormatError, StorageError
from zckpt.format import names
from zckpt.listing.find import open_contents
from zckpt.listing.runs import directories, nothing_at
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.cleaning.cleanup import Cleanup
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath


class _Committed(NamedTuple):
    """A checkpoint whose manifest can be read. Tuples of this class sort in the order of the commits."""

    changed_at: float
    step: int
    path: str
    store: Store


def prune(run: StrPath, *, keep_last: int, keep_every: int | None = None, dry_run: bool = False) -> Cleanup:
    """Removes whole checkpoints of a run. It never removes the checkpoint that ``latest`` names, one that somebody is
    writing at this moment, or one whose manifest cannot be read. Of each checkpoint it removes the manifest first,
    durably, and then the data.

    ``keep_last``: the number of checkpoints to keep, counted from the one that was committed last. ``keep_every``: keep
    the checkpoints whose step is a multiple of this number, too. ``dry_run``: remove nothing, and return what would be
    removed. The checkpoints of a run are those that ``zckpt.gc`` finds. Call this on one rank only.

    Raises CheckpointNotFoundError if there is no such directory, or if it is the directory of one checkpoint;
    FormatError if ``latest`` cannot be read; StorageError; UnsupportedError for a URL of an unknown kind of store; and
    ValueError for numbers below 1.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    store = open_store(run)
    entries = store.entries()
    if entries is None:
        raise nothing_at(store)
    if names.MANIFEST in entries:
        raise CheckpointNotFoundError(
            "this is the directory of one checkpoint, not of a run", file=str(store.location),
            hint=f"give the directory of its run, such as {store.location.absolute().parent}",
        )  # fmt: skip
    found = [one for one, entries in directories(store) if names.MANIFEST in entries]
    committed, unreadable = _committed(found)
    last = committed[-keep_last:]
    kept = [
        one
        for one in committed
        if one in last or (keep_every is not None and one.step % keep_every == 0) or is_latest(store, one.store)
    ]
    work = Work(dry_run)
    for one in committed:
        if one not in kept:
            work.clean(one.store, store)
    return work.result(len(found), [one.path for one in kept], unreadable)


def _committed(found: Sequence[Store]) -> tuple[list[_Committed], list[str]]:
    """Returns the checkpoints in the order of their commits, and the paths of those whose manifests cannot be read."""
    committed, unreadable = [], []
    for store in found:
        path = str(store.location)
        try:
            contents = open_contents(store)
            contents.reader.close()
            changed_at = store.changed_at(names.MANIFEST)
        except CheckpointNotFoundError:
            continue  # somebody has removed it just now
        except (FormatError, StorageError):
            unreadable.append(path)
            continue
        if changed_at is not None:
            committed.append(_Committed(changed_at, contents.manifest.step, path, store))
    return sorted(committed, key=lambda one: one[:3]), unreadable
