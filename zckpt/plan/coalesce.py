"""From extents to reads: whole blocks where digests are to be checked, neighbours joined, each byte read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.index import ragged, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zckpt.format.index import Ints
    from zckpt.plan.reshard import Extents

SEGMENTS_MAX = 512
"""Per read: below the operating system's limit on vectors, 1024."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive bytes of a read, and where they go, as int64 columns.

    For each segment its ``nbytes``, the number of the digest that covers exactly them (``block``, -1 for none), and how
    many ``copies`` there are of parts of it. For each copy: ``copy_bytes`` from byte ``source`` of the segment to byte
    ``target`` of sink ``sink``.
    """

    nbytes: Ints
    block: Ints
    copies: Ints
    source: Ints
    copy_bytes: Ints
    sink: Ints
    target: Ints


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One contiguous read of ``nbytes`` at byte ``offset`` of file ``file``."""

    file: int
    offset: int
    nbytes: int
    segments: Segments


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
    extents: Extents, *, data_starts: Sequence[int], block_bytes: int, verify: bool, batch_bytes: int
) -> tuple[ReadOp, ...]:
    """The reads for ``extents``, file by file in ascending order.

    With ``verify`` every block that an extent touches is read whole, once, however many extents touch it; without, only
    the wanted bytes are. ``data_starts`` holds the first data byte of each file. ``batch_bytes`` is at least
    ``block_bytes``.
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
    ops = []
    for run, run_stop in runs(np.cumsum(~joins)):
        position = run
        while position < run_stop:
            offset = int(start_at[position])
            fits = int(np.searchsorted(stop_at[position:run_stop], offset + batch_bytes, side="right"))
            next_position = position + min(fits, SEGMENTS_MAX)
            own = slice(position, next_position)
            first_own = int(first_copy[position])
            last_own = int(first_copy[next_position - 1] + copies[next_position - 1])
            segments = Segments(
                stop_at[own] - start_at[own], block[own], copies[own], *(c[first_own:last_own] for c in copy_columns)
            )
            ops.append(ReadOp(int(file[run]), offset, int(stop_at[next_position - 1]) - offset, segments))
            position = next_position
    return tuple(ops)
