"""Makes the manifest and the index of the whole checkpoint from what every rank plans to write, before it writes."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgpack
import numpy as np
import zstandard

from zckpt.errors import RankError, UnsupportedError
from zckpt.format import index as index_format
from zckpt.format import manifest as manifest_format
from zckpt.format import tree
from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.dtypes import DTYPE_IDS
from zckpt.format.grids import packed_sections
from zckpt.format.index import IndexWriter, Rows
from zckpt.format.limits import MANY_PIECES_MAX
from zckpt.format.manifest import File, Files, Manifest, Part
from zckpt.format.names import LINEAGE, MACHINES, Tier, data_file_path
from zckpt.format.rules import broken
from zckpt.plan.inventory import MASTER, PARAM
from zckpt.plan.lineage import Lineage, run_by_tensors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from zckpt.geometry import Ints, Sections
    from zckpt.plan.data_files import DataFilePlan

Kind = tuple[tuple[int, ...], str, "Sections"]
"""The shape and the dtype of a tensor, and the sections of its grid. Very many tensors may be of the same kind."""


class Tensors(NamedTuple):
    """Tensors as columns: the name of each, and the position of its kind in ``kinds``, as the bytes of a u32."""

    names: tuple[str, ...]
    kind: bytes
    kinds: tuple[Kind, ...]

    @classmethod
    def of(cls, tensors: Collection[tuple[str, Kind]]) -> Tensors:
        """Returns the columns of tensors, of which each is given as its name and its kind."""
        kinds: dict[Kind, int] = {}
        kind = np.array([kinds.setdefault(kind, len(kinds)) for _, kind in tensors], "<u4")
        return cls(tuple(name for name, _ in tensors), kind.tobytes(), tuple(kinds))

    def rows(self) -> list[tuple[str, Kind]]:
        """Returns the name and the kind of each tensor."""
        numbers = np.frombuffer(self.kind, "<u4").tolist()
        return [(name, self.kinds[number]) for name, number in zip(self.names, numbers, strict=True)]


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """The pieces of a file, as columns of integers. ``tensor`` is a position in ``RankRecord.tensors``. ``start``,
    ``numel`` and ``copy`` are those of the fragment and its span. ``offset`` and ``block`` are ``start`` and ``block``
    of ``DataFilePlan.pieces``. Files whose columns are equal, such as those of the master weights and of the moments,
    share one object. There is no column for the end of each span, because equal shares of a tensor have the same number
    of elements on all ranks, but not the same end."""

    tensor: Ints
    start: Ints
    numel: Ints
    copy: Ints
    offset: Ints
    block: Ints

    def __len__(self) -> int:
        return len(self.tensor)


class FileRecord(NamedTuple):
    """The sizes of a data file in bytes, the number of its first digest in the rank's digest table, and its pieces."""

    part: str
    tier: Tier
    nbytes: int
    data_start: int
    first_block: int
    columns_id: int
    """The position of its pieces in ``RankRecord.piece_columns``."""
    origin: str
    """The same as ``DataFileId.origin``."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What the data files of one rank hold, and the digest of the rank's digest table. Until the digest is known, it is
    all zeros."""

    rank: int
    digest: bytes
    tensors: Tensors
    piece_columns: tuple[PieceColumns, ...]
    files: tuple[FileRecord, ...]

    def paths(self, save_id: str) -> list[tuple[str, int]]:
        """Returns the path of each data file, relative to the checkpoint's directory, and its length in bytes."""
        return [(data_file_path(save_id, self.rank, file.part, file.tier), file.nbytes) for file in self.files]


