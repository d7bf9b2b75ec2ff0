"""Makes the manifest and the index of the whole checkpoint from what every rank plans to write, before it writes."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgpack
import numpy as np
import zstandard

from zckpt.errors import RankError, UnsupportedError
from zckpt.format import index as index_format
from zckpt.format import manifest as manifest_format
from zckpt.format import tree
from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.grids import packed_sections
from zckpt.format.index import IndexWriter, Layout
from zckpt.format.limits import MANY_PIECES_MAX
from zckpt.format.manifest import File, Files, Manifest, Part
from zckpt.format.names import LINEAGE, MACHINES, Tier, data_file_path
from zckpt.format.rules import broken
from zckpt.geometry import Spans
from zckpt.state.inventory import MASTER, PARAM
from zckpt.state.lineage import Lineage, run_by_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from zckpt.geometry import Ints, Sections
    from zckpt.plan.layout import DataFilePlan

Tensor = tuple[str, tuple[int, ...], str, "Sections"]
"""The name, the shape and the dtype of a tensor, and the sections of its grid. A record has it in the bytes of msgpack,
which are compared faster, so that a tensor that a thousand ranks have pieces of is unpacked once."""


@dataclass(frozen=True, slots=True)
class PieceColumns(Spans):
    """The pieces of a file, as columns. ``tensor`` is a position in ``RankRecord.tensors``. ``start``, ``stop`` and
    ``copy`` are those of the fragment and its span. ``offset`` and ``block`` are ``start`` and ``block`` of
    ``DataFilePlan.pieces``. Files whose columns are equal, such as those of the master weights and of the moments,
    share one object."""

    copy: Ints
    offset: Ints
    block: Ints


@dataclass(frozen=True, slots=True)
class FileRecord:
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
    tensors: tuple[bytes, ...]
    """The packed tensors."""
    piece_columns: tuple[PieceColumns, ...]
    files: tuple[FileRecord, ...]

    def paths(self, save_id: str) -> list[tuple[str, int]]:
        """Returns the path of each data file, relative to the checkpoint's directory, and its length in bytes."""
        return [(data_file_path(save_id, self.rank, file.part, file.tier), file.nbytes) for file in self.files]


def rank_record(rank: int, plans: Iterable[DataFilePlan], digest: bytes = bytes(DIGEST_BYTES)) -> RankRecord:
    """Returns the record of a rank that writes ``plans``."""
    tensors: dict[Tensor, int] = {}
    piece_columns: dict[bytes, tuple[int, PieceColumns]] = {}
    files: list[FileRecord] = []
    for plan in plans:
        fragments, pieces = plan.fragments, plan.pieces
        table = np.array(
            [
                [tensors.setdefault((f.name, f.shape, f.dtype, f.span.grid.sections), len(tensors)) for f in fragments],
                [f.span.start for f in fragments],
                [f.span.stop for f in fragments],
                [f.copy for f in fragments],
                pieces.start,
                pieces.block,
            ],
            np.int64,
        )
        number, _ = piece_columns.setdefault(table.tobytes(), (len(piece_columns), PieceColumns(*table)))
        data_file = plan.id
        size = (plan.nbytes, len(plan.header))
        files.append(FileRecord(data_file.part, data_file.tier, *size, plan.first_block, number, data_file.origin))
    return RankRecord(
        rank, digest, packed_tensors(tensors), tuple(columns for _, columns in piece_columns.values()), tuple(files)
    )


def packed_tensors(tensors: Iterable[Tensor]) -> tuple[bytes, ...]:
    """Returns the tensors of a record."""
    return tuple(map(msgpack.Packer().pack, tensors))


_RECEIVED_DTYPES = {"tensor": "<u4", "start": "<i8", "stop": "<i8", "copy": "<u4", "offset": "<i8", "block": "<u4"}
"""The dtypes of the columns of ``PieceColumns`` in a packed record, and after ``unpack``."""


