"""Finds the older checkpoints of a run that are kept no longer, and removes them."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from zckpt.checkpoint.cleaning.work import Work, is_latest
from zckpt.checkpoint.listing.find import open_contents
from zckpt.checkpoint.listing.runs import check_lengths, directories, is_of_trainer, names_at
from zckpt.errors import CheckpointNotFoundError, FormatError, StorageError
from zckpt.format import names
from zckpt.plan.catalog import tensor_counts
from zckpt.plan.inventory import PARAM
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zckpt.checkpoint.cleaning.cleanup import Cleanup
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath


class Series(NamedTuple):
    """What is alike for the checkpoints that take each other's place."""

    run_id: str
    use: str
    has_param: bool
    """Whether they have the part ``param``. If a run has frozen weights, only some checkpoints may have them."""
    of_trainer: bool
    """Whether they are in directories ``checkpoint-<N>`` of Hugging Face's Trainer. Trainer resumes only from those."""


class _Committed(NamedTuple):
    """A complete checkpoint of the run. The first three fields sort checkpoints in the order of their commits."""

    changed_at: float
    step: int
    path: str
    series: Series
    save_id: str
    store: Store


def remove_older(
    run: StrPath,
    keep_last: int,
    keep_every: int | None = None,
    *,
    written: tuple[str, str] | None = None,
    needed: Collection[str] = (),
    dry_run: bool = False,
) -> Cleanup:
    """Does the work of ``prune``, and of writes that remove older checkpoints. ``written``: the identity of the run and
    the save id of the checkpoint that a write has just committed. Then only checkpoints of this run are removed, and
    this one counts as the last, even if its manifest has an older time: the clocks of two hosts may differ, and the
    files of a copied run may have any times. ``needed``: the save ids of checkpoints that are being copied."""
    store = open_store(run)
    if names.MANIFEST in names_at(store):
        raise CheckpointNotFoundError(
            "this is the directory of one checkpoint, not of a run", file=str(store.location),
            hint=f"give the directory of its run, such as {store.location.absolute().parent}",
        )  # fmt: skip
    stores = [checkpoint for checkpoint, entries in directories(store) if names.MANIFEST in entries]
    committed, unreadable = _committed(stores, time.time())
    run_id, newest = written or (None, None)
    committed.sort(key=lambda checkpoint: checkpoint.save_id == newest)
    by_series = sorted(committed, key=lambda checkpoint: checkpoint.series)  # The sorts are stable.
    grouped = groupby(by_series, lambda checkpoint: checkpoint.series)
    last = {checkpoint.path for _, group in grouped for checkpoint in [*group][-keep_last:]}
    reasons: dict[str, str] = {}
    work = Work(dry_run)
    for checkpoint in committed:
        series = checkpoint.series
        if is_latest(store, checkpoint.store):
            reasons[checkpoint.path] = "`latest` names it"
        elif checkpoint.save_id in needed:
            reasons[checkpoint.path] = "it is being copied"
        elif checkpoint.path in last:
            reasons[checkpoint.path] = f"one of the last {keep_last} of run {series.run_id} with use {series.use!r}"
        elif keep_every is not None and checkpoint.step % keep_every == 0:
            reasons[checkpoint.path] = f"its step, {checkpoint.step}, is a multiple of {keep_every}"
        elif run_id not in (None, series.run_id):
            reasons[checkpoint.path] = f"it belongs to another run, {series.run_id}"
    for checkpoint in committed:
        if checkpoint.path not in reasons:
            work.clean(checkpoint.store, store, checkpoint.save_id)
    return work.result(len(stores), reasons, unreadable)


def _committed(stores: Sequence[Store], now: float) -> tuple[list[_Committed], list[str]]:
    """Returns the complete checkpoints in the order of their commits, and the paths of those that are not complete.
    ``now``: the present time, in seconds since the epoch. Later times are of a clock that was set back, or of another
    host. Such a checkpoint takes its place by its step."""
    committed, unreadable = [], []
    for store in stores:
        path = str(store.location)
        try:
            contents = open_contents(store)
            with closing(contents.reader):
                check_lengths(contents)
                manifest, lineage = contents.manifest, contents.lineage
                of_trainer = is_of_trainer(store.parent.location.name)
                series = Series(lineage.run_id, str(lineage.use), PARAM in tensor_counts(manifest), of_trainer)
            entry = store.entry(names.MANIFEST)
        except CheckpointNotFoundError:
            continue  # Another process has removed it meanwhile.
        except (FormatError, StorageError):
            unreadable.append(path)
            continue
        if entry is not None:
            committed.append(_Committed(entry.changed_at, manifest.step, path, series, manifest.save_id, store))
    past = [checkpoint for checkpoint in committed if checkpoint.changed_at <= now]
    for number, checkpoint in enumerate(committed):
        if checkpoint.changed_at > now:
            earlier = (other for other in past if other.series == checkpoint.series and other.step < checkpoint.step)
            changed_at = max((other.changed_at for other in earlier), default=0.0)
            committed[number] = checkpoint._replace(changed_at=changed_at)
    return sorted(committed, key=lambda checkpoint: checkpoint[:3]), unreadable
