"""Removes whole checkpoints of a run, except for those that are to be kept."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from zckpt.cleaning.work import Work, is_latest
from zckpt.errors import CheckpointNotFoundError, FormatError, StorageError
from zckpt.format import names
from zckpt.listing.find import open_contents
from zckpt.listing.runs import check_lengths, directories, nothing_at
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.cleaning.cleanup import Cleanup
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath


class _Committed(NamedTuple):
    """A checkpoint that is whole. Tuples of this class sort in the order of the commits."""

    changed_at: float
    step: int
    path: str
    save_id: str
    store: Store


def prune(run: StrPath, *, keep_last: int, keep_every: int | None = None, dry_run: bool = False) -> Cleanup:
    """Removes whole checkpoints of a run. It never removes the checkpoint that ``latest`` names, one that somebody is
    writing at this moment, or one that is not whole, because its manifest cannot be read or because a file is missing
    or does not have its length. A checkpoint that is not whole does not count as one of ``keep_last`` either. Of each
    checkpoint it removes the manifest first, durably, and then the data.

    ``keep_last``: the number of checkpoints to keep, counted from the one that was committed last. ``keep_every``: keep
    the checkpoints whose step is a multiple of this number, too. ``dry_run``: remove nothing, and return what would be
    removed. The checkpoints of a run are those that ``zckpt.gc`` finds. Call this on one rank only.

    Raises CheckpointNotFoundError if there is no such directory, or if it is the directory of one checkpoint;
    FormatError if ``latest`` cannot be read; StorageError; UnsupportedError for a URL of an unknown kind of store; and
    ValueError for what is not a whole number of 1 or more.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name} must be a whole number of 1 or more, got {value!r}")
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
            work.clean(one.store, store, one.save_id)
    return work.result(len(found), [one.path for one in kept], unreadable)


def _committed(found: Sequence[Store]) -> tuple[list[_Committed], list[str]]:
    """Returns the checkpoints in the order of their commits, and the paths of those that are not whole."""
    committed, unreadable = [], []
    for store in found:
        path = str(store.location)
        try:
            contents = open_contents(store)
            with closing(contents.reader):
                check_lengths(contents)
            changed_at = store.changed_at(names.MANIFEST)
        except CheckpointNotFoundError:
            continue  # somebody has removed it just now
        except (FormatError, StorageError):
            unreadable.append(path)
            continue
        manifest = contents.manifest
        if changed_at is not None:
            committed.append(_Committed(changed_at, manifest.step, path, manifest.save_id, store))
    return sorted(committed, key=lambda one: one[:3]), unreadable
