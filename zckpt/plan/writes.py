"""Plans the writes that make the data files of a rank."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import DIGEST_BYTES, block_count
from zckpt.geometry import ragged, runs_of_equal
from zckpt.plan.reads import STRAIGHT_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from zckpt.geometry import Ints
    from zckpt.plan.data_files import DataFilePlan


@dataclass(frozen=True, slots=True, eq=False)
class WriteOp:
    """One contiguous write of ``nbytes`` bytes at byte ``offset`` of file number ``file`` of the plan. ``block`` is the
    number of its first digest in the rank's digest table.

    The bytes come from one or several sources. ``source``, ``source_start`` and ``source_bytes`` are int64 columns: of
    each source, as in ``Regions``, the write takes ``source_bytes`` bytes from byte ``source_start`` on. These are
    whole blocks, except that the last block of a source may be shorter. ``address`` is the address of the first of them
    if they are in host memory, and otherwise -1.

    ``place`` says where all of these bytes are adjacent, as ``FragmentPlaces.begin`` does, if they begin as far behind
    the start of a page there as in the data file. Then a swap file may share its pages with the data file, and host
    memory is written without a copy. If ``place`` is None, the bytes are copied to a staging buffer first.
    """

    file: int
    offset: int
    nbytes: int
    block: int
    source: Ints
    source_start: Ints
    source_bytes: Ints
    address: Ints
    place: tuple[str, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """All writes of one rank. ``ops`` are in the order in which their sources are read. The first ``urgent`` of them
    read the parts of the state that may change at any time. Each block of ``block_bytes`` bytes has a digest in the
    rank's digest table."""

    files: tuple[DataFilePlan, ...]
    ops: tuple[WriteOp, ...]
    urgent: int
    block_bytes: int

    @property
    def table_bytes(self) -> int:
        """The size of the rank's digest table in bytes."""
        return max((file.first_block + file.blocks for file in self.files), default=0) * DIGEST_BYTES

    @property
    def tensor_bytes(self) -> int:
        """The number of bytes of all fragments, without headers and fillers."""
        return sum(int(file.pieces.nbytes.sum()) for file in self.files)


def plan_writes(
    files: Iterable[DataFilePlan],
    later: Collection[str] = (),
    *,
    batch_bytes: int,
    block_bytes: int,
    straight: Collection[str] = (),
) -> WritePlan:
    """Cuts the files of one rank into writes of at most ``batch_bytes`` bytes, which is a multiple of ``block_bytes``.

    The parts in ``later`` are written last, because they do not change before all other parts have been read. The parts
    in ``straight`` do not change before everything is written. So long runs of their bytes are written straight from
    host memory, without a copy. Such a write may have up to ``STRAIGHT_BYTES_MAX`` bytes, if that is more than
    ``batch_bytes``.
    """
    files = tuple(files)
    ops = [op for number, file in enumerate(files) for op in _cut(file, number, batch_bytes, block_bytes, straight)]
    ops.sort(key=lambda op: files[op.file].id.part in later)
    urgent = sum(files[op.file].id.part not in later for op in ops)
    return WritePlan(files, tuple(ops), urgent, block_bytes)


def _cut(
    plan: DataFilePlan, number: int, batch_bytes: int, block_bytes: int, straight: Collection[str]
) -> Iterator[WriteOp]:
    """Yields the writes of one file. A long run (see ``FragmentPlaces.long_runs``) shares no write with other bytes."""
    regions = plan.regions
    # The columns below have one item for each block: the number of its region, its number in the region, and so on.
    region, block = ragged(block_count(regions.nbytes, block_bytes))
    source, start = regions.source[region], block * block_bytes
    nbytes = np.minimum(regions.nbytes[region] - start, block_bytes)
    file_start = regions.start[region] + start
    file_stop = file_start + nbytes
    if plan.is_copy:  # all bytes of the file are adjacent in the file that is copied
        run, address = np.zeros(len(region), np.int64), np.full(len(region), -1)
    else:
        first_of_run = plan.places.long_runs(in_memory=plan.id.part in straight)
        # Of a header and of a filler, both are -1.
        number_of_fragment = np.maximum(source, -1)
        run = np.append(first_of_run, -1)[number_of_fragment]
        address = np.append(plan.places.address, -1)[number_of_fragment]
        address = np.where(address < 0, -1, address + start)
    starts, stops = file_start.tolist(), file_stop.tolist()
    firsts: list[int] = []  # the number of the first block of each write
    places: list[tuple[str, int] | None] = []
    for first, run_stop in runs_of_equal(run):
        while first < run_stop:
            place = plan.places.begin(source[first], start[first]) if run[first] >= 0 and not plan.is_copy else None
            is_straight = place is not None and place[0] == ""
            firsts.append(first)
            places.append((plan.id.path, starts[first]) if plan.is_copy else place)
            limit = starts[first] + (max(batch_bytes, STRAIGHT_BYTES_MAX) if is_straight else batch_bytes)
            first = bisect_right(stops, limit, first, run_stop)
    # The columns below have one item for each source of each write. They are computed for all writes of the file at
    # once, because separate calls of numpy for each write would take most of the time of planning.
    is_begin = np.diff(source, prepend=source[0] - 1) != 0
    is_begin[firsts] = True
    begins = np.flatnonzero(is_begin)
    span_source, span_start, span_address = source[begins], start[begins], address[begins]
    span_bytes = np.add.reduceat(nbytes, begins)
    bounds = [*firsts, len(source)]
    edges = np.searchsorted(begins, bounds).tolist()
    blocks, spans = itertools.pairwise(bounds), itertools.starmap(slice, itertools.pairwise(edges))
    for (first, stop), span, place in zip(blocks, spans, places, strict=True):
        total = stops[stop - 1] - starts[first]
        sources = span_source[span], span_start[span], span_bytes[span], span_address[span]
        yield WriteOp(number, starts[first], total, plan.first_block + first, *sources, place)
