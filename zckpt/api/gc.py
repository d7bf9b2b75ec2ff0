"""Removes what dead writers have left, safely."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zckpt.cleaning.work import Work
from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from zckpt.format import names
from zckpt.listing.runs import directories, is_begun, nothing_at, run_leftovers
from zckpt.storage.location import Location, StrPath
from zckpt.storage.schemes import open_store
from zckpt.storage.scratch import left_over

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zckpt.cleaning.cleanup import Cleanup
    from zckpt.storage.contract import Store


def gc(path: StrPath, *, dry_run: bool = False, discard: StrPath | Collection[StrPath] = ()) -> Cleanup:
    """Removes what dead writers have left in a run, or in one checkpoint: data that no manifest names, temporary files,
    checkpoints that were never committed, and scratch files of ``zckpt.offload``. No checkpoint is removed:
    ``zckpt.prune`` does that. What somebody writes at this moment is left alone, and so is what ``zckpt.repair`` could
    make a checkpoint of: there is no manifest, but all data of a save.

    The checkpoints of a run are those directly in it, those in directories of it where ``latest`` may name them, and
    those in the ``checkpoint-<N>`` of Hugging Face's Trainer. Another run inside of it is left alone.

    ``dry_run``: only say what would be removed. ``discard``: the directory of a checkpoint without a manifest, or
    several, relative to ``path`` or not, that are to be removed although they could be repaired. Call it on one rank.

    Raises CheckpointNotFoundError if there is no such directory, of the run or of ``discard``; CheckpointExistsError if
    one of ``discard`` has a manifest; StorageError; UnsupportedError for the URL of a store that does not exist.
    """
    run = open_store(path)
    entries = run.entries()
    if entries is None:
        raise nothing_at(run)
    checkpoints = [one for one, entries in directories(run) if is_begun(entries)]
    found = [run] * is_begun(entries) + checkpoints
    work = Work(dry_run, _discarded(run, found, discard))
    for one in found:
        work.clean(one)
    work.remove(run, [*run_leftovers(run), *left_over(entries)], "leftover")
    return work.result(len(found))


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
                    hint="zckpt.prune removes older checkpoints",
                )  # fmt: skip
            found.add(checkpoint.location)
    return found
