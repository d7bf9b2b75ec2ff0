"""What each rank does in a write before its first byte: it collects its state, and later plans its files. In between,
rank 0 decides what all ranks need for their plans."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import torch

from zckpt.checkpoint.listing.runs import latest_name, refuse_place
from zckpt.checkpoint.writing.collect import (
    Changes,
    add_rank_tree,
    collect,
    fingerprint,
    joined,
    kept_client_state,
    pack_tree,
    packed_for_joining,
)
from zckpt.checkpoint.writing.decide import Facts, Planned
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.checkpoint.writing.reuse import LATEST, SameFile, earlier_checkpoint, reused
from zckpt.engines import readable
from zckpt.engines.away import away
from zckpt.engines.history import claim, history_of
from zckpt.engines.registered import with_registered
from zckpt.errors import StateError, UnsupportedError, ZckptError, first_few, warn
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES, digest
from zckpt.plan import catalog
from zckpt.plan.data_files import FragmentPlaces, plan_data_files
from zckpt.plan.inventory import BUFFER
from zckpt.plan.lineage import Lineage
from zckpt.plan.replicas import Share, own_shares
from zckpt.plan.together import Range, common_files, own_files, with_common_files
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.system import linux
from zckpt.system.available import available_bytes
from zckpt.system.collector import without_collector
from zckpt.transfer.budget import budget_or_default
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.checkpoint.writing.collect import Collected
    from zckpt.checkpoint.writing.decide import Agreed, ForRank
    from zckpt.checkpoint.writing.machines import Machines
    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.engines.contract import StateAdapter
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.plan.inventory import Fragment
    from zckpt.plan.together import CommonFile
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preparation:
    """What one rank has to write, and where."""

    engine: object
    adapter: StateAdapter
    """An adapter for the engine. It is not the one that has collected the state, which would keep a description of each
    parameter in memory for as long as the write takes."""
    options: WriteOptions
    """The options as ``WriteOptions.checked`` returns them, without client_state that cannot be kept."""
    store: Store
    """The directory of the checkpoint."""
    run: Store
    """The directory of the run that the checkpoint belongs to."""
    collected: Collected
    rank_state: Mapping[str, Any] | None
    """The values of the caller and of registered objects that are written for this rank alone."""
    changes: Changes
    facts: Facts

    @property
    def target(self) -> str:
        """The absolute path of the checkpoint."""
        return str(self.store.location)


@without_collector
def prepare(engine: object, path: StrPath | None, options: WriteOptions, *, first: bool) -> Preparation:
    """Collects what this rank has to write, and what the ranks compare. ``first``: whether this is rank 0."""
    options, adapter = options.checked(), readable(engine)
    history = history_of(engine)
    offloaded = away(engine)
    if offloaded is not None:
        offloaded.refuse_lost("zckpt.write")
    dropped = options.pending_gradients == "drop"
    adapter.refuse_unsupported(drop_gradients=dropped, leave_out=options.leave_out)
    if options.lazy:
        adapter.refuse_lazy()
    if options.step is not None:
        adapter.set_step(options.step)
    store = open_store(Location.of(f"checkpoints/global_step{adapter.step}" if path is None else path).absolute())
    store.refuse_read_only()
    run = store.parent if options.run is None else open_store(Location.of(options.run).absolute())
    if options.ranks_per_file > 1 and not store.divides_files:
        raise UnsupportedError(
            f"{store.location} is not in a file system, so several ranks cannot write to one file of it",
            hint="leave ranks_per_file at 1 there; or write to a file system, and have the checkpoint copied there by "
            "copy_to",
        )
    if options.latest:
        latest_name(store.location, run.location)
    rank_state, changes = with_registered(engine, options.rank_state), Changes()
    if options.leave_out and options.client_state is not None:
        options = replace(options, client_state=kept_client_state(options.client_state, changes))
    collected = collect(adapter, options, history.replicas)
    if first and collected.unsaved:
        warn(f"the checkpoint does not hold {first_few(collected.unsaved, 5)}")
    differ, leave_out = adapter.names_differ, options.leave_out
    facts = Facts(
        arguments=options.common(str(store.location)),
        scalars=b"" if differ else digest(msgpack.packb(collected.scalars)),
        client_state=_client_digest(options, first=first),
        host=linux.boot_id() or platform.node(),
        buffers=collected.buffers if first or differ else {},
        to_join=packed_for_joining(collected, changes, leave_out=leave_out) if differ else b"",
        run_id=history.run_id,
        sample={name: digest(value) for name, value in adapter.sample().items() if value},
        replicas=[(held.layout, held.values) for held in collected.replicas.values()],
        earlier=earlier_checkpoint(options.reuse, history.last, run) if first else "",
    )
    return Preparation(
        engine=engine, adapter=readable(engine), options=options, store=store, run=run, collected=collected,
        rank_state=rank_state, changes=changes, facts=facts,
    )  # fmt: skip


def _client_digest(options: WriteOptions, *, first: bool) -> bytes | None:
    try:
        return None if options.client_state is None else fingerprint(options.client_state)
    except StateError:
        if first or options.each_client_state:
            raise
        # Only rank 0's client_state is written, so this one may have what cannot be kept. The empty digest differs from
        # that of rank 0, so a warning follows.
        return b""


class _Alone(NamedTuple):
    """What a rank would write if it did not share files with other ranks."""

    data_files: Sequence[DataFilePlan]
    metadata: catalog.SaveMetadata
    changes: Changes
    """What is replaced or left out in the trees of the preparation, and in those that were packed after it."""
    replicas: Mapping[bytes, Mapping[str, bytes]]


@without_collector
def plan(
    prepared: Preparation, agreed: Agreed, own: ForRank, machines: Machines, ranks: Ranks
) -> tuple[RankWrite, Sequence[int], Planned]:
    """Plans the files of this rank. It is called in a step of ``ranks``, and has a step of its own, of those ranks that
    write to the same files. Returns three things: the write, which lacks what only ``begin`` knows; these ranks; and
    what this rank tells rank 0 about the plan."""
    rank, machine = ranks.rank, machines.of(ranks.rank).ranks
    # Only ranks of one host share files, because they also share the host's page cache. Two hosts that write to one
    # file would wait for each other's locks, or lose bytes, on many file systems.
    together = [other for other in own.group if other in machine]
    common: Sequence[CommonFile] = ()
    alone: _Alone

    def plan_alone() -> bytes:
        nonlocal alone
        alone = _alone(prepared, agreed, own, ranks)
        return catalog.pack(catalog.rank_record(rank, alone.data_files)) if len(together) > 1 else b""

    def share(records: Sequence[bytes]) -> tuple[None, dict[int, Sequence[Range]]]:
        """Plans the common files, on the first of the ranks. Returns the ranges that each of them writes."""
        nonlocal common
        if len(records) > 1:
            common = common_files(catalog.unpack(records), agreed.save_id, ranks.size, block_bytes=BLOCK_BYTES)
        of_ranks = ([file.ranges[other] for file in common if other in file.ranges] for other in together)
        return None, dict(enumerate(of_ranks))

    _, ranges = ranks.part(together).decide_each(plan_alone, share, "plan the write")
    with ranks.interruptible():
        to_share = [Range(*fields) for fields in ranges or ()]
        own_plans, ranges_of_files = own_files(alone.data_files, to_share, together[0], block_bytes=BLOCK_BYTES)
        options, same = prepared.options, dict[str, SameFile]()
        try:
            if agreed.earlier:
                budget = budget_or_default(options.budget)
                own_plans, same = reused(own_plans, rank, agreed.earlier, budget, BLOCK_BYTES)
        except ZckptError:
            if options.reuse != LATEST:  # The caller has asked for this very checkpoint.
                raise
        background = options.in_background
        if background is not None and background.snapshot_bytes is None:
            share_bytes = available_bytes() // 2 // own.ranks_of_host
            options = replace(options, background=replace(background, snapshot_bytes=share_bytes))
        write = RankWrite(
            store=prepared.store, save_id=agreed.save_id, rank=rank, data_files=(*own_plans, *ranges_of_files),
            metadata=alone.metadata, options=options, same=same, common_files=common,
            machine=machine if machines.several else None,
        )  # fmt: skip
        own_blocks = sum(data_file.blocks for data_file in own_plans)
        common_blocks = sum(sum(file.blocks.values()) for file in common)
        record = with_common_files(catalog.rank_record(rank, own_plans), common, own_blocks)
        told = Planned(
            catalog.pack(record), prepared.collected.scalars if agreed.scalars_differ else {},
            sum(data_file.nbytes for data_file in write.data_files), DIGEST_BYTES * (own_blocks + common_blocks),
            write.shared_bytes(), alone.changes.replaced, alone.changes.left_out, alone.replicas,
        )  # fmt: skip
        return write, together, told


def _alone(prepared: Preparation, agreed: Agreed, own: ForRank, ranks: Ranks) -> _Alone:
    collected, options, rank = prepared.collected, prepared.options, ranks.rank
    fragments, changes = [*collected.fragments], prepared.changes.copy()
    aliases, root = collected.aliases, b""
    if rank == 0:
        root, aliases = _packed_root(prepared, own.to_join, fragments, changes)
    writer = {
        "zckpt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **collected.description,
    }
    lineage = Lineage(agreed.run_id, collected.use)
    metadata = catalog.SaveMetadata(collected.step, BLOCK_BYTES, aliases, root, writer, lineage)
    rank_state = collected.rank_state
    if agreed.client_states_differ and options.each_client_state:  # A rank without one writes an empty one.
        rank_state = {**rank_state, names.CLIENT_STATE: dict(options.client_state or {})}
    if prepared.rank_state is not None:
        rank_state = {**rank_state, names.CLIENT_RANK_STATE: prepared.rank_state}
    add_rank_tree(rank_state, fragments, rank, changes, leave_out=options.leave_out)

    def is_stored(buffer: Fragment) -> bool:
        """Returns whether this rank is the first one that has the buffer, or has other values than that one."""
        first = agreed.buffers.get(buffer.key)
        return first is None or first[0] == rank or first[1] != collected.buffers[buffer.key]

    places = collected.places.joined(FragmentPlaces.of(fragments[len(collected.fragments) :]))
    stored = [fragment.part != BUFFER or is_stored(fragment) for fragment in fragments]
    if not all(stored):
        fragments, places = [*compress(fragments, stored)], places.take(np.flatnonzero(stored))
    shares: dict[str, Share] = {}
    replicas: dict[bytes, Mapping[str, bytes]] = {}
    for (label, held), (number, count, differ) in zip(collected.replicas.items(), own.shares, strict=True):
        # If the values differ and are written all the same, a mixture of them is the only thing that would be worse.
        shares[label] = Share(number, 1 if differ and options.leave_out else count)
        if differ:
            replicas[held.layout] = held.digests
    written, places = own_shares(fragments, places, shares)
    data_files = plan_data_files(written, agreed.save_id, rank, ranks.size, block_bytes=BLOCK_BYTES, places=places)
    return _Alone(data_files, metadata, changes, replicas)


def _packed_root(
    prepared: Preparation, to_join: Sequence[bytes], fragments: list[Fragment], changes: Changes
) -> tuple[bytes, Mapping[str, str]]:
    """Returns the tree that all ranks share, in packed form, and the aliases of the tensors of all ranks. The last two
    arguments are those of ``pack_tree``."""
    collected, options = prepared.collected, prepared.options
    state, aliases = collected.state, collected.aliases
    if to_join:
        state, aliases = joined(prepared.adapter, state, to_join, leave_out=options.leave_out)
    root: dict[str, Any] = {"engine": state, names.CLIENT_STATE: dict(options.client_state or {})}
    if collected.peft_configs:
        root[names.ADAPTERS] = dict(collected.peft_configs)
    if collected.left_out:
        root[names.LEFT_OUT] = collected.left_out
    return pack_tree(root, "", fragments, 0, changes, leave_out=options.leave_out), aliases


def claimed(prepared: Preparation) -> Store | None:
    """Checks, on the leader of a machine, that the checkpoint may be at its place, and notes that the engine writes
    there. Returns the directory of the run whose file ``latest`` will name the checkpoint. It is None if ``latest``
    stays as it is, also because it names the checkpoints of another engine that writes to the same directory."""
    engine, run, options = prepared.engine, prepared.run, prepared.options
    refuse_place(prepared.store, run, latest=options.latest)
    if not claim(engine, prepared.target) and options.leave_out:
        warn(
            f"this save replaces {prepared.target}, which another engine of this process has written: give each "
            "engine a directory of its own, or tags of its own"
        )
    latest_in = run if options.latest else None
    if not claim(engine, str(run.location)):
        if run.entry(names.LATEST) is not None:
            latest_in = None
        history = history_of(engine)
        if not history.beside:
            history.beside = True
            warn(
                f"two engines of this process write to {run.location}: `latest` there goes on naming the "
                "checkpoints of the other one, and keep_last counts those of each engine alone. Give each engine a "
                "directory of its own, or restore this one by the path of its checkpoint"
            )
    return latest_in
