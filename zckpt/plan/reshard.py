"""Finds which bytes of which files hold the ranges of tensors that are to be read."""

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

    from numpy.typing import NDArray

    from zckpt.format.data_file import Header
    from zckpt.format.index import Ints


class ElementRange(NamedTuple):
    """The elements ``[start, stop)`` of a tensor, in row-major order, which go to the target from its element
    ``target_start`` on."""

    start: int
    stop: int
    target_start: int


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """Stored pieces of the tensors that are read, as int64 columns. They are ordered by request, and within a request
    by their elements, so that the pieces of a request make up its whole tensor. ``request`` is the number of the
    request and of its target, ``file`` is the number of the data file in the manifest, and the other columns are those
    of ``Piece``."""

    request: Ints
    file: Ints
    start: Ints
    stop: Ints
    offset: Ints
    block: Ints

    def split(self, requests: int) -> Iterator[StoredPieces]:
        """Yields the pieces of each request. ``requests`` is the number of requests."""
        bounds = np.searchsorted(self.request, np.arange(requests + 1)).tolist()
        columns = [getattr(self, name) for name in self.__slots__]
        for first, stop in itertools.pairwise(bounds):
            yield StoredPieces(*(column[first:stop] for column in columns))


@dataclass(frozen=True, slots=True)
class FilePieces:
    """Stored pieces of any tensors, in all their copies, as int64 columns. ``part_id`` is the position of the tensor's
    part in the manifest, and ``row`` is the position of the tensor in that part. ``nbytes`` is the size of the piece in
    bytes. The other columns are those of ``StoredPieces`` and ``Piece``."""

    part_id: Ints
    row: Ints
    file: Ints
    start: Ints
    stop: Ints
    offset: Ints
    block: Ints
    copy: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: slice | Ints | NDArray[np.bool_]) -> FilePieces:
        """Returns the pieces that ``which`` selects."""
        return FilePieces(*(getattr(self, name)[which] for name in self.__slots__))

    def in_file(self, number: int) -> FilePieces:
        """Returns the pieces in file number ``number``. These pieces have to be ``in_order``."""
        return self.take(slice(*np.searchsorted(self.file, [number, number + 1]).tolist()))

    @classmethod
    def in_order(cls, groups: Sequence[FilePieces]) -> FilePieces:
        """Returns the pieces of all groups, ordered by file and by offset. A piece of 0 bytes comes before a piece that
        begins at the same byte."""
        columns = ([getattr(group, name) for group in groups] for name in cls.__slots__)
        pieces = cls(*(np.concatenate([np.empty(0, np.int64), *column]) for column in columns))
        return pieces.take(np.lexsort((pieces.nbytes, pieces.offset, pieces.file)))


@dataclass(frozen=True, slots=True)
class PieceRanges:
    """Ranges of stored pieces, and where they go, as int64 columns.

    A piece occupies ``piece_bytes`` bytes of the data of file number ``file``, from byte ``piece_offset`` on. Its first
    digest has the number ``block`` among the digests of the file. The bytes ``[start, stop)`` of the piece go to byte
    ``target_offset`` of target number ``target``."""

    file: Ints
    piece_offset: Ints
    piece_bytes: Ints
    block: Ints
    start: Ints
    stop: Ints
    target: Ints
    target_offset: Ints


def choose_copies(row: Ints, copy: Ints, holder: Ints, rank: int | None) -> Ints:
    """Chooses the copy of each row that is read: the first copy that ``rank`` alone holds if there is one, otherwise
    copy 0. The columns have an entry for each piece: its row, in ascending order, its copy, and the rank that holds
    it."""
    none = len(copy)
    chosen = np.full(int(row.max(initial=-1)) + 1, none)
    if rank is not None and len(row):
        # The first piece of each copy.
        first = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(copy, prepend=-1) != 0))
        of_rank_alone = first[np.logical_and.reduceat(holder == rank, first)]
        np.minimum.at(chosen, row[of_rank_alone], copy[of_rank_alone])
    return np.where(chosen == none, 0, chosen)


