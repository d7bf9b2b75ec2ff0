"""Writes a ``Source`` as a checkpoint. Each of several processes writes the files of some ranks of the checkpoint."""

from __future__ import annotations

import platform
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain
from typing import TYPE_CHECKING

import torch

from zckpt.converting.source import values_of
from zckpt.errors import FormatError, StateError
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES
from zckpt.listing.runs import refuse_place
from zckpt.plan import catalog
from zckpt.plan.layout import plan_shards
from zckpt.progress import PartOfProgress, reported
from zckpt.storage.lock import WriteLock
from zckpt.storage.space import Space
from zckpt.transfer.snapshot import Snapshot
from zckpt.version import __version__
from zckpt.writing.collect import add_rank_tree, fingerprint, pack_tree
from zckpt.writing.options import WriteOptions
from zckpt.writing.rank_write import RankWrite

if TYPE_CHECKING:
    from zckpt.converting.source import Source
    from zckpt.plan.layout import ShardPlan
    from zckpt.progress import Progress
    from zckpt.ranks.collectives import Ranks
    from zckpt.state.inventory import Fragment
    from zckpt.storage.contract import Store
    from zckpt.transfer.budget import Budget


def write_source(
    source: Source, store: Store, ranks: Ranks, *, overwrite: bool, budget: Budget | None, progress: Progress | None
) -> None:
    """Writes ``source`` as a checkpoint to ``store``. No file ``latest`` is written. The processes ``ranks`` share the
    ranks of the checkpoint, and all of them have to call this function. What each rank has is read twice: first to plan
    all files before anything is written, then to write the rank's files. Raises what a write raises, and StateError if
    ranks differ in optimizer state of which zckpt keeps one value for all ranks."""
    lock = WriteLock(store)
    writer = {
        "zckpt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **source.description,
        "converted_from": source.found_format,
        "missing": "; ".join(source.missing),
    }
    planned = _Planned(source, ranks.first(lambda: lock.save_id, "plan the checkpoint"))
    own = range(ranks.rank, source.world_size, ranks.size)
    own_bytes = 0
    options = WriteOptions(overwrite=overwrite, latest=False, budget=budget).checked()
    begun: list[RankWrite] = []
    """The write of rank 0, on process 0. It takes the lock and commits."""

    def plan() -> list[bytes]:
        nonlocal own_bytes
        receipts = []
        with values_of(source.path):
            for rank in sorted({0, *own}):  # with rank 0 all others are compared
                shards = planned.shards(rank)
                if rank in own:
                    receipts.append(catalog.pack(catalog.receipt(rank, shards)))
                    own_bytes += sum(int(one.pieces.nbytes.sum()) for one in shards)
        return receipts

    def rank_write(rank: int, options: WriteOptions) -> RankWrite:
        about = catalog.About(source.step, BLOCK_BYTES, source.aliases, planned.packed, writer)
        return RankWrite(
            store=store, latest_in=None, save_id=planned.save_id, rank=rank, shards=planned.shards(rank), about=about,
            options=options,
        )  # fmt: skip

    def begin() -> Space:
        first = rank_write(0, options)
        with values_of(source.path):
            try:
                first.describe(sorted(map(catalog.unpack, chain(*receipts)), key=lambda one: one.rank))
            except FormatError as error:
                error.file = source.path  # The file that it names is never written.
                raise
        refuse_place(store, store.parent, latest=False)
        begun.append(first)
        return first.begin(lock)

    def write() -> list[tuple[int, bytes]]:
        with reported(progress, "convert", own_bytes) as advance:
            told = replace(options, progress=PartOfProgress(advance))
            return [(rank, rank_write(rank, told).write_own(Snapshot())) for rank in own]

    try:
        receipts = ranks.share(plan, "plan the checkpoint")
        space = ranks.first(begin, "begin the checkpoint")
        ranks.together(lambda: Space(*space).refuse_lack(), "begin the checkpoint")
        digests = ranks.share(write, "convert")
        ranks.first(lambda: begun[0].commit([one for _, one in sorted(chain(*digests))]), "commit")
    finally:
        for first in begun:
            first.remove()


class _Planned:
    """The files of each rank. They are planned again whenever they are asked for."""

    packed = b""
    """The packed tree that all ranks share. It is set when the files of rank 0 are planned for the first time."""

    def __init__(self, source: Source, save_id: str) -> None:
        self._source, self.save_id = source, save_id
        self._scalars = b""

    def shards(self, rank: int) -> tuple[ShardPlan, ...]:
        source, part = self._source, self._source.rank(rank)
        fragments: list[Fragment] = part.fragments
        scalars = fingerprint(part.optimizer)
        if rank == 0:
            root = {"engine": source.state, names.CLIENT_STATE: dict(source.client_state)}
            self.packed, self._scalars = pack_tree(root, "", fragments, 0), scalars
        elif scalars != self._scalars:
            raise StateError(
                f"the optimizer of rank {rank} has other settings or scalars than that of rank 0: zckpt keeps one "
                "value for all ranks", key="optimizer",
            )  # fmt: skip
        if part.state:
            add_rank_tree(part.state, fragments, rank)
        fragments = [replace(one, data=part.place(one.data)) for one in fragments]
        return plan_shards(fragments, self.save_id, rank, source.world_size, block_bytes=BLOCK_BYTES)
