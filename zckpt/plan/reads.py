"""Plans reads from ranges of pieces. Blocks are read whole if their digests are checked, adjacent bytes are read
together, each byte is read once, and long ranges go straight to their target. Where another request would cost more,
the bytes between two ranges are read too. Equally spaced ranges are read as one, and copied with one stride."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zckpt.format.limits import DATA_ALIGNMENT_BYTES as PAGE_BYTES
from zckpt.geometry import ragged, runs_of_equal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from zckpt.geometry import Ints
    from zckpt.plan.reshard import PieceRanges

SEGMENTS_MAX = 511
"""The most segments of one read. A segment may need two vectors, and the read one more. Linux allows 1024 vectors."""
STRAIGHT_BYTES_MIN = 256 << 10
"""The fewest adjacent bytes that direct I/O reads straight into their target. Fewer bytes are copied from a buffer in
about the same time."""
STRAIGHT_BYTES_MAX = 16 << 20
"""The most bytes of one read or write that is straight as a whole, unless a staging buffer is larger. Such a read or
write needs no buffer. The larger it is, the less of the processor's time it takes for each byte. But if it were larger
than this, some threads might end long before others."""
SPACED_GAP_BYTES = 64 << 10
"""The most bytes between two equally spaced ranges that are read together. A further request takes longer than reading
so many bytes."""


@dataclass(frozen=True, slots=True)
class TargetPlaces:
    """Where the targets of a load are in the memory of the host. ``address`` is an int64 column with the address of the
    first byte of each target, or -1 for a target that cannot take stored bytes as they are, because it is on a device
    or has another dtype. Direct I/O needs memory whose address is a multiple of ``memory_bytes``, and ranges of a file
    that begin and end at multiples of ``offset_bytes``. Both are powers of two."""

    address: Ints
    memory_bytes: int
    offset_bytes: int


class Segments(NamedTuple):
    """The segments of a read as int64 columns. A segment is a range of consecutive bytes of one block, or a gap: bytes
    between two such ranges that nobody wants. No copies are made of a gap, and it is neither the first segment nor the
    last one.

    ``nbytes`` is the size of the segment, ``block`` the number of the digest that covers exactly these bytes (-1 if
    none is checked), and ``copy_count`` the number of copies that are made of ranges of the segment. ``address`` is the
    memory that takes all of the segment as it is, or -1 if there is no such memory. ``straight``, a column of bool,
    says whether direct I/O reads the segment straight into that memory, except for its edges. ``copies`` has the copies
    of all segments, whose ``source`` is a byte of the segment.
    """

    nbytes: Ints
    block: Ints
    address: Ints
    straight: NDArray[np.bool_]
    copy_count: Ints
    copies: Copies


class StridedCopy(NamedTuple):
    """A copy of equally spaced runs of ``run_bytes`` bytes. The first of the ``runs`` runs begins at byte ``source``,
    and goes to byte ``target_offset`` of target number ``target``. Each further one begins ``source_stride`` bytes
    later, and goes to a place ``target_stride`` bytes later in the target. Bytes of the target count as stored bytes,
    too."""

    target: int
    target_offset: int
    target_stride: int
    runs: int
    run_bytes: int
    source: int
    source_stride: int

    @property
    def source_bytes(self) -> int:
        """The number of bytes from the begin of the first run to the end of the last one."""
        return (self.runs - 1) * self.source_stride + self.run_bytes


class Copies(NamedTuple):
    """Copies as int64 columns, which are the fields of ``StridedCopy``."""

    target: Ints
    target_offset: Ints
    target_stride: Ints
    runs: Ints
    run_bytes: Ints
    source: Ints
    source_stride: Ints

    def take(self, which: slice | Ints | NDArray[np.bool_]) -> Copies:
        """Returns the copies that ``which`` selects."""
        return Copies._make(column[which] for column in self)

    def rows(self) -> list[StridedCopy]:
        """Returns the copies as objects."""
        return list(map(StridedCopy._make, zip(*(column.tolist() for column in self), strict=True)))


class Ranges(NamedTuple):
    """Ranges of a file, and the memory that they are read into, as int64 columns: ``nbytes`` bytes from byte ``start``
    of the file on go to ``address``."""

    start: Ints
    nbytes: Ints
    address: Ints


class ReadOp(NamedTuple):
    """One contiguous read of ``nbytes`` bytes at byte ``offset`` of file number ``file``. ``is_urgent`` says whether
    the file has bytes of an urgent target.

    For direct I/O, the straight segments are cut into two kinds of ranges. The ranges ``inner`` are aligned as direct
    I/O needs it and ascending, and are read straight into their memory. The ranges ``edges`` are the rest of these
    segments. They are read into a buffer together with the other segments, and copied from there, because another read
    may fill the memory beside them.
    """

    file: int
    offset: int
    nbytes: int
    segments: Segments
    inner: Ranges
    edges: Ranges
    is_urgent: bool

    @property
    def is_verified(self) -> bool:
        """Whether the digests of the segments are compared."""
        return int(self.segments.block[0]) >= 0

    @property
    def is_straight(self) -> bool:
        """Whether direct I/O reads all segments straight into their memory, except for their edges."""
        return bool(self.segments.straight.all())


def joined_copies(segments: Segments, wanted: NDArray[np.bool_]) -> list[StridedCopy]:
    """Returns the copies to the targets for which ``wanted`` is true, in the order of the targets. ``source`` is a byte
    of the read. Copies of adjacent bytes to adjacent bytes of one target are joined into one."""
    segment = np.repeat(np.arange(len(segments.nbytes)), segments.copy_count)
    starts = (np.cumsum(segments.nbytes) - segments.nbytes)[segment]
    copies = segments.copies._replace(source=starts + segments.copies.source)
    order = np.lexsort((copies.source, copies.target))
    copies = copies.take(order[wanted[copies.target[order]]])
    target, target_offset, _, runs, run_bytes, source, _ = copies
    if not len(target):
        return []
    begins = np.ones(len(target), bool)
    begins[1:] = (target[1:] != target[:-1]) | (source[1:] != source[:-1] + run_bytes[:-1])
    begins[1:] |= (target_offset[1:] != target_offset[:-1] + run_bytes[:-1]) | (runs[1:] > 1) | (runs[:-1] > 1)
    first = np.flatnonzero(begins)
    return copies.take(first)._replace(run_bytes=np.add.reduceat(run_bytes, first)).rows()


def plan_reads(
    piece_ranges: PieceRanges,
    *,
    data_starts: Sequence[int],
    block_bytes: int,
    verify: bool,
    batch_bytes: int,
    places: TargetPlaces | None = None,
    urgent: int = 0,
    gap_bytes: int = 0,
) -> tuple[ReadOp, ...]:
    """Plans the reads for ``piece_ranges``, file by file. The first ``urgent`` targets are urgent. Files that have
    bytes of them come first, and their reads are urgent too. Among these files, and among the others, the order is
    ascending.

    With ``verify``, each block that has bytes of a range is read whole, and once. Without ``verify``, the bytes of the
    ranges are read, and what lies between two of the equally spaced ranges of a row if that is at most
    ``SPACED_GAP_BYTES`` or ``gap_bytes``. ``data_starts`` has the first data byte of each file. A read has at most
    ``batch_bytes`` bytes. If all of its segments are straight, it may have up to ``STRAIGHT_BYTES_MAX`` bytes, if that
    is more. ``batch_bytes`` is at least ``block_bytes``. Without ``places``, all bytes that are read go through staging
    buffers. Two ranges of a file are read together if there are at most ``gap_bytes`` bytes between them.
    """
    if not verify:  # Ranges with long gaps between them are read one by one.
        gaps = piece_ranges.source_stride - piece_ranges.stop + piece_ranges.start
        piece_ranges = piece_ranges.apart(gaps > max(gap_bytes, SPACED_GAP_BYTES))
    spaced = piece_ranges.spaced
    first = spaced.start // block_bytes
    # From here on, the columns have an item for each row of ranges and each block that may have bytes of it.
    row, number = ragged((spaced.stop - 1) // block_bytes - first + 1)
    number += first[row]
    block_start = number * block_bytes
    block_stop = np.minimum(block_start + block_bytes, piece_ranges.piece_bytes[row])
    parts = spaced.take(row).clip(block_start, block_stop)
    # And from here on, for each copy.
    row, number, block_start, block_stop = (column[parts.row] for column in (row, number, block_start, block_stop))
    source_stride, target_stride = piece_ranges.source_stride[row], piece_ranges.target_stride[row]
    cut_start = piece_ranges.start[row] + parts.first * source_stride + parts.before
    cut_stop = cut_start + (parts.runs - 1) * source_stride + parts.numel
    start, stop = (block_start, block_stop) if verify else (cut_start, cut_stop)
    block = piece_ranges.block[row] + number if verify else np.full(len(row), -1)
    file = piece_ranges.file[row]
    origin = np.array(data_starts, np.int64)[file] + piece_ranges.piece_offset[row]
    is_urgent = np.isin(file, piece_ranges.file[piece_ranges.target < urgent])

    order = np.lexsort((block, origin + stop, origin + start, file, ~is_urgent))
    file, start_at, stop_at, block = file[order], (origin + start)[order], (origin + stop)[order], block[order]
    begins = np.ones(len(order), bool)  # where a segment begins; copies of the same bytes share one
    begins[1:] = file[1:] != file[:-1]
    if verify:
        begins[1:] |= (start_at[1:] != start_at[:-1]) | (stop_at[1:] != stop_at[:-1]) | (block[1:] != block[:-1])
    else:
        for of_file in runs_of_equal(file):
            np.maximum.accumulate(stop_at[slice(*of_file)], out=stop_at[slice(*of_file)])
        begins[1:] |= start_at[1:] >= stop_at[:-1]
    first_copy = np.flatnonzero(begins)
    copies = np.diff(first_copy, append=len(order))
    copy_columns = (
        piece_ranges.target[row][order],
        (piece_ranges.target_offset[row] + parts.first * target_stride + parts.before)[order],
        target_stride[order],
        parts.runs[order],
        parts.numel[order],
        (origin + cut_start)[order] - np.repeat(start_at[begins], copies),
        source_stride[order],
    )
    file, start_at, stop_at, block = file[begins], start_at[begins], stop_at[first_copy + copies - 1], block[begins]
    is_urgent = is_urgent[order][begins]
    nbytes = stop_at - start_at
    target, target_offset, _, runs, run_bytes, _, _ = (column[first_copy] for column in copy_columns)
    if places is None:
        places = TargetPlaces(np.full(int(target.max(initial=-1)) + 1, -1), 1, 1)
    alone = (copies == 1) & (runs == 1) & (run_bytes == nbytes) & (places.address[target] >= 0)
    address = np.where(alone, places.address[target] + target_offset, -1)
    cuts = _cuts(file, start_at, stop_at, address, batch_bytes, places, gap_bytes)
    after_gap = np.append(False, start_at[1:] > stop_at[:-1])
    after_gap[cuts] = False
    gap = np.flatnonzero(after_gap)  # the segments that come after a gap in one read
    if len(gap):
        start_at, stop_at = np.insert(start_at, gap, stop_at[gap - 1]), np.insert(stop_at, gap, start_at[gap])
        file, is_urgent = np.insert(file, gap, file[gap]), np.insert(is_urgent, gap, is_urgent[gap])
        first_copy = np.insert(first_copy, gap, first_copy[gap])
        block, address, copies = np.insert(block, gap, -1), np.insert(address, gap, -1), np.insert(copies, gap, 0)
        nbytes = stop_at - start_at
        cuts = (np.array(cuts) + np.searchsorted(gap, cuts)).tolist()
    straight, inner, edges = _straight(cuts, start_at, stop_at, address, places)
    bounds = [*cuts, len(file)]
    first, last = np.array(bounds[:-1], np.int64), np.array(bounds[1:], np.int64) - 1
    of_segments = _cut((nbytes, block, address, straight, copies), bounds)
    of_copies = _cut(copy_columns, np.append(first_copy, len(order))[bounds].tolist())
    segments = (Segments._make((*one, Copies._make(other))) for one, other in zip(of_segments, of_copies, strict=True))
    columns = (file[first], start_at[first], stop_at[last] - start_at[first])
    scalars = (column.tolist() for column in columns)
    return tuple(starmap(ReadOp, zip(*scalars, segments, inner, edges, is_urgent[first].tolist(), strict=True)))


def _cut(columns: Sequence[NDArray[Any]], bounds: Sequence[int]) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yields, for each two neighbouring ``bounds``, the rows of all ``columns`` from the first bound to the second."""
    parts = [slice(begin, end) for begin, end in pairwise(bounds)]
    return zip(*([column[part] for part in parts] for column in columns), strict=True)


