"""Finds which bytes of which files hold the ranges of tensors that are to be read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.errors import UnsupportedError
from zckpt.geometry import Span, Spans, ragged, same_order, spans_in_both
from zckpt.orders import ROWS_MAX, Spaced, rectangles_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from zckpt.format.data_file import Header
    from zckpt.geometry import Grid, Ints


class RequestedSpan(NamedTuple):
    """Elements that are read for a request. They go to the target of the request, from its element ``target_start`` on,
    in the order of the span."""

    request: int
    span: Span
    target_start: int = 0


@dataclass(frozen=True, slots=True)
class StoredPieces(Spans):
    """Stored pieces of the tensors that are read. They are ordered by request, and within a request by their elements,
    so that the pieces of a request make up its whole tensor. ``tensor`` is the number of the request and of its target,
    ``file`` is the number of the data file in the manifest. ``offset`` and ``block`` are those of ``Rows``."""

    file: Ints
    offset: Ints
    block: Ints

    def split(self, requests: int) -> Iterator[StoredPieces]:
        """Yields the pieces of each request. ``requests`` is the number of requests."""
        for first, stop in itertools.pairwise(np.searchsorted(self.tensor, np.arange(requests + 1)).tolist()):
            yield self.take(slice(first, stop))


@dataclass(frozen=True, slots=True)
class FilePieces(Spans):
    """Stored pieces of any tensors, in all their copies. ``part_id`` is the position of the tensor's part in the
    manifest, and ``tensor`` is its position in that part. ``nbytes`` is the size of the piece in bytes. The
    other columns are those of ``StoredPieces`` and ``Rows``."""

    part_id: Ints
    file: Ints
    offset: Ints
    block: Ints
    copy: Ints
    nbytes: Ints

    def in_file(self, number: int) -> FilePieces:
        """Returns the pieces in file number ``number``. These pieces have to be ``in_order``."""
        return self.take(slice(*np.searchsorted(self.file, [number, number + 1]).tolist()))

    @classmethod
    def in_order(cls, groups: Sequence[FilePieces]) -> FilePieces:
        """Returns the pieces of all groups, ordered by file and by offset. A piece of 0 bytes comes before a piece that
        begins at the same byte."""
        pieces = cls.concatenated(groups)
        return pieces.take(np.lexsort((pieces.nbytes, pieces.offset, pieces.file)))


@dataclass(frozen=True, slots=True)
class PieceRanges:
    """Ranges of stored pieces, and where they go, as int64 columns.

    A piece occupies ``piece_bytes`` bytes of the data of file number ``file``, from byte ``piece_offset`` on. Its first
    digest has the number ``block`` among the digests of the file. A row has ``runs`` equally spaced ranges of the
    piece. The first one is its bytes ``[start, stop)``, which go to byte ``target_offset`` of target number ``target``.
    Each further one begins ``source_stride`` bytes later in the piece, and goes to a place ``target_stride`` bytes
    later in the target."""

    file: Ints
    piece_offset: Ints
    piece_bytes: Ints
    block: Ints
    start: Ints
    stop: Ints
    target: Ints
    target_offset: Ints
    runs: Ints
    source_stride: Ints
    target_stride: Ints

    @classmethod
    def whole(cls, rows: Sequence[tuple[int, int, int, int]]) -> PieceRanges:
        """Returns the ranges of whole pieces, each of which goes to the target of its own number. ``rows``: the file,
        the offset, the size in bytes and the first block of each piece."""
        file, offset, nbytes, block = np.array(rows, np.int64).reshape(-1, 4).T
        zeros, ones, targets = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64), np.arange(len(rows))
        return cls(
            file, piece_offset=offset, piece_bytes=nbytes, block=block, start=zeros, stop=nbytes, target=targets,
            target_offset=zeros, runs=ones, source_stride=nbytes, target_stride=nbytes,
        )  # fmt: skip

    @property
    def spaced(self) -> Spaced:
        """The bytes of each row, counted in its piece."""
        return Spaced(self.start, self.stop - self.start, self.runs, self.source_stride)

    @property
    def in_targets(self) -> Spaced:
        """The bytes to which each row goes, counted in its target."""
        return Spaced(self.target_offset, self.stop - self.start, self.runs, self.target_stride)

    def take(self, rows: Ints) -> PieceRanges:
        """Returns the rows with these numbers."""
        return PieceRanges(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def apart(self, which: NDArray[np.bool_]) -> PieceRanges:
        """Returns the same ranges. Those of the rows for which ``which`` is true are in a row of their own each. Raises
        UnsupportedError if there are too many for the memory."""
        if not (which & (self.runs > 1)).any():
            return self
        count = np.where(which, self.runs, 1)
        if int(count.sum()) > ROWS_MAX:
            raise UnsupportedError(
                f"a tensor would be read in more than {ROWS_MAX:,} ranges with gaps between them",
                hint="read it with verify=True, or in smaller slices",
            )
        row, number = ragged(count)
        rows = self.take(row)
        return replace(
            rows,
            start=rows.start + number * rows.source_stride,
            stop=rows.stop + number * rows.source_stride,
            target_offset=rows.target_offset + number * rows.target_stride,
            runs=np.where(which, 1, self.runs)[row],
        )


def choose_copies(row: Ints, copy: Ints, holder: Ints, rank: int | None) -> Ints:
    """Chooses the copy of each row that is read: the first copy that ``rank`` alone holds if there is one, otherwise
    copy 0. The columns have for each piece its row, in ascending order, its copy, and the rank that holds it."""
    none = len(copy)
    chosen = np.full(int(row.max(initial=-1)) + 1, none)
    if rank is not None and len(row):
        # The first piece of each copy.
        first = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(copy, prepend=-1) != 0))
        of_rank_alone = first[np.logical_and.reduceat(holder == rank, first)]
        np.minimum.at(chosen, row[of_rank_alone], copy[of_rank_alone])
    return np.where(chosen == none, 0, chosen)


def piece_ranges(
    stored: StoredPieces, grids: Sequence[Grid], wanted: Iterable[RequestedSpan], item_bytes: Sequence[int] | Ints
) -> PieceRanges:
    """Finds where the elements that are ``wanted`` are stored. ``grids`` has the grid of the tensor of each request, in
    whose order the tensor is stored, and ``item_bytes`` the size in bytes of an element of each request."""
    item_of_request = np.array(item_bytes, np.int64)
    tensor, spaced, target_start, target_stride = _in_order_of(grids, wanted)
    # From here on, the columns have one item for each pair of a row and a piece that may have elements of it.
    row, piece, common = spans_in_both(Spans(tensor, spaced.start, spaced.stop), stored)
    spaced = spaced.take(row)
    parts = spaced.clip(common.start, common.stop)
    # And from here on, one item for each part of a row that is in one piece.
    row, piece, stride = row[parts.row], piece[parts.row], spaced.stride[parts.row]
    item = item_of_request[tensor[row]]
    start = spaced.start[parts.row] + parts.first * stride + parts.before - stored.start[piece]
    return PieceRanges(
        file=stored.file[piece],
        piece_offset=stored.offset[piece],
        piece_bytes=stored.numel[piece] * item,
        block=stored.block[piece],
        start=start * item,
        stop=(start + parts.numel) * item,
        target=tensor[row],
        target_offset=(target_start[row] + parts.first * target_stride[row] + parts.before) * item,
        runs=parts.runs,
        source_stride=stride * item,
        target_stride=target_stride[row] * item,
    )


def _in_order_of(grids: Sequence[Grid], wanted: Iterable[RequestedSpan]) -> tuple[Ints, Spaced, Ints, Ints]:
    """Returns the elements that are ``wanted``, in the order in which they are stored, as rows of equally spaced runs:
    the request of each row, its runs, the element of the target to which its first run goes, and the number of elements
    from there to the place of the next run."""
    numbers: list[int] = []  # four for each span, in one list, which numpy converts in half the time
    tables = []
    for request, (own, start, stop), target_start in wanted:
        grid = grids[request]
        if same_order(own, grid):
            if start < stop:
                numbers += (request, start, stop, target_start)
            continue
        one, other, numel, runs, one_stride, other_stride = rectangles_in(Span(own, start, stop), grid)
        columns = (np.full_like(one, request), other, numel, runs, other_stride, target_start + one, one_stride)
        tables.append(np.stack(columns, 1))
    requests, starts, stops, places = np.array(numbers, np.int64).reshape(-1, 4).T
    numel = stops - starts
    single = np.stack([requests, starts, numel, np.ones_like(numel), numel, places, numel], 1)
    tensor, *spaced, target, target_stride = np.concatenate([single, *tables]).T
    return tensor, Spaced(*spaced), target, target_stride


def entry_ranges(headers: Mapping[int, Header], block_bytes: int) -> PieceRanges:
    """Returns the ranges that read all entries of these files whole. The target of an entry is its position among the
    entries of all files."""
    rows = [
        (number, entry.offset, entry.nbytes, block)
        for number, header in headers.items()
        for entry, block in zip(header.entries, header.first_blocks(block_bytes), strict=False)
    ]
    return PieceRanges.whole(rows)
