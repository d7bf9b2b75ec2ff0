"""Writes a ``Source`` as a checkpoint. If there are several processes, each of them writes the files of some ranks of
the checkpoint."""

from __future__ import annotations

import platform
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING

import torch

from zckpt.checkpoint.listing.runs import refuse_place
from zckpt.checkpoint.writing.collect import add_rank_tree, fingerprint, pack_tree
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.checkpoint.writing.rank_write import RankWrite, join
from zckpt.errors import FormatError, StateError
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES
from zckpt.plan import catalog
from zckpt.plan.data_files import plan_data_files
from zckpt.plan.inventory import STATE
from zckpt.plan.lineage import Lineage, Use
from zckpt.progress import PartOfProgress, reported
from zckpt.storage.lock import WriteLock
from zckpt.tools.converting.replica_sums import check_sums, sum_of
from zckpt.tools.converting.restricted_pickle import COPIED_BYTES_MAX
from zckpt.tools.converting.source import AS_WRITTEN, values_of
from zckpt.transfer.snapshot import Snapshot
from zckpt.transfer.stored import stored_range
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.plan.inventory import Fragment
    from zckpt.progress import Progress
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Store
    from zckpt.storage.space import Space
    from zckpt.tools.converting.replica_sums import Sums
    from zckpt.tools.converting.source import RankPart, Source
    from zckpt.transfer.budget import Budget

REPEATED_MAX = 8
"""How many times as many bytes as all files of a source together the tensors of one rank may take, beside those that
are copied. The same tensor may be in a source under several names."""


def write_source(
    source: Source, store: Store, ranks: Ranks, *, overwrite: bool, budget: Budget | None, progress: Progress | None
) -> None:
    """Writes ``source`` as a checkpoint to ``store``. Does not write a file ``latest``. The processes ``ranks`` share
    the ranks of the checkpoint, and all of them have to call this function. What each rank has is read twice: first to
    plan all files before anything is written, then to write the files of the rank. Raises what a write raises, and
    StateError if ranks differ in optimizer state of which zckpt keeps one value for all ranks."""
    lock = WriteLock(store)
    writer = {
        "zckpt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **source.description,
        "converted_from": source.found_format,
        "missing": "; ".join(source.missing),
    }
    planned = _Planned(source, ranks.first(lambda: lock.save_id, "plan the checkpoint"))
    own_ranks = range(ranks.rank, source.world_size, ranks.size)
    own_bytes = 0
    options = WriteOptions(overwrite=overwrite, latest=False, budget=budget).checked()
    begun: list[RankWrite] = []
    """The write of rank 0, on process 0. It takes the lock and commits. The list is empty on other processes."""
    packed_records: list[bytes] = []
    """The records of the files of all ranks, on process 0."""
    digests: list[tuple[int, bytes]] = []
    """Each rank and the digests of its files, on process 0."""

    def plan() -> tuple[list[bytes], Sums]:
        nonlocal own_bytes
        rank_records: list[bytes] = []
        sums: Sums = []
        with values_of(source.path):
            for rank in sorted({0, *own_ranks}):  # All other ranks are compared with rank 0.
                part = source.rank(rank)
                data_files = planned.data_files(rank, part)
                nbytes = sum(int(file.pieces.nbytes.sum()) for file in data_files)
                if nbytes > REPEATED_MAX * source.nbytes + COPIED_BYTES_MAX:
                    raise FormatError(
                        f"its tensors would take {nbytes} bytes, and its files have only {source.nbytes}: the same "
                        "bytes are in many tensors", hint=AS_WRITTEN,
                    )  # fmt: skip
                if rank in own_ranks:
                    rank_records.append(catalog.pack(catalog.rank_record(rank, data_files)))
                    sums += [(name, part.group, sum_of(fragment)) for name, fragment in part.replicas]
                    own_bytes += nbytes
        return rank_records, sums

    def rank_write(rank: int, options: WriteOptions) -> RankWrite:
        lineage = Lineage("", Use.RESUME if source.state.get("optimizer") else Use.WEIGHTS)
        metadata = catalog.SaveMetadata(source.step, BLOCK_BYTES, source.aliases, planned.packed, writer, lineage)
        return RankWrite(
            store=store, latest_in=None, save_id=planned.save_id, rank=rank,
            data_files=planned.data_files(rank, source.rank(rank)), metadata=metadata, options=options,
        )  # fmt: skip

    def compare(of_processes: list[tuple[list[bytes], Sums]]) -> None:
        with values_of(source.path):
            check_sums(chain(*(sums for _, sums in of_processes)))
        packed_records.extend(chain(*(rank_records for rank_records, _ in of_processes)))

    def begin() -> Space:
        first = rank_write(0, options)
        with values_of(source.path):
            try:
                records = catalog.unpack(packed_records)
                if all(file.part == STATE for record in records for file in record.files):
                    raise FormatError("the source has no tensor of a model or of its optimizer")
                first.make_manifest(records)
            except FormatError as error:
                error.file = source.path  # The error names a file of the checkpoint, which is never written.
                raise
        refuse_place(store, store.parent, latest=False)
        begun.append(first)
        return first.begin(lock)

    def write() -> list[tuple[int, bytes]]:
        with reported(progress, "convert", own_bytes) as advance:
            with_progress = replace(options, progress=PartOfProgress(advance))
            own_digests = [(rank, rank_write(rank, with_progress).write_data_files(Snapshot())) for rank in own_ranks]
        source.refuse_changes()
        return own_digests

    try:
        ranks.decide(plan, compare, "plan the checkpoint")
        space = ranks.first(begin, "begin the checkpoint")
        ranks.together(lambda: join(store, planned.save_id, ranks.rank, 0, space), "begin the checkpoint")
        ranks.decide(write, lambda of_processes: digests.extend(chain(*of_processes)), "convert")
        ranks.first(lambda: begun[0].commit([digest for _, digest in sorted(digests)]), "commit")
    finally:
        for first in begun:
            first.remove()


class _Planned:
    """Plans the files of each rank. They are planned again at each call."""

    packed = b""
    """The packed tree that all ranks share. It is set when the files of rank 0 are planned for the first time."""

    def __init__(self, source: Source, save_id: str) -> None:
        self._source, self.save_id = source, save_id
        self._scalars = b""

    def data_files(self, rank: int, part: RankPart) -> tuple[DataFilePlan, ...]:
        """Returns the plan of the data files of one rank. ``part``: what the rank has. Call this for rank 0 first."""
        source = self._source
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
        fragments = [
            fragment._replace(data=stored_range(fragment.data) or fragment.data)
            if isinstance(fragment.data, torch.Tensor)
            else fragment
            for fragment in fragments
        ]
        return plan_data_files(fragments, self.save_id, rank, source.world_size, block_bytes=BLOCK_BYTES)