def _cuts(
    file: Ints, start: Ints, stop: Ints, address: Ints, batch_bytes: int, places: TargetPlaces, gap_bytes: int
) -> list[int]:
    """Returns the first segment of each read. The columns have the file of each segment, the bytes of the file at which
    it begins and ends, and the address of its memory, or -1."""
    gap = start[1:] - stop[:-1]
    joins = np.zeros(len(file), bool)  # whether a segment may be in one read with the one before it
    joins[1:] = (file[1:] == file[:-1]) & (gap >= 0) & (gap <= gap_bytes)
    can_be_straight = (address >= 0) & ((address - start) % places.memory_bytes == 0)
    # Whether they are adjacent in the file and in memory, and can be straight.
    joins_in_memory = np.zeros(len(file), bool)
    joins_in_memory[1:] = joins[1:] & (gap == 0) & can_be_straight[1:] & can_be_straight[:-1]
    joins_in_memory[1:] &= np.diff(address - start) == 0
    straight_stops = np.append(np.flatnonzero(~joins_in_memory), len(file))  # the first segment after each such run
    # A read of so many bytes of one run is straight, however much of its first and last page is not aligned.
    straight_bytes = STRAIGHT_BYTES_MIN + 2 * max(PAGE_BYTES, places.memory_bytes, places.offset_bytes)
    cuts = []
    for run, run_stop in runs_of_equal(np.cumsum(~joins)):
        position = run
        while position < run_stop:
            cuts.append(position)
            fits = stop[position:run_stop].searchsorted(start[position] + batch_bytes, "right")
            if can_be_straight[position]:
                straight_stop = straight_stops[straight_stops.searchsorted(position, "right")]
                straight = stop[position:straight_stop].searchsorted(start[position] + STRAIGHT_BYTES_MAX, "right")
                if straight and stop[position + straight - 1] - start[position] >= straight_bytes:
                    fits = max(fits, straight)
            position += min(int(fits), SEGMENTS_MAX)
    return cuts


