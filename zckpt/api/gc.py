"""Removes what dead writers have left in a run or in a checkpoint."""

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
    checkpoints that were never committed, and scratch files of ``zckpt.offload``. It removes no committed checkpoint;
    ``zckpt.prune`` does that. It leaves alone what somebody is writing at this moment, and what ``zckpt.repair`` could
    make a checkpoint of, because all data of a save are there and only the manifest is missing.

    The checkpoints of a run are those directly in its directory, those further down that ``latest`` may name, and those
    in the ``checkpoint-<N>`` of Hugging Face's Trainer. Another run within the directory is left alone.

    ``dry_run``: remove nothing, and return what would be removed. ``discard``: the directory of a checkpoint without a
    manifest, or several such directories, as paths that may be relative to ``path``: they are removed although they
    could be repaired. Call this on one rank only.

    Raises CheckpointNotFoundError if ``path`` is no directory, or if ``discard`` names no checkpoint in it;
    CheckpointExistsError if a checkpoint that ``discard`` names has a manifest; StorageError; and UnsupportedError for
    a URL of an unknown kind of store.
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
    """Returns the directories of those ``checkpoints`` that ``discard`` names."""
    found = set()
    for given in (discard,) if isinstance(discard, (str, os.PathLike)) else discard:
        one = os.fspath(given)
        named = {Location.of(one).absolute(), run.location.child(one).absolute()}
        matching = [checkpoint for checkpoint in checkpoints if checkpoint.location.absolute() in named]
        if not matching:
            raise CheckpointNotFoundError(
                f"discard names {one!r}, in which no checkpoint was begun", file=str(run.location)
            )
        for checkpoint in matching:
            if checkpoint.exists(names.MANIFEST):
                raise CheckpointExistsError(
                    "discard names a checkpoint that has a manifest", file=str(checkpoint.location),
                    hint="to remove checkpoints that have a manifest, use zckpt.prune",
                )  # fmt: skip
            found.add(checkpoint.location)
    return found
