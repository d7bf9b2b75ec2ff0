"""Settles what a crash has left between the two phases of a commit on several machines.

If each machine writes to a disk of its own, all leaders prepare their manifests first, and only then does each of them
commit. After a crash in between, some machines may have committed while others have only prepared. A prepared manifest
is *in doubt* then: nobody can tell from one machine alone whether another one has committed. If one has, all have
prepared, so the others commit too. If none has, the checkpoint does not exist.
"""

from __future__ import annotations

from contextlib import closing, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.checkpoint.listing.contents import plain_root
from zckpt.checkpoint.listing.find import manifest_of
from zckpt.checkpoint.listing.runs import entries_of
from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.limits import MANIFEST_BYTES_MAX
from zckpt.plan.machines import Machine, machines_in
from zckpt.storage.lock import is_alive, read_lock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Store


class Doubt(NamedTuple):
    """A prepared manifest that is in doubt."""

    name: str
    """The name of its file."""
    raw: bytes
    manifest: Manifest

    def ranks_in(self, checkpoint: Store) -> list[int]:
        """Returns the ranks of the machines whose files are in this directory. Raises StorageError."""
        first = {machine.ranks: names.rank_dir(self.manifest.save_id, machine.ranks[0]) for machine in self.machines}
        here = [ranks for ranks, directory in first.items() if checkpoint.entry(directory) is not None]
        return [rank for ranks in here for rank in ranks]

    @property
    def machines(self) -> tuple[Machine, ...]:
        return machines_in(plain_root(self.manifest))


def in_doubt(checkpoint: Store) -> dict[str, Doubt]:
    """Returns the prepared manifests of a checkpoint's directory that are in doubt, by their save ids. Only a store in
    which the removal of a prepared file stops a commit has such files. Raises StorageError."""
    found: dict[str, Doubt] = {}
    for name in entries_of(checkpoint) if checkpoint.stops_commits else ():
        if not names.is_temporary(name, names.MANIFEST):
            continue
        # A manifest that is not whole was never prepared.
        with suppress(FormatError), closing(checkpoint.reader()) as reader:
            raw = reader.read(name, 0, MANIFEST_BYTES_MAX + 1)
            doubt = Doubt(name, raw, manifest_format.decode(raw))
            if doubt.machines:
                found[doubt.manifest.save_id] = doubt
    return found


def refuse_doubt(checkpoint: Store) -> None:
    """Raises CheckpointExistsError if a prepared manifest here is in doubt. This is called before the lock is taken,
    because to take over the lock of the dead writer removes what it has prepared. Raises StorageError."""
    if in_doubt(checkpoint):
        raise CheckpointExistsError(
            "a checkpoint is prepared here that another machine may have committed", file=str(checkpoint.location),
            hint="zckpt.restore of this checkpoint on all of its machines settles it; write elsewhere, or replace "
            "it with overwrite=True (--overwrite)",
        )  # fmt: skip


def settle(checkpoint: Store, ranks: Ranks) -> None:
    """Commits what is prepared on this machine and committed on another one. Removes what is prepared if the files of
    all machines are seen and none of them has committed. All ranks call this, each with the directory of one checkpoint
    as it sees it. Leaves alone what a live writer has prepared. Raises RankError and StorageError."""
    own: dict[str, Doubt] = {}

    def look() -> list[Any]:
        holder = read_lock(checkpoint)
        if holder is None or not is_alive(checkpoint, holder):
            own.update(in_doubt(checkpoint))
        return [_committed(checkpoint), {save_id: doubt.ranks_in(checkpoint) for save_id, doubt in own.items()}]

    def settled(reports: Sequence[Any]) -> list[Any]:
        seen: dict[str, set[int]] = {}
        for save_id, ranks_there in chain.from_iterable(prepared.items() for _, prepared in reports):
            seen.setdefault(save_id, set()).update(ranks_there)
        committed = {save_id for of_rank, _ in reports for save_id in of_rank}
        return [sorted(committed), {save_id: len(ranks_there) for save_id, ranks_there in seen.items()}]

    def carry_out() -> None:
        for save_id, doubt in own.items():
            if save_id in committed:
                if _committed(checkpoint) != [save_id]:  # Another rank of this machine may have been quicker.
                    checkpoint.prepare(names.MANIFEST, doubt.raw).commit()
            elif counts[save_id] < doubt.manifest.world_size:
                continue
            checkpoint.remove(doubt.name)

    committed, counts = ranks.decide(look, settled, "look for checkpoints that are committed on some machines only")
    ranks.together(carry_out, "commit on all machines")


def _committed(checkpoint: Store) -> list[str]:
    """Returns a list with the save id of the checkpoint's manifest. The list is empty if there is no manifest, or if it
    is damaged. Raises StorageError."""
    try:
        return [manifest_of(checkpoint).save_id]
    except (CheckpointNotFoundError, FormatError):
        return []
