"""From extents to reads: whole blocks where digests are to be checked, neighbours joined, each byte read once, and
straight into its place where that can be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.index import ragged, runs
from zckpt.format.limits import DATA_ALIGNMENT_BYTES as PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zckpt.format.index import Ints
    from zckpt.plan.reshard import Extents

SEGMENTS_MAX = 511
"""The most segments of one read. Each may need two vectors, and the read one more; the operating system allows 1024."""
STRAIGHT_BYTES_MIN = 256 << 10
"""The fewest adjacent bytes that direct I/O reads straight into their place. Fewer are copied from a buffer as fast."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the sinks of a load lie in the host's memory.

    ``address``: of the first byte of each sink, int64; -1 for those that stored bytes cannot go into as they are, on
    devices or of another dtype. ``memory_bytes`` and ``offset_bytes``, powers of two: direct I/O takes memory whose
    address is a multiple of the former, and ranges of a file that begin and end at multiples of the latter.
    """

    address: Ints
    memory_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive bytes of a read, and where they go, as int64 columns.

    For each segment its ``nbytes``, the number of the digest that covers exactly them (``block``, -1 for none), and how
    many ``copies`` there are of parts of it. ``address``: the memory that all of it goes to as it is, -1 where there is
    no such memory; ``straight``, a column of bool: whether direct I/O reads it straight into that memory, but for its
    edges. For each copy: ``copy_bytes`` from byte ``source`` of the segment to byte ``target`` of sink
    ``sink``.
    """

    nbytes: Ints
    block: Ints
    address: Ints
    straight: NDArray[np.bool_]
    copies: Ints
    source: Ints
    copy_bytes: Ints
    sink: Ints
    target: Ints


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of a file and the memory that they go to as they are, as int64 columns: ``nbytes`` from byte ``start`` of
    the file on, to ``address``."""

    start: Ints
    nbytes: Ints
    address: Ints


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One contiguous read of ``nbytes`` at byte ``offset`` of file ``file``.

    For direct I/O, the segments that are ``straight`` are cut in two: the ranges ``inner``, ascending and aligned as it
    asks for, which are read straight into their memory; and ``edges``, what is left of these segments, which is read
    into a buffer with all others and copied from there, since another read may fill what lies beside it.
    """

    file: int
    offset: int
    nbytes: int
    segments: Segments
    inner: Ranges
    edges: Ranges


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes of a read and where they go, as int64 columns: ``nbytes`` from byte ``start`` of the read on, to byte
    ``target`` of sink ``sink``."""

    start: Ints
    nbytes: Ints
    sink: Ints
    target: Ints


def joined_copies(segments: Segments, wanted: NDArray[np.bool_]) -> Copies:
    """Returns the copies to the sinks for which ``wanted`` is true, in order of their sinks. Copies of adjacent bytes
    to adjacent bytes of one sink are joined into one."""
    segment = np.repeat(np.arange(len(segments.nbytes)), segments.copies)
    at = (np.cumsum(segments.nbytes) - segments.nbytes)[segment] + segments.source
    order = np.lexsort((at, segments.sink))
    order = order[wanted[segments.sink[order]]]
    start, nbytes, sink, target = (
        column[order] for column in (at, segments.copy_bytes, segments.sink, segments.target)
    )
    begins = np.ones(len(order), bool)
    begins[1:] = (sink[1:] != sink[:-1]) | (start[1:] != start[:-1] + nbytes[:-1])
    begins[1:] |= target[1:] != target[:-1] + nbytes[:-1]
    first = np.flatnonzero(begins)
    return Copies(start[first], np.add.reduceat(nbytes, first) if len(first) else nbytes, sink[first], target[first])


def plan_reads(
    extents: Extents,
    *,
    data_starts: Sequence[int],
    block_bytes: int,
    verify: bool,
    batch_bytes: int,
    places: Places | None = None,
) -> tuple[ReadOp, ...]:
    """The reads for ``extents``, file by file in ascending order.

    With ``verify`` every block that an extent touches is read whole, once, however many extents touch it; without, only
    the wanted bytes are. ``data_starts`` holds the first data byte of each file. ``batch_bytes`` is at least
    ``block_bytes``. Without ``places``, all that is read goes through staging buffers.
    """
    first = extents.start // block_bytes
    extent, number = ragged((extents.stop - 1) // block_bytes - first + 1)  # an extent for each block that it touches
    number += first[extent]
    wanted_start, piece_bytes = extents.start[extent], extents.piece_bytes[extent]
    block_start, block_stop = number * block_bytes, np.minimum((number + 1) * block_bytes, piece_bytes)
    cut_start, cut_stop = np.maximum(wanted_start, block_start), np.minimum(extents.stop[extent], block_stop)
    start, stop = (block_start, block_stop) if verify else (cut_start, cut_stop)
    block = extents.block[extent] + number if verify else np.full(len(number), -1)
    file = extents.file[extent]
    origin = np.array(data_starts, np.int64)[file] + extents.piece_offset[extent]

    order = np.lexsort((block, origin + stop, origin + start, file))
    file, start_at, stop_at, block = file[order], (origin + start)[order], (origin + stop)[order], block[order]
    begins = np.ones(len(order), bool)  # a segment; what covers the same bytes shares it
    begins[1:] = ((file[1:] != file[:-1]) | (start_at[1:] != start_at[:-1]) | (stop_at[1:] != stop_at[:-1])) | (
        block[1:] != block[:-1]
    )
    first_copy = np.flatnonzero(begins)
    copies = np.diff(first_copy, append=len(order))
    copy_columns = (
        (cut_start - start)[order],
        (cut_stop - cut_start)[order],
        extents.sink[extent][order],
        (extents.sink_offset[extent] + cut_start - wanted_start)[order],
    )
    file, start_at, stop_at, block = file[begins], start_at[begins], stop_at[begins], block[begins]
    joins = np.zeros(len(file), bool)  # with the segment before it
    joins[1:] = (file[1:] == file[:-1]) & (start_at[1:] == stop_at[:-1])
    cuts = []  # the first segment of each read
    for run, run_stop in runs(np.cumsum(~joins)):
        position = run
        while position < run_stop:
            cuts.append(position)
            fits = int(np.searchsorted(stop_at[position:run_stop], start_at[position] + batch_bytes, side="right"))
            position += min(fits, SEGMENTS_MAX)

    nbytes = stop_at - start_at
    _, copy_bytes, sink, target = (column[first_copy] for column in copy_columns)
    if places is None:
        places = Places(np.full(int(sink.max(initial=-1)) + 1, -1), 1, 1)
    alone = (copies == 1) & (copy_bytes == nbytes) & (places.address[sink] >= 0)
    address = np.where(alone, places.address[sink] + target, -1)
    straight, inner, edges = _straight(cuts, start_at, stop_at, address, places)
    ops = []
    for (begin, end), own_inner, own_edges in zip(pairwise([*cuts, len(file)]), inner, edges, strict=True):
        own, own_copies = slice(begin, end), slice(int(first_copy[begin]), int(first_copy[end - 1] + copies[end - 1]))
        segments = Segments(
            nbytes[own], block[own], address[own], straight[own], copies[own],
            *(column[own_copies] for column in copy_columns),
        )  # fmt: skip
        offset, stop_byte = int(start_at[begin]), int(stop_at[end - 1])
        ops.append(ReadOp(int(file[begin]), offset, stop_byte - offset, segments, own_inner, own_edges))
    return tuple(ops)


def _straight(
    cuts: Sequence[int], start: Ints, stop: Ints, address: Ints, places: Places
) -> tuple[NDArray[np.bool_], list[Ranges], list[Ranges]]:
    """Which segments are straight, and for each read its ``inner`` and its ``edges``. ``cuts``: the first segment of
    each read; ``start`` and ``stop``: the bytes of the files at which the segments begin and end."""
    shift = address - start
    begins = np.zeros(len(start), bool)  # a run of segments that lie in memory as they lie in the file
    begins[np.array(cuts, np.int64)] = True
    begins[1:] |= (np.diff(shift) != 0) | (np.diff(address >= 0) != 0)
    first = np.flatnonzero(begins)
    run_stop = stop[np.roll(begins, -1)]  # of the segments before those that begin a run; the last one, for the first
    # Whole pages where that can be: before Linux 6.5, if the process forks during a direct read into a part of a page,
    # and another thread writes to the rest of that page, the bytes that were read may be lost.
    step = np.where(shift[first] % PAGE_BYTES, max(places.memory_bytes, places.offset_bytes), PAGE_BYTES)
    inner_start, inner_stop = -(-start[first] // step) * step, run_stop // step * step
    is_straight = (address[first] >= 0) & (shift[first] % places.memory_bytes == 0)
    is_straight &= inner_stop - inner_start >= STRAIGHT_BYTES_MIN
    bounds = np.stack([start[first], inner_start, inner_stop, run_stop], 1)[is_straight]
    segment = first[is_straight]

    def of_each_read(which_bounds: list[int]) -> list[Ranges]:
        """The ranges between two neighbouring columns of ``bounds``."""
        starts, stops = bounds[:, which_bounds], bounds[:, np.add(which_bounds, 1)]
        run, column = np.nonzero(starts < stops)
        at, nbytes = starts[run, column], (stops - starts)[run, column]
        columns = (at, nbytes, at + shift[segment[run]])
        cut = np.searchsorted(segment[run], [*cuts, len(start)]).tolist()
        return [Ranges(*(one[a:b] for one in columns)) for a, b in pairwise(cut)]

    mask = np.repeat(is_straight, np.diff(first, append=len(start)))
    return mask, of_each_read([1]), of_each_read([0, 2])
