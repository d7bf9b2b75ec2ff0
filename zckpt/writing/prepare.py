"""What comes before the first byte of a write: a rank collects its state, the ranks agree, and each plans its files."""

from __future__ import annotations

import platform
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

import msgpack
import torch

from zckpt.engines import adapt
from zckpt.engines.peft import adapter_configs
from zckpt.engines.registered import with_registered
from zckpt.errors import StateError, ZckptError, warn
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES, digest
from zckpt.listing.runs import latest_name, refuse_place
from zckpt.offloading.away import away
from zckpt.plan import catalog
from zckpt.plan.layout import plan_shards
from zckpt.ranks.collectives import check_arguments
from zckpt.storage.location import Location
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.storage.space import Space
from zckpt.system import linux
from zckpt.system.available import available_bytes
from zckpt.transfer.budget import Budget
from zckpt.version import __version__
from zckpt.writing.collect import add_rank_tree, collect, fingerprint, pack_tree
from zckpt.writing.rank_write import RankWrite, SameFile
from zckpt.writing.reuse import LATEST, earlier_checkpoint, remember, reused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.plan.layout import ShardPlan
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.writing.options import WriteOptions


class Facts(NamedTuple):
    """What a rank tells the others before they plan."""

    arguments: Mapping[str, object]
    """Those that have to be the same on every rank."""
    scalars: bytes
    """The digest of what the optimizer keeps once for all ranks."""
    client_state: bytes | None
    """The digest of this rank's own; None if it has none."""
    machine: str
    buffers: Mapping[str, bytes]
    """Of rank 0: the digests of its buffers."""
    save_id: str
    """Of rank 0."""
    earlier: str
    """Of rank 0: the path of the checkpoint whose files are taken over where they have not changed; empty for none."""


class Planned(NamedTuple):
    """What a rank tells the others once it has planned its files."""

    receipt: bytes
    scalars: Mapping[str, str]
    """What the optimizer keeps once for all ranks, by path; empty unless the ranks differ in it."""


