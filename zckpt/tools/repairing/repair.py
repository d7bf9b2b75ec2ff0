"""Rebuilds a lost or damaged manifest, index or digest table from the data files."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.doubt import refuse_doubt
from zckpt.checkpoint.listing.find import manifest_of, open_contents
from zckpt.checkpoint.listing.leftovers import may_be_named
from zckpt.checkpoint.listing.runs import names_at, not_a_checkpoint
from zckpt.checkpoint.writing.removal import remove
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FeatureError,
    FormatError,
    VersionError,
    check_flags,
    count,
    printable,
)
from zckpt.format import names
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.tools.repairing.rebuilt import (
    check_copy,
    check_rebuilt,
    copy_data,
    put_files,
    rebuild_from,
    structure_findings,
)
from zckpt.tools.repairing.save import refused, the_save
from zckpt.transfer.budget import Budget, budget_or_default

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

LOST = ("step", "aliases of tied weights", "the tree of state: counters, param groups, scheduler, client_state")
"""Descriptions of what only the manifest contains, so that it cannot be rebuilt."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of ``zckpt.repair``."""

    path: str
    """The directory of the checkpoint that is complete now."""
    rebuilt: tuple[str, ...]
    """The paths of the files that were rebuilt, relative to the checkpoint. It is empty if nothing had to be
    rebuilt."""
    kept: tuple[str, ...] = ()
    """The paths to which the damaged files were renamed."""
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
        return "\n".join(map(printable, [*lines, f"{self.path}: {verdict}"]))


def repair(
    path: StrPath, *, output: StrPath | None = None, accept_unverified: bool = False, budget: Budget | None = None
) -> RepairReport:
    """Rebuilds a lost or damaged manifest, index or digest table from the data files. Call this on one rank only.

    All data are read, and compared with the digests that are left. If the manifest is lost, so are the step, the
    aliases and the tree of non-tensor state. Tensors can then be loaded, and the weights of an engine can be restored
    (``zckpt.restore`` with ``parts``), but training cannot resume. Damaged data cannot be repaired.

    Args:
        path: the directory of the checkpoint.
        output: another directory, in which a complete checkpoint with all data is made. The copy is read back and
            compared before it becomes a checkpoint. None repairs the checkpoint in place. The damaged files are then
            kept under other names.
        accept_unverified: whether to continue if some data are damaged or cannot be verified. Damaged blocks keep their
            old digests, so reading them raises an error.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.

    Returns:
        The files that were rebuilt, and what is lost.

    Raises:
        RepairError: data files are missing or damaged, or they belong to several saves. The error lists everything.
        LockedError: another writer is writing to the checkpoint.
        CheckpointNotFoundError: there is no checkpoint. The error says what is there instead.
        CheckpointExistsError: there is already a checkpoint at ``output``, or one is prepared that another machine may
            have committed.
        VersionError: the checkpoint has another major version of the format.
        FeatureError: the checkpoint uses a feature that this version of zckpt does not know.
        UnsupportedError: a path is a URL, and there is no store for its scheme, or a path of Windows elsewhere.
        StorageError: the operating system reports an error when it reads or writes, or the copy differs from what was
            written. Nothing of the copy is left then.
    """
    check_flags(accept_unverified=accept_unverified)
    source = open_store(path)
    target = source if output is None else open_store(output)
    entries = names_at(source)
    if not any(name == names.MANIFEST or names.is_data_dir(name) for name in entries):
        raise not_a_checkpoint(source, entries, "this is not the directory of a checkpoint")
    if output is not None and target.entry(names.MANIFEST) is not None:
        raise CheckpointExistsError(
            "there is already a checkpoint here", file=str(target.location), hint="choose another output"
        )
    refuse_doubt(target)
    budget = budget_or_default(budget)
    with WriteLock(target) as lock:
        return _repair(source, target, output is not None, accept_unverified, budget, lock.confirm)


def _repair(
    source: Store, target: Store, elsewhere: bool, accept_unverified: bool, budget: Budget, confirm: Callable[[], None]
) -> RepairReport:
    path = str(target.location)
    old, finding = _manifest(source)
    if old is not None and not elsewhere:
        contents = open_contents(source)
        with closing(contents.reader):
            if not structure_findings(contents, budget):
                return RepairReport(path, ())
    save = the_save(source, old, finding)
    rebuilt = rebuild_from(source, save, old, budget)
    if rebuilt.unverified and not accept_unverified:
        hint = "to go on all the same, pass accept_unverified (--accept-unverified)"
        raise refused(source, rebuilt.unverified, hint)
    check_rebuilt(source, rebuilt, budget)
    files = dict(rebuilt.files)
    if old is None or elsewhere or rebuilt.differs_from(old):
        files[names.MANIFEST] = rebuilt.manifest  # The manifest is the last file, because it commits the others.
    data_dir = names.data_dir(save.save_id)
    if elsewhere and target.entry(data_dir) is not None:
        existing = str(target.location.child(data_dir))
        raise CheckpointExistsError("the data of this save are here", file=existing, hint="choose another output")
    try:
        if elsewhere:
            copy_data(source, target, save, budget)
            check_copy(target, rebuilt, budget)
        changed, kept = put_files(target, files, confirm)
    except BaseException:
        if elsewhere and not may_be_named(target, save.save_id):
            remove(target, {data_dir: ()})
        raise
    return RepairReport(path, changed, kept, LOST if old is None else (), rebuilt.unverified)


def _manifest(store: Store) -> tuple[Manifest | None, str]:
    """Returns the manifest and an empty text, or None and what is wrong with the manifest. Raises VersionError and
    FeatureError, because another version of zckpt may be able to read such a manifest."""
    try:
        return manifest_of(store), ""
    except (VersionError, FeatureError):
        raise
    except CheckpointNotFoundError:
        return None, "there is no manifest"
    except FormatError as error:
        return None, f"the manifest is damaged: {error.message}"
