"""Settles what a crash has left between the two phases of a commit on several machines.

If each machine writes to a disk of its own, all leaders prepare their manifests first, and only then does each of them
commit. After a crash in between, some machines may have committed while others have only prepared. A prepared manifest
is *in doubt* then: nobody can tell from one machine alone whether another one has committed. If one has, all have
prepared, so the others commit too. If none has, the checkpoint does not exist.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from zckpt.errors import CheckpointNotFoundError, ZckptError
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.limits import MANIFEST_BYTES_MAX
from zckpt.listing.contents import machines_of
from zckpt.listing.find import manifest_of
from zckpt.listing.runs import entries_of
from zckpt.storage.lock import is_alive, read_lock

if TYPE_CHECKING:
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Store


def in_doubt(checkpoint: Store) -> dict[str, str]:
    """Returns the names of the prepared manifests that are in doubt, by their save ids. Raises StorageError."""
    found: dict[str, str] = {}
    for name in entries_of(checkpoint):
        if not names.is_temporary(name, names.MANIFEST):
            continue
        try:
            manifest = manifest_format.decode(_read(checkpoint, name))
            if machines_of(manifest.state):
                found[manifest.save_id] = name
        except ZckptError:  # It is not whole, so it was never prepared.
            continue
    return found


def settle(checkpoint: Store, ranks: Ranks) -> None:
    """Commits what is prepared on this machine and committed on another one. All ranks call this, each with the
    directory of one checkpoint as it sees it. Leaves alone what a live writer has prepared. Raises RankError and
    StorageError."""

    def look() -> list[list[str]]:
        holder = read_lock(checkpoint)
        alive = holder is not None and is_alive(checkpoint, holder)
        return [_committed(checkpoint), [] if alive else [*in_doubt(checkpoint)]]

    def commit() -> None:
        committed = {save_id for of_rank, _ in reports for save_id in of_rank}
        if not any(committed.intersection(prepared) for _, prepared in reports):
            return
        for save_id, name in in_doubt(checkpoint).items():
            if save_id in committed:
                prepared = _read(checkpoint, name)
                if _committed(checkpoint) != [save_id]:  # Another rank of this machine may have been quicker.
                    checkpoint.prepare(names.MANIFEST, prepared).commit()
                checkpoint.remove(name)

    reports = ranks.share(look, "look for checkpoints that are committed on some machines only")
    ranks.together(commit, "commit on all machines")


def _committed(checkpoint: Store) -> list[str]:
    """Returns the save id of the manifest in a list, or an empty list if there is none that can be read."""
    try:
        return [manifest_of(checkpoint).save_id]
    except (CheckpointNotFoundError, ZckptError):
        return []


def _read(checkpoint: Store, name: str) -> bytes:
    with closing(checkpoint.reader()) as reader:
        return reader.read(name, 0, MANIFEST_BYTES_MAX + 1)
