"""From the fragments that a rank holds to its files (names, headers, offsets, block numbers), and to their writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import UnsupportedError
from zckpt.format.digest import DIGEST_BYTES, block_count
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.index import ragged, runs
from zckpt.format.limits import DATA_ALIGNMENT_BYTES, DIGEST_TABLE_BYTES_MAX
from zckpt.format.names import FILLER_PREFIX, piece_name, split_piece_name
from zckpt.format.shard import ShardId, encode_header
from zckpt.state.inventory import ANY_TIME, TIERS, FileSpan, Fragment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from zckpt.format.index import Ints
    from zckpt.format.shard import Header

HEADER, FILLER = -1, -2
"""Sources of a write that are no pieces."""
SHARED_BYTES_MIN, HOST_BYTES_MIN = 64 << 10, 1 << 20
"""The fewest adjacent bytes, in a swap file and in host memory, that get a filler before them so that nothing has to be
copied."""


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The bytes of a file in their order, as int64 columns: the header, then pieces, with fillers between them.

    ``source``: position in ``ShardPlan.fragments``, HEADER or FILLER. ``start`` and ``nbytes`` are bytes of the file;
    ``block`` is the number of the first digest, counted from the file's first.
    """

    source: Ints
    start: Ints
    nbytes: Ints
    block: Ints


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file to be written: its header, then ``fragments`` in order; where, ``regions`` says. Its digests begin with
    ``first_block`` of the rank's table."""

    shard: ShardId
    header: bytes
    fragments: tuple[Fragment, ...]
    regions: Regions
    nbytes: int
    first_block: int
    blocks: int

    @property
    def pieces(self) -> Regions:
        """The regions of ``fragments``, one for each; ``start`` counts from the file's first data byte."""
        own = self.regions.source >= 0
        source, start, nbytes, block = (
            getattr(self.regions, column)[own] for column in ("source", "start", "nbytes", "block")
        )
        return Regions(source, start - len(self.header), nbytes, block)

    @property
    def reserved_bytes(self) -> int:
        """The space to reserve before the first write; none for what lies in a swap file, which may not need any."""
        return 0 if self.shard.tier == "nvme" else self.nbytes


def plan_shards(
    fragments: Sequence[Fragment], save_id: str, rank: int, world_size: int, *, block_bytes: int
) -> tuple[ShardPlan, ...]:
    """The files of one rank, in the order of their digests in the rank's table.

    Pieces keep the order of ``fragments``, so that what is adjacent in memory is adjacent in the file; only where one
    file holds elements of several sizes do the larger come first, which keeps every piece aligned to its elements.

    Raises UnsupportedError, or FormatError (S001), for more than the format can hold.
    """
    parts = list(dict.fromkeys(fragment.part for fragment in fragments))
    place = {(part, tier): (i, t) for i, part in enumerate(parts) for t, tier in enumerate(TIERS)}
    ordered = sorted(fragments, key=lambda f: (place[f.part, f.tier], -ITEM_BYTES[f.dtype]))
    plans: list[ShardPlan] = []
    first_block = 0
    for (part, tier), group in groupby(ordered, key=lambda f: (f.part, f.tier)):
        plan = _plan_shard(ShardId(save_id, rank, world_size, part, tier), list(group), first_block, block_bytes)
        plans.append(plan)
        first_block += plan.blocks
    if first_block * DIGEST_BYTES > DIGEST_TABLE_BYTES_MAX:
        raise UnsupportedError(
            f"rank {rank} would have {first_block:,} blocks of {block_bytes:,} bytes; the format can hold "
            f"{DIGEST_TABLE_BYTES_MAX // DIGEST_BYTES:,} of each rank",
            hint="leave parts out with `exclude`, and write them as a checkpoint of their own with `parts`",
        )
    return tuple(plans)