def rank_record(rank: int, plans: Iterable[DataFilePlan], digest: bytes = bytes(DIGEST_BYTES)) -> RankRecord:
    """Returns the record of a rank that writes ``plans``."""
    kinds: dict[Kind, int] = {}
    tensors: dict[tuple[str, int], int] = {}
    piece_columns: dict[bytes, tuple[int, PieceColumns]] = {}
    files: list[FileRecord] = []
    for plan in plans:
        _, names, dtypes, spans, _, copies, *_ = zip(*plan.fragments, strict=True)
        grids, starts, _ = zip(*spans, strict=True)
        kind = [
            kinds.setdefault((grid.shape, dtype, grid.sections), len(kinds))
            for grid, dtype in zip(grids, dtypes, strict=True)
        ]
        numbers = [tensors.setdefault(tensor, len(tensors)) for tensor in zip(names, kind, strict=True)]
        numel = plan.places.nbytes // plan.places.item_bytes
        table = np.array([numbers, starts, numel, copies, plan.pieces.start, plan.pieces.block], np.int64)
        number, _ = piece_columns.setdefault(table.tobytes(), (len(piece_columns), PieceColumns(*table)))
        sizes = plan.nbytes, len(plan.header), plan.first_block
        files.append(FileRecord(plan.id.part, plan.id.tier, *sizes, number, plan.id.origin))
    columns_of_files = tuple(columns for _, columns in piece_columns.values())
    kind_of_each = np.array([number for _, number in tensors], "<u4").tobytes()
    of_rank = Tensors(tuple(name for name, _ in tensors), kind_of_each, tuple(kinds))
    return RankRecord(rank, digest, of_rank, columns_of_files, tuple(files))


def pack(value: RankRecord) -> bytes:
    """Returns the bytes of a rank's record, which is sent to the rank that commits."""
    piece_columns = [
        [_packed(getattr(columns, name)) for name in PieceColumns.__dataclass_fields__]
        for columns in value.piece_columns
    ]
    names, kind, kinds = value.tensors
    tensors = msgpack.packb([names, kind, [*map(msgpack.packb, kinds)]])
    raw = msgpack.packb([value.rank, value.digest, tensors, piece_columns, value.files])
    return zstandard.ZstdCompressor(level=1).compress(raw)


def _packed(column: Ints) -> tuple[str, bytes]:
    """Returns the smallest dtype that can hold a column, and its bytes."""
    smallest = np.min_scalar_type(int(column.max(initial=0))).newbyteorder("<")
    dtype = smallest if smallest.itemsize < np.int64().itemsize else np.dtype("<i8")  # u64 and i64 make floats in numpy
    return dtype.str, column.astype(dtype).tobytes()


def unpack(raws: Iterable[bytes]) -> list[RankRecord]:
    """Returns the records that ``pack`` has packed, in the order of their ranks. Equal names, kinds, lists of tensors
    and columns become one object, because a thousand ranks may each have pieces of the same thousand tensors."""
    names: dict[str, str] = {}
    known_kinds: dict[bytes, Kind] = {}
    lists: dict[bytes, Tensors] = {}
    columns: dict[tuple[str, bytes], Ints] = {}
    records = []
    decompressor = zstandard.ZstdDecompressor()
    for raw in raws:
        packed = decompressor.decompress(raw)
        rank, rank_digest, packed_tensors, piece_columns, files = msgpack.unpackb(packed, use_list=False)
        key = digest(packed_tensors)
        if key not in lists:
            of_rank, kind, kinds = msgpack.unpackb(packed_tensors, use_list=False)
            for packed_kind in kinds:
                if packed_kind not in known_kinds:
                    known_kinds[packed_kind] = msgpack.unpackb(packed_kind, use_list=False)
            of_kinds = tuple([known_kinds[packed_kind] for packed_kind in kinds])
            lists[key] = Tensors(tuple([names.setdefault(name, name) for name in of_rank]), kind, of_kinds)
        own_columns = (
            PieceColumns(
                *(columns.setdefault((dtype, column), np.frombuffer(column, dtype)) for dtype, column in of_files)
            )
            for of_files in piece_columns
        )
        own_files = (FileRecord(part, Tier(tier), *rest) for part, tier, *rest in files)
        records.append(RankRecord(rank, rank_digest, lists[key], tuple(own_columns), tuple(own_files)))
    return sorted(records, key=lambda record: record.rank)


class _Numbered:
    """The names and the kinds of the tensors that the ranks have recorded, numbered from 0."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.kinds: dict[Kind, int] = {}
        self._known: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
        """What ``add`` has returned for each list, by its ``id``."""

    def add(self, tensors: Tensors) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the numbers of the names and of the kinds of ``tensors``, a list that many ranks may share. What is
        new gets the next number. The list has to stay in memory as long as this object is used."""
        if id(tensors) not in self._known:
            name = [self.names.setdefault(name, len(self.names)) for name in tensors.names]
            kind = np.array([self.kinds.setdefault(kind, len(self.kinds)) for kind in tensors.kinds], np.int32)
            # Thousands of ranks may have different lists, so these columns are narrow.
            self._known[id(tensors)] = np.array(name, np.int32), kind[np.frombuffer(tensors.kind, "<u4")]
        return self._known[id(tensors)]