def piece_ranges(
    stored: StoredPieces, ranges: Sequence[Sequence[ElementRange]], item_bytes: Sequence[int]
) -> PieceRanges:
    """Finds where the elements of each request are stored. ``ranges`` has the ranges of elements of each request, and
    ``item_bytes`` the size in bytes of an element of each request."""
    columns = [
        (request, elements.start, elements.stop, elements.target_start)
        for request, of_request in enumerate(ranges)
        for elements in of_request
        if elements.start < elements.stop
    ]
    request, start, stop, target_start = np.array(columns, np.int64).reshape(-1, 4).T
    numel = np.zeros(len(ranges), np.int64)
    np.maximum.at(numel, stored.request, stored.stop)
    base = np.cumsum(numel) - numel  # the number of the first element of each tensor, if all are counted together
    first_element = base[stored.request] + stored.start
    first_piece = np.searchsorted(first_element, base[request] + start, side="right") - 1
    piece_count = np.searchsorted(first_element, base[request] + stop, side="left") - first_piece
    # From here on, the columns have one item for each pair of a range and a piece that has elements of it.
    of_range, number = ragged(piece_count)
    piece = first_piece[of_range] + number
    item = np.array(item_bytes, np.int64)[request[of_range]]
    piece_start, piece_stop = stored.start[piece], stored.stop[piece]
    cut_start = np.maximum(start[of_range], piece_start)
    return PieceRanges(
        file=stored.file[piece],
        piece_offset=stored.offset[piece],
        piece_bytes=(piece_stop - piece_start) * item,
        block=stored.block[piece],
        start=(cut_start - piece_start) * item,
        stop=(np.minimum(stop[of_range], piece_stop) - piece_start) * item,
        target=request[of_range],
        target_offset=(target_start[of_range] + cut_start - start[of_range]) * item,
    )


def slice_ranges(shape: Sequence[int], index: Sequence[slice]) -> tuple[tuple[int, ...], list[ElementRange]]:
    """Returns the shape of ``tensor[index]``, and its elements as row-major ranges. ``index`` has at most one slice for
    each dimension, with the step 1.

    Raises MismatchError if there are more slices than dimensions, if a step is not 1, or if an item of ``index`` is not
    a slice.
    """
    if len(index) > len(shape):
        raise MismatchError(f"{len(index)} slices for a tensor of shape {list(shape)}")
    bounds = []
    for dim, item in zip(shape, (*index, *[slice(None)] * (len(shape) - len(index))), strict=True):
        if not isinstance(item, slice):
            raise MismatchError(f"{item!r} is not a slice")
        start, stop, step = item.indices(dim)
        if step != 1:
            raise MismatchError(f"a slice of step {step}; only step 1 can be read")
        bounds.append((start, max(start, stop)))
    out_shape = tuple(stop - start for start, stop in bounds)
    if math.prod(out_shape) == 0:
        return out_shape, []
    # The last dimension that is not read whole, and all dimensions after it, form one contiguous range.
    last = max((d for d, (dim, size) in enumerate(zip(shape, out_shape, strict=True)) if dim != size), default=0)
    inner = math.prod(shape[last + 1 :])
    length = out_shape[last] * inner if shape else 1
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    base = bounds[last][0] * inner if shape else 0
    ranges = []
    for number, outer in enumerate(itertools.product(*(range(*bound) for bound in bounds[:last]))):
        start = base + sum(position * stride for position, stride in zip(outer, strides, strict=False))
        ranges.append(ElementRange(start, start + length, number * length))
    return out_shape, ranges


def entry_ranges(headers: Mapping[int, Header], block_bytes: int) -> PieceRanges:
    """Returns the ranges that read all entries of these files whole. The target of an entry is its position among the
    entries of all files."""
    rows = [
        (number, entry.offset, entry.nbytes, block)
        for number, header in headers.items()
        for entry, block in zip(header.entries, header.first_blocks(block_bytes), strict=False)
    ]
    file, offset, nbytes, block_column = np.array(rows, np.int64).reshape(-1, 4).T
    zeros, targets = np.zeros(len(rows), np.int64), np.arange(len(rows))
    return PieceRanges(
        file, piece_offset=offset, piece_bytes=nbytes, block=block_column, start=zeros, stop=nbytes, target=targets,
        target_offset=zeros,
    )  # fmt: skip
