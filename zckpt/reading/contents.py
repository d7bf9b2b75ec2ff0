"""What tensors a checkpoint holds, and where: its manifest, index, digest tables and headers, read when asked for."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from zckpt.format import index as index_format
from zckpt.format import names
from zckpt.format import shard as shard_format
from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import DIGEST_TABLE_BYTES_MAX
from zckpt.format.manifest import TIERS, Manifest
from zckpt.format.rules import broken
from zckpt.plan.reshard import StoredPieces, choose_copies
from zckpt.transfer.read import ReadFile
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from zckpt.format.index import Ints, Layout, Piece
    from zckpt.format.shard import Header
    from zckpt.storage.contract import Reader


@dataclass(frozen=True, slots=True)
class PieceInfo:
    """Elements ``[start, stop)`` of a tensor, in row-major order, and where they are stored.

    ``copy`` is 0 but for rank-local values such as buffers that differ from rank to rank. ``offset`` is the byte of
    ``file`` (relative to the checkpoint) at which ``nbytes`` bytes begin.
    """

    rank: int
    tier: str
    copy: int
    start: int
    stop: int
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint. ``pieces`` is read from the index when it is first asked for."""

    key: str
    part: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    """Of one whole copy."""
    _place: tuple[int, int] = field(repr=False)
    """Its part in the manifest, and its row there."""
    _contents: Contents = field(repr=False, compare=False)

    @cached_property
    def pieces(self) -> tuple[PieceInfo, ...]:
        return self._contents.piece_infos(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote it, ascending."""
        return tuple(sorted({piece.rank for piece in self.pieces}))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold it, relative to the checkpoint."""
        return tuple(dict.fromkeys(piece.file for piece in self.pieces))


class Contents:
    """Safe to share by threads."""

    def __init__(self, manifest: Manifest, reader: Reader) -> None:
        self.manifest = manifest
        self.reader = reader
        self._layouts: dict[int, Layout] = {}
        self._tables: dict[int, memoryview] = {}
        self._sized: set[int] = set()
        """The files whose length was found to be the manifest's."""

    def find(self, part: str, name: str) -> TensorInfo | None:
        """The tensor of that name, which is no alias."""
        part_id, name_id = self.manifest.part_ids.get(part), self.manifest.name_ids.get(name)
        if part_id is None or name_id is None:
            return None
        ids = self.manifest.parts[part_id].names
        row = bisect_left(ids, name_id)
        return self._info(part_id, row) if row < len(ids) and ids[row] == name_id else None

    def _info(self, part_id: int, row: int) -> TensorInfo:
        part = self.manifest.parts[part_id]
        name, shape = self.manifest.names[part.names[row]], self.manifest.shapes[part.shapes[row]]
        dtype = part.dtypes[row]
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        return TensorInfo(
            f"{part.name}/{name}", part.name, name, TORCH_DTYPES[dtype], shape, nbytes, (part_id, row), self
        )

    def pieces(self, info: TensorInfo) -> Iterator[Piece]:
        """The index's records of one tensor, copy by copy, in the order of their elements."""
        part_id, row = info._place
        number = int(self._chunks_of(np.array([part_id]), np.array([row]))[0])
        first_row = self.manifest.chunks[number].first_row
        return index_format.pieces(self.chunk(number), row - first_row, math.prod(info.shape))

    def _chunks_of(self, parts: Ints, rows: Ints) -> Ints:
        """The numbers of the chunks that have these rows of these parts."""
        layout = np.array([part.layout for part in self.manifest.parts], np.int64)[parts]
        found = np.zeros(len(rows), np.int64)
        for one in set(layout.tolist()):
            own = layout == one
            first_rows, numbers = self._chunks_by_layout[one]
            found[own] = numbers[np.searchsorted(first_rows, rows[own], side="right") - 1]
        return found

    @cached_property
    def _chunks_by_layout(self) -> dict[int, tuple[Ints, Ints]]:
        """For each layout the first rows of its chunks, ascending, and their numbers."""
        layout, first_row = np.array([(c.layout, c.first_row) for c in self.manifest.chunks], np.int64).reshape(-1, 2).T
        return {one: (first_row[layout == one], np.flatnonzero(layout == one)) for one in set(layout.tolist())}

    def chunk(self, number: int) -> Layout:
        """One chunk of the index, read and checked when it is first asked for."""
        if number not in self._layouts:
            chunk = self.manifest.chunks[number]
            raw = self.reader.read(names.index_path(self.manifest.save_id), chunk.offset, chunk.nbytes)
            self._layouts[number] = index_format.decode(raw, chunk, self.manifest)
        return self._layouts[number]

    def piece_infos(self, info: TensorInfo) -> tuple[PieceInfo, ...]:
        pieces = list(self.pieces(info))
        rank, tier = np.array([(piece.rank, piece.tier) for piece in pieces], np.int64).T
        found = []
        for piece, number in zip(pieces, self.manifest.file_numbers(rank, info._place[0], tier).tolist(), strict=True):
            file = self.manifest.files[number]
            nbytes = (piece.stop - piece.start) * info.dtype.itemsize
            place = (self.manifest.path(file), file.data_start + piece.offset, nbytes)
            found.append(PieceInfo(piece.rank, TIERS[piece.tier], piece.copy, piece.start, piece.stop, *place))
        return tuple(found)

    def read_file(self, number: int, *, verify: bool) -> ReadFile:
        """A data file as the read pipeline wants it."""
        file = self.manifest.files[number]
        table = self.digest_table(file.rank)[file.first_block * DIGEST_BYTES :] if verify else memoryview(b"")
        return ReadFile(self.manifest.path(file), file.nbytes, table)

    def digest_table(self, rank: int) -> memoryview:
        """The digest table of one rank, checked."""
        if rank not in self._tables:
            path = names.digests_path(self.manifest.save_id, rank)
            nbytes = self.reader.size(path)
            if nbytes % DIGEST_BYTES or nbytes > DIGEST_TABLE_BYTES_MAX:
                raise broken("D001", f"the table is {nbytes} bytes long", file=path)
            raw = self.reader.read(path, 0, nbytes)
            if digest(raw) != self.manifest.digests[rank]:
                raise broken("D002", "the digest table is damaged", file=path, start=0, stop=nbytes)
            self._tables[rank] = memoryview(raw)
        return self._tables[rank]

    def stored(self, infos: Sequence[TensorInfo], copies: Sequence[int | None], rank: int | None) -> StoredPieces:
        """The pieces of one copy of each tensor: that of ``copies``, or whichever suits ``rank``."""
        places = np.array([info._place for info in infos], np.int64).reshape(-1, 2)
        chunks = self._chunks_of(places[:, 0], places[:, 1])
        found = [np.empty((6, 0), np.int64)]
        for part_id, chunk in sorted(set(zip(places[:, 0].tolist(), chunks.tolist(), strict=True))):
            numbers = np.flatnonzero((places[:, 0] == part_id) & (chunks == chunk))
            (row, *columns), copy, holder = self.pieces_of_rows(part_id, chunk, places[numbers, 1])
            given = (copies[number] for number in numbers.tolist())
            asked = np.array([-1 if one is None else one for one in given], np.int64)
            chosen = np.where(asked < 0, choose_copies(row, copy, holder, rank), asked)
            found.append(np.stack([numbers[row], *columns])[:, copy == chosen[row]])
        stored = np.concatenate(found, axis=1)
        return StoredPieces(*stored[:, np.argsort(stored[0], kind="stable")])

    def pieces_of_rows(self, part_id: int, number: int, rows: Ints) -> tuple[Sequence[Ints], Ints, Ints]:
        """The pieces of some rows of a part, which chunk ``number`` has: the columns of StoredPieces, where ``want`` is
        a position in ``rows``; the copy that each piece belongs to; and the rank that holds it."""
        manifest, part = self.manifest, self.manifest.parts[part_id]
        layout = index_format.take(self.chunk(number), rows - manifest.chunks[number].first_row)
        numel = np.array([math.prod(manifest.shapes[part.shapes[row]]) for row in rows.tolist()], np.int64)
        start, copy = index_format.spans(layout, numel)
        row, _ = index_format.ragged(layout.count)
        file = manifest.file_numbers(layout.rank, part_id, layout.tier)
        return (row, file, start, start + layout.length, layout.offset, layout.block), copy, layout.rank

    def check_sizes(self, infos: Iterable[TensorInfo]) -> dict[str, int]:
        """Raises FormatError (F001 to F003, I007) unless the files that hold ``infos`` are there, as long as recorded,
        and hold no less than that. Returns for each key the byte of its first file at which the tensor begins."""
        by_key = {info.key: info for info in infos}
        begins = self.check_copies(list(by_key.values()), [None] * len(by_key))
        return dict(zip(by_key, begins, strict=True))

    def check_copies(self, infos: Sequence[TensorInfo], copies: Sequence[int | None]) -> list[int]:
        """As ``check_sizes``, of one copy of each of ``infos``, none of which is given twice."""
        stored = self.stored(infos, copies, None)
        item = np.array([info.dtype.itemsize for info in infos], np.int64)
        index_format.check_claims(self.manifest, stored.file, (stored.stop - stored.start) * item[stored.want])
        first = dict(zip(stored.file[::-1].tolist(), stored.want[::-1].tolist(), strict=True))  # of each file
        for number, one in sorted(first.items()):
            self.check_length(number, infos[one].key)
        first_piece = np.searchsorted(stored.want, np.arange(len(infos)))
        starts = np.array(self.manifest.files.data_start, np.int64)[stored.file] + stored.offset
        return cast("list[int]", starts[first_piece].tolist())

    def check_length(self, number: int, key: str | None = None) -> None:
        """Raises FormatError (F001 to F003) unless the data file is there and as long as recorded. It names ``key``."""
        if number in self._sized:
            return
        file = self.manifest.files[number]
        path = self.manifest.path(file)
        nbytes = self.reader.size(path)
        if nbytes != file.nbytes:
            raise broken("F003", f"the file is {nbytes} bytes long, expected {file.nbytes}", file=path, key=key)
        self._sized.add(number)

    def header(self, number: int) -> tuple[Header, bytes]:
        """A data file's header, checked, and its bytes. Raises FormatError (F001 to F003, S001 to S006, S008)."""
        file = self.manifest.files[number]
        shard = self.manifest.shard(file)
        self.check_length(number)
        raw = read_header(self.reader, shard.path, file.data_start)
        return shard_format.decode_header(raw, file.nbytes, shard), raw


def read_header(reader: Reader, path: str, expected_bytes: int | None = None) -> bytes:
    """All bytes before the data of a data file. Raises FormatError (F001, F002, S001; S003, also if they are not
    ``expected_bytes``) and StorageError."""
    nbytes = shard_format.header_bytes(reader.read(path, 0, shard_format.LENGTH_BYTES), path)
    if expected_bytes is not None and nbytes != expected_bytes:
        raise broken("S003", f"the data begins at {nbytes}, expected {expected_bytes}", file=path)
    return reader.read(path, 0, nbytes)