def pack(value: RankRecord) -> bytes:
    """Returns the bytes of a rank's record, which is sent to the rank that commits."""
    piece_columns = [
        [getattr(columns, column).astype(dtype).tobytes() for column, dtype in _RECEIVED_DTYPES.items()]
        for columns in value.piece_columns
    ]
    files = [[f.part, f.tier, f.nbytes, f.data_start, f.first_block, f.columns_id, f.origin] for f in value.files]
    raw = msgpack.packb([value.rank, value.digest, msgpack.packb(value.tensors), piece_columns, files])
    return zstandard.ZstdCompressor(level=1).compress(raw)


def unpack(raws: Iterable[bytes]) -> list[RankRecord]:
    """Returns the records that ``pack`` has packed, in the order of their ranks.

    Equal things become one object, because a thousand ranks may each have pieces of a thousand tensors: tensors that
    several ranks have pieces of, lists of them, which are mostly the same on many ranks, and columns, such as the
    offsets of equal shares.
    """
    tensors: dict[bytes, bytes] = {}
    lists: dict[bytes, tuple[bytes, ...]] = {}
    columns: dict[tuple[str, bytes], Ints] = {}
    records = []
    decompressor = zstandard.ZstdDecompressor()
    for raw in raws:
        packed = decompressor.decompress(raw)
        rank, rank_digest, packed_list, piece_columns, files = msgpack.unpackb(packed, use_list=False)
        key = digest(packed_list)
        if key not in lists:
            lists[key] = tuple(tensors.setdefault(tensor, tensor) for tensor in msgpack.unpackb(packed_list))
        own_columns = (
            PieceColumns(
                *(
                    columns.setdefault((dtype, column), np.frombuffer(column, dtype))
                    for dtype, column in zip(_RECEIVED_DTYPES.values(), of_files, strict=True)
                )
            )
            for of_files in piece_columns
        )
        own_files = (FileRecord(part, Tier(tier), *rest) for part, tier, *rest in files)
        records.append(RankRecord(rank, rank_digest, lists[key], tuple(own_columns), tuple(own_files)))
    return sorted(records, key=lambda record: record.rank)


