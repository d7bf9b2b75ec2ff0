"""What writes that died, failed or were replaced have left behind, and how a new write clears it away."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from zckpt.errors import CheckpointExistsError, StorageError, ZckptError
from zckpt.format import names
from zckpt.listing.runs import entries_of, is_leftover, read_manifest
from zckpt.repairing.salvage import is_complete
from zckpt.storage.lock import DEAD_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection

    from zckpt.storage.contract import Store


def leftovers(checkpoint: Store) -> list[str]:
    """The names in a checkpoint's directory that belong to writes which died, failed or were replaced, or to the write
    under way: the manifest does not name them. If the manifest cannot be read, it may name any of them, and the list
    is empty. Whoever removes them holds the lock."""
    named = None
    try:
        if checkpoint.exists(names.MANIFEST):
            with closing(checkpoint.reader()) as reader:
                named = names.data_dir(read_manifest(checkpoint, reader).save_id)
    except ZckptError:  # it may name any of them
        return []
    return [name for name in entries_of(checkpoint) if is_leftover(name) and name != named]


def run_leftovers(run: Store) -> list[str]:
    """The temporary files of ``latest`` in a run that dead writers have left. A run has no lock, so a file counts as
    left over when it is older than ``DEAD_SECONDS``; a commit needs it for an instant only."""
    found = [name for name in entries_of(run) if names.is_temporary(name, names.LATEST)]
    changed_at = {name: run.changed_at(name) for name in found}
    now = run.now() if found else 0.0
    return [name for name, at in changed_at.items() if at is not None and now - at > DEAD_SECONDS]


def recoverable(checkpoint: Store) -> list[str]:
    """The names of the data directories in a checkpoint's directory from which ``zckpt.repair`` could make a
    checkpoint: there is no manifest, but the data directory has all files of a save. They are among the
    ``leftovers``."""
    try:
        found = [] if checkpoint.exists(names.MANIFEST) else checkpoint.directories()
    except StorageError:
        return []
    return [name for name in found if names.is_data_dir(name) and is_complete(checkpoint, name.removeprefix("data-"))]


def clear_for_write(checkpoint: Store, *, overwrite: bool, dead: Collection[str] = ()) -> None:
    """Removes the leftovers of a checkpoint, whose lock the caller holds, for a new write. What cannot be removed
    stays, and so does what could be repaired, until the new write has committed.

    ``dead``: the save ids of writers whose lock was taken over. They have not committed, so nobody misses their data.
    Raises CheckpointExistsError for what could be repaired, unless it is to be overwritten.
    """
    for name in prepared_manifests(checkpoint):
        checkpoint.remove(name)
    kept = [name for name in recoverable(checkpoint) if name.removeprefix("data-") not in dead]
    if kept and not overwrite:
        raise CheckpointExistsError(
            "here is a checkpoint whose manifest was lost",
            file=str(checkpoint.location),
            hint="zckpt.repair makes a manifest of its data; write elsewhere, or pass overwrite=True",
        )
    for name in leftovers(checkpoint):
        if name not in kept:
            checkpoint.remove(name)


def prepared_manifests(checkpoint: Store) -> list[str]:
    """The names of the temporary manifests of writers that died, or were taken for dead. Once these files are removed,
    none of those writers can commit any more, so no later manifest names what ``leftovers`` finds then."""
    return [name for name in entries_of(checkpoint) if names.is_temporary(name, names.MANIFEST)]
