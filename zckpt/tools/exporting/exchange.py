"""Plans which rank sends which elements to which other rank, and when, so that each file is written by one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zckpt.geometry import ragged
from zckpt.plan.reshard import piece_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zckpt.geometry import Grid, Ints
    from zckpt.plan.reshard import PieceRanges, RequestedSpan, StoredPieces


@dataclass(frozen=True, slots=True)
class SlicedFiles:
    """Files that are cut into slices of ``slice_bytes``. Each file begins with a new slice, so the last slice of a file
    may be shorter. Slices are numbered through all files. The slices are sent in rounds: in each round each writer gets
    its next slice, until it has had the slices of all its files."""

    slice_bytes: int
    """The size of a slice in bytes."""
    file_bytes: tuple[int, ...]
    """The size of each file in bytes."""
    writer: tuple[int, ...]
    """For each file the rank that writes it."""

    @property
    def count(self) -> Ints:
        """The number of slices of each file."""
        return -(-np.array(self.file_bytes, np.int64) // self.slice_bytes)

    @property
    def starts(self) -> list[int]:
        """The byte at which each file begins, if every slice before it counts as ``slice_bytes`` bytes."""
        count = self.count
        starts: list[int] = ((np.cumsum(count) - count) * self.slice_bytes).tolist()
        return starts

    @property
    def owners(self) -> tuple[Ints, Ints, Ints]:
        """For each slice, its file, the rank that writes it, and the round in which that rank gets it."""
        file, _ = ragged(self.count)
        writer = np.array(self.writer, np.int64)[file]
        order = np.argsort(writer, kind="stable")
        first = np.searchsorted(writer[order], writer[order])
        turn = np.empty(len(file), np.int64)
        turn[order] = np.arange(len(file)) - first
        return file, writer, turn

    def own(self, rank: int) -> list[tuple[int, int, int]]:
        """Returns the slices that ``rank`` writes, round by round. Each is the number of its file, its first byte in
        the file, and its size in bytes."""
        file, writer, _ = self.owners
        mine = np.flatnonzero(writer == rank)
        starts = mine * self.slice_bytes - np.array(self.starts, np.int64)[file[mine]]
        nbytes = np.minimum(np.array(self.file_bytes, np.int64)[file[mine]] - starts, self.slice_bytes)
        return list(zip(file[mine].tolist(), starts.tolist(), nbytes.tolist(), strict=True))

    @property
    def rounds(self) -> int:
        """The number of rounds in which all slices are sent."""
        return int(self.owners[2].max(initial=-1)) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The messages that the ranks send each other in one round, as int64 columns, ordered by ``source``, ``target`` and
    ``position``. Rank ``source`` sends ``runs`` equally spaced runs of elements of its fragment number ``fragment`` to
    rank ``target``. A run has ``run_numel`` elements. The first one begins with element ``start``, and each further one
    ``source_stride`` elements later. In a message, which has ``nbytes`` bytes, they follow each other without gaps. The
    first run goes to byte ``position`` of the slice that ``target`` writes in this round, and each further one
    ``target_stride`` bytes later."""

    source: Ints
    target: Ints
    position: Ints
    target_stride: Ints
    fragment: Ints
    start: Ints
    source_stride: Ints
    run_numel: Ints
    runs: Ints
    nbytes: Ints

    def take(self, rows: Ints) -> Messages:
        """Returns the messages in these rows."""
        return Messages(*(getattr(self, column)[rows] for column in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """The plan of all messages. It has a row for all equally spaced runs that a fragment and a file have in common. The
    messages of a round are made of these rows when the round comes, because there may be many more messages than
    rows."""

    ranges: PieceRanges
    """The held elements that are written, ordered by their places in the files, which count as in
    ``SlicedFiles.starts``."""
    stops: Ints
    """For each row, the byte after the last one that it and the rows before it have in the files."""
    item_bytes: Ints
    """For each row, the size of an element in bytes."""
    slice_bytes: int
    """The size of a slice in bytes."""
    writer: Ints
    """For each slice, the rank that writes it."""
    turn: Ints
    """For each slice, the round in which it is sent."""

    def messages(self, turn: int, rank: int) -> Messages:
        """Returns the messages that ``rank`` sends or receives in round ``turn``."""
        number = np.flatnonzero(self.turn == turn)
        slice_start = number * self.slice_bytes
        first = np.searchsorted(self.stops, slice_start, "right")
        stop = np.searchsorted(self.ranges.target_offset, slice_start + self.slice_bytes)
        # The columns have one item for each pair of a slice and a row that may have bytes of it.
        of_slice, row = ragged(stop - first)
        row += first[of_slice]
        own = (self.ranges.file[row] == rank) | (self.writer[number][of_slice] == rank)
        of_slice, row = of_slice[own], row[own]
        target = self.ranges.in_targets.take(row)
        parts = target.clip(slice_start[of_slice], slice_start[of_slice] + self.slice_bytes)
        # And from here on, one item for each message.
        of_slice, row, target = of_slice[parts.row], row[parts.row], target.take(parts.row)
        ranges, item = self.ranges.take(row), self.item_bytes[row]
        messages = Messages(
            source=ranges.file,
            target=self.writer[number][of_slice],
            position=target.start + parts.first * target.stride + parts.before - slice_start[of_slice],
            target_stride=target.stride,
            fragment=ranges.piece_offset,
            start=(ranges.start + parts.first * ranges.source_stride + parts.before) // item,
            source_stride=ranges.source_stride // item,
            run_numel=parts.numel // item,
            runs=parts.runs,
            nbytes=parts.runs * parts.numel,
        )
        return messages.take(np.lexsort((messages.position, messages.target, messages.source)))


def plan_exchange(
    held: StoredPieces,
    grids: Sequence[Grid],
    wanted: Iterable[RequestedSpan],
    item_bytes: Sequence[int],
    slices: SlicedFiles,
) -> Exchange:
    """Plans what the ranks send each other.

    ``held`` has the elements of each tensor that the ranks hold. In it, ``file`` is the rank and ``offset`` is the
    number of the rank's fragment. ``grids`` has the grid of each tensor. ``wanted`` has the elements of each tensor
    that are written. Their ``target_start`` is their place among the bytes of all files, counted as in
    ``slices.starts``, divided by ``item_bytes``. ``item_bytes`` is the size in bytes of an element of each tensor in
    the files."""
    ranges = piece_ranges(held, grids, wanted, item_bytes)
    ranges = ranges.take(np.argsort(ranges.target_offset, kind="stable"))
    _, writer, turn = slices.owners
    return Exchange(
        ranges,
        np.maximum.accumulate(ranges.in_targets.stop),
        np.array(item_bytes, np.int64)[ranges.target],
        slices.slice_bytes,
        writer,
        turn,
    )