class _FilePieces(NamedTuple):
    """The pieces of one data file."""

    rank: int
    tier: Tier
    columns_id: int
    columns: PieceColumns
    names: NDArray[np.int32]
    """The numbers of the names of the tensors to which ``columns.tensor`` refers."""
    kinds: NDArray[np.int32]
    """The numbers of their kinds."""

    @property
    def name(self) -> NDArray[np.int32]:
        """The number of the name of each piece's tensor."""
        return self.names[self.columns.tensor]

    @property
    def kind(self) -> NDArray[np.int32]:
        """The number of the kind of each piece's tensor."""
        return self.kinds[self.columns.tensor]


def _rows_of_part(files: Sequence[_FilePieces], names: int) -> tuple[Ints, Ints, Ints]:
    """Returns the number of the name, the number of the kind, and the number of the pieces of each row of a part.
    ``names``: how many names there are."""
    kind, count = np.zeros(names, np.int64), np.zeros(names, np.int64)
    for file in files:
        name = file.name
        kind[name] = file.kind
        np.add.at(count, name, 1)
    present = np.flatnonzero(count)
    return present, kind[present], count[present]


def _chunks(part: str, files: Sequence[_FilePieces], name: Ints, count: Ints, numbered: _Numbered) -> Iterator[Rows]:
    """Yields the rows of one part, chunk by chunk. Only the pieces of one chunk are put together at a time, because
    all pieces of thousands of ranks would take much memory. ``files``: the pieces of all files of the part. ``name``
    and ``count``: of ``_rows_of_part``. The other arguments and the errors are those of ``_rows``."""
    first_names = name[[of_chunk.start for of_chunk in index_format.chunk_rows(count)]]
    placed: list[tuple[_FilePieces, Ints | None, list[int]]] = []
    """Each file, the order of its pieces by name, or None if they are in this order, and the first piece of each
    chunk."""
    for file in files:
        of_file = file.name
        order = np.argsort(of_file, kind="stable") if (of_file[1:] < of_file[:-1]).any() else None
        first = np.searchsorted(of_file if order is None else of_file[order], first_names)
        placed.append((file, order, [*first.tolist(), len(of_file)]))
    for number in range(len(first_names)):
        yield _rows(part, _pieces_of_chunk(placed, number), numbered)


def _pieces_of_chunk(placed: Sequence[tuple[_FilePieces, Ints | None, Sequence[int]]], number: int) -> list[Ints]:
    """Returns the columns of all pieces of one chunk, which ``_rows`` gets. ``placed``: as in ``_chunks``."""
    chosen: list[tuple[_FilePieces, slice | Ints, int]] = []
    for file, order, first_pieces in placed:
        first, end = first_pieces[number : number + 2]
        if first < end:
            chosen.append((file, slice(first, end) if order is None else order[first:end], end - first))
    name, kind = (
        np.concatenate(
            [getattr(file, column)[file.columns.tensor[pieces]] for file, pieces, _ in chosen], dtype=np.int64
        )
        for column in ("names", "kinds")
    )
    start, numel, copy, offset, block = (
        np.concatenate([getattr(file.columns, column)[pieces] for file, pieces, _ in chosen], dtype=np.int64)
        for column in ("start", "numel", "copy", "offset", "block")
    )
    rank, tier = (
        np.repeat([getattr(file, column) for file, *_ in chosen], [count for *_, count in chosen])
        for column in ("rank", "tier")
    )
    together = [name, kind, start, numel, copy, offset, block, rank, tier]
    order = np.lexsort((start, copy, name))
    del name, kind, start, numel, copy, offset, block, rank, tier
    for number, column in enumerate(together):  # so that few columns are in memory in both orders
        together[number] = column[order]
    return together


