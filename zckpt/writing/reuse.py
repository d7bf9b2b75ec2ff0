"""Data files that an earlier checkpoint has already, such as those of frozen weights: found by their digests."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import ZckptError
from zckpt.format.digest import DIGEST_BYTES, blocks, digest
from zckpt.format.manifest import TIERS
from zckpt.format.shard import with_origin
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
    from zckpt.plan.layout import ShardPlan
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget

LATEST = "latest"
"""What stands for the checkpoint that was written or restored last."""
REUSED_BYTES_MIN = 64 << 10
"""Smaller files are always written: to share them would save nothing."""
_LAST = "_zckpt_last"
"""The attribute of an engine with the path of the checkpoint that it has written, or was restored from, last."""


def remember(engine: object, path: str) -> None:
    """That the engine has written this checkpoint, or was restored from it."""
    setattr(engine, _LAST, path)


def earlier_checkpoint(reuse: StrPath | None, engine: object, run: Store) -> str:
    """The path of the checkpoint whose files ``engine`` may take over; empty if there is none. For "latest", that is
    the one which the engine has written or was restored from last, else the one that the ``latest`` of ``run`` names.
    Raises CheckpointNotFoundError and FormatError (L001) for a path that was given."""
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
    shards: Sequence[ShardPlan], rank: int, earlier: str, budget: Budget, block_bytes: int
) -> tuple[tuple[ShardPlan, ...], dict[str, SameFile]]:
    """The files of a rank, and by path those of them that ``earlier`` has already. These are planned with the header
    that they have there, which names the save that wrote them.

    No tensor of ``earlier`` is read: its manifest and its digest table say what it holds. Raises FormatError and
    StorageError.
    """
    store = open_store(earlier)
    contents = open_contents(store)
    with closing(contents.reader):
        found = {}
        for number, shard in enumerate(shards):
            if shard.nbytes >= REUSED_BYTES_MIN:
                one = _with_equal_header(store, contents, rank, shard, block_bytes)
                if one is not None:
                    found[number] = one
    if not found:
        return tuple(shards), {}
    devices = devices_of(tensors_of(fragment for number in found for fragment in shards[number].fragments))
    synchronize(devices)
    staging = pool_for(devices, budget, block_bytes)
    lasting = {shard.shard.part for shard in shards} - ANY_TIME
    twins = [found[number][0] if number in found else shard for number, shard in enumerate(shards)]
    plan = plan_writes(twins, batch_bytes=staging.batch_bytes, block_bytes=block_bytes, straight=lasting)
    expected = {number: same.digests for number, (_, same) in found.items()}
    unchanged = unchanged_files(plan, expected, budget, staging, staging.buffers or budget.threads)
    planned = tuple(twins[number] if number in unchanged else shard for number, shard in enumerate(shards))
    return planned, {planned[number].shard.path: found[number][1] for number in unchanged}


def _with_equal_header(
    store: Store, contents: Contents, rank: int, shard: ShardPlan, block_bytes: int
) -> tuple[ShardPlan, SameFile] | None:
    """The file as an earlier checkpoint has it, if that has one of the same rank, world size, part, tier and layout.
    Its tensors may differ. Raises FormatError and StorageError."""
    manifest = contents.manifest
    part, tier = manifest.part_ids.get(shard.shard.part), TIERS.index(shard.shard.tier)
    if part is None or manifest.block_bytes != block_bytes:
        return None
    number = int(manifest.file_numbers(np.array([rank]), part, np.array([tier]))[0])
    if number < 0:
        return None
    file = manifest.files[number]
    if (file.nbytes, file.data_start) != (shard.nbytes, len(shard.header)):
        return None
    contents.check_length(number)
    own = replace(shard.shard, origin=file.origin or manifest.save_id)
    header = with_origin(shard.header, own)
    first = file.first_block * DIGEST_BYTES
    digests = bytes(contents.digest_table(rank)[first : first + shard.blocks * DIGEST_BYTES])
    if not digests.startswith(b"".join(digest(header[a:b]) for _, a, b in blocks(0, len(header), 0, block_bytes))):
        return None
    same = SameFile(store.location.child(manifest.path(file)), digests)
    return replace(shard, shard=own, header=header), same
