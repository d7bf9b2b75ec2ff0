"""Finds the data files that an earlier checkpoint has already, such as those of frozen weights, by their digests."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import ZckptError
from zckpt.format.data_file import with_origin
from zckpt.format.digest import DIGEST_BYTES
from zckpt.listing.find import find, open_contents
from zckpt.plan.layout import plan_writes
from zckpt.state.inventory import ANY_TIME
from zckpt.storage.schemes import open_store
from zckpt.transfer.devices import devices_of, synchronize
from zckpt.transfer.staging import pool_for
from zckpt.transfer.write import unchanged_files
from zckpt.writing.collect import tensors_of
from zckpt.writing.rank_write import SameFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.listing.contents import Contents
    from zckpt.plan.layout import DataFilePlan
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget

LATEST = "latest"
"""The value of ``reuse`` that stands for the checkpoint that the engine has written, or was restored from, last."""
REUSED_BYTES_MIN = 64 << 10
"""The smallest size in bytes of a file that is shared. To share smaller files would save nothing, so they are
written."""
_LAST = "_zckpt_last"
"""The name of the attribute of an engine that has the path of the checkpoint that it has written, or was restored from,
last."""


def remember(engine: object, path: str) -> None:
    """Notes that the engine has written this checkpoint, or was restored from it."""
    setattr(engine, _LAST, path)


def earlier_checkpoint(reuse: StrPath | None, engine: object, run: Store) -> str:
    """Returns the path of the checkpoint whose files ``engine`` may share, or an empty text if there is none. For
    "latest", that is the checkpoint that the engine has written or was restored from last, or else the one that the
    file ``latest`` of ``run`` names. Raises CheckpointNotFoundError and FormatError (L001) for a path that was
    given."""
    if reuse is None:
        return ""
    if reuse != LATEST:
        return str(find(reuse).location.absolute())
    for place in (getattr(engine, _LAST, None), str(run.location)):
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
    store = open_store(earlier)
    contents = open_contents(store)
    with closing(contents.reader):
        counterparts = {}
        for number, data_file in enumerate(data_files):
            if data_file.nbytes >= REUSED_BYTES_MIN:
                counterpart = _counterpart(store, contents, rank, data_file, block_bytes)
                if counterpart is not None:
                    counterparts[number] = counterpart
    if not counterparts:
        return tuple(data_files), {}
    devices = devices_of(tensors_of(fragment for number in counterparts for fragment in data_files[number].fragments))
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
