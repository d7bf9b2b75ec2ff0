"""Copies a checkpoint that was just written to another place, such as an object store: each rank copies the files that
it has written itself."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zckpt.checkpoint.copying.copy import Copy, Tries
from zckpt.checkpoint.copying.files import TABLE, Copied
from zckpt.checkpoint.listing.contents import Contents
from zckpt.checkpoint.listing.find import manifest_of
from zckpt.checkpoint.listing.runs import decode_manifest, latest_name, manifest_bytes, refuse_place
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.checkpoint.writing.rank_write import join
from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from zckpt.format import names
from zckpt.storage.location import Location, StrPath
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Reader
    from zckpt.transfer.budget import Budget

_ONE_SAVE = re.compile(r"checkpoint[-_][0-9]+|.+\.ckpt", re.ASCII)
"""The name of a directory that Trainer, Accelerate or Lightning makes for one save."""


def run_there(copy_to: StrPath, run: Location) -> Location:
    """Returns the directory that the copies of a run's checkpoints are in. It is ``copy_to``, or, if a framework has
    made the directory ``run`` for a single save, a directory of the same name in ``copy_to``."""
    there = Location.of(copy_to).absolute()
    return there.child(run.name) if _ONE_SAVE.fullmatch(run.name) else there


def place_there(copy_to: StrPath, run: Location, checkpoint: Location) -> Location:
    """Returns the directory of the copy of a checkpoint of ``run``. Raises ValueError if it has none, or if it would be
    the checkpoint itself, inside of it or around it, and UnsupportedError if nothing can be written there."""
    name = checkpoint.path_from(run)
    if name.split("/")[0] in ("..", ".", names.LATEST) or "://" in name:
        raise ValueError(f"copy_to copies the checkpoints in {run}, and {checkpoint} is not in it: choose another path")
    place = run_there(copy_to, run).child(name)
    # A link may lead to the run, whose checkpoints are no copies.
    from_checkpoint = place.resolved().path_from(checkpoint.resolved())
    if from_checkpoint == ".":
        raise ValueError(f"copy_to leads to the directory of the run itself: copy {checkpoint} to another place")
    if from_checkpoint.split("/")[0] != ".." and place.scheme == checkpoint.scheme:
        raise ValueError(f"copy_to leads into the checkpoint {checkpoint} itself: copy it to another place")
    if {*from_checkpoint.split("/")} == {".."}:
        raise ValueError(f"copy_to leads to {place}, which {checkpoint} is in: copy it to another place")
    store = open_store(place)
    store.refuse_read_only()
    return store.location


def refuse_copy(copy: Location, copies: Location, checkpoint: Location, options: WriteOptions) -> None:
    """Raises CheckpointExistsError if the copy of ``checkpoint`` would replace another checkpoint, hide others or be
    hidden by one. ``copy``: the directory of the copy. ``copies``: that of its run. ``options``: those of the write.

    If the two are in stores of different kinds, such as a file system and an object store, nothing is looked at: a
    store that is slow or out of reach must not hold up the training. Then the copy itself raises the error."""
    if copy.scheme != checkpoint.scheme:
        return
    store = open_store(copy)
    try:
        refuse_place(store, open_store(copies), latest=options.latest)
        if not options.overwrite and store.entry(names.MANIFEST) is not None:
            raise CheckpointExistsError("there is already a checkpoint here", file=str(copy))
    except CheckpointExistsError as error:
        error.message = f"the checkpoint cannot be copied by copy_to: {error.message}"
        error.hint = "choose another directory for copy_to, or, to replace a checkpoint there, overwrite=True"
        raise
    except StorageError:  # The copy is tried later, and tells its error then.
        return


@dataclass(slots=True, kw_only=True, eq=False)
class Upload:
    """The copy of one checkpoint to another place."""

    source: Location
    """The directory of the checkpoint."""
    target: Location
    """The directory of the copy."""
    run: Location
    """The directory whose file ``latest`` will name the copy, if ``latest`` is true."""
    save_id: str
    """The save id of the checkpoint, which its copy has too."""
    overwrite: bool
    """Whether a checkpoint at the target is replaced."""
    budget: Budget | None
    ranks: Ranks
    """The ranks that have written the checkpoint, for use in the thread of the uploads."""
    afterwards: Callable[[], None]
    """The function that rank 0 calls after the commit, which must not raise."""
    latest: bool = False
    tries: Tries = field(default_factory=Tries)

    def copy(self, ranks: Ranks) -> None:
        """Copies the checkpoint, and commits the copy. All ranks call this. If one of them fails, all raise an
        error."""
        self.tries.count += 1
        run = open_store(self.run) if self.latest else None

        def is_there() -> bool:
            """Returns whether the copy is committed already, because an earlier try has failed after its commit."""
            try:
                there = manifest_of(open_store(self.target)).save_id == self.save_id
            except CheckpointNotFoundError:
                return False
            if there and run is not None:
                run.prepare(names.LATEST, names.encode_latest(latest_name(self.target, self.run))).commit()
            return there

        if not ranks.first(is_there, "look for the copy"):
            with closing(ranks.together(lambda: open_store(self.source).reader(), "open the checkpoint")) as reader:
                self._copy(ranks, reader)
        ranks.first(self.afterwards, "remove older copies")

    def _copy(self, ranks: Ranks, reader: Reader) -> None:
        source, target = open_store(self.source), open_store(self.target)

        def prepare() -> Copy:
            if source.entry(names.MANIFEST) is None:
                raise CheckpointNotFoundError("it was removed before it was copied", file=str(self.source))
            raw = manifest_bytes(reader)
            contents = Contents(decode_manifest(source, raw), reader, source)
            if contents.manifest.save_id != self.save_id:
                raise CheckpointNotFoundError("another checkpoint has replaced it", file=str(self.source))
            own = (number for number, rank in enumerate(contents.manifest.files.rank) if rank == ranks.rank)
            return Copy(
                copied=Copied.of(contents, raw), files_of_rank={ranks.rank: {*own, TABLE}}, target=target,
                save_id=self.save_id,
                options=WriteOptions(overwrite=self.overwrite, budget=self.budget),
                latest_in=open_store(self.run) if self.latest else None, tries=self.tries,
            )  # fmt: skip

        copy = ranks.together(prepare, "open the checkpoint")
        try:
            lock = WriteLock(target, copied=self.save_id)
            space = ranks.first(lambda: copy.begin(lock, []), "begin the copy")
            ranks.together(lambda: join(target, self.save_id, ranks.rank, 0, space), "begin the copy")
            ranks.together(copy.write, "copy")
            ranks.first(lambda: copy.commit([]), "commit the copy")
        finally:
            copy.remove()
            target.remove("")  # An earlier try may have made the directory. ``remove`` removes it only if it is empty.