def _plan_shard(shard: ShardId, fragments: list[Fragment], first_block: int, block_bytes: int) -> ShardPlan:
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    sources = [HEADER]
    shapes: dict[str, tuple[int, ...]] = {}
    offset = 0
    # Parts that are never written from memory itself have the same layout wherever they lie: others may share them.
    long = long_runs(fragments, in_memory=shard.part not in ANY_TIME)
    for number, fragment in enumerate(fragments):
        if long.get(number) == number and fragment.place is not None:
            gap = (fragment.place[1] - offset) % DATA_ALIGNMENT_BYTES  # as far behind the start of a page as there
            if gap:
                entries.append((f"{FILLER_PREFIX}{number}", "U8", (gap,), offset, gap))
                sources.append(FILLER)
                offset += gap
        shape, count = fragment.shape, fragment.stop - fragment.start
        name = piece_name(fragment.name, fragment.start, fragment.stop, math.prod(shape))
        if name != fragment.name:
            shapes[fragment.name] = shape
            shape = (count,)
        nbytes = count * ITEM_BYTES[fragment.dtype]
        entries.append((name, fragment.dtype, shape, offset, nbytes))
        sources.append(number)
        offset += nbytes
    header = encode_header(shard, entries, shapes)
    regions, blocks = _regions(sources, [len(header), *[entry[-1] for entry in entries]], block_bytes)
    nbytes = len(header) + offset
    return ShardPlan(shard, header, tuple(fragments), regions, nbytes, first_block, blocks)


def _regions(sources: Sequence[int], nbytes: Sequence[int], block_bytes: int) -> tuple[Regions, int]:
    """Returns the regions of a file and the number of their blocks, given the source and the size in bytes of each
    region."""
    sizes = np.array(nbytes, np.int64)
    stops, counts = np.cumsum(sizes), block_count(sizes, block_bytes)
    block_stops = np.cumsum(counts)
    regions = Regions(np.array(sources, np.int64), stops - sizes, sizes, block_stops - counts)
    return regions, int(block_stops[-1])


def copied_shard(header: Header, raw: bytes, nbytes: int, first_block: int, *, block_bytes: int) -> ShardPlan:
    """Returns the plan of a file that is the same, byte for byte, as the one of ``nbytes`` bytes that has this header.
    ``raw``: the bytes of the header. The data of its fragments are ranges of that file, which is named by its path in
    its checkpoint."""
    fragments: list[Fragment] = []
    sources, sizes = [HEADER], [len(raw)]
    shard = header.shard
    for entry in header.entries:
        sizes.append(entry.nbytes)
        if entry.is_filler:
            sources.append(FILLER)
            continue
        shape = header.whole_shape(entry)
        name, start, stop = split_piece_name(entry.name) or (entry.name, 0, math.prod(shape))
        data = FileSpan(shard.path, len(raw) + entry.offset, entry.nbytes)
        sources.append(len(fragments))
        fragments.append(Fragment(shard.part, name, shape, entry.dtype, start, stop, shard.tier, data=data))
    regions, blocks = _regions(sources, sizes, block_bytes)
    return ShardPlan(shard, raw, tuple(fragments), regions, nbytes, first_block, blocks)


