"""Removes older checkpoints of a run."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from zckpt.cleaning.work import Work, is_latest
from zckpt.errors import CheckpointNotFoundError, FormatError, StorageError
from zckpt.format import names
from zckpt.listing.find import open_contents
from zckpt.listing.runs import check_lengths, directories, nothing_at
from zckpt.storage.schemes import open_store
from zckpt.writing.options import check_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.cleaning.cleanup import Cleanup
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath


class _Committed(NamedTuple):
    """A complete checkpoint of the run. The first three fields sort checkpoints in the order of their commits."""

    changed_at: float
    step: int
    path: str
    save_id: str
    store: Store
    full: bool
    """Whether the checkpoint has all of the optimizer's state."""


def prune(run: StrPath, *, keep_last: int, keep_every: int | None = None, dry_run: bool = False) -> Cleanup:
    """Removes older checkpoints of a run, and keeps the newest ones. Call this on one rank only.

    These checkpoints are never removed:

    - the checkpoint that ``latest`` names,
    - the newest checkpoint that has all of the optimizer's state,
    - a checkpoint that another process is writing at this moment,
    - an incomplete checkpoint, whose manifest cannot be read, or of which a file is missing or has the wrong length. It
      does not count as one of ``keep_last`` either.

    Of each checkpoint, the manifest is removed first, durably, and then the data.

    Args:
        run: the directory of the run. Its checkpoints are those that ``zckpt.gc`` finds.
        keep_last: the number of checkpoints that are kept, counted from the one that was committed last.
        keep_every: if it is given, checkpoints whose step is a multiple of this number are kept too.
        dry_run: whether to remove nothing, and only return what would be removed.

    Returns:
        The files and directories that were removed, with their sizes.

    Raises:
        CheckpointNotFoundError: there is no such directory, or it is the directory of one checkpoint.
        FormatError: ``latest`` cannot be read.
        StorageError: the operating system reports an error when it reads or removes something.
        UnsupportedError: the path is a URL, and there is no store for its scheme, or a path of Windows elsewhere.
        ValueError: a number is not a whole number of 1 or more.
    """
    check_counts(keep_last=keep_last, keep_every=keep_every)
    return remove_older(run, keep_last, keep_every, dry_run=dry_run)


def remove_older(
    run: StrPath, keep_last: int, keep_every: int | None = None, *, newest: str | None = None, dry_run: bool = False
) -> Cleanup:
    """Does the work of ``prune``, and of writes that remove older checkpoints. ``newest``: the save id of a checkpoint
    that counts as the one that was committed last, even if its manifest has an older time. The clocks of two hosts may
    differ, and the files of a copied run may have any times."""
    store = open_store(run)
    entries = store.entries()
    if entries is None:
        raise nothing_at(store)
    if names.MANIFEST in entries:
        raise CheckpointNotFoundError(
            "this is the directory of one checkpoint, not of a run", file=str(store.location),
            hint=f"give the directory of its run, such as {store.location.absolute().parent}",
        )  # fmt: skip
    stores = [checkpoint for checkpoint, entries in directories(store) if names.MANIFEST in entries]
    committed, unreadable = _committed(stores)
    committed.sort(key=lambda checkpoint: checkpoint.save_id == newest)  # The sort is stable.
    last = [*committed[-keep_last:], *[checkpoint for checkpoint in committed if checkpoint.full][-1:]]
    kept = [
        checkpoint
        for checkpoint in committed
        if checkpoint in last
        or (keep_every is not None and checkpoint.step % keep_every == 0)
        or is_latest(store, checkpoint.store)
    ]
    work = Work(dry_run)
    for checkpoint in committed:
        if checkpoint not in kept:
            work.clean(checkpoint.store, store, checkpoint.save_id)
    return work.result(len(stores), [checkpoint.path for checkpoint in kept], unreadable)


def _committed(stores: Sequence[Store]) -> tuple[list[_Committed], list[str]]:
    """Returns the complete checkpoints in the order of their commits, and the paths of those that are not complete."""
    committed, unreadable = [], []
    for store in stores:
        path = str(store.location)
        try:
            contents = open_contents(store)
            with closing(contents.reader):
                check_lengths(contents)
                full = not contents.left_out
            changed_at = store.changed_at(names.MANIFEST)
        except CheckpointNotFoundError:
            continue  # Another process has removed it meanwhile.
        except (FormatError, StorageError):
            unreadable.append(path)
            continue
        manifest = contents.manifest
        if changed_at is not None:
            committed.append(_Committed(changed_at, manifest.step, path, manifest.save_id, store, full))
    return sorted(committed, key=lambda checkpoint: checkpoint[:3]), unreadable