def _rows(part: str, columns: Sequence[Ints], numbered: _Numbered) -> Rows:
    """Returns the rows of one chunk of a part. ``columns`` are int64 arrays with an entry for each piece, in the order
    of their names, copies and starts. ``numbered`` has the names and kinds to which they refer. Raises RankError if
    ranks disagree about a tensor, and FormatError (I005) if the pieces of all ranks do not make up whole tensors."""
    name, kind, start, length, copy, offset, block, rank, tier = columns
    row_name, first, count = np.unique(name, return_index=True, return_counts=True)
    row_kind, kinds = kind[first], [*numbered.kinds]
    differs = np.flatnonzero(kind != np.repeat(row_kind, count))
    if len(differs):
        pair = (differs[0], first[np.searchsorted(first, differs[0], "right") - 1])
        label, (one, other) = [*numbered.names][name[differs[0]]], (kinds[kind[at]] for at in pair)
        this_rank, other_rank = (int(rank[at]) for at in pair)
        raise RankError(
            f"{part}/{label} is {_described(*one)} on rank {this_rank}, {_described(*other)} on rank {other_rank}",
            key=f"{part}/{label}",
            rank=this_rank,
        )
    rows = Rows(row_name, count, rank, tier, length, offset, block)
    numel = np.array([math.prod(shape) for shape, _, _ in kinds], np.int64)[row_kind]
    # A reader has to compute the start and the copy of each piece, because the index does not store where pieces start.
    read_start, read_copy = index_format.starts_and_copies(rows, numel)
    wrong = start != read_start
    wrong[1:] |= (name[1:] == name[:-1]) & ((copy[1:] == copy[:-1]) != (read_copy[1:] == read_copy[:-1]))
    wrong &= np.repeat(numel, count) > 0
    if wrong.any():
        label = [*numbered.names][name[np.argmax(wrong)]]
        raise broken("I005", "the pieces of all ranks leave a gap or overlap", key=f"{part}/{label}")
    return rows


def _described(shape: tuple[int, ...], dtype: str, sections: Sections) -> str:
    """Returns a phrase for an error about a tensor."""
    return f"{dtype} {list(shape)}" + (
        f" in the sections {reprlib.repr(packed_sections(sections))}" if sections else ""
    )


@dataclass(frozen=True, slots=True)
class SaveMetadata:
    """Fields of the manifest that the records of the ranks do not have. ``Manifest`` documents them."""

    step: int
    block_bytes: int
    aliases: Mapping[str, str]
    state: bytes
    """The packed root tree, without the lineage."""
    writer: Mapping[str, str]
    lineage: Lineage | None = None
    """The lineage that is added to the root tree. If its ``run_id`` is empty, ``run_id_of`` decides about it."""
    machines: Sequence[Mapping[str, object]] = ()
    """The machines of which each has only the files of its own ranks, for the root tree. Empty if there is one."""


def catalog(rank_records: Sequence[RankRecord], save_id: str, metadata: SaveMetadata) -> tuple[bytes, bytes]:
    """Returns ``(manifest, index)``, the bytes of both files. They are checked by the rules that a reader checks.
    ``rank_records`` has one record for each rank. An alias whose tensor no part holds is left out. Raises RankError if
    ranks disagree about a tensor, UnsupportedError if there are more pieces than a checkpoint can have, and FormatError
    for anything that a reader would refuse, such as pieces that do not make up whole tensors."""
    pieces = sum(len(record.piece_columns[file.columns_id]) for record in rank_records for file in record.files)
    if pieces > MANY_PIECES_MAX:  # Tables of them would take much memory.
        parts = {file.part for record in rank_records for file in record.files}
        raise UnsupportedError(
            f"the checkpoint would have {pieces:,} pieces of tensors ({len(rank_records):,} ranks, "
            f"{len(parts)} parts); the format can hold {MANY_PIECES_MAX:,}",
            rule="M013",
            hint="leave parts out with `exclude`, and write them as a checkpoint of their own with `parts`",
        )
    # A function of its own, so that what it takes beside its result is free before the check.
    raw, index = _encoded(rank_records, save_id, metadata)
    # Both are read back before they are committed, while the state that they describe still exists.
    manifest = manifest_format.decode(raw)
    for chunk in manifest.chunks:
        index_format.decode(index[chunk.offset : chunk.offset + chunk.nbytes], chunk, manifest)
    return raw, index