def _straight(
    cuts: Sequence[int], start: Ints, stop: Ints, address: Ints, places: TargetPlaces
) -> tuple[NDArray[np.bool_], list[Ranges], list[Ranges]]:
    """Returns which segments are read straight into their memory, and the ranges ``inner`` and ``edges`` of each read.

    ``cuts`` has the first segment of each read. ``start`` and ``stop`` are the bytes of the files at which the segments
    begin and end.
    """
    shift = address - start
    begins = np.zeros(len(start), bool)  # where a run of segments begins that are adjacent in memory and in the file
    begins[np.array(cuts, np.int64)] = True
    begins[1:] |= (np.diff(shift) != 0) | (np.diff(address >= 0) != 0)
    first = np.flatnonzero(begins)
    # Where each run ends: its last segment is the one before the next run begins, or the last one of all.
    run_stop = stop[np.roll(begins, -1)]
    # Only whole pages are read directly where that is possible. Before Linux 6.5, bytes may be lost if the process
    # forks during a direct read into a part of a page while another thread writes to the rest of that page.
    step = np.where(shift[first] % PAGE_BYTES, max(places.memory_bytes, places.offset_bytes), PAGE_BYTES)
    inner_start, inner_stop = -(-start[first] // step) * step, run_stop // step * step
    is_straight = (address[first] >= 0) & (shift[first] % places.memory_bytes == 0)
    is_straight &= inner_stop - inner_start >= STRAIGHT_BYTES_MIN
    bounds = np.stack([start[first], inner_start, inner_stop, run_stop], 1)[is_straight]
    segment = first[is_straight]

    def of_each_read(which_bounds: list[int]) -> list[Ranges]:
        """Returns, for each read, the ranges between two neighbouring columns of ``bounds``."""
        starts, stops = bounds[:, which_bounds], bounds[:, np.add(which_bounds, 1)]
        run, bound = np.nonzero(starts < stops)
        at, nbytes = starts[run, bound], (stops - starts)[run, bound]
        bounds_of_reads = np.searchsorted(segment[run], [*cuts, len(start)]).tolist()
        return [Ranges(*row) for row in _cut((at, nbytes, at + shift[segment[run]]), bounds_of_reads)]

    mask = np.repeat(is_straight, np.diff(first, append=len(start)))
    return mask, of_each_read([1]), of_each_read([0, 2])
