"""The steps of a write before its first byte: a rank collects its state, the ranks agree, and each rank plans its
files."""

from __future__ import annotations

import platform
from bisect import bisect_left
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack
import torch

from zckpt.checkpoint.listing.doubt import settle
from zckpt.checkpoint.listing.runs import latest_name, refuse_place
from zckpt.checkpoint.writing.collect import Changes, add_rank_tree, collect, fingerprint, kept_client_state, pack_tree
from zckpt.checkpoint.writing.joining import joined, packed_for_joining
from zckpt.checkpoint.writing.machines import Machines, find_machines
from zckpt.checkpoint.writing.rank_write import RankWrite, join
from zckpt.checkpoint.writing.reuse import LATEST, SameFile, earlier_checkpoint, reused
from zckpt.checkpoint.writing.saves import saves_of
from zckpt.engines import readable
from zckpt.engines.away import away
from zckpt.engines.history import claim, history_of, note_write, run_id_of_next_write
from zckpt.engines.peft import adapter_configs
from zckpt.engines.registered import with_registered
from zckpt.errors import RankError, StateError, UnsupportedError, ZckptError, first_few, warn
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES, digest
from zckpt.plan import catalog
from zckpt.plan.data_files import plan_data_files
from zckpt.plan.inventory import BUFFER
from zckpt.plan.lineage import Lineage
from zckpt.plan.replicas import Share, own_shares
from zckpt.plan.together import Range, common_files, own_files, with_common_files
from zckpt.ranks.collectives import check_arguments
from zckpt.storage.location import Location
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.system import linux
from zckpt.system.available import available_bytes
from zckpt.system.collector import without_collector
from zckpt.transfer.budget import budget_or_default
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.plan.inventory import Fragment
    from zckpt.plan.together import CommonFile
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.storage.space import Space

T = TypeVar("T")

SHOWN_MAX = 5
"""The largest number of values that a warning names."""
LEFT_OUT = "these values are left out of the checkpoints of this engine, because they cannot be kept"


class Facts(NamedTuple):
    """The values that a rank tells rank 0 before the ranks plan."""

    arguments: Mapping[str, object]
    """The arguments that have to be the same on every rank."""
    scalars: bytes
    """The digest of the values that the optimizer keeps once for all ranks."""
    client_state: bytes | None
    """The digest of the client_state of this rank, or None if it has none."""
    host: str
    """The boot id of the computer, or its name if it has none."""
    buffers: Mapping[str, bytes]
    """The digest of each buffer. Only rank 0 tells it, or every rank if the names of the tensors differ between
    ranks."""
    to_join: bytes
    """What ``packed_for_joining`` has returned, if the names of the tensors differ between ranks. Otherwise it is
    empty."""
    run_id: str
    """The identity of the run that the engine belongs to on this rank, or an empty text if it has none yet."""
    sample: Mapping[str, bytes]
    """The digests of what ``EngineAdapter.sample`` has returned. Empty values are left out."""
    replicas: Sequence[tuple[bytes, bytes]]
    """For each set of replicas of which the rank holds one, the digests of its layout and of its values."""


class Agreed(NamedTuple):
    """What rank 0 tells all ranks before they plan."""

    save_id: str
    """The save id of the write."""
    earlier: str
    """The path of the checkpoint whose unchanged data files are shared, or an empty text if there is none."""
    run_id: str
    """The identity of the run that the checkpoint belongs to."""
    client_states_differ: bool
    """Whether a rank has another client_state than rank 0."""
    scalars_differ: bool
    """Whether the ranks differ in the values that the optimizer keeps once for all ranks."""
    buffers: Mapping[str, tuple[int, bytes]]
    """The first rank that has each buffer, and the digest of the buffer there."""


class ForRank(NamedTuple):
    """What rank 0 tells one rank before it plans."""

    shares: Sequence[tuple[int, int, bool]]
    """For each set of replicas of which the rank holds one: the number of its share, the number of the shares, and
    whether the ranks that hold the set have other values."""
    ranks_of_host: int
    """How many ranks are on the computer of this rank."""
    group: Sequence[int]
    """Those of them that write to the same files as this rank, if they see the same directory."""


