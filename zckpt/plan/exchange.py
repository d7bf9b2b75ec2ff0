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
    from zckpt.plan.reshard import StoredPieces, Wanted


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
        """The number of rounds."""
        return int(self.owners[2].max(initial=-1)) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The messages that the ranks send each other, as int64 columns, ordered by ``turn``, ``source``, ``target`` and
    ``position``. In round ``turn``, rank ``source`` sends ``numel`` elements of its fragment number ``fragment``, from
    element ``start`` on, to rank ``target``. They go to byte ``position`` of the slice that ``target`` writes in this
    round, and take ``nbytes`` bytes there."""

    turn: Ints
    source: Ints
    target: Ints
    position: Ints
    fragment: Ints
    start: Ints
    numel: Ints
    nbytes: Ints

    def take(self, rows: Ints) -> Messages:
        """Returns the messages in these rows."""
        return Messages(*(getattr(self, column)[rows] for column in self.__dataclass_fields__))

    def of_turn(self, turn: int) -> Messages:
        """Returns the messages of one round."""
        first, stop = np.searchsorted(self.turn, [turn, turn + 1])
        return self.take(np.arange(first, stop))


def plan_messages(
    held: StoredPieces,
    grids: Sequence[Grid],
    wanted: Iterable[Wanted],
    item_bytes: Sequence[int],
    slices: SlicedFiles,
    rank: int,
) -> Messages:
    """Plans what ``rank`` sends and receives.

    ``held`` has the elements of each tensor that the ranks hold. In it, ``file`` is the rank and ``offset`` is the
    number of the rank's fragment. ``grids`` has the grid of each tensor. ``wanted`` has the elements of each tensor
    that are written. Their ``target_start`` is their place among the bytes of all files, counted as in
    ``slices.starts``, divided by ``item_bytes``. ``item_bytes`` is the size in bytes of an element of each tensor in
    the files."""
    held_ranges = piece_ranges(held, grids, wanted, item_bytes)
    held_ranges = held_ranges.apart(held_ranges.runs > 1)
    item = np.array(item_bytes, np.int64)[held_ranges.target]
    # Each range is cut where a slice ends, so there is a row for each slice that it has bytes of.
    first, stop = held_ranges.target_offset, held_ranges.target_offset + held_ranges.stop - held_ranges.start
    row, number = ragged(-(-stop // slices.slice_bytes) - first // slices.slice_bytes)
    slice_start = (first[row] // slices.slice_bytes + number) * slices.slice_bytes
    begin, end = np.maximum(first[row], slice_start), np.minimum(stop[row], slice_start + slices.slice_bytes)
    _, writer, turn = slices.owners
    slice_number = slice_start // slices.slice_bytes
    messages = Messages(
        turn=turn[slice_number],
        source=held_ranges.file[row],
        target=writer[slice_number],
        position=begin - slice_start,
        fragment=held_ranges.piece_offset[row],
        start=(held_ranges.start[row] + begin - first[row]) // item[row],
        numel=(end - begin) // item[row],
        nbytes=end - begin,
    )
    order = np.lexsort((messages.position, messages.target, messages.source, messages.turn))
    return messages.take(order[(messages.source[order] == rank) | (messages.target[order] == rank)])
