"""Removes the files that dead writers have left in a run or in a checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zckpt.checkpoint.cleaning import work as cleaning
from zckpt.checkpoint.cleaning.cleanup import Removed
from zckpt.checkpoint.cleaning.work import Work
from zckpt.checkpoint.listing.leftovers import run_leftovers
from zckpt.checkpoint.listing.runs import directories, is_begun, names_at
from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError, check_flags, warn
from zckpt.format import names
from zckpt.storage.location import Location, StrPath
from zckpt.storage.process_names import left_over
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zckpt.checkpoint.cleaning.cleanup import Cleanup
    from zckpt.storage.contract import Store


def gc(path: StrPath, *, dry_run: bool = False, discard: StrPath | Collection[StrPath] = ()) -> Cleanup:
    """Removes the files that dead writers have left in a run, or in one checkpoint. Call this on one rank only.

    These are data that no manifest names, temporary files, checkpoints that were never committed, unfinished exports
    and conversions on file systems, and scratch files of ``zckpt.offload``. Committed checkpoints are not removed;
    ``zckpt.prune`` does that. A checkpoint that another process is writing at this moment stays too, and so does one
    that only lacks its manifest, because ``zckpt.repair`` can rebuild it.

    In an object store, the data and the unfinished uploads of dead writers are removed when they are a day old, because
    a writer that was taken for dead may still commit before. Uploads are found only in S3, by the package boto3.

    Args:
        path: the directory of a run, or of one checkpoint. The checkpoints of a run are those directly in its
            directory, those further down that a file ``latest`` can name, and those in the folders ``checkpoint-<N>``
            of Hugging Face's Trainer. Another run inside of the directory is left alone.
        dry_run: whether to remove nothing, and only return what would be removed.
        discard: the directory of a checkpoint without a manifest, or several such directories. The paths are absolute,
            or relative to ``path`` or to the working directory. They are removed although they could be repaired.

    Returns:
        The files and directories that were removed, with their sizes.

    Raises:
        CheckpointNotFoundError: ``path`` is not a directory, or ``discard`` names no checkpoint in it.
        CheckpointExistsError: a checkpoint that ``discard`` names has a manifest.
        StorageError: the operating system reports an error when it reads or removes something.
        UnsupportedError: the path is a URL, and there is no store for its scheme, or a path of Windows elsewhere.
    """
    check_flags(dry_run=dry_run)
    run = open_store(path)
    entries = names_at(run)
    checkpoints = [run] * is_begun(entries) + [store for store, entries in directories(run) if is_begun(entries)]
    work = Work(dry_run, _discarded(run, checkpoints, discard))
    for checkpoint in checkpoints:
        work.clean(checkpoint)
    _give_up_uploads(run, work)
    work.remove(run, [*run_leftovers(run), *left_over(entries)], "leftover")
    return work.result(len(checkpoints))


def _discarded(run: Store, checkpoints: Sequence[Store], discard: StrPath | Collection[StrPath]) -> set[Location]:
    """Returns the directories of those ``checkpoints`` that ``discard`` names. Raises CheckpointNotFoundError and
    CheckpointExistsError."""
    discarded = set()
    for path_like in (discard,) if isinstance(discard, (str, os.PathLike)) else discard:
        path = os.fspath(path_like)
        locations = {Location.of(path).absolute(), run.location.child(path).absolute()}
        matching = [checkpoint for checkpoint in checkpoints if checkpoint.location.absolute() in locations]
        if not matching:
            raise CheckpointNotFoundError(
                f"discard names {path!r}, in which no checkpoint was begun", file=str(run.location)
            )
        for checkpoint in matching:
            if checkpoint.entry(names.MANIFEST) is not None:
                raise CheckpointExistsError(
                    "discard names a checkpoint that has a manifest", file=str(checkpoint.location),
                    hint="to remove checkpoints that have a manifest, use zckpt.prune",
                )  # fmt: skip
            discarded.add(checkpoint.location)
    return discarded


def _give_up_uploads(run: Store, work: Work) -> None:
    """Removes the unfinished uploads of data files in and below the directory that are older than ``OLD_SECONDS``."""
    try:
        for upload in run.unfinished(cleaning.OLD_SECONDS):
            if any(map(names.is_data_dir, upload.path.split("/"))):
                if not work.dry_run:
                    run.give_up(upload)
                work.removed.append(Removed(str(run.location.child(upload.path)), upload.nbytes, 0, "leftover"))
    except StorageError as error:  # To list and to end uploads are other rights than to list and to remove files.
        warn(f"unfinished uploads stay: {error}")
