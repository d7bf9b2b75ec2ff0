"""What rank 0 decides for all ranks of a write: first which checkpoint they write together, and then, from the plans of
all of them, its manifest and its index. The ranks tell rank 0 their ``Facts``, and get ``Agreed`` and ``ForRank``. Then
they tell it what they have ``Planned``, and get what is ``Assigned`` to them."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.checkpoint.writing.saves import saves_of
from zckpt.engines.history import run_id_of_next_write
from zckpt.errors import RankError, StateError, first_few, warn
from zckpt.format import names
from zckpt.plan import catalog
from zckpt.ranks.collectives import check_arguments
from zckpt.system.collector import without_collector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.checkpoint.writing.machines import Machines
    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.checkpoint.writing.prepare import Preparation
    from zckpt.checkpoint.writing.rank_write import RankWrite

LEFT_OUT = "these values are left out of the checkpoints of this engine, because they cannot be kept"


class Facts(NamedTuple):
    """What a rank tells rank 0 before the ranks plan."""

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
    """A pair of digests for each set of replicas to which tensors of the rank belong: that of the layout of these
    tensors, and that of their values."""
    earlier: str
    """The path of the checkpoint whose unchanged data files are shared, or an empty text if there is none. Only rank 0
    tells it."""


class Agreed(NamedTuple):
    """What rank 0 tells all ranks before they plan."""

    save_id: str
    earlier: str
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
    hosts: Sequence[str] = ()
    """``Facts.host`` of all ranks. Only rank 0 gets this and ``to_join``."""
    to_join: Sequence[bytes] = ()
    """``Facts.to_join`` of all ranks. It is empty if the names of the tensors do not differ between ranks."""


class Planned(NamedTuple):
    """What a rank tells rank 0 once it has planned its files."""

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
    described: tuple[bytes, bytes] = (b"", b"")
    """The manifest without digests, and the index. Only the leaders of machines get this and ``data_bytes``."""
    data_bytes: int = 0
    """How many bytes of data files the ranks of the machine write."""


def agree(prepared: Preparation, facts_of_ranks: Sequence[Facts]) -> tuple[Agreed, dict[int, ForRank]]:
    """Checks that all ranks write the same checkpoint. Returns what all ranks get, and what each of them gets.
    ``prepared``: that of rank 0. Raises RankError."""
    options, facts = prepared.options, [Facts(*values) for values in facts_of_ranks]
    check_arguments([of_rank.arguments for of_rank in facts])
    _check_engines(facts, options)
    client_states_differ = any(of_rank.client_state not in (None, facts[0].client_state) for of_rank in facts)
    if client_states_differ and not options.each_client_state:
        warn(
            "the ranks have different client_state: that of rank 0 is written, and all others are not; "
            "rank_state is for what each rank has of its own"
        )
    buffers: dict[str, tuple[int, bytes]] = {}
    holders: dict[bytes, dict[int, bytes]] = {}
    ranks_of: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(facts):
        for key, value in of_rank.buffers.items():
            buffers.setdefault(key, (rank, value))
        for layout, values in of_rank.replicas:
            holders.setdefault(layout, {})[rank] = values
        ranks_of.setdefault(of_rank.host, []).append(rank)
    differ = {layout: len({*filter(None, held.values())}) > 1 for layout, held in holders.items()}
    numbers = {layout: {rank: number for number, rank in enumerate(held)} for layout, held in holders.items()}
    agreed = Agreed(
        secrets.token_hex(8), facts[0].earlier, run_id_of_next_write(prepared.engine), client_states_differ,
        any(of_rank.scalars != facts[0].scalars for of_rank in facts), buffers,
    )  # fmt: skip
    of_ranks = {}
    for rank, of_rank in enumerate(facts):
        layouts = [layout for layout, _ in of_rank.replicas]
        shares = [(numbers[layout][rank], len(numbers[layout]), differ[layout]) for layout in layouts]
        here, most = ranks_of[of_rank.host], options.ranks_per_file
        first = bisect_left(here, rank) // most * most
        of_ranks[rank] = ForRank(shares, len(here), here[first : first + most])
    to_join = [of_rank.to_join for of_rank in facts] if facts[0].to_join else []
    of_ranks[0] = of_ranks[0]._replace(hosts=[of_rank.host for of_rank in facts], to_join=to_join)
    return agreed, of_ranks


@without_collector
def describe(
    prepared: Preparation, hosts: Sequence[str], machines: Machines, write: RankWrite, plans_of_ranks: Sequence[Any]
) -> tuple[None, dict[int, Assigned]]:
    """Makes and checks the manifest and the index. Returns what each rank gets. ``prepared`` and ``write``: those of
    rank 0. Raises StateError if the optimizers of the ranks differ in a value that is kept once, or replicas in their
    values."""
    options, plans = prepared.options, [Planned(b"", *values[1:]) for values in plans_of_ranks]
    if any(of_rank.scalars for of_rank in plans):
        error = _differing([of_rank.scalars for of_rank in plans])
        if not options.leave_out:
            raise error
        warn(f"{error.message}: the checkpoint has that of rank 0, which every rank gets in a resume")
    if any(of_rank.replicas for of_rank in plans):
        error = _differing_replicas([of_rank.replicas for of_rank in plans])
        error.hint = prepared.adapter.if_replicas_differ
        if not options.leave_out:
            raise error
        warn(f"{error.message}: the checkpoint has the values of the first of these ranks")
    replaced = {path: said for of_rank in plans for path, said in of_rank.replaced.items()}
    tell(prepared.engine, "some values come back in a plain form", replaced)
    tell(prepared.engine, LEFT_OUT, {path: said for of_rank in plans for path, said in of_rank.left_out.items()})
    # Each packed record is taken out of its message, so that its memory is free once it is unpacked. The packed records
    # of thousands of ranks take about as much memory as the unpacked ones.
    save_id, records = write.save_id, catalog.unpack(values.pop(0) for values in plans_of_ranks)
    described = catalog.catalog(records, save_id, replace(write.metadata, machines=machines.tree()))
    files = [
        [*record.paths(save_id), (names.digests_path(save_id, rank), of_rank.table_bytes)]
        for rank, (record, of_rank) in enumerate(zip(records, plans, strict=True))
    ]
    assigned = {rank: Assigned(files[other]) for rank, other in enumerate(machines.checked_by(hosts))}
    for _, ranks in machines.all:
        data_bytes = sum(plans[rank].data_bytes - plans[rank].shared_bytes for rank in ranks)
        assigned[ranks[0]] = Assigned(assigned[ranks[0]].to_check, described, data_bytes)
    return None, assigned


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
        warn(f"{message}: {first_few([*new.values()], 5)}")


def _differing(scalars: Sequence[Mapping[str, str]]) -> StateError:
    """Returns the error for values that the optimizer should have once for all ranks, and that differ, such as those
    that are computed from a rank's own partition of the weights."""
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
