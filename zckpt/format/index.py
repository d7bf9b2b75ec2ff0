"""The index: it says where the pieces of each tensor are, in columns (spec, "Index").

The pieces of a tensor are stored in the order of their elements and without their starts, because each piece begins
where the one before it ends. So the index cannot express gaps and overlaps, and the columns of a regular layout
compress to very few bytes.

These are the columns of a chunk, one after the other, little-endian, with R rows (tensors) and P pieces:

    name_id u32[R]   position of the tensor's name in the manifest's names, ascending
    count   u32[R]   number of the tensor's pieces, at least 1
    rank    u32[P]   rank that wrote the piece
    tier    u8 [P]   number of the tier that the piece was in
    length  u64[P]   number of elements
    offset  u64[P]   first byte of the piece, counted from the first byte of the file's data
    block   u32[P]   number of the piece's first block, counted from the first block of the file
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from zckpt.format.digest import digest
from zckpt.format.limits import INDEX_CHUNK_RAW_BYTES_MAX, TENSOR_BYTES_MAX
from zckpt.format.manifest import Chunk, Manifest, Part
from zckpt.format.names import index_path
from zckpt.format.rules import broken
from zckpt.geometry import ragged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zckpt.geometry import Ints

ROW_COLUMNS = (("name_id", "<u4"), ("count", "<u4"))
"""The names and the dtypes of the columns that have one item for each row of a chunk."""
PIECE_COLUMNS = (("rank", "<u4"), ("tier", "u1"), ("length", "<u8"), ("offset", "<u8"), ("block", "<u4"))
"""The names and the dtypes of the columns that have one item for each piece of a chunk."""
ROW_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in ROW_COLUMNS)
"""The bytes of one row in the columns of rows."""
PIECE_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in PIECE_COLUMNS)
"""The bytes of one piece in the columns of pieces."""
CHUNK_PIECES = 1 << 16
"""A chunk ends with the row that brings it to this number of pieces. So to find one tensor, a reader decompresses about
1.6 MB."""
_LEVEL = 9
"""The level of zstd's compression."""


@dataclass(frozen=True)
class Rows:
    """Some rows of one layout, as int64 columns of R rows and P pieces. Equal layouts of several parts are stored
    once."""

    name_id: Ints
    """For each row, the position of the tensor's name in the manifest's names."""
    count: Ints
    """For each row, its number of pieces."""
    rank: Ints
    """For each piece, the rank that wrote it."""
    tier: Ints
    """For each piece, the number of the tier that it was in."""
    length: Ints
    """For each piece, its number of elements."""
    offset: Ints
    """For each piece, its first byte, counted from the first byte of the data of its data file."""
    block: Ints
    """For each piece, the number of its first block, counted from the first block of its data file."""

    @cached_property
    def first(self) -> Ints:
        """For each row, the number of its first piece."""
        return np.cumsum(self.count) - self.count


class IndexWriter:
    """Makes the bytes of an index chunk by chunk, so that no layout has to be in memory as a whole."""

    def __init__(self) -> None:
        self.index = bytearray()
        """The bytes of the index."""
        self.chunks: list[Chunk] = []
        """What the manifest records of the chunks."""
        self._ids: dict[tuple[bytes, ...], int] = {}
        """The id of each layout, by the digests of its chunks."""
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)

    def add(self, layout: Iterable[Rows]) -> int:
        """Adds a layout. Each item has the rows of one chunk. Returns the id of the layout. If an equal layout has been
        added before, this is its id, and nothing is stored."""
        start, first_row, layout_id = len(self.index), 0, len(self._ids)
        chunks: list[Chunk] = []
        for size, frame in map(self._compressed, layout):  # This keeps no rows while it makes the next ones.
            chunks.append(Chunk(layout_id, first_row, *size, len(self.index), len(frame), digest(frame)))
            first_row += size[0]
            self.index += frame
        known_id = self._ids.setdefault(tuple(chunk.digest for chunk in chunks), layout_id)
        if known_id == layout_id:
            self.chunks += chunks
        else:
            del self.index[start:]
        return known_id

    def _compressed(self, rows: Rows) -> tuple[tuple[int, int], bytes]:
        """Returns the number of rows and of pieces of a chunk, and its frame."""
        columns = ROW_COLUMNS + PIECE_COLUMNS
        raw = b"".join(getattr(rows, column).astype(dtype).tobytes() for column, dtype in columns)
        return (len(rows.count), len(rows.length)), self._compressor.compress(raw)


