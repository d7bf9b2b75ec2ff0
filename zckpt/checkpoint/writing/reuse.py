"""Finds the data files that an earlier checkpoint has already, such as those of frozen weights, by their digests."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from zckpt.checkpoint.listing.find import find, open_contents
from zckpt.checkpoint.writing.collect import tensors_of
from zckpt.errors import ZckptError, warn
from zckpt.format.data_file import with_origin
from zckpt.format.digest import DIGEST_BYTES, ReadFile
from zckpt.plan.inventory import ANY_TIME, FileRange
from zckpt.plan.writes import plan_writes
from zckpt.storage.schemes import open_store
from zckpt.transfer.devices import devices_of, synchronize
from zckpt.transfer.staging import host_pool, pool_for
from zckpt.transfer.write import CopySource, unchanged_files

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.storage.contract import Store
    from zckpt.storage.location import Location, StrPath
    from zckpt.transfer.budget import Budget

LATEST = "latest"
"""The value of ``reuse`` that stands for the checkpoint that the engine has written, or was restored from, last."""
REUSED_BYTES_MIN = 64 << 10
"""The smallest size in bytes of a file that is shared. To share smaller files would save nothing, so they are
written."""


_read_back: set[tuple[str, Hashable]] = set()
"""The shared files that this process has read back, by the save id of their first write and the identity of the file.
"""


@dataclass(frozen=True, slots=True)
class SameFile:
    """A data file of another checkpoint that has the same bytes as a planned data file."""

    location: Location
    digests: bytes
    """The digests of all blocks of the file, one after the other."""


def earlier_checkpoint(reuse: StrPath | None, last: str | None, run: Store) -> str:
    """Returns the path of the checkpoint whose files a write may share, or an empty text if there is none. For
    "latest", that is ``last``, which the engine has written or was restored from last, or else the one that the file
    ``latest`` of ``run`` names. Raises CheckpointNotFoundError and FormatError (L001) for a path that was
    given."""
    if reuse is None:
        return ""
    if reuse != LATEST:
        return str(find(reuse).location.absolute())
    for place in (last, str(run.location)):
        with suppress(ZckptError):
            if place is not None:
                return str(find(place).location.absolute())
    return ""


def reused(
    data_files: Sequence[DataFilePlan], rank: int, earlier: str, budget: Budget, block_bytes: int
) -> tuple[tuple[DataFilePlan, ...], dict[str, SameFile]]:
    """Returns the planned files of a rank, and those of them that ``earlier`` has already, by their path. A file that
    ``earlier`` has is planned with the header that it has there, which names the save that wrote it.

    No tensor of ``earlier`` is read, because its manifest and its digest table are enough. Raises FormatError and
    StorageError.
    """
    counterparts = _counterparts(data_files, rank, earlier, block_bytes)
    if not counterparts:
        return tuple(data_files), {}
    devices = devices_of(tensors_of(fragment for number in counterparts for fragment in data_files[number].on_devices))
    synchronize(devices)
    staging = pool_for(devices, budget, block_bytes)
    lasting = {data_file.id.part for data_file in data_files} - ANY_TIME
    twins = [
        counterparts[number][0] if number in counterparts else data_file for number, data_file in enumerate(data_files)
    ]
    plan = plan_writes(twins, batch_bytes=staging.batch_bytes, block_bytes=block_bytes, straight=lasting)
    expected = {number: same.digests for number, (_, same) in counterparts.items()}
    unchanged = unchanged_files(plan, expected, budget, staging)
    planned = tuple(twins[number] if number in unchanged else data_file for number, data_file in enumerate(data_files))
    return planned, {planned[number].id.path: counterparts[number][1] for number in unchanged}


def read_back(
    data_files: Sequence[DataFilePlan], same: Mapping[str, SameFile], budget: Budget, block_bytes: int
) -> dict[str, SameFile]:
    """Returns those files of ``same`` that may be shared. The first time that this process shares a file, all of it is
    read from the disk and compared with its digests. A file that is damaged there is left out, with a warning, so that
    it is written anew. Otherwise each further checkpoint would share the damage, although the memory has the right
    bytes."""
    sound = dict(same)
    for data_file in data_files:
        path = data_file.id.path
        if path not in same:
            continue
        place = same[path].location
        entry = open_store(place.parent).entry(place.name)
        file = (data_file.id.origin, (entry and entry.identity) or str(place))
        if entry is not None and file in _read_back:
            continue
        if _is_sound(data_file, same[path], budget, block_bytes):
            _read_back.add(file)
        else:
            del sound[path]
            warn(f"{same[path].location} is damaged on the disk, so it is not shared but written anew from memory")
    return sound


def _is_sound(data_file: DataFilePlan, file: SameFile, budget: Budget, block_bytes: int) -> bool:
    """Reads all of a file. Returns whether it has the bytes that are planned, of which only the digests are looked at,
    and the header."""
    name, pieces = file.location.name, data_file.pieces
    starts = (pieces.start + len(data_file.header)).tolist()
    ranges = [FileRange(name, start, nbytes) for start, nbytes in zip(starts, pieces.nbytes.tolist(), strict=True)]
    fragments = [fragment._replace(data=data) for fragment, data in zip(data_file.fragments, ranges, strict=True)]
    stored = replace(data_file.reading(fragments), first_block=0)
    batch_bytes = budget.batch_bytes(block_bytes)
    plan = plan_writes([stored], batch_bytes=batch_bytes, block_bytes=block_bytes)
    try:
        store = open_store(file.location.parent)
        with closing(store.reader()) as reader:
            files = {name: ReadFile(name, data_file.nbytes)}
            source = CopySource(store, reader, files, b"", False, lambda path, byte: None)
            unchanged = unchanged_files(plan, {0: file.digests}, budget, host_pool(batch_bytes), source)
            return bool(unchanged) and reader.read(name, 0, len(data_file.header)) == data_file.header
    except ZckptError:
        return False


def _counterparts(
    data_files: Sequence[DataFilePlan], rank: int, earlier: str, block_bytes: int
) -> dict[int, tuple[DataFilePlan, SameFile]]:
    """Returns what ``_counterpart`` does for the files that are large enough to share, by their numbers. The index of
    the earlier checkpoint is in memory only until this returns."""
    store = open_store(earlier)
    contents = open_contents(store)
    with closing(contents.reader):
        found = (
            (number, _counterpart(store, contents, rank, data_file, block_bytes))
            for number, data_file in enumerate(data_files)
            if data_file.nbytes >= REUSED_BYTES_MIN
        )
        return {number: counterpart for number, counterpart in found if counterpart is not None}


def _counterpart(
    store: Store, contents: Contents, rank: int, data_file: DataFilePlan, block_bytes: int
) -> tuple[DataFilePlan, SameFile] | None:
    """Looks for the data file of an earlier checkpoint that has the same rank, part, tier and size. Returns the plan of
    ``data_file`` with the header that the earlier file has if nothing has changed, and the earlier file with its
    digests, which tell whether anything has changed. Returns None if there is no such file. Raises FormatError and
    StorageError."""
    manifest = contents.manifest
    part_id, tier = manifest.part_ids.get(data_file.id.part), data_file.id.tier
    if part_id is None or manifest.block_bytes != block_bytes:
        return None
    number = int(manifest.file_numbers(np.array([rank]), part_id, np.array([tier]))[0])
    if number < 0:
        return None
    file = manifest.files[number]
    if (file.nbytes, file.data_start) != (data_file.nbytes, len(data_file.header)):
        return None
    contents.check_length(number)
    shared_id = replace(data_file.id, origin=file.origin or manifest.save_id)
    header = with_origin(data_file.header, shared_id)
    first = file.first_block * DIGEST_BYTES
    digests = bytes(contents.digest_table(rank)[first : first + data_file.blocks * DIGEST_BYTES])
    same = SameFile(store.location.child(manifest.path(file)), digests)
    return replace(data_file, id=shared_id, header=header), same
