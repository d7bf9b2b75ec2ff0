"""From extents to reads: whole blocks where digests are to be checked, neighbours joined, each byte read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zckpt.plan.reshard import Extent

SEGMENTS_MAX = 512
"""Per read: below the operating system's limit on vectors, 1024."""


@dataclass(frozen=True, slots=True)
class Copy:
    """``nbytes`` from byte ``source`` of a segment to byte ``target`` of sink ``sink``."""

    source: int
    nbytes: int
    sink: int
    target: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive bytes of a read. ``block`` is the number of the digest that covers exactly them, or -1 for none."""

    nbytes: int
    block: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One contiguous read of ``nbytes`` at byte ``offset`` of file ``file``."""

    file: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


def plan_reads(
    extents: Iterable[Extent], *, data_starts: Sequence[int], block_bytes: int, verify: bool, batch_bytes: int
) -> tuple[ReadOp, ...]:
    """The reads for ``extents``, file by file in ascending order.

    With ``verify`` every block that an extent touches is read whole, once, however many extents touch it; without, only
    the wanted bytes are. ``data_starts`` holds the first data byte of each file. ``batch_bytes`` is at least
    ``block_bytes``.
    """
    cuts: dict[tuple[int, int, int, int], list[Copy]] = {}
    for extent in extents:
        origin = data_starts[extent.file] + extent.piece_offset
        position = extent.start
        while position < extent.stop:
            number = position // block_bytes
            start, stop = number * block_bytes, min((number + 1) * block_bytes, extent.piece_bytes)
            end = min(stop, extent.stop)
            block = extent.block + number
            if not verify:
                start, stop, block = position, end, -1
            copy = Copy(position - start, end - position, extent.sink, extent.sink_offset + position - extent.start)
            cuts.setdefault((extent.file, origin + start, origin + stop, block), []).append(copy)
            position = end
    ops: list[ReadOp] = []
    segments: list[Segment] = []
    file = offset = stop = -1

    def flush() -> None:
        if segments:
            ops.append(ReadOp(file, offset, stop - offset, tuple(segments)))
            segments.clear()

    for next_file, next_start, next_stop, block in sorted(cuts):
        joins = next_file == file and next_start == stop and next_stop - offset <= batch_bytes
        if not joins or len(segments) == SEGMENTS_MAX:
            flush()
            file, offset = next_file, next_start
        segments.append(Segment(next_stop - next_start, block, tuple(cuts[next_file, next_start, next_stop, block])))
        stop = next_stop
    flush()
    return tuple(ops)