class Planned(NamedTuple):
    """The values that a rank tells rank 0 once it has planned its files."""

    rank_record: bytes
    scalars: Mapping[str, str]
    """The values that the optimizer keeps once for all ranks, by their path. It is empty unless the ranks differ in
    them."""
    data_bytes: int
    """The size of the rank's data files in bytes."""
    table_bytes: int
    """The size of the rank's digest table in bytes."""
    shared_bytes: int
    """How many bytes of the rank's files may be shared with existing files, and need no space then."""
    replaced: Mapping[str, str]
    left_out: Mapping[str, str]
    """What of the trees of the rank is not kept as it is, as in ``Changes``."""
    replicas: Mapping[bytes, Mapping[str, bytes]]
    """For each set of replicas that is not the same on all ranks that hold it: the digests of its fragments by key. The
    key of the set is the digest of its layout."""


class Assigned(NamedTuple):
    """What rank 0 tells one rank before it writes."""

    to_check: Sequence[tuple[str, int]]
    """The data files and the digest table of another rank, which this rank checks before the commit: their paths and
    their lengths in bytes."""
    manifest_and_index: Sequence[bytes] = ()
    """The manifest without digests, and the index. Only the leaders of machines other than rank 0 get this and
    ``data_bytes``."""
    data_bytes: int = 0
    """How many bytes of data files the ranks of the machine write."""