def long_runs(fragments: Sequence[Fragment], *, in_memory: bool = True) -> dict[int, int]:
    """For each fragment that is part of a long run, by its position: the position of the first fragment of that run. A
    run is adjacent bytes of a swap file or, with ``in_memory``, of the host's memory. Where it begins as far behind the
    start of a page in the checkpoint's file as it does there, this file can share pages with the swap file, or be
    written from the memory itself."""
    found: dict[int, int] = {}
    run: list[int] = []  # the fragments of the run so far
    path, stop, run_bytes = "", -1, 0

    def end() -> None:
        if run_bytes >= (SHARED_BYTES_MIN if path else HOST_BYTES_MIN):
            found.update(dict.fromkeys(run, run[0]))
        run.clear()

    for number, fragment in enumerate(fragments):
        item_bytes, place = ITEM_BYTES[fragment.dtype], fragment.place
        nbytes = (fragment.stop - fragment.start) * item_bytes
        if nbytes == 0:
            continue
        # In the file, each piece begins at a multiple of the bytes of its elements.
        if place is None or place[1] % item_bytes or not (place[0] or in_memory):
            stop = -1
            continue
        if place != (path, stop):
            end()
            path, run_bytes = place[0], 0
        run.append(number)
        run_bytes += nbytes
        stop = place[1] + nbytes
    end()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class WriteOp:
    """One contiguous write of ``nbytes`` at byte ``offset`` of file number ``file`` of the plan. ``block`` is the
    number of its first digest in the rank's table.

    Its spans, as int64 columns: ``span_bytes`` of a ``source``, as in ``Regions``, from that source's byte
    ``span_start`` on. Whole blocks, but for the last of a source. ``place``: where all of these bytes lie one after the
    other, as ``Fragment.place``, and as far behind the start of a page as in the file: those of a swap file may share
    its pages, those in host memory are written from there. None: they are staged.
    """

    file: int
    offset: int
    nbytes: int
    block: int
    source: Ints
    span_start: Ints
    span_bytes: Ints
    place: tuple[str, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """All that one rank writes: ``ops`` in the order in which their sources are read. The first ``urgent`` ones are of
    the parts of the state that may change at any time. Each block of ``block_bytes`` has a digest in the rank's table,
    which has ``table_bytes``."""

    files: tuple[ShardPlan, ...]
    ops: tuple[WriteOp, ...]
    urgent: int
    block_bytes: int

    @property
    def table_bytes(self) -> int:
        return max((file.first_block + file.blocks for file in self.files), default=0) * DIGEST_BYTES

    @property
    def tensor_bytes(self) -> int:
        return sum(int(file.pieces.nbytes.sum()) for file in self.files)


def plan_writes(
    files: Iterable[ShardPlan],
    later: Collection[str] = (),
    *,
    batch_bytes: int,
    block_bytes: int,
    straight: Collection[str] = (),
) -> WritePlan:
    """Cuts the files of one rank into writes of at most ``batch_bytes``, a multiple of ``block_bytes``. The parts in
    ``later`` come last, for they do not change before the others have been read. Those in ``straight`` do not change
    before all is written, so that long runs of their bytes in host memory can be written from there, without a copy."""
    files = tuple(files)
    ops = [op for number, file in enumerate(files) for op in _cut(file, number, batch_bytes, block_bytes, straight)]
    ops.sort(key=lambda op: files[op.file].shard.part in later)
    urgent = sum(files[op.file].shard.part not in later for op in ops)
    return WritePlan(files, tuple(ops), urgent, block_bytes)


def _cut(
    plan: ShardPlan, number: int, batch_bytes: int, block_bytes: int, straight: Collection[str]
) -> Iterator[WriteOp]:
    """The writes of one file. Each of the ``long_runs`` has writes of its own."""
    long = long_runs(plan.fragments, in_memory=plan.shard.part in straight)
    regions = plan.regions
    region, block = ragged(block_count(regions.nbytes, block_bytes))  # a row for each block
    source, start = regions.source[region], block * block_bytes
    nbytes = np.minimum(regions.nbytes[region] - start, block_bytes)
    at = regions.start[region] + start
    run = np.array([long.get(one, -1) for one in regions.source.tolist()], np.int64)[region]
    for first, run_stop in runs(run):
        while first < run_stop:
            stop = first + int(
                np.searchsorted(at[first:run_stop] + nbytes[first:run_stop], at[first] + batch_bytes, "right")
            )
            begins = np.array([begin for begin, _ in runs(source[first:stop])], np.int64)
            spans = source[first:stop][begins], start[first:stop][begins], np.add.reduceat(nbytes[first:stop], begins)
            total = int(nbytes[first:stop].sum())
            place = plan.fragments[source[first]].place if run[first] >= 0 else None
            if place is not None:
                place = place[0], place[1] + int(start[first])
            yield WriteOp(number, int(at[first]), total, plan.first_block + first, *spans, place)
            first = stop
