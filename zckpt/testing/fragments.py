"""Writes checkpoints of fragments: without an engine, by one process, without a lock."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from zckpt.plan import catalog
from zckpt.plan.layout import plan_shards
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.transfer.snapshot import Snapshot
from zckpt.writing.options import WriteOptions
from zckpt.writing.rank_write import RankWrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.state.inventory import Fragment
    from zckpt.storage.location import StrPath


class Unlocked(WriteLock):
    """In the place of a lock, where nobody else can be writing."""

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
    about: catalog.About,
    options: WriteOptions | None = None,
) -> RankWrite:
    """One rank's part in a write of what all ``ranks`` hold."""
    store, options = open_store(path), options or WriteOptions(latest=False)
    shards = plan_shards(ranks[rank], save_id, rank, len(ranks), block_bytes=about.block_bytes)
    return RankWrite(
        store=store, latest_in=store.parent if options.latest else None, save_id=save_id, rank=rank, shards=shards,
        about=about, options=options,
    )  # fmt: skip


def write_fragments(
    path: StrPath,
    ranks: Sequence[Sequence[Fragment]],
    about: catalog.About,
    save_id: str | None = None,
    *,
    overwrite: bool = False,
    latest: bool = False,
) -> str:
    """Writes a checkpoint of what all ``ranks`` hold; returns its save id."""
    save_id, options = save_id or secrets.token_hex(8), WriteOptions(overwrite=overwrite, latest=latest)
    writes = [rank_write(path, save_id, ranks, rank, about, options) for rank in range(len(ranks))]
    first = writes[0]
    first.describe([catalog.receipt(one.rank, one.shards) for one in writes])
    first.begin(Unlocked(first.store))
    first.commit([one.write_own(Snapshot()) for one in writes])
    return save_id
