"""Copies a checkpoint, or some of its tensors, and verifies the data on the way."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from zckpt.checkpoint.copying.copy import Copy
from zckpt.checkpoint.copying.files import TABLE, Copied
from zckpt.checkpoint.listing.contents import Contents
from zckpt.checkpoint.listing.find import advised, find
from zckpt.checkpoint.listing.runs import decode_manifest, manifest_bytes
from zckpt.checkpoint.restoring.machines import find_spread
from zckpt.checkpoint.restoring.peers import Peers
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.checkpoint.writing.rank_write import join
from zckpt.errors import KeyNotFoundError, check_flags
from zckpt.format.digest import digest
from zckpt.ranks.collectives import Ranks, check_arguments, check_equal, comparable
from zckpt.storage.location import Location
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.tools.copying.selected import SelectedTensors
from zckpt.tools.share import shared_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.format.manifest import Manifest
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
    """Copies a checkpoint, or some of its tensors, to a new directory.

    The manifest is written last, so ``destination`` becomes a checkpoint only when the copy is complete and durable.
    After an error, everything that was at ``destination`` before is unchanged, and nothing of the copy is left. No file
    ``latest`` is changed.

    If torch.distributed is initialised, every rank has to call this with the same arguments. The ranks share the files
    that are copied. If one rank fails or is lost, all of them raise an error.

    Args:
        source: the directory of a checkpoint, or that of a run, whose file ``latest`` names the checkpoint.
        destination: the directory of the copy.
        keys: the tensors that are copied. None copies the whole checkpoint, and the copy has the same bytes and the
            same save id. Otherwise this is a key, a glob such as ``"master/*"`` for a part, several keys or globs, or a
            predicate over keys. It makes a checkpoint of only these tensors, with a save id of its own. This checkpoint
            has the step and all trees of non-tensor state of the source. Each rank's files hold the same pieces of
            these tensors as in the source, so ``zckpt.restore(..., strict=False)`` can restore it. If it has weights
            without their moments, training cannot resume from it.
        verify: whether everything that is read is compared with its digest, and the first damaged block raises an
            error. With False, damaged blocks and their digests are copied as they are. Reading them from the copy
            raises the same error as reading them from the source.
        overwrite: whether a checkpoint at ``destination`` is replaced once the copy is complete. A copy of a whole
            checkpoint cannot replace a checkpoint with the same save id, because their data directories have the same
            name.
        share: whether a copy of a whole checkpoint within one file system shares the data files of the source instead
            of writing them again. The new files then share their blocks with those of the source if the file system can
            do that. Otherwise they are hard links to them. Damage to a shared file damages both checkpoints. With
            False, all bytes are written again.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.
        progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.

    Returns:
        The absolute path of the copy.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at ``source``.
        KeyNotFoundError: ``keys`` is empty, or matches nothing.
        FormatError: data of the source is damaged or missing.
        CheckpointExistsError: there is already a checkpoint at ``destination``, or ``destination`` is the directory of
            a run or is inside of a checkpoint.
        ValueError: ``destination`` has a name that the own files of a checkpoint have.
        LockedError: another writer is writing to ``destination``.
        RankError: another rank has failed or is lost, or the ranks have different arguments.
        NoSpaceError: there is too little free space for the copy.
        StorageError: the operating system reports an error when it reads or writes.
        UnsupportedError: a path is a URL, and there is no store for its scheme, or a path of Windows elsewhere.
    """
    ranks = Ranks(call="zckpt.cp")
    copies: list[Copy] = []
    records: list[bytes] = []
    digests: list[tuple[int, bytes]] = []
    """What rank 0 needs of all ranks to begin and to commit the copy. Both lists are empty on other ranks."""

    def arguments() -> dict[str, object]:
        check_flags(verify=verify, share=share)
        paths = {"source": source, "destination": destination}
        locations = {name: str(open_store(path).location.absolute()) for name, path in paths.items()}
        return comparable(**locations, verify=verify, overwrite=overwrite, share=share)

    def prepare() -> bytes:
        options = WriteOptions(overwrite=overwrite, latest=False, budget=budget, progress=progress).checked()
        if spread is None:
            reader = origin.reader()
            raw = manifest_bytes(reader)
            contents = Contents(decode_manifest(origin, raw), reader, origin)
        else:
            raw, contents = spread.raw, spread.opened(peers)[1]
        selected_keys = None if keys is None else list(contents.select(keys))
        if selected_keys == []:
            raise KeyNotFoundError("no key is given, so the copy would have no tensor", hint="keys=None copies all")
        if selected_keys is None:
            copied = Copied.of(contents, raw)
        else:
            copied = SelectedTensors.with_keys(contents, raw, selected_keys)
        files_of_rank = _own_files(contents.manifest, copied.file_bytes, ranks.rank, ranks.size)
        copy = Copy(
            copied=copied, files_of_rank=files_of_rank, save_id=contents.manifest.save_id, target=target,
            verify=verify, options=options,
            shared_with=origin.location if share and spread is None and selected_keys is None else None,
        )  # fmt: skip
        copies.append(copy)
        return digest(raw + repr(selected_keys).encode(errors="backslashreplace"))

    with ranks.undivided(), ExitStack() as exchange:
        ranks.decide(arguments, check_arguments, "prepare the copy")
        spread = find_spread(source, ranks)[0] if ranks.size > 1 else None
        if spread is None:
            origin = open_store(ranks.first(lambda: str(find(source).location.absolute()), "find the checkpoint"))
        else:
            origin = spread.store
            peers = exchange.enter_context(Peers(None, origin.reader(), "zckpt.cp"))
        target = open_store(Location.of(destination).absolute())
        with advised(origin):
            ranks.decide(prepare, partial(check_equal, what="checkpoints, or keys"), "open the checkpoint")
            (copy,) = copies
            lock = WriteLock(target, copied=copy.save_id)
            if keys is not None:
                copy.save_id = ranks.first(lambda: lock.save_id, "plan the copy")
            try:
                ranks.decide(copy.records, lambda of_ranks: records.extend(chain(*of_ranks)), "plan the copy")
                space = ranks.first(lambda: copy.begin(lock, records), "begin the copy")
                ranks.together(lambda: join(target, copy.save_id, ranks.rank, 0, space), "begin the copy")
                ranks.decide(copy.write, lambda of_ranks: digests.extend(chain(*of_ranks)), "copy")
                ranks.first(lambda: copy.commit(digests), "commit")
            finally:
                copy.remove()
    return str(target.location)


def _own_files(
    manifest: Manifest, file_bytes: Mapping[int, int], process: int, processes: int
) -> dict[int, frozenset[int]]:
    """Returns the numbers of the files that one of several processes copies, by the ranks of the checkpoint to which
    the files belong. The numbers contain ``TABLE`` if the process writes the rank's digest table. All processes copy
    about the same number of bytes. Each file is copied by one process, because network file systems lose bytes if
    several processes write parts of one page. ``file_bytes``: the number of bytes that are copied of each file.
    ``process`` and ``processes``: the number of the process, and the number of processes."""
    tables = ((rank, TABLE, 1) for rank in range(manifest.world_size))
    files = ((manifest.files.rank[number], number, nbytes) for number, nbytes in file_bytes.items())
    everything = sorted([*tables, *files])
    numbers_of_rank: dict[int, list[int]] = {}
    owners = shared_out([nbytes for *_, nbytes in everything], processes)
    for (rank, number, _), owner in zip(everything, owners, strict=True):
        if owner == process:
            numbers_of_rank.setdefault(rank, []).append(number)
    return {rank: frozenset(numbers) for rank, numbers in numbers_of_rank.items()}