class Preparation:
    """One rank's way to its ``RankWrite``: ``prepare``, ``plan``, ``begin``. Each step gives all ranks a value, and the
    next step is given those of all."""

    write: RankWrite
    """Made by ``plan``."""
    run: Store
    """The directory of the run that the checkpoint belongs to. Made by ``prepare``."""

    def __init__(self, engine: object, path: StrPath | None, options: WriteOptions, rank: int, size: int) -> None:
        self._engine, self._path, self.options, self._rank, self._size = engine, path, options, rank, size

    def prepare(self) -> Facts:
        """All that this rank has to write, and what the ranks have to agree about."""
        options = self.options = self.options.checked()
        adapter = self.adapter = adapt(self._engine)
        out = away(self._engine)
        if out is not None:
            out.refuse_lost("zckpt.write")
        adapter.refuse_unsupported(drop_gradients=options.pending_gradients == "drop")
        if options.lazy:
            adapter.refuse_lazy()
        path = f"checkpoints/global_step{adapter.step}" if self._path is None else self._path
        self._store = open_store(Location.of(path).absolute())
        self.run = self._store.parent if options.run is None else open_store(Location.of(options.run).absolute())
        self.target = str(self._store.location)
        if options.latest:
            latest_name(self._store.location, self.run.location)
        self._client_rank_state = with_registered(self._engine, options.rank_state)
        own = self._own = collect(adapter, options)
        packed, earlier, first = b"", "", self._rank == 0
        if first:
            root = {"engine": own.state, names.CLIENT_STATE: dict(options.client_state or {})}
            adapters = adapter_configs(adapter.module)
            if adapters:
                root[names.ADAPTERS] = adapters
            packed = pack_tree(root, "", own.fragments, 0)
            self._lock = WriteLock(self._store)
            earlier = earlier_checkpoint(options.reuse, self._engine, self.run)
        writer = {
            "zckpt": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **adapter.description,
        }
        self._about = catalog.About(adapter.step, BLOCK_BYTES, own.aliases, packed, writer)
        return Facts(
            options.shared(self.target), digest(msgpack.packb(own.scalars)), self._client_digest(),
            linux.boot_id() or platform.node(), own.buffers if first else {}, self._lock.save_id if first else "",
            earlier,
        )  # fmt: skip

    def _client_digest(self) -> bytes | None:
        options = self.options
        try:
            return None if options.client_state is None else fingerprint(options.client_state)
        except StateError:
            if self._rank and not options.each_client_state:
                return b""  # it is not written, and differs from rank 0's, which is
            raise

    def plan(self, told: Sequence[Facts]) -> Planned:
        """This rank's files, once the ranks agree about what has to be the same on all of them."""
        options, own, rank = self.options, self._own, self._rank
        facts = [Facts(*one) for one in told]
        check_arguments([one.arguments for one in facts])
        rank_state = own.rank_state
        if any(one.client_state not in (None, facts[0].client_state) for one in facts):
            if options.each_client_state:  # a rank that has passed none has an empty one of its own
                rank_state = {**rank_state, names.CLIENT_STATE: dict(options.client_state or {})}
            elif rank == 0:
                warn(
                    "the ranks have different client_state: that of rank 0 is written, and all others are not; "
                    "rank_state is for what each rank has of its own"
                )
        if self._client_rank_state is not None:
            rank_state = {**rank_state, names.CLIENT_RANK_STATE: self._client_rank_state}
        add_rank_tree(rank_state, own.fragments, rank)
        first = facts[0].buffers  # a replicated buffer is stored once
        fragments = [f for f in own.fragments if f.copy == 0 or own.buffers[f.key] != first.get(f.key)]
        save_id = facts[0].save_id
        planned = plan_shards(fragments, save_id, rank, self._size, block_bytes=BLOCK_BYTES)
        shards, same = self._reused(planned, facts[0].earlier)
        if options.background and options.snapshot_bytes is None:
            machines = [one.machine for one in facts]
            options = replace(options, snapshot_bytes=available_bytes() // 2 // machines.count(machines[rank]))
        self.write = RankWrite(
            store=self._store, latest_in=self.run if options.latest else None, save_id=save_id, rank=rank,
            shards=shards, about=self._about, options=options, same=same,
        )  # fmt: skip
        differ = any(one.scalars != facts[0].scalars for one in facts)
        return Planned(catalog.pack(catalog.receipt(rank, shards)), own.scalars if differ else {})

    def _reused(self, shards: Sequence[ShardPlan], earlier: str) -> tuple[Sequence[ShardPlan], Mapping[str, SameFile]]:
        try:
            if earlier:
                budget = self.options.budget or Budget.from_environment()
                return reused(shards, self._rank, earlier, budget, BLOCK_BYTES)
        except ZckptError:
            if self.options.reuse != LATEST:  # that one was asked for
                raise
        return shards, {}

    def begin(self, told: Sequence[Planned]) -> Space:
        """On rank 0, the manifest and the index, checked; then the lock and the place for the data, and the space that
        is there, which no other rank looks for. Raises StateError where the ranks' optimizers differ in what is kept
        once."""
        plans = [Planned(*one) for one in told]
        if any(one.scalars for one in plans):
            raise _differing([one.scalars for one in plans])
        if self._rank == 0:
            self.write.describe([catalog.unpack(one.receipt) for one in plans])
            refuse_place(self._store, self.run, latest=self.options.latest)
            return self.write.begin(self._lock)
        return Space(self.target, 0, None)

    def commit(self, digests: Sequence[bytes]) -> None:
        """Commits on rank 0, as ``RankWrite.commit`` does."""
        self.write.commit(digests)
        remember(self._engine, self.target)


def _differing(scalars: Sequence[Mapping[str, str]]) -> StateError:
    """An optimizer's scalars, which are kept once, differ from rank to rank, as do those that are computed from a
    rank's own part of the weights."""
    first = scalars[0]
    differs, other = next((rank, one) for rank, one in enumerate(scalars) if one != first)
    path = next(path for path in {**first, **other} if first.get(path) != other.get(path))
    return StateError(
        f"{path} is {first.get(path)} on rank 0, {other.get(path)} on rank {differs}", key=path,
        hint="zckpt keeps one value for all ranks: have the optimizer compute it over all of them",
    )  # fmt: skip
