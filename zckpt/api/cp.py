"""Copies a checkpoint, or some of its tensors, and verifies the data on the way."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from zckpt.copying.copy import Copy
from zckpt.copying.files import Selection
from zckpt.format.digest import digest
from zckpt.listing.contents import Contents
from zckpt.listing.find import advised, find
from zckpt.listing.runs import decode_manifest, manifest_bytes
from zckpt.ranks.collectives import Ranks, check_arguments, check_equal, comparable
from zckpt.storage.location import Location
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.storage.space import Space
from zckpt.writing.options import WriteOptions

if TYPE_CHECKING:
    from zckpt.plan.select import Keys
    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


def cp(
    source: StrPath,
    destination: StrPath,
    keys: Keys = None,
    *,
    verify: bool = True,
    overwrite: bool = False,
    share: bool = True,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> str:
    """Copies a checkpoint to the new directory ``destination``. Returns the absolute path of the copy once the copy is
    whole and durable. The manifest is written last, so nothing at ``destination`` is a checkpoint before that.

    ``source``: a checkpoint, or the directory of a run, whose ``latest`` names the checkpoint. ``keys``: None means the
    whole checkpoint: then the copy has the same bytes and the same save id. Otherwise a key, a glob such as
    ``"master/*"`` for a part, several of either, or a predicate over keys: then the copy is a checkpoint of these
    tensors alone, with a save id of its own. Such a copy has the step and all trees of non-tensor state of the source,
    and each rank's files hold the same pieces of these tensors as in the source, so
    ``zckpt.restore(..., strict=False)`` can restore it. No file ``latest`` is changed.

    ``verify``: compare everything that is read with its digest, and raise an error at the first damage. With False,
    damaged blocks are copied as they are, and so are their digests: reading them from the copy raises the same error as
    reading them from the source. ``overwrite``: replace a checkpoint at ``destination`` once the copy is whole. A copy
    of a whole checkpoint cannot replace a checkpoint of the same save, because their data would have the same names.
    ``share``: where a whole checkpoint is copied within one file system, do not write its data files again. The files
    of the copy then share their blocks with those of the source where the file system can do that. Otherwise they are
    further names (hard links) of them. Damage to such a file is damage to both checkpoints. With False, the copy has
    all bytes of its own. ``budget``: memory, threads and kind of I/O; None means ``Budget.from_environment()``.
    ``progress``: an object that is told how far the copy is, such as ``zckpt.ProgressBar()``.

    Where torch.distributed is initialised, every rank has to call this with the same arguments. The ranks share the
    files that are copied. If one rank fails or is lost, all of them raise an error.

    Raises CheckpointNotFoundError, KeyNotFoundError, FormatError (damaged or missing data), CheckpointExistsError (also
    where ``destination`` is the directory of a run or lies in a checkpoint), LockedError, RankError, StorageError,
    NoSpaceError, and UnsupportedError for a URL of an unknown kind of store. After an error, everything that was at
    ``destination`` before is unchanged, and nothing of the copy is left.
    """
    ranks = Ranks(call="zckpt.cp")
    copies: list[Copy] = []

    def arguments() -> dict[str, object]:
        paths = {"source": source, "destination": destination}
        places = {name: str(open_store(path).location.absolute()) for name, path in paths.items()}
        return comparable(**places, verify=verify, overwrite=overwrite, share=share)

    def prepare() -> bytes:
        options = WriteOptions(overwrite=overwrite, latest=False, budget=budget, progress=progress).checked()
        reader = origin.reader()
        raw = manifest_bytes(reader)
        contents = Contents(decode_manifest(origin, raw), reader)
        chosen = None if keys is None else contents.select(keys)
        copy = Copy(
            contents=contents, manifest=raw, save_id=contents.manifest.save_id, target=target,
            selection=None if chosen is None else Selection.of(contents, chosen),
            number=ranks.rank, size=ranks.size, verify=verify, shared_with=origin.location if share else None,
            options=options,
        )  # fmt: skip
        copies.append(copy)
        return digest(raw + repr(chosen).encode(errors="backslashreplace"))

    with ranks.undivided():
        check_arguments(ranks.share(arguments, "prepare the copy"))
        found = ranks.first(lambda: str(find(source).location.absolute()), "find the checkpoint")
        origin, target = open_store(found), open_store(Location.of(destination).absolute())
        with advised(origin):
            check_equal(ranks.share(prepare, "open the checkpoint"), "checkpoints, or keys")
            (copy,) = copies
            lock = WriteLock(target, copied=copy.save_id)
            if copy.selection is not None:
                copy.save_id = ranks.first(lambda: lock.save_id, "plan the copy")
            try:
                receipts = ranks.share(copy.receipts, "plan the copy")
                space = ranks.first(lambda: copy.begin(lock, [*chain(*receipts)]), "begin the copy")
                ranks.together(lambda: Space(*space).refuse_lack(), "begin the copy")
                digests = ranks.share(copy.write, "copy")
                ranks.first(lambda: copy.commit([*chain(*digests)]), "commit")
            finally:
                copy.remove()
    return str(target.location)