def chunk_rows(count: Ints) -> Iterator[slice]:
    """Yields the rows of each chunk of a layout, whose rows have ``count`` pieces."""
    stops = np.cumsum(count)
    row = piece = 0
    while row < len(count):
        next_row = min(int(np.searchsorted(stops, piece + CHUNK_PIECES)) + 1, len(count))
        yield slice(row, next_row)
        row, piece = next_row, int(stops[next_row - 1])


def decode(raw: bytes, chunk: Chunk, manifest: Manifest) -> Rows:
    """Decompresses one chunk and checks it for every part that has its layout.

    Args:
        raw: the compressed bytes.
        chunk: what the manifest records of the chunk.
        manifest: the manifest.

    Returns:
        The rows of the chunk.

    Raises:
        FormatError: the chunk breaks one of the rules I002 to I006.
    """
    where = _Where(manifest, chunk)
    if digest(raw) != chunk.digest:
        raise where.broken("I002", "the chunk is damaged")
    layout = _columns(_decompress(raw, where), chunk)
    for part_id, part in enumerate(manifest.parts):
        if part.layout_id == chunk.layout_id:
            _check(layout, part_id, part, where)
    return layout


@dataclass(frozen=True, slots=True)
class _Where:
    """The chunk that is being decoded, for error messages."""

    manifest: Manifest
    chunk: Chunk

    def broken(self, rule: str, message: str, key: str | None = None) -> Exception:
        """Returns the error of a rule that the chunk breaks."""
        start = self.chunk.offset
        file = index_path(self.manifest.save_id)
        return broken(rule, message, file=file, start=start, stop=start + self.chunk.nbytes, key=key)


def _decompress(raw: bytes, where: _Where) -> bytes:
    """Returns the columns of a chunk as bytes. Raises FormatError (I003)."""
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


def _columns(raw: bytes, chunk: Chunk) -> Rows:
    """Returns the columns of a chunk. A u64 of 2^63 or more becomes negative."""
    columns = []
    position = 0
    for fields, size in ((ROW_COLUMNS, chunk.rows), (PIECE_COLUMNS, chunk.pieces)):
        for _, dtype in fields:
            column = np.frombuffer(raw, dtype, size, position)
            position += column.nbytes
            columns.append(column.astype(np.int64))
    return Rows(*columns)