class Preparation:
    """The steps by which one rank prepares its ``RankWrite``: ``prepare``, ``plan``, ``begin`` and ``join``. What the
    first three return is sent to rank 0, where ``agree``, ``describe`` and ``of_leaders`` decide what the ranks get for
    the next step."""

    write: RankWrite
    """This rank's part in the write. ``plan`` makes it."""
    run: Store
    """The directory of the run that the checkpoint belongs to. ``prepare`` makes it."""

    def __init__(self, engine: object, path: StrPath | None, options: WriteOptions, rank: int, size: int) -> None:
        self._engine, self._path, self.options, self._rank, self._size = engine, path, options, rank, size
        self._common_files: Sequence[CommonFile] = ()

    @without_collector
    def prepare(self) -> Facts:
        """Collects all state that this rank has to write. Returns the values that the ranks have to agree about."""
        options, history = self.options.checked(), history_of(self._engine)
        self.options = options
        self._machines = Machines.one(self._size)  # unless ``find_machines`` finds several
        adapter = self.adapter = readable(self._engine)
        offloaded = away(self._engine)
        if offloaded is not None:
            offloaded.refuse_lost("zckpt.write")
        dropped = options.pending_gradients == "drop"
        adapter.refuse_unsupported(drop_gradients=dropped, leave_out=options.leave_out)
        if options.lazy:
            adapter.refuse_lazy()
        if options.step is not None:
            adapter.set_step(options.step)
        path = f"checkpoints/global_step{adapter.step}" if self._path is None else self._path
        self._store = open_store(Location.of(path).absolute())
        self.run = self._store.parent if options.run is None else open_store(Location.of(options.run).absolute())
        self.target = str(self._store.location)
        if options.ranks_per_file > 1 and not self._store.divides_files:
            raise UnsupportedError(
                f"{self.target} is not in a file system, so several ranks cannot write to one file of it",
                hint="leave ranks_per_file at 1 there; or write to a file system, and have the checkpoint copied there "
                "by copy_to",
            )
        if options.latest:
            latest_name(self._store.location, self.run.location)
        self._client_rank_state = with_registered(self._engine, options.rank_state)
        self._changes = Changes()
        if options.leave_out and options.client_state is not None:
            kept = kept_client_state(options.client_state, self._changes)
            options = self.options = replace(options, client_state=kept)
        collected = self._collected = collect(adapter, options, history.replicas)
        first = self._rank == 0
        if first:
            if collected.unsaved:
                warn(f"the checkpoint does not hold {first_few(collected.unsaved, 5)}")
            self._lock = WriteLock(self._store)
            self._earlier = earlier_checkpoint(options.reuse, history.last, self.run)
        differ = adapter.names_differ
        scalars = b"" if differ else digest(msgpack.packb(collected.scalars))
        to_join = b""
        if differ:
            to_join = packed_for_joining(collected, self._changes, leave_out=options.leave_out)
        sample = {name: digest(value) for name, value in adapter.sample().items() if value}
        return Facts(
            options.common(self.target), scalars, self._client_digest(), linux.boot_id() or platform.node(),
            collected.buffers if first or differ else {}, to_join,
            history.run_id, sample,
            [(held.layout, held.values) for held in collected.replicas.values()],
        )  # fmt: skip

    def agree(self, facts_of_ranks: Sequence[Facts]) -> tuple[Agreed, dict[int, ForRank]]:
        """On rank 0, checks that all ranks write the same checkpoint. Returns what ``plan`` gets. Raises RankError."""
        facts = [Facts(*values) for values in facts_of_ranks]
        check_arguments([of_rank.arguments for of_rank in facts])
        _check_engines(facts, self.options)
        self._to_join = [of_rank.to_join for of_rank in facts]
        client_states_differ = any(of_rank.client_state not in (None, facts[0].client_state) for of_rank in facts)
        if client_states_differ and not self.options.each_client_state:
            warn(
                "the ranks have different client_state: that of rank 0 is written, and all others are not; "
                "rank_state is for what each rank has of its own"
            )
        buffers: dict[str, tuple[int, bytes]] = {}
        holders: dict[bytes, dict[int, bytes]] = {}
        for rank, of_rank in enumerate(facts):
            for key, value in of_rank.buffers.items():
                buffers.setdefault(key, (rank, value))
            for layout, values in of_rank.replicas:
                holders.setdefault(layout, {})[rank] = values
        differ = {layout: len({*filter(None, held.values())}) > 1 for layout, held in holders.items()}
        numbers = {layout: {rank: number for number, rank in enumerate(held)} for layout, held in holders.items()}
        self._hosts = [of_rank.host for of_rank in facts]
        ranks_of: dict[str, list[int]] = {}
        for rank, host in enumerate(self._hosts):
            ranks_of.setdefault(host, []).append(rank)
        agreed = Agreed(
            self._lock.save_id, self._earlier, run_id_of_next_write(self._engine), client_states_differ,
            any(of_rank.scalars != facts[0].scalars for of_rank in facts), buffers,
        )  # fmt: skip
        of_ranks = {}
        for rank, of_rank in enumerate(facts):
            layouts = [layout for layout, _ in of_rank.replicas]
            shares = [(numbers[layout][rank], len(numbers[layout]), differ[layout]) for layout in layouts]
            here, most = ranks_of[of_rank.host], self.options.ranks_per_file
            first = bisect_left(here, rank) // most * most
            of_ranks[rank] = ForRank(shares, len(here), here[first : first + most])
        return agreed, of_ranks

    def _describe_state(self, run_id: str) -> catalog.SaveMetadata:
        """Packs the root tree on rank 0, and returns what the manifest has beside the records of the ranks."""
        collected, options, adapter, packed = self._collected, self.options, self.adapter, b""
        aliases = collected.aliases
        if self._rank == 0:
            state = collected.state
            if self._to_join[0]:
                state, aliases = joined(state, self._to_join, leave_out=options.leave_out)
            root: dict[str, Any] = {"engine": state, names.CLIENT_STATE: dict(options.client_state or {})}
            adapters = adapter_configs(adapter.module)
            if adapters:
                root[names.ADAPTERS] = adapters
            if collected.left_out:
                root[names.LEFT_OUT] = collected.left_out
            packed = pack_tree(root, "", collected.fragments, 0, self._changes, leave_out=options.leave_out)
        writer = {
            "zckpt": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **adapter.description,
        }
        lineage = Lineage(run_id, collected.use)
        return catalog.SaveMetadata(adapter.step, BLOCK_BYTES, aliases, packed, writer, lineage)

    def _client_digest(self) -> bytes | None:
        options = self.options
        try:
            return None if options.client_state is None else fingerprint(options.client_state)
        except StateError:
            if self._rank and not options.each_client_state:
                # Only rank 0's client_state is written, so this one may have what cannot be kept. The empty digest
                # differs from that of rank 0, so a warning follows.
                return b""
            raise

    @without_collector
    def plan(self, agreed_fields: Sequence[Any], own_fields: Sequence[Any] | None, ranks: Ranks) -> Planned:
        """Plans the files of this rank. Gets what ``agree`` has returned for all ranks and for this one."""
        assert own_fields is not None, "rank 0 tells every rank its shares"
        agreed, own = Agreed(*agreed_fields), ForRank(*own_fields)
        # Only ranks of one host share files, because they also share the host's page cache. Two hosts that write to one
        # file would wait for each other's locks, or lose bytes, on many file systems.
        self._together = [rank for rank in own.group if rank in self._machines.of(self._rank).ranks]
        _, ranges = ranks.part(self._together).decide_each(
            lambda: self._plan_alone(agreed, own),
            partial(self._share_files, agreed.save_id),
            "plan the write",
        )
        with ranks.interruptible():
            return self._plan_write(agreed, own, [Range(*fields) for fields in ranges or ()])

    def _plan_write(self, agreed: Agreed, own: ForRank, shares: Sequence[Range]) -> Planned:
        """Plans what this rank writes, which includes its ranges of common files."""
        options, collected, rank = self.options, self._collected, self._rank
        own_plans, ranges_of_files = own_files(self._planned, shares, self._together[0], block_bytes=BLOCK_BYTES)
        alone, same = self._reused(own_plans, agreed.earlier)
        if options.background and options.snapshot_bytes is None:
            options = replace(options, snapshot_bytes=available_bytes() // 2 // own.ranks_of_host)
        machine = self._machines.of(rank).ranks if self._machines.several else None
        self.write = RankWrite(
            store=self._store, latest_in=self.run if options.latest else None, save_id=agreed.save_id, rank=rank,
            data_files=(*alone, *ranges_of_files), metadata=self._metadata, options=options, same=same, machine=machine,
            common_files=self._common_files,
        )  # fmt: skip
        own_blocks = sum(data_file.blocks for data_file in alone)
        common_blocks = sum(sum(file.blocks.values()) for file in self._common_files)
        record = with_common_files(catalog.rank_record(rank, alone), self._common_files, own_blocks)
        return Planned(
            catalog.pack(record), collected.scalars if agreed.scalars_differ else {},
            sum(data_file.nbytes for data_file in self.write.data_files),
            DIGEST_BYTES * (own_blocks + common_blocks), self.write.shared_bytes(), self._changes.replaced,
            self._changes.left_out, self._differing,
        )  # fmt: skip

    def _plan_alone(self, agreed: Agreed, own: ForRank) -> bytes:
        """Plans the files that this rank would write alone. Returns their record if it shares files with other ranks,
        and otherwise nothing."""
        options, collected, rank = self.options, self._collected, self._rank
        self._run_id = agreed.run_id
        self._metadata = self._describe_state(agreed.run_id)  # This adds the tensors of the root tree to the fragments.
        rank_state = collected.rank_state
        if agreed.client_states_differ and options.each_client_state:  # A rank without one writes an empty one.
            rank_state = {**rank_state, names.CLIENT_STATE: dict(options.client_state or {})}
        if self._client_rank_state is not None:
            rank_state = {**rank_state, names.CLIENT_RANK_STATE: self._client_rank_state}
        add_rank_tree(rank_state, collected.fragments, rank, self._changes, leave_out=options.leave_out)
        fragments = [f for f in collected.fragments if f.part != BUFFER or self._stores(f, agreed.buffers)]
        fragments, self._differing = self._shared_out(fragments, own.shares)
        self._planned = plan_data_files(fragments, agreed.save_id, rank, self._size, block_bytes=BLOCK_BYTES)
        several = len(self._together) > 1
        return catalog.pack(catalog.rank_record(rank, self._planned)) if several else b""

    def _share_files(self, save_id: str, records: Sequence[bytes]) -> tuple[None, dict[int, Sequence[Range]]]:
        """On the first of the ranks that share files, plans these files. Returns the ranges that each rank writes."""
        if len(records) > 1:
            unpacked = catalog.unpack(records)
            self._common_files = common_files(unpacked, save_id, self._size, block_bytes=BLOCK_BYTES)
        files = self._common_files
        return None, {
            number: [file.ranges[rank] for file in files if rank in file.ranges]
            for number, rank in enumerate(self._together)
        }

    def _stores(self, buffer: Fragment, first: Mapping[str, tuple[int, bytes]]) -> bool:
        """Returns whether this rank writes a buffer: it is the first rank that has the buffer, or has other values.
        ``first``: the first rank that has each buffer, and the digest there."""
        known = first.get(buffer.key)
        return known is None or known[0] == self._rank or known[1] != self._collected.buffers[buffer.key]

    def _shared_out(
        self, fragments: Sequence[Fragment], own: Sequence[tuple[int, int, bool]]
    ) -> tuple[list[Fragment], dict[bytes, Mapping[str, bytes]]]:
        """Returns the fragments that this rank writes, and ``Planned.replicas``. ``own``: as in ``ForRank.shares``."""
        shares: dict[str, Share] = {}
        differing: dict[bytes, Mapping[str, bytes]] = {}
        for (label, held), (number, count, differ) in zip(self._collected.replicas.items(), own, strict=True):
            shares[label] = Share(number, count)
            if differ:
                differing[held.layout] = held.digests
                if self.options.leave_out:  # A mixture of values is the only thing that would be worse.
                    shares[label] = replace(shares[label], count=1)
        return own_shares(fragments, shares), differing

    def _reused(
        self, data_files: Sequence[DataFilePlan], earlier: str
    ) -> tuple[Sequence[DataFilePlan], Mapping[str, SameFile]]:
        try:
            if earlier:
                budget = budget_or_default(self.options.budget)
                return reused(data_files, self._rank, earlier, budget, BLOCK_BYTES)
        except ZckptError:
            if self.options.reuse != LATEST:  # the caller has asked for this very checkpoint
                raise
        return data_files, {}

    def find_machines(self, agreed_fields: Sequence[Any], ranks: Ranks) -> None:
        """Finds out which ranks see the same directory, if each machine may have a disk of its own. Then also commits
        what a crash has left committed on some machines only. This is collective."""
        if self.options.node_local:
            settle(self._store, ranks)
            self._machines = find_machines(self._store, Agreed(*agreed_fields).save_id, ranks)

    @property
    def leaders(self) -> list[int]:
        """On rank 0, the ranks that lead a machine each."""
        return [machine.ranks[0] for machine in self._machines.all]

    def of_leaders(self, results: Sequence[T]) -> tuple[T, dict[int, T]]:
        """On rank 0, returns the result of its own machine's leader, and for each rank of another machine that of its
        leader."""
        first, *others = self._machines.all
        return results[first.ranks[0]], {rank: results[other.ranks[0]] for other in others for rank in other.ranks}

    @without_collector
    def describe(self, plans_of_ranks: Sequence[Planned]) -> tuple[None, dict[int, Assigned]]:
        """On rank 0, makes and checks the manifest and the index. Returns what each rank gets. Raises StateError if the
        optimizers of the ranks differ in a value that is kept once, or replicas in their values."""
        plans = [Planned(*values) for values in plans_of_ranks]
        if any(of_rank.scalars for of_rank in plans):
            error = _differing([of_rank.scalars for of_rank in plans])
            if not self.options.leave_out:
                raise error
            warn(f"{error.message}: the checkpoint has that of rank 0, which every rank gets in a resume")
        if any(of_rank.replicas for of_rank in plans):
            error = _differing_replicas([of_rank.replicas for of_rank in plans])
            error.hint = self.adapter.if_replicas_differ
            if not self.options.leave_out:
                raise error
            warn(f"{error.message}: the checkpoint has the values of the first of these ranks")
        self._tell_changes(plans)
        self.write.metadata = replace(self.write.metadata, machines=self._machines.tree())
        records = catalog.unpack(of_rank.rank_record for of_rank in plans)
        self.write.describe(records)
        checked = self._machines.checked_by(self._hosts)
        tables = [(names.digests_path(self.write.save_id, n), of_rank.table_bytes) for n, of_rank in enumerate(plans)]
        assigned = {
            rank: Assigned([*records[other].paths(self.write.save_id), tables[other]])
            for rank, other in enumerate(checked)
        }
        for leader, *others in (machine.ranks for machine in self._machines.all):
            data_bytes = sum(plans[rank].data_bytes - plans[rank].shared_bytes for rank in (leader, *others))
            if leader == self._rank:
                self.write.data_bytes = data_bytes
            else:
                assigned[leader] = Assigned(assigned[leader].to_check, self.write.described, data_bytes)
        return None, assigned

    def connect(self, writing_ranks: Ranks, ranks: Ranks) -> None:
        """Connects this rank with those that write to the same files, inside of a step of ``ranks``. ``writing_ranks``:
        those that finish the write. A write in the background has to do this while the training still has its process
        groups."""
        if len(self._together) > 1:
            self.write.writers = writing_ranks.part(self._together, inside=ranks)

    def begin(self, assigned: Sequence[Any] | None) -> Space | None:
        """On the leader of each machine, takes the lock, and makes the directory of the data. Gets what ``describe``
        has returned for this rank. Returns the space in bytes that the machine needs and that is free, on leaders
        only."""
        assert assigned is not None, "rank 0 tells every rank what to check"
        self._assigned = own = Assigned(*assigned)
        note_write(self._engine, self._run_id)
        if not self._machines.leads(self._rank):
            return None
        if own.manifest_and_index:
            (manifest, index), self.write.data_bytes = own.manifest_and_index, own.data_bytes
            self.write.described = manifest, index
            self._lock = WriteLock(self._store, save_id=self.write.save_id)
        refuse_place(self._store, self.run, latest=self.options.latest)
        if not claim(self._engine, self.target) and self.options.leave_out:
            warn(
                f"this save replaces {self.target}, which another engine of this process has written: give each "
                "engine a directory of its own, or tags of its own"
            )
        if not claim(self._engine, str(self.run.location)):
            self._stay_beside()
        return self.write.begin(self._lock)

    def join(self, space_of_first: Any, space: Any) -> None:
        """On each rank, checks that it can take part in the write. Gets what ``of_leaders`` has returned."""
        leader = self._machines.of(self._rank).ranks[0]
        join(self.write.store, self.write.save_id, self._rank, leader, space or space_of_first)

    def _stay_beside(self) -> None:
        """Lets ``latest`` go on naming the checkpoints of another engine that writes to the same directory."""
        if self.run.entry(names.LATEST) is not None:
            self.write.latest_in = None
        history = history_of(self._engine)
        if not history.beside:
            history.beside = True
            warn(
                f"two engines of this process write to {self.run.location}: `latest` there goes on naming the "
                "checkpoints of the other one, and keep_last counts those of each engine alone. Give each engine a "
                "directory of its own, or restore this one by the path of its checkpoint"
            )

    @property
    def written(self) -> tuple[str, str]:
        """The identity of the run and the save id of the checkpoint."""
        return self._run_id, self.write.save_id

    def _tell_changes(self, plans: Sequence[Planned]) -> None:
        replaced = {path: said for of_rank in plans for path, said in of_rank.replaced.items()}
        tell(self._engine, "some values come back in a plain form", replaced)
        tell(self._engine, LEFT_OUT, {path: said for of_rank in plans for path, said in of_rank.left_out.items()})

    def check_files(self) -> None:
        """Checks the files of another rank, as ``RankWrite.check_files`` does."""
        self.write.check_files({path: range(nbytes, nbytes + 1) for path, nbytes in self._assigned.to_check})

    def prepare_commit(self, digests: Sequence[bytes] | None) -> None:
        """On each leader, which has the digests of all ranks, does what ``RankWrite.prepare_commit`` does."""
        if digests is not None:
            self.write.prepare_commit(*self.write.with_digests(digests))

    def commit(self) -> None:
        """On each leader, does what ``RankWrite.commit_prepared`` does."""
        if self._machines.leads(self._rank):
            self.write.commit_prepared()

    def finish(self) -> None:
        """On each leader, does what ``RankWrite.finish`` does."""
        if self._machines.leads(self._rank):
            self.write.finish()
            history_of(self._engine).last = self.target


def _check_engines(facts: Sequence[Facts], options: WriteOptions) -> None:
    """Raises RankError if the ranks write different engines, which would commit a mixture of them. An attached engine
    whose replicas differ is written all the same, with a warning, because DeepSpeed would save it."""
    first: dict[str, tuple[int, bytes]] = {}
    first_run_id = next((of_rank.run_id for of_rank in facts if of_rank.run_id), "")
    for number, of_rank in enumerate(facts):
        runs_differ = of_rank.run_id not in ("", first_run_id)
        for name, value in of_rank.sample.items():
            first.setdefault(name, (number, value))
        differing = next((name for name, value in of_rank.sample.items() if first[name][1] != value), None)
        engine = f"the engine of rank {number}"
        if runs_differ:
            message = f"{engine} is not that of rank 0: it belongs to another run"
        elif differing is None:
            continue
        else:
            other = first[differing][0]
            if options.leave_out:
                warn(f"{engine} is not that of rank {other}, or its copy of the weights differs")
                return
            message = f"{engine} is not that of rank {other}: its weights are others, such as {differing}"
        raise RankError(
            message, rank=number,
            hint="every rank has to write the same engine, and in the same order if there are several; without "
            "DeepSpeed, the model of every rank has to be wrapped by DistributedDataParallel or fully_shard",
        )  # fmt: skip


def tell(engine: object, message: str, changes: Mapping[str, str]) -> None:
    """Gives one warning about ``changes``, which have a text for each path of a value. It tells only once of a value
    that several ranks have, and, if the engine is attached, of one that several saves have."""
    saves = saves_of(engine)
    told = set() if saves is None else saves.told
    new: dict[str, str] = {}
    for path, said in changes.items():
        place = path.partition("]")[2] if path.startswith("rank_state[") else path
        if place not in told:
            new.setdefault(place, said)
    told.update(new)
    if new:
        warn(f"{message}: {first_few([*new.values()], SHOWN_MAX)}")


def _differing(scalars: Sequence[Mapping[str, str]]) -> StateError:
    """Returns the error for values that the optimizer should have once for all ranks, and that differ between the
    ranks. Values that are computed from a rank's own partition of the weights differ so."""
    first = scalars[0]
    differs, other = next((rank, of_rank) for rank, of_rank in enumerate(scalars) if of_rank != first)
    path = next(path for path in {**first, **other} if first.get(path) != other.get(path))
    return StateError(
        f"{path} is {first.get(path)} on rank 0, {other.get(path)} on rank {differs}", key=path,
        hint="zckpt keeps one value for all ranks: have the optimizer compute it over all of them",
    )  # fmt: skip


def _differing_replicas(replicas: Sequence[Mapping[bytes, Mapping[str, bytes]]]) -> StateError:
    """Returns the error for a tensor of which several ranks should hold the same values, and do not. ``replicas``: as
    in ``Planned``, by rank."""
    for layout in {layout: None for of_rank in replicas for layout in of_rank}:
        holders = {rank: of_rank[layout] for rank, of_rank in enumerate(replicas) if layout in of_rank}
        for key in next(iter(holders.values())):
            # A rank whose values are in a swap file does not know their digest.
            known = {rank: digests[key] for rank, digests in holders.items() if digests[key]}
            first = min(known, default=0)
            other = next((values for values in known.values() if values != known[first]), None)
            if other is not None:
                ranks = [str(rank) for rank, values in known.items() if values == other]
                return StateError(
                    f"{key} has other values on rank {first_few(ranks, 5)} than on rank {first}, "
                    "though these ranks hold the same elements of it", key=key,
                )  # fmt: skip
    raise AssertionError("no replicas differ")
