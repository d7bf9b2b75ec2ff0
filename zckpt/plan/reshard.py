"""Interval arithmetic: wanted spans of tensors against stored pieces gives extents of files."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.errors import MismatchError
from zckpt.format.index import ragged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.format.index import Ints
    from zckpt.format.shard import Header


class Span(NamedTuple):
    """Elements ``[start, stop)`` of a tensor, in row-major order, that go to element ``sink_start`` of a sink."""

    start: int
    stop: int
    sink_start: int


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """Stored pieces of the tensors that are wanted, as int64 columns: want by want, in the order of their elements, so
    that those of one want make up all of its tensor. ``want`` is the number of the want and so of its sink; ``file`` a
    position in the manifest, the rest as in ``Piece``."""

    want: Ints
    file: Ints
    start: Ints
    stop: Ints
    offset: Ints
    block: Ints

    def split(self, wants: int) -> Iterator[StoredPieces]:
        """Yields the pieces of each want. ``wants``: the number of wants."""
        bounds = np.searchsorted(self.want, np.arange(wants + 1)).tolist()
        columns = [getattr(self, name) for name in self.__slots__]
        for first, stop in itertools.pairwise(bounds):
            yield StoredPieces(*(column[first:stop] for column in columns))


@dataclass(frozen=True, slots=True)
class Extents:
    """Parts of stored pieces, and the sinks that they go to, as int64 columns. All numbers are bytes, but for ``file``,
    ``sink`` and ``block``: the piece occupies ``piece_bytes`` of the file's data from ``piece_offset`` on, its first
    digest has the number ``block`` in the file, and the bytes ``[start, stop)`` of the piece go to byte ``sink_offset``
    of it."""

    file: Ints
    piece_offset: Ints
    piece_bytes: Ints
    block: Ints
    start: Ints
    stop: Ints
    sink: Ints
    sink_offset: Ints


def choose_copies(row: Ints, copy: Ints, holder: Ints, rank: int | None) -> Ints:
    """The copy to be read of each row: the first that ``rank`` alone holds if there is one, else the first. The columns
    have the row of each piece, ascending, its copy and who holds it."""
    none = len(copy)
    chosen = np.full(int(row.max(initial=-1)) + 1, none)
    if rank is not None and len(row):
        first = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(copy, prepend=-1) != 0))  # of each copy
        own = first[np.logical_and.reduceat(holder == rank, first)]
        np.minimum.at(chosen, row[own], copy[own])
    return np.where(chosen == none, 0, chosen)


def extents(stored: StoredPieces, spans: Sequence[Sequence[Span]], item_bytes: Sequence[int]) -> Extents:
    """Where the bytes of each want's ``spans`` lie; ``item_bytes`` are those of an element of each want."""
    columns = [
        (want, span.start, span.stop, span.sink_start)
        for want, own in enumerate(spans)
        for span in own
        if span.start < span.stop
    ]
    want, start, stop, sink_start = np.array(columns, np.int64).reshape(-1, 4).T
    numel = np.zeros(len(spans), np.int64)
    np.maximum.at(numel, stored.want, stored.stop)
    base = np.cumsum(numel) - numel  # as if all tensors lay one behind the other
    at = base[stored.want] + stored.start
    first = np.searchsorted(at, base[want] + start, side="right") - 1
    span, number = ragged(np.searchsorted(at, base[want] + stop, side="left") - first)
    piece = first[span] + number
    item = np.array(item_bytes, np.int64)[want[span]]
    piece_start, piece_stop = stored.start[piece], stored.stop[piece]
    cut_start = np.maximum(start[span], piece_start)
    return Extents(
        file=stored.file[piece],
        piece_offset=stored.offset[piece],
        piece_bytes=(piece_stop - piece_start) * item,
        block=stored.block[piece],
        start=(cut_start - piece_start) * item,
        stop=(np.minimum(stop[span], piece_stop) - piece_start) * item,
        sink=want[span],
        sink_offset=(sink_start[span] + cut_start - start[span]) * item,
    )


def slice_spans(shape: Sequence[int], index: Sequence[slice]) -> tuple[tuple[int, ...], list[Span]]:
    """Shape and row-major spans of ``tensor[index]``. ``index`` has at most one slice per dimension, of step 1.

    Raises MismatchError for more slices than dimensions, another step, or what is no slice.
    """
    if len(index) > len(shape):
        raise MismatchError(f"{len(index)} slices for a tensor of shape {list(shape)}")
    bounds = []
    for dim, part in zip(shape, (*index, *[slice(None)] * (len(shape) - len(index))), strict=True):
        if not isinstance(part, slice):
            raise MismatchError(f"{part!r} is not a slice")
        start, stop, step = part.indices(dim)
        if step != 1:
            raise MismatchError(f"a slice of step {step}; only step 1 can be read")
        bounds.append((start, max(start, stop)))
    out = tuple(stop - start for start, stop in bounds)
    numel = math.prod(out)
    if numel == 0:
        return out, []
    # All dimensions behind the last one that is cut short form one contiguous run
    last = max((d for d, (dim, size) in enumerate(zip(shape, out, strict=True)) if dim != size), default=0)
    inner = math.prod(shape[last + 1 :])
    run = out[last] * inner if shape else 1
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    base = bounds[last][0] * inner if shape else 0
    spans = []
    for number, outer in enumerate(itertools.product(*(range(*bound) for bound in bounds[:last]))):
        start = base + sum(position * stride for position, stride in zip(outer, strides, strict=False))
        spans.append(Span(start, start + run, number * run))
    return out, spans


def file_extents(headers: Mapping[int, Header], block_bytes: int) -> Extents:
    """All entries of these files, whole; each one's sink is its position among all of them."""
    rows = [
        (number, entry.offset, entry.nbytes, block)
        for number, header in headers.items()
        for entry, block in zip(header.entries, header.first_blocks(block_bytes), strict=False)
    ]
    file, offset, nbytes, block_column = np.array(rows, np.int64).reshape(-1, 4).T
    zeros, sinks = np.zeros(len(rows), np.int64), np.arange(len(rows))
    return Extents(file, offset, nbytes, block_column, zeros, nbytes, sinks, zeros)