def _encoded(rank_records: Sequence[RankRecord], save_id: str, metadata: SaveMetadata) -> tuple[bytes, bytes]:
    """Does what ``catalog`` does, without its checks of the number of pieces and of the result."""
    numbered = _Numbered()
    parts: dict[str, list[_FilePieces]] = {}
    part_ids: dict[str, int] = {}
    files: list[File] = []
    digests: dict[int, bytes] = {}
    for record in rank_records:
        digests[record.rank] = record.digest
        tensors = numbered.add(record.tensors)
        for data_file in record.files:
            part_id = part_ids.setdefault(data_file.part, len(part_ids))
            number, size = data_file.columns_id, (data_file.nbytes, data_file.data_start)
            pieces = _FilePieces(record.rank, data_file.tier, number, record.piece_columns[number], *tensors)
            parts.setdefault(data_file.part, []).append(pieces)
            files.append(File(record.rank, part_id, data_file.tier, *size, data_file.first_block, data_file.origin))
    kinds, writer = [*numbered.kinds], IndexWriter()
    shapes: dict[tuple[int, ...], int] = {}
    grids: dict[Sections, int] = {(): 0}
    different: dict[tuple[tuple[int, Tier, int], ...], Part] = {}
    """The parts that do not have the same tensors and pieces as a part before them, by what identifies the pieces."""
    manifest_parts: list[Part] = []
    for part, of_part in parts.items():
        identity = tuple(file[:3] for file in of_part)
        if identity not in different:
            name, kind, count = _rows_of_part(of_part, len(numbered.names))
            layout_id = writer.add(_chunks(part, of_part, name, count, numbered))
            shape_ids, dtype_ids, grid_ids = np.zeros((3, len(kinds)), np.int64)
            for number in dict.fromkeys(kind.tolist()):
                shape, dtype, sections = kinds[number]
                shape_ids[number], dtype_ids[number] = shapes.setdefault(shape, len(shapes)), DTYPE_IDS[dtype]
                grid_ids[number] = grids.setdefault(sections, len(grids))
            columns = (shape_ids[kind], dtype_ids[kind].astype(np.uint8), grid_ids[kind])
            different[identity] = Part(part, layout_id, name, *columns)
        manifest_parts.append(replace(different[identity], name=part))
    manifest = Manifest(
        save_id=save_id,
        step=metadata.step,
        world_size=len(rank_records),
        block_bytes=metadata.block_bytes,
        names=tuple(numbered.names),
        shapes=tuple(shapes),
        grids=tuple(grids),
        parts=tuple(manifest_parts),
        files=Files.of(files),
        digests=tuple(digests[rank] for rank in range(len(rank_records))),
        chunks=tuple(writer.chunks),
        index_bytes=len(writer.index),
        aliases={alias: name for alias, name in metadata.aliases.items() if name in numbered.names},
        state=metadata.state,
        writer=metadata.writer,
    )
    if metadata.lineage is not None:
        lineage = metadata.lineage if metadata.lineage.run_id else replace(metadata.lineage, run_id=run_id_of(manifest))
        entry = lineage.tree(tensor_counts(manifest))
        manifest = replace(manifest, state=tree.with_entry(manifest.state, LINEAGE, entry))
    if metadata.machines:
        manifest = replace(manifest, state=tree.with_entry(manifest.state, MACHINES, metadata.machines))
    return manifest_format.encode(manifest), bytes(writer.index)


def tensor_counts(manifest: Manifest) -> dict[str, int]:
    """Returns the number of tensors of each part."""
    return {part.name: len(part.name_ids) for part in manifest.parts}


def run_id_of(manifest: Manifest) -> str:
    """Returns the identity of the run of a checkpoint that does not record it."""
    return run_by_tensors(
        (manifest.names[name_id], manifest.shapes[shape_id])
        for part in manifest.parts
        if part.name in (MASTER, PARAM)
        for name_id, shape_id in zip(part.name_ids.tolist(), part.shape_ids.tolist(), strict=True)
    )


def with_digests(manifest: bytes, digests: Sequence[bytes]) -> bytes:
    """Returns the same manifest with the digests of the digest tables of all ranks."""
    return manifest_format.encode(replace(manifest_format.decode(manifest), digests=tuple(digests)))