def _check(layout: Rows, part_id: int, part: Part, where: _Where) -> None:
    """Checks the rules I004 to I006 for one part. A u64 of 2^63 or more has become negative here, and is refused
    because of that."""
    manifest, chunk = where.manifest, where.chunk
    rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
    if not np.array_equal(layout.name_id, part.name_ids[rows]):
        raise where.broken("I004", "the rows are other names than the manifest's")
    if not (layout.count.min() >= 1 and layout.count.sum() == chunk.pieces):
        raise where.broken("I004", f"the rows have {layout.count.sum()} pieces, the chunk {chunk.pieces}")
    numel = manifest.numel[part.shape_ids[rows]]
    item = part.item_bytes[rows]
    _check_copies(layout, numel, part, where)
    copies = np.where(numel > 0, np.add.reduceat(layout.length, layout.first) // np.maximum(numel, 1), layout.count)
    if copies.max() > manifest.world_size:
        key = f"{part.name}/{manifest.names[layout.name_id[int(np.argmax(copies))]]}"
        raise where.broken("I005", f"{copies.max()} copies of {manifest.world_size} ranks", key)

    item_of = np.repeat(item, layout.count)
    file = manifest.file_numbers(layout.rank, part_id, layout.tier)
    stop = np.append(manifest.data_bytes, -1)[file]  # Where there is no data file, ``file`` is -1, the last item.
    sound = (layout.offset >= 0) & (layout.offset <= TENSOR_BYTES_MAX) & (layout.offset % item_of == 0)
    sound &= layout.offset + layout.length * item_of <= stop
    if not sound.all():
        row = int(np.searchsorted(np.cumsum(layout.count), int(np.argmin(sound)), side="right"))
        key = f"{part.name}/{manifest.names[layout.name_id[row]]}"
        raise where.broken("I006", "a piece lies outside its file's data", key)


def _check_copies(layout: Rows, numel: Ints, part: Part, where: _Where) -> None:
    """Raises FormatError (I005) unless the lengths of each row make up whole copies of its tensor, which has ``numel``
    elements."""
    numel_of = np.repeat(numel, layout.count)
    whole = (layout.length >= 1) & (layout.length <= numel_of) | (numel_of == 0) & (layout.length == 0)
    start, _ = starts_and_copies(layout, numel)
    total = np.add.reduceat(layout.length, layout.first)
    fits = start + layout.length <= numel_of
    complete = total % np.maximum(numel, 1) == 0
    # The upper and the lower halves are added up separately, because hostile lengths could make a sum wrap around.
    upper, lower = (np.add.reduceat(half, layout.first) for half in (layout.length >> 32, layout.length & 0xFFFFFFFF))
    complete &= upper + (lower >> 32) <= TENSOR_BYTES_MAX >> 32
    if not (whole.all() and fits.all() and complete.all()):
        bad_row = ~complete
        bad_piece = ~(whole & fits)
        if bad_piece.any():
            bad_row[np.searchsorted(np.cumsum(layout.count), np.argmax(bad_piece), side="right")] = True
        row = int(np.argmax(bad_row))
        key = f"{part.name}/{where.manifest.names[layout.name_id[row]]}"
        raise where.broken("I005", "the pieces leave a gap, overlap or do not end with the tensor", key)


def starts_and_copies(layout: Rows, numel: Ints) -> tuple[Ints, Ints]:
    """Returns the start and the copy of every piece. ``numel`` has the number of elements of each row's tensor."""
    before = np.cumsum(layout.length) - layout.length
    first = layout.first
    within = before - np.repeat(before[first], layout.count)
    divisor = np.maximum(np.repeat(numel, layout.count), 1)
    copy = within // divisor
    empty = np.repeat(numel, layout.count) == 0
    if empty.any():  # Every piece of a tensor without elements is a copy of it.
        number = np.arange(len(within)) - np.repeat(first, layout.count)
        copy = np.where(empty, number, copy)
        within = np.where(empty, 0, within)
        return within - np.where(empty, 0, copy * divisor), copy
    return within - copy * divisor, copy


def check_claims(manifest: Manifest, pieces: Iterable[tuple[Ints, Ints]]) -> Ints:
    """Checks that the pieces in each data file have no more bytes than its data.

    Args:
        manifest: the manifest.
        pieces: pairs of columns: the number of each piece's data file, and the size of the piece in bytes. No piece may
            occur twice.

    Returns:
        The bytes of all these pieces, for each data file.

    Raises:
        FormatError: the pieces in a data file have too many bytes (I007).
    """
    claimed = np.zeros(len(manifest.files), np.int64)
    roughly = np.zeros(len(manifest.files))  # The same sums as floats show whether an integer has wrapped around.
    for file, nbytes in pieces:
        np.add.at(claimed, file, nbytes)
        roughly += np.bincount(file, nbytes, len(manifest.files))
    over = np.flatnonzero((claimed > manifest.data_bytes) | (roughly > 2.0**62))
    if len(over):
        path = manifest.path(manifest.files[int(over[0])])
        raise broken("I007", f"pieces of {roughly[over[0]]:.0f} bytes in {manifest.data_bytes[over[0]]}", file=path)
    return claimed


def take(layout: Rows, rows: Ints) -> Rows:
    """Returns some rows of a layout, with their pieces, in the order of ``rows``."""
    row, number = ragged(layout.count[rows])
    piece = layout.first[rows][row] + number
    return Rows(layout.name_id[rows], layout.count[rows], *(getattr(layout, name)[piece] for name, _ in PIECE_COLUMNS))
