"""Finds and removes the files that were left behind by writes that died, failed or were replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.leftovers import is_file, left_alone, leftovers, look
from zckpt.checkpoint.listing.runs import directories_of, entries_of
from zckpt.checkpoint.listing.salvage import is_complete
from zckpt.errors import CheckpointExistsError, StorageError, warn
from zckpt.format import names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from zckpt.checkpoint.listing.leftovers import Found, Leftovers
    from zckpt.storage.contract import Store
    from zckpt.storage.location import Location


def recoverable(checkpoint: Store, removed: str = "") -> list[str]:
    """Returns the names of the data directories from which ``zckpt.repair`` could make a checkpoint. These are the ones
    that have all files of a save, if there is no manifest, except those of the save id ``removed``. ``leftovers``
    returns them too."""
    try:
        directories = directories_of(checkpoint) if checkpoint.entry(names.MANIFEST) is None else []
    except StorageError:
        return []
    save_ids = [name.removeprefix("data-") for name in directories if names.is_data_dir(name)]
    return [names.data_dir(each) for each in save_ids if each != removed and is_complete(checkpoint, each)]


def clear_for_write(checkpoint: Store, *, overwrite: bool, dead: Collection[str] = (), own: str = "") -> Leftovers:
    """Removes the leftovers of a checkpoint for a new write. The caller holds the lock of the checkpoint. Files that
    cannot be removed stay. In a store that does not stop commits, all leftovers stay until the new write has committed,
    because until then a writer that was taken for dead may still commit. A save that could be repaired stays until then
    in any store. ``dead`` has the save ids of the writers whose lock was taken over. They have not committed, so nobody
    misses their data. ``own`` is the name of a data directory that stays, because the new write goes on with it. What
    is foreign stays, and a warning says so.

    Returns what there was. Raises CheckpointExistsError if there is a save that could be repaired, unless it is to be
    overwritten.
    """
    checkpoint.remove(*prepared_manifests(checkpoint))
    kept = [name for name in recoverable(checkpoint) if name.removeprefix("data-") not in dead and name != own]
    if kept and not overwrite:
        raise CheckpointExistsError(
            "here is a checkpoint whose manifest was lost",
            file=str(checkpoint.location),
            hint="zckpt.repair makes a manifest of its data; write elsewhere, or replace it with "
            "overwrite=True (--overwrite)",
        )
    left = leftovers(checkpoint)
    if checkpoint.stops_commits:
        remove(checkpoint, {name: None for name in left.own if name not in (own, *kept)})
    if left.foreign:
        warn(left_alone([checkpoint.location.child(name) for name in left.foreign]))
    return left


def prepared_manifests(checkpoint: Store) -> list[str]:
    """Returns the names of the temporary manifests of writers that died, or that were taken for dead. Once these files
    are removed, none of these writers can commit any more, so no manifest will name what ``leftovers`` finds then."""
    temporaries = [name for name in entries_of(checkpoint) if names.is_temporary(name, names.MANIFEST)]
    return [name for name in temporaries if is_file(checkpoint, name)]


def remove(checkpoint: Store, entries: Mapping[str, Collection[str] | None]) -> None:
    """Removes entries of a checkpoint's directory. The value of each is the argument ``named`` of ``look``. What cannot
    be looked at or removed stays. What is foreign stays too, and a warning says so."""
    foreign: list[Location] = []
    for name, named in entries.items():
        try:
            found = look(checkpoint, name, named)
        except StorageError:
            continue
        remove_found(checkpoint, found)
        foreign += [checkpoint.location.child(path) for path in found.foreign]
    if foreign:
        warn(left_alone(foreign))


def remove_found(store: Store, found: Found) -> None:
    """Removes what ``look`` has found, except what is foreign."""
    store.remove(*found.files, *found.directories)
