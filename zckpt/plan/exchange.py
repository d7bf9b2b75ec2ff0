"""Which rank sends which elements to which other one, and when, so that each file is written by one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.index import ragged
from zckpt.plan.reshard import extents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.format.index import Ints
    from zckpt.plan.reshard import Span, StoredPieces


@dataclass(frozen=True, slots=True)
class Slices:
    """Files that lie one behind the other, cut into slices of ``slice_bytes``. Each file begins with a slice of its
    own, so that its last one may be shorter. The numbers of slices count over all files. ``writer`` is the rank that
    writes each file. In a round, each writer gets its next slice, until it has had those of all its files."""

    slice_bytes: int
    file_bytes: tuple[int, ...]
    writer: tuple[int, ...]

    @property
    def count(self) -> Ints:
        """The number of slices of each file."""
        return -(-np.array(self.file_bytes, np.int64) // self.slice_bytes)

    @property
    def starts(self) -> list[int]:
        """The byte at which each file begins."""
        count = self.count
        starts: list[int] = ((np.cumsum(count) - count) * self.slice_bytes).tolist()
        return starts

    @property
    def owners(self) -> tuple[Ints, Ints, Ints]:
        """For each slice: its file, the rank that writes it, and its round."""
        file, _ = ragged(self.count)
        writer = np.array(self.writer, np.int64)[file]
        order = np.argsort(writer, kind="stable")
        first = np.searchsorted(writer[order], writer[order])
        turn = np.empty(len(file), np.int64)
        turn[order] = np.arange(len(file)) - first
        return file, writer, turn

    def own(self, rank: int) -> list[tuple[int, int, int]]:
        """The slices that ``rank`` writes, round by round: file, first byte in it, and bytes."""
        file, writer, _ = self.owners
        mine = np.flatnonzero(writer == rank)
        starts = mine * self.slice_bytes - np.array(self.starts, np.int64)[file[mine]]
        nbytes = np.minimum(np.array(self.file_bytes, np.int64)[file[mine]] - starts, self.slice_bytes)
        return list(zip(file[mine].tolist(), starts.tolist(), nbytes.tolist(), strict=True))

    @property
    def rounds(self) -> int:
        return int(self.owners[2].max(initial=-1)) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """What the ranks send each other, as int64 columns, in the order of ``turn``, ``source``, ``target`` and
    ``position``. In the round ``turn``, the rank ``source`` sends ``numel`` elements of its fragment number
    ``fragment``, from element ``start`` on, to the rank ``target``, for byte ``position`` of the slice that this one is
    to write. They take ``nbytes`` there."""

    turn: Ints
    source: Ints
    target: Ints
    position: Ints
    fragment: Ints
    start: Ints
    numel: Ints
    nbytes: Ints

    def take(self, rows: Ints) -> Messages:
        return Messages(*(getattr(self, column)[rows] for column in self.__dataclass_fields__))

    def of_turn(self, turn: int) -> Messages:
        first, stop = np.searchsorted(self.turn, [turn, turn + 1])
        return self.take(np.arange(first, stop))


def plan_messages(
    held: StoredPieces, spans: Sequence[Sequence[Span]], item_bytes: Sequence[int], slices: Slices, rank: int
) -> Messages:
    """What ``rank`` sends and receives.

    ``held``: of each tensor the elements that the ranks hold, where ``file`` is the rank and ``offset`` the number of
    its fragment. ``spans``: the elements of each tensor that are written; ``sink_start`` is their place among the bytes
    of all files, as ``slices`` counts them, divided by the ``item_bytes`` that an element of this tensor takes there.
    """
    found = extents(held, spans, item_bytes)
    item = np.array(item_bytes, np.int64)[found.sink]
    # Cut where a slice ends: a row for each slice that an extent touches
    first, stop = found.sink_offset, found.sink_offset + found.stop - found.start
    row, number = ragged(-(-stop // slices.slice_bytes) - first // slices.slice_bytes)
    slice_start = (first[row] // slices.slice_bytes + number) * slices.slice_bytes
    begin, end = np.maximum(first[row], slice_start), np.minimum(stop[row], slice_start + slices.slice_bytes)
    _, writer, turn = slices.owners
    slice_number = slice_start // slices.slice_bytes
    messages = Messages(
        turn=turn[slice_number],
        source=found.file[row],
        target=writer[slice_number],
        position=begin - slice_start,
        fragment=found.piece_offset[row],
        start=(found.start[row] + begin - first[row]) // item[row],
        numel=(end - begin) // item[row],
        nbytes=end - begin,
    )
    order = np.lexsort((messages.position, messages.target, messages.source, messages.turn))
    return messages.take(order[(messages.source[order] == rank) | (messages.target[order] == rank)])
