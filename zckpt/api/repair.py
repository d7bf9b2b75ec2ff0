"""Rebuilds a lost or damaged manifest, index or digest table from the data files themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.api.open import open_checkpoint
from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FeatureError, FormatError, VersionError, count
from zckpt.format import names
from zckpt.listing.runs import leftovers, not_a_checkpoint, nothing_at
from zckpt.repairing.rebuilt import check_copy, check_rebuilt, copy_data, put_files, rebuild_from, structure_findings
from zckpt.repairing.salvage import refused, the_save
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.transfer.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

LOST = ("step", "aliases of tied weights", "the tree of state: counters, param groups, scheduler, client_state")
"""The things that are only in the manifest, and so cannot be rebuilt."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What ``zckpt.repair`` has done."""

    path: str
    """The directory of the checkpoint that is whole now."""
    rebuilt: tuple[str, ...]
    """The files that were rebuilt, relative to the checkpoint. It is empty if nothing had to be rebuilt."""
    kept: tuple[str, ...] = ()
    """The paths that the damaged files have now."""
    lost: tuple[str, ...] = ()
    """Descriptions of what could not be recovered."""
    unverified: tuple[str, ...] = ()
    """Descriptions of the data that could not be compared with a digest, or that differ from their digest."""

    def __str__(self) -> str:
        lines = [f"rebuilt     {name}" for name in self.rebuilt]
        lines += [f"kept        {name}" for name in self.kept]
        lines += [f"lost        {what}" for what in self.lost]
        lines += [f"unverified  {what}" for what in self.unverified]
        verdict = f"{count(len(self.rebuilt), 'file')} rebuilt" if self.rebuilt else "nothing to repair"
        return "\n".join([*lines, f"{self.path}: {verdict}"])


def repair(
    path: StrPath, *, output: StrPath | None = None, accept_unverified: bool = False, budget: Budget | None = None
) -> RepairReport:
    """Rebuilds the manifest, the index or digest tables of a checkpoint from the headers of its data files, where they
    are lost or damaged. All data is read, and compared with the digests that are left.

    ``path``: the directory of the checkpoint. ``output``: another directory, where a whole checkpoint is made, data and
    all; the copy is read back and compared before it becomes a checkpoint. None: in place, where the damaged files stay
    under other names. ``accept_unverified``: go on although some data cannot be verified, or is damaged. Damaged
    blocks keep their old digest and are refused when read. ``budget``: memory, threads and kind of I/O. Call it on one
    rank.

    Without the manifest, step, aliases and the tree of non-tensor state are lost: tensors can be loaded, and an
    engine's weights restored (``parts``), but no training resumed. Damaged data cannot be repaired at all.

    Raises RepairError, which lists everything, if files are missing, damaged or of several saves; LockedError;
    CheckpointNotFoundError, which says what is there instead; CheckpointExistsError (``output``); VersionError;
    FeatureError; UnsupportedError for the URL of a store that does not exist; StorageError, also for a copy that
    differs, of which nothing is left then.
    """
    source = open_store(path)
    target = source if output is None else open_store(output)
    entries = source.entries()
    if entries is None:
        raise nothing_at(source)
    if not any(name == names.MANIFEST or names.is_data_dir(name) for name in entries):
        raise not_a_checkpoint(source, entries, "this is not the directory of a checkpoint")
    if output is not None and target.exists(names.MANIFEST):
        raise CheckpointExistsError(
            "there is already a checkpoint here", file=str(target.location), hint="choose another output"
        )
    budget = budget or Budget.from_environment()
    try:
        with WriteLock(target) as lock:
            return _repair(source, target, output is not None, accept_unverified, budget, lock.confirm)
    except BaseException:
        target.remove_if_empty("")
        raise


def _repair(
    source: Store, target: Store, elsewhere: bool, accept_unverified: bool, budget: Budget, confirm: Callable[[], None]
) -> RepairReport:
    path = str(target.location)
    old, finding = _manifest(source)
    if old is not None and not elsewhere and not structure_findings(open_checkpoint(source, budget)):
        return RepairReport(path, ())
    found = the_save(source, old, finding)
    rebuilt = rebuild_from(source, found, old, budget)
    if rebuilt.unverified and not accept_unverified:
        hint = "to go on all the same, pass accept_unverified (--accept-unverified)"
        raise refused(source, rebuilt.unverified, hint)
    check_rebuilt(source, rebuilt, budget)
    files = dict(rebuilt.files)
    if old is None or elsewhere or rebuilt.differs_from(old):
        files[names.MANIFEST] = rebuilt.manifest  # last: it is the commit
    data_dir = names.data_dir(found.save_id)
    if elsewhere and target.exists(data_dir):
        there = str(target.location.child(data_dir))
        raise CheckpointExistsError("the data of this save are here", file=there, hint="choose another output")
    try:
        if elsewhere:
            copy_data(source, target, found, budget)
            check_copy(target, rebuilt, budget)
        changed, kept = put_files(target, files, confirm)
    except BaseException:
        if elsewhere and data_dir in leftovers(target):
            target.remove(data_dir)
        raise
    return RepairReport(path, changed, kept, LOST if old is None else (), rebuilt.unverified)


def _manifest(store: Store) -> tuple[Manifest | None, str]:
    """The manifest if it is sound, else what is wrong with it. Raises VersionError, FeatureError: it may be sound to
    others."""
    try:
        return open_checkpoint(store).manifest, ""
    except (VersionError, FeatureError):
        raise
    except CheckpointNotFoundError:
        return None, "there is no manifest"
    except FormatError as error:
        return None, f"the manifest is damaged: {error.message}"
