"""Writes checkpoints of given fragments, in one process, without an engine and without a lock."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.plan import catalog
from zckpt.plan.data_files import plan_data_files
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.plan.inventory import Fragment
    from zckpt.storage.location import StrPath


class Unlocked(WriteLock):
    """A lock that does nothing, for writes that no other process can disturb."""

    def acquire(self) -> None:
        pass

    def confirm(self) -> None:
        pass

    def release(self) -> None:
        pass


def rank_write(
    path: StrPath,
    save_id: str,
    ranks: Sequence[Sequence[Fragment]],
    rank: int,
    metadata: catalog.SaveMetadata,
    options: WriteOptions | None = None,
) -> RankWrite:
    """Returns the write of one rank, in a checkpoint of the fragments of all ``ranks``."""
    store, options = open_store(path), options or WriteOptions(latest=False)
    data_files = plan_data_files(ranks[rank], save_id, rank, len(ranks), block_bytes=metadata.block_bytes)
    return RankWrite(
        store=store, latest_in=store.parent if options.latest else None, save_id=save_id, rank=rank,
        data_files=data_files, metadata=metadata, options=options,
    )  # fmt: skip


def write_fragments(
    path: StrPath,
    ranks: Sequence[Sequence[Fragment]],
    metadata: catalog.SaveMetadata,
    save_id: str | None = None,
    *,
    overwrite: bool = False,
    latest: bool = False,
) -> str:
    """Writes a checkpoint of the fragments of all ``ranks``. Returns its save id."""
    save_id, options = save_id or secrets.token_hex(8), WriteOptions(overwrite=overwrite, latest=latest)
    writes = [rank_write(path, save_id, ranks, rank, metadata, options) for rank in range(len(ranks))]
    first = writes[0]
    first.make_manifest([catalog.rank_record(write.rank, write.data_files) for write in writes])
    first.begin(Unlocked(first.store))
    first.commit([write.write_data_files(Snapshot()) for write in writes])
    return save_id
