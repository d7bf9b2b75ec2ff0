"""What writes that died, failed or were replaced have left behind, and how a new write clears it away."""

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
            hint="zckpt.repair makes a manifest of its data; write elsewhere, or replace it with "
            "overwrite=True (--overwrite)",
        )
    for name in leftovers(checkpoint):
        if name not in kept:
            checkpoint.remove(name)


def prepared_manifests(checkpoint: Store) -> list[str]:
    """The names of the temporary manifests of writers that died, or were taken for dead. Once these files are removed,
    none of those writers can commit any more, so no later manifest names what ``leftovers`` finds then."""
    return [name for name in entries_of(checkpoint) if names.is_temporary(name, names.MANIFEST)]
