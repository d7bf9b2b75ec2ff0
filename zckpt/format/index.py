"""The index: where the pieces of every tensor lie, grouped by tensor, in columns (spec, "Index").

The pieces of a tensor are stored in the order of their elements and without their starts: each begins where the one
before it ends. So gaps and overlaps cannot be written down, and the columns of a regular layout compress to nothing.

Columns of a chunk, one after the other, little-endian; R rows (tensors), P pieces:

    name    u32[R]   id into the manifest's names, ascending
    count   u32[R]   pieces of the tensor, at least 1
    rank    u32[P]
    tier    u8 [P]
    length  u64[P]   elements
    offset  u64[P]   bytes from the beginning of the file's data
    block   u32[P]   number of the piece's first digest, counted from the file's first
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from zckpt.format.digest import digest
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import INDEX_CHUNK_RAW_BYTES_MAX, TENSOR_BYTES_MAX
from zckpt.format.manifest import Chunk, Manifest, Part
from zckpt.format.names import index_path
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

ROW_COLUMNS = (("name", "<u4"), ("count", "<u4"))
PIECE_COLUMNS = (("rank", "<u4"), ("tier", "u1"), ("length", "<u8"), ("offset", "<u8"), ("block", "<u4"))
ROW_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in ROW_COLUMNS)
PIECE_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in PIECE_COLUMNS)
CHUNK_PIECES = 1 << 16
"""A chunk ends with the row that brings it to so many pieces: one key is resolved by decompressing about 1.6 MB."""
_LEVEL = 9


@dataclass(frozen=True)
class Layout:
    """Rows of one layout as columns: int64 arrays of R rows and P pieces. Equal layouts are stored once."""

    name: Ints
    count: Ints
    rank: Ints
    tier: Ints
    length: Ints
    offset: Ints
    block: Ints

    @cached_property
    def first(self) -> Ints:
        """The number of each row's first piece."""
        return np.cumsum(self.count) - self.count

    def same_as(self, other: Layout) -> bool:
        return all(
            np.array_equal(getattr(self, column), getattr(other, column)) for column, _ in ROW_COLUMNS + PIECE_COLUMNS
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of a tensor in one file. ``offset`` is in bytes of the file's data, ``block`` the
    number of its first digest in the file's, ``copy`` which of the tensor's copies it belongs to."""

    rank: int
    tier: int
    copy: int
    start: int
    stop: int
    offset: int
    block: int


def encode(layouts: Sequence[Layout]) -> tuple[bytes, tuple[Chunk, ...]]:
    """The index file and the manifest's records of its chunks."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
    frames: list[bytes] = []
    chunks: list[Chunk] = []
    offset = 0
    for number, layout in enumerate(layouts):
        for rows, pieces in _cuts(layout.count):
            raw = b"".join(
                getattr(layout, column)[part].astype(dtype).tobytes()
                for columns, part in ((ROW_COLUMNS, rows), (PIECE_COLUMNS, pieces))
                for column, dtype in columns
            )
            frame = compressor.compress(raw)
            frames.append(frame)
            size = (rows.stop - rows.start, pieces.stop - pieces.start)
            chunks.append(Chunk(number, rows.start, *size, offset, len(frame), digest(frame)))
            offset += len(frame)
    return b"".join(frames), tuple(chunks)


def _cuts(count: Ints) -> Iterable[tuple[slice, slice]]:
    """Rows and pieces of each chunk."""
    stops = np.cumsum(count)
    row = piece = 0
    while row < len(count):
        last = int(np.searchsorted(stops, piece + CHUNK_PIECES))
        next_row = min(last + 1, len(count))
        next_piece = int(stops[next_row - 1])
        yield slice(row, next_row), slice(piece, next_piece)
        row, piece = next_row, next_piece


def decode(raw: bytes, chunk: Chunk, manifest: Manifest) -> Layout:
    """One chunk's columns, checked against every part that has its layout. Raises FormatError (I002 to I006)."""
    where = _Where(manifest, chunk)
    if digest(raw) != chunk.digest:
        raise where.broken("I002", "the chunk is damaged")
    layout = _columns(_decompress(raw, where), chunk)
    for part_id, part in enumerate(manifest.parts):
        if part.layout == chunk.layout:
            _check(layout, part_id, part, where)
    return layout


@dataclass(frozen=True, slots=True)
class _Where:
    manifest: Manifest
    chunk: Chunk

    def broken(self, rule: str, message: str, key: str | None = None) -> Exception:
        start = self.chunk.offset
        file = index_path(self.manifest.save_id)
        return broken(rule, message, file=file, start=start, stop=start + self.chunk.nbytes, key=key)


def _decompress(raw: bytes, where: _Where) -> bytes:
    need = where.chunk.rows * ROW_BYTES + where.chunk.pieces * PIECE_BYTES
    if need > INDEX_CHUNK_RAW_BYTES_MAX:
        raise where.broken("I003", f"a chunk of {need} bytes")
    try:
        size = zstandard.frame_content_size(raw)
        if size != need:
            raise where.broken("I003", f"the frame holds {size} bytes, its rows and pieces need {need}")
        if zstandard.get_frame_parameters(raw).window_size > INDEX_CHUNK_RAW_BYTES_MAX:
            raise where.broken("I003", "the frame needs a larger window")
        out = zstandard.ZstdDecompressor().decompress(raw, max_output_size=need, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise where.broken("I003", f"not a zstd frame: {error}") from error
    if len(out) != need:
        raise where.broken("I003", f"the frame holds {len(out)} bytes, its rows and pieces need {need}")
    return out


def _columns(raw: bytes, chunk: Chunk) -> Layout:
    columns = []
    position = 0
    for fields, size in ((ROW_COLUMNS, chunk.rows), (PIECE_COLUMNS, chunk.pieces)):
        for _, dtype in fields:
            column = np.frombuffer(raw, dtype, size, position)
            position += column.nbytes
            columns.append(column.astype(np.int64))
    return Layout(*columns)


def _check(layout: Layout, part_id: int, part: Part, where: _Where) -> None:
    """Rules I004 to I006 for one part. A u64 over 2^63 has become negative here, and is refused as such."""
    manifest, chunk = where.manifest, where.chunk
    rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
    if not np.array_equal(layout.name, np.array(part.names[rows], np.int64)):
        raise where.broken("I004", "the rows are other names than the manifest's")
    if not (layout.count.min() >= 1 and layout.count.sum() == chunk.pieces):
        raise where.broken("I004", f"the rows have {layout.count.sum()} pieces, the chunk {chunk.pieces}")
    numel = np.array([math.prod(manifest.shapes[shape]) for shape in part.shapes[rows]], np.int64)
    item = np.array([ITEM_BYTES[dtype] for dtype in part.dtypes[rows]], np.int64)
    _check_copies(layout, numel, part, where)
    copies = np.where(numel > 0, np.add.reduceat(layout.length, layout.first) // np.maximum(numel, 1), layout.count)
    if copies.max() > manifest.world_size:
        key = f"{part.name}/{manifest.names[layout.name[int(np.argmax(copies))]]}"
        raise where.broken("I005", f"{copies.max()} copies of {manifest.world_size} ranks", key)

    item_of = np.repeat(item, layout.count)
    file = manifest.file_numbers(layout.rank, part_id, layout.tier)
    stop = np.append(manifest.data_bytes, -1)[file]  # where there is no file, the last
    sound = (layout.offset >= 0) & (layout.offset <= TENSOR_BYTES_MAX) & (layout.offset % item_of == 0)
    sound &= layout.offset + layout.length * item_of <= stop
    if not sound.all():
        row = int(np.searchsorted(np.cumsum(layout.count), int(np.argmin(sound)), side="right"))
        key = f"{part.name}/{manifest.names[layout.name[row]]}"
        raise where.broken("I006", "a piece lies outside its file's data", key)


def _check_copies(layout: Layout, numel: Ints, part: Part, where: _Where) -> None:
    numel_of = np.repeat(numel, layout.count)
    whole = (layout.length >= 1) & (layout.length <= numel_of) | (numel_of == 0) & (layout.length == 0)
    start, _ = spans(layout, numel)
    total = np.add.reduceat(layout.length, layout.first)
    fits = start + layout.length <= numel_of
    complete = total % np.maximum(numel, 1) == 0
    wrapped = float(layout.length.astype(float).sum()) >= 2.0**62  # a sum of hostile lengths could wrap around
    if wrapped or not (whole.all() and fits.all() and complete.all()):
        bad_row = ~complete
        bad_piece = ~(whole & fits)
        if bad_piece.any():
            bad_row[np.searchsorted(np.cumsum(layout.count), np.argmax(bad_piece), side="right")] = True
        row = int(np.argmax(bad_row))
        key = f"{part.name}/{where.manifest.names[layout.name[row]]}"
        raise where.broken("I005", "the pieces leave a gap, overlap or do not end with the tensor", key)


def spans(layout: Layout, numel: Ints) -> tuple[Ints, Ints]:
    """``(start, copy)`` of every piece; ``numel`` has the elements of each row's tensor."""
    before = np.cumsum(layout.length) - layout.length
    first = layout.first
    within = before - np.repeat(before[first], layout.count)
    divisor = np.maximum(np.repeat(numel, layout.count), 1)
    copy = within // divisor
    empty = np.repeat(numel, layout.count) == 0
    if empty.any():  # every piece of an empty tensor is a copy of it
        number = np.arange(len(within)) - np.repeat(first, layout.count)
        copy = np.where(empty, number, copy)
        within = np.where(empty, 0, within)
        return within - np.where(empty, 0, copy * divisor), copy
    return within - copy * divisor, copy


def check_claims(manifest: Manifest, file: Ints, nbytes: Ints) -> None:
    """Rule I007 for pieces of so many bytes in these files, of which none is given twice."""
    claimed = np.zeros(len(manifest.files), np.int64)
    np.add.at(claimed, file, nbytes)
    roughly = np.bincount(file, nbytes, len(manifest.files))  # for a sum that has wrapped around
    over = np.flatnonzero((claimed > manifest.data_bytes) | (roughly > 2.0**62))
    if len(over):
        path = manifest.path(manifest.files[int(over[0])])
        raise broken("I007", f"pieces of {roughly[over[0]]:.0f} bytes in {manifest.data_bytes[over[0]]}", file=path)


def ragged(count: Ints) -> tuple[Ints, Ints]:
    """For groups of these sizes, one after the other: the group of each member, and its number within the group."""
    first = np.cumsum(count) - count
    group = np.repeat(np.arange(len(count)), count)
    return group, np.arange(len(group)) - first[group]


def runs(column: Ints) -> list[tuple[int, int]]:
    """``(start, stop)`` of each run of equal neighbours."""
    begins = np.flatnonzero(np.diff(column)) + 1
    return list(itertools.pairwise([0, *begins.tolist(), len(column)])) if len(column) else []


def take(layout: Layout, rows: Ints) -> Layout:
    """Some rows of a layout, with their pieces, in the order of ``rows``."""
    row, number = ragged(layout.count[rows])
    piece = layout.first[rows][row] + number
    return Layout(layout.name[rows], layout.count[rows], *(getattr(layout, name)[piece] for name, _ in PIECE_COLUMNS))


def pieces(layout: Layout, row: int, numel: int) -> Iterator[Piece]:
    """The pieces of row ``row`` of a checked layout, copy by copy, in the order of their elements."""
    # One by one: 1000 objects at once would have Python's garbage collector look through all of torch's (0.1 s).
    single = take(layout, np.array([row]))
    start, copy = spans(single, np.array([numel], np.int64))
    columns = (single.rank, single.tier, copy, start, start + single.length, single.offset, single.block)
    return itertools.starmap(Piece, zip(*(column.tolist() for column in columns), strict=True))