class Tensors:
    """The tensors that the ranks have recorded, numbered from 0. A tensor is a name with a shape, a dtype and a
    grid."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.name_ids: dict[str, int] = {}
        self._ids: dict[bytes, int] = {}
        """The number of each packed tensor."""
        self._known: dict[int, Ints] = {}
        """The numbers of the tensors of each list, by its ``id``."""

    def add(self, tensors: tuple[bytes, ...]) -> Ints:
        """Returns the numbers of ``tensors``, a list that many ranks may share. Tensors that are new get the next
        numbers. The list has to stay in memory as long as this object is used."""
        if id(tensors) not in self._known:
            for packed in tensors:
                if packed not in self._ids:
                    self._ids[packed] = len(self.tensors)
                    self.tensors.append(msgpack.unpackb(packed, use_list=False))
                    self.name_ids.setdefault(self.tensors[-1][0], len(self.name_ids))
            self._known[id(tensors)] = np.array([self._ids[packed] for packed in tensors], np.int64)
        return self._known[id(tensors)]

    @property
    def packed(self) -> tuple[bytes, ...]:
        """The packed tensors, in the order of their numbers."""
        return tuple(self._ids)

    @cached_property
    def name_of(self) -> Ints:
        """The name id of each tensor. It is used when all tensors are known."""
        return np.array([self.name_ids[name] for name, *_ in self.tensors], np.int64)


class _FilePieces(NamedTuple):
    """The pieces of one data file."""

    rank: int
    tier: Tier
    columns_id: int
    columns: PieceColumns
    ids: Ints
    """The numbers of the tensors to which ``columns.tensor`` refers."""

    @property
    def tensor(self) -> Ints:
        """The number of the tensor of each piece."""
        return self.ids[self.columns.tensor]


def _rows_of_part(files: Sequence[_FilePieces], name_of: Ints) -> tuple[Ints, Ints]:
    """Returns the number of the tensor and the number of the pieces of each row of a part. ``name_of`` has the name id
    of each tensor."""
    tensor_of, count = np.zeros(len(name_of), np.int64), np.zeros(len(name_of), np.int64)
    for file in files:
        tensor = file.tensor
        tensor_of[name_of[tensor]] = tensor
        np.add.at(count, name_of[tensor], 1)
    present = np.flatnonzero(count)
    return tensor_of[present], count[present]


def _chunks(
    part: str, files: Sequence[_FilePieces], rows: tuple[Ints, Ints], tensors: Sequence[Tensor], name_of: Ints
) -> Iterator[Layout]:
    """Yields the layout of one part, chunk by chunk. Only the pieces of one chunk are put together at a time, because
    all pieces of thousands of ranks would take much memory. ``files``: the pieces of all files of the part. ``rows``:
    what ``_rows_of_part`` has returned. The other arguments and the errors are those of ``_rows``."""
    row_tensor, count = rows
    first_names = name_of[row_tensor[[of_chunk.start for of_chunk in index_format.chunk_rows(count)]]]
    placed: list[tuple[_FilePieces, Ints | None, list[int]]] = []
    """Each file, the order of its pieces by name, or None if they are in this order, and the first piece of each
    chunk."""
    for file in files:
        name = name_of[file.tensor]
        order = np.argsort(name, kind="stable") if (name[1:] < name[:-1]).any() else None
        first = np.searchsorted(name if order is None else name[order], first_names)
        placed.append((file, order, [*first.tolist(), len(name)]))
    for number in range(len(first_names)):
        yield _rows(part, _pieces_of_chunk(placed, number, name_of), tensors, name_of)


def _pieces_of_chunk(
    placed: Sequence[tuple[_FilePieces, Ints | None, Sequence[int]]], number: int, name_of: Ints
) -> list[Ints]:
    """Returns the columns of all pieces of one chunk, which ``_rows`` gets. ``placed``: as in ``_chunks``."""
    chosen: list[tuple[_FilePieces, slice | Ints, int]] = []
    for file, order, first_pieces in placed:
        first, end = first_pieces[number : number + 2]
        if first < end:
            chosen.append((file, slice(first, end) if order is None else order[first:end], end - first))
    tensor = np.concatenate([file.ids[file.columns.tensor[pieces]] for file, pieces, _ in chosen])
    start, stop, copy, offset, block = (
        np.concatenate([getattr(file.columns, name)[pieces] for file, pieces, _ in chosen], dtype=np.int64)
        for name in ("start", "stop", "copy", "offset", "block")
    )
    rank, tier = (
        np.repeat([getattr(file, name) for file, *_ in chosen], [count for *_, count in chosen])
        for name in ("rank", "tier")
    )
    together = (tensor, start, stop, copy, offset, block, rank, tier)
    order = np.lexsort((start, copy, name_of[tensor]))
    return [column[order] for column in together]


def _rows(part: str, columns: Sequence[Ints], tensors: Sequence[Tensor], name_of: Ints) -> Layout:
    """Returns the rows of one chunk of a part.

    ``columns`` are int64 arrays with an entry for each piece of the chunk: tensor, start, stop, copy, offset, block,
    rank, tier. The pieces are in the order of their names, copies and starts. ``tensors`` are all tensors, and
    ``name_of`` has the name id of each of them. Raises RankError if ranks disagree about a tensor, and FormatError
    (I005) if the pieces of all ranks do not make up whole tensors.
    """
    tensor, start, stop, copy, offset, block, rank, tier = columns
    name = name_of[tensor]
    row_name, first, count = np.unique(name, return_index=True, return_counts=True)
    row_tensor = tensor[first]
    differs = np.flatnonzero(tensor != np.repeat(row_tensor, count))
    if len(differs):
        pair = (differs[0], first[np.searchsorted(first, differs[0], "right") - 1])
        (label, *one), (_, *other) = (tensors[tensor[at]] for at in pair)
        this_rank, other_rank = (int(rank[at]) for at in pair)
        raise RankError(
            f"{part}/{label} is {_described(*one)} on rank {this_rank}, {_described(*other)} on rank {other_rank}",
            key=f"{part}/{label}",
            rank=this_rank,
        )
    layout = Layout(row_name, count, rank, tier, stop - start, offset, block)
    numel = np.array([math.prod(tensors[number][1]) for number in row_tensor.tolist()], np.int64)
    wrong = _wrong_starts(layout, name, copy, start, numel)
    if wrong.any():
        label = tensors[tensor[np.argmax(wrong)]][0]
        raise broken("I005", "the pieces of all ranks leave a gap or overlap", key=f"{part}/{label}")
    return layout


def _described(shape: tuple[int, ...], dtype: str, sections: Sections) -> str:
    """Returns a phrase for an error about a tensor."""
    return f"{dtype} {list(shape)}" + (
        f" in the sections {reprlib.repr(packed_sections(sections))}" if sections else ""
    )


def _wrong_starts(layout: Layout, name: Ints, copy: Ints, start: Ints, numel: Ints) -> NDArray[np.bool]:
    """Returns, for each piece, whether a reader would compute another start or copy for it than the ranks have recorded
    (I005). A reader has to compute them, because the index does not store where pieces start."""
    read_start, read_copy = index_format.starts_and_copies(layout, numel)
    wrong: NDArray[np.bool] = start != read_start
    wrong[1:] |= (name[1:] == name[:-1]) & ((copy[1:] == copy[:-1]) != (read_copy[1:] == read_copy[:-1]))
    wrong &= np.repeat(numel, layout.count) > 0
    return wrong


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
    """The lineage that is added to the root tree. If its ``run`` is empty, ``run_of`` decides about it."""
    machines: Sequence[Mapping[str, object]] = ()
    """The machines of which each has only the files of its own ranks, for the root tree. Empty if there is one."""


def catalog(rank_records: Sequence[RankRecord], save_id: str, metadata: SaveMetadata) -> tuple[bytes, bytes]:
    """Returns ``(manifest, index)``, the bytes of both files. They are checked by the rules that a reader checks.
    ``rank_records`` has one record for each rank.

    An alias whose tensor no part holds is left out. Raises RankError if ranks disagree about a tensor, UnsupportedError
    if there are more pieces than a checkpoint can have, FormatError if the pieces of all ranks do not make up whole
    tensors, or for anything else that a reader would refuse.
    """
    _check_pieces(rank_records)
    numbered = Tensors()
    parts: dict[str, list[_FilePieces]] = {}
    part_ids: dict[str, int] = {}
    files: list[File] = []
    digests: dict[int, bytes] = {}
    for record in rank_records:
        digests[record.rank] = record.digest
        ids = numbered.add(record.tensors)
        for data_file in record.files:
            part_id = part_ids.setdefault(data_file.part, len(part_ids))
            number, size = data_file.columns_id, (data_file.nbytes, data_file.data_start)
            pieces = _FilePieces(record.rank, data_file.tier, number, record.piece_columns[number], ids)
            parts.setdefault(data_file.part, []).append(pieces)
            files.append(File(record.rank, part_id, data_file.tier, *size, data_file.first_block, data_file.origin))
    tensors, names = numbered.tensors, tuple(numbered.name_ids)
    writer = IndexWriter()
    shapes: dict[tuple[int, ...], int] = {}
    grids: dict[Sections, int] = {(): 0}
    different: dict[tuple[tuple[int, Tier, int], ...], Part] = {}
    """The parts that do not have the same tensors and pieces as a part before them, by what identifies the pieces."""
    manifest_parts: list[Part] = []
    for part, of_part in parts.items():
        identity = tuple(file[:3] for file in of_part)
        if identity not in different:
            rows = _rows_of_part(of_part, numbered.name_of)
            layout_id = writer.add(_chunks(part, of_part, rows, tensors, numbered.name_of))
            part_tensors = [tensors[number] for number in rows[0].tolist()]
            name_ids = tuple(numbered.name_ids[name] for name, *_ in part_tensors)
            shape_ids = tuple(shapes.setdefault(shape, len(shapes)) for _, shape, _, _ in part_tensors)
            dtypes = tuple(dtype for _, _, dtype, _ in part_tensors)
            grid_ids = tuple(grids.setdefault(sections, len(grids)) for *_, sections in part_tensors)
            different[identity] = Part(part, layout_id, name_ids, shape_ids, dtypes, grid_ids)
        manifest_parts.append(replace(different[identity], name=part))
    manifest = Manifest(
        save_id=save_id,
        step=metadata.step,
        world_size=len(rank_records),
        block_bytes=metadata.block_bytes,
        names=names,
        shapes=tuple(shapes),
        grids=tuple(grids),
        parts=tuple(manifest_parts),
        files=Files.of(files),
        digests=tuple(digests[rank] for rank in range(len(rank_records))),
        chunks=tuple(writer.chunks),
        index_bytes=len(writer.index),
        aliases={alias: name for alias, name in metadata.aliases.items() if name in numbered.name_ids},
        state=metadata.state,
        writer=metadata.writer,
    )
    if metadata.lineage is not None:
        lineage = metadata.lineage if metadata.lineage.run_id else replace(metadata.lineage, run_id=run_of(manifest))
        entry = lineage.tree(tensor_counts(manifest))
        manifest = replace(manifest, state=tree.with_entry(manifest.state, LINEAGE, entry))
    if metadata.machines:
        manifest = replace(manifest, state=tree.with_entry(manifest.state, MACHINES, metadata.machines))
    raw = manifest_format.encode(manifest)
    index = bytes(writer.index)
    _check(raw, index)
    return raw, index


def tensor_counts(manifest: Manifest) -> dict[str, int]:
    """Returns the number of tensors of each part."""
    return {part.name: len(part.name_ids) for part in manifest.parts}


def run_of(manifest: Manifest) -> str:
    """Returns the identity of the run of a checkpoint that does not record it."""
    return run_by_tensors(
        (manifest.names[name_id], manifest.shapes[shape_id])
        for part in manifest.parts
        if part.name in (MASTER, PARAM)
        for name_id, shape_id in zip(part.name_ids, part.shape_ids, strict=True)
    )


def with_digests(manifest: bytes, digests: Sequence[bytes]) -> bytes:
    """Returns the same manifest with the digests of the digest tables of all ranks."""
    return manifest_format.encode(replace(manifest_format.decode(manifest), digests=tuple(digests)))


def _check_pieces(rank_records: Sequence[RankRecord]) -> None:
    """Raises UnsupportedError if there are too many pieces. The caller does this before it makes tables of them, which
    would take much memory."""
    pieces = sum(len(record.piece_columns[file.columns_id]) for record in rank_records for file in record.files)
    if pieces > MANY_PIECES_MAX:
        parts = {file.part for record in rank_records for file in record.files}
        raise UnsupportedError(
            f"the checkpoint would have {pieces:,} pieces of tensors ({len(rank_records):,} ranks, "
            f"{len(parts)} parts); the format can hold {MANY_PIECES_MAX:,}",
            rule="M013",
            hint="leave parts out with `exclude`, and write them as a checkpoint of their own with `parts`",
        )


def _check(raw: bytes, index: bytes) -> None:
    """Reads back the manifest and the index that are about to be committed, while the state that they describe still
    exists."""
    manifest = manifest_format.decode(raw)
    for chunk in manifest.chunks:
        index_format.decode(index[chunk.offset : chunk.offset + chunk.nbytes], chunk, manifest)
