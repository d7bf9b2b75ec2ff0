"""Finds and removes the files that were left behind by writes that died, failed or were replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.errors import CheckpointExistsError, StorageError
from zckpt.format import names
from zckpt.listing.runs import entries_of, leftovers
from zckpt.repairing.salvage import is_complete

if TYPE_CHECKING:
    from collections.abc import Collection

    from zckpt.storage.contract import Store


def recoverable(checkpoint: Store) -> list[str]:
    """Returns the names of the data directories from which ``zckpt.repair`` could make a checkpoint. These are the ones
    that have all files of a save, if there is no manifest. ``leftovers`` returns them too."""
    try:
        directories = [] if checkpoint.exists(names.MANIFEST) else checkpoint.directories()
    except StorageError:
        return []
    return [
        name for name in directories if names.is_data_dir(name) and is_complete(checkpoint, name.removeprefix("data-"))
    ]


def clear_for_write(checkpoint: Store, *, overwrite: bool, dead: Collection[str] = ()) -> None:
    """Removes the leftovers of a checkpoint for a new write. The caller holds the lock of the checkpoint. Files that
    cannot be removed stay. A save that could be repaired stays until the new write has committed. ``dead`` has the save
    ids of the writers whose lock was taken over. They have not committed, so nobody misses their data.

    Raises CheckpointExistsError if there is a save that could be repaired, unless it is to be overwritten.
    """
    for name in prepared_manifests(checkpoint):
        checkpoint.remove(name)
    kept = [name for name in recoverable(checkpoint) if name.removeprefix("data-") not in dead]
    if kept and not overwrite:
        raise CheckpointExistsError(
            "here is a checkpoint whose manifest was lost",
            file=str(checkpoint.location),
            hint="zckpt.repair makes a manifest of its data; write elsewhere, or replace it with "
            "overwrite=True (--overwrite)",
        )
    for name in leftovers(checkpoint):
        if name not in kept:
            checkpoint.remove(name)


def prepared_manifests(checkpoint: Store) -> list[str]:
    """Returns the names of the temporary manifests of writers that died, or that were taken for dead. After these files
    are removed, none of these writers can commit any more, so no manifest will name the files that ``leftovers`` finds
    then."""
    return [name for name in entries_of(checkpoint) if names.is_temporary(name, names.MANIFEST)]
