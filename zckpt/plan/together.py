"""Plans data files that several ranks write together.

The ranks of a group are on one host. Such a file belongs to the first of them, and so do its pieces and its digests.
Each rank writes a range of the file. The ranges are whole pages, so no two ranks write to the same page. A reader finds
nothing special in such a checkpoint: one rank has written much, and the others have written little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.errors import FormatError, UnsupportedError
from zckpt.format.data_file import DataFileId, encode_header
from zckpt.format.digest import DIGEST_BYTES, block_count
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import DATA_ALIGNMENT_BYTES, DIGEST_TABLE_BYTES_MAX
from zckpt.format.names import FILLER_PREFIX, Tier, partial_name
from zckpt.plan.catalog import FileRecord, Kind, PieceColumns, RankRecord, Tensors
from zckpt.plan.data_files import plan_range
from zckpt.plan.inventory import BUFFER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zckpt.format.data_file import EntryFields
    from zckpt.geometry import Ints, Sections
    from zckpt.plan.data_files import DataFilePlan

HINT = "let fewer ranks share a file: ranks_per_file"


class Range(NamedTuple):
    """The range of a common file that one rank writes, as the first rank of the group tells it."""

    part: str
    tier: int
    header: bytes
    """The header of the file, for the rank whose range is the first. It is empty for all others."""
    start: int
    """The first byte of the range in the file."""
    padding: int
    """How many zeros follow the last piece, so that the range ends with a page. The last range needs none."""


@dataclass(frozen=True, slots=True)
class CommonFile:
    """A data file that several ranks write together."""

    id: DataFileId
    nbytes: int
    data_start: int
    tensors: tuple[tuple[str, Kind], ...]
    pieces: PieceColumns
    """The pieces of all ranges. ``tensor`` is a position in ``tensors``."""
    ranges: Mapping[int, Range]
    """The ranges in the order of the file, by the rank that writes each of them."""
    blocks: Mapping[int, int]
    """How many digests the range of each rank has, in the order of the file."""


def common_files(
    records: Sequence[RankRecord], save_id: str, world_size: int, *, block_bytes: int
) -> tuple[CommonFile, ...]:
    """Returns the files that the ranks of a group write together. ``records``: what each of them would write alone.
    These are the files of which several ranks have one of the same part and tier, except where the rank of a piece has
    a meaning: for buffers, and for tensors with several copies. Raises UnsupportedError if there is more than the
    format can hold."""
    members: dict[tuple[str, Tier], list[tuple[RankRecord, FileRecord]]] = {}
    for record in records:
        for file in record.files:
            members.setdefault((file.part, file.tier), []).append((record, file))
    tensors: dict[tuple[str, Kind], int] = {}
    numbers = {
        record.rank: np.array([tensors.setdefault(tensor, len(tensors)) for tensor in record.tensors.rows()], np.int64)
        for record in records
    }
    first = records[0].rank
    files: list[CommonFile] = []
    for (part, tier), of_file in members.items():
        has_copies = any(record.piece_columns[file.columns_id].copy.any() for record, file in of_file)
        if len(of_file) > 1 and part != BUFFER and not has_copies:
            file_id = DataFileId(save_id, first, world_size, part, tier)
            common = _common_file(file_id, of_file, tuple(tensors), numbers, block_bytes)
            files += [] if common is None else [common]
    table_bytes = sum(sum(file.blocks.values()) for file in files) * DIGEST_BYTES
    if table_bytes > DIGEST_TABLE_BYTES_MAX:
        raise UnsupportedError(f"the digests of {len(records)} ranks do not fit in one table of digests", hint=HINT)
    return tuple(files)


def _common_file(
    data_file: DataFileId,
    members: Sequence[tuple[RankRecord, FileRecord]],
    tensors: tuple[tuple[str, Kind], ...],
    numbers: Mapping[int, Ints],
    block_bytes: int,
) -> CommonFile | None:
    """Returns the file that is made of the files of several ranks, or None if it would have two entries of one name.
    ``tensors``: all tensors of these ranks. ``numbers``: the position there of each tensor of each rank's record."""
    item_bytes = np.array([ITEM_BYTES[dtype] for _, (_, dtype, _) in tensors], np.int64)
    numel = [math.prod(shape) for _, (shape, *_) in tensors]
    entries: list[EntryFields] = []
    shapes: dict[str, tuple[int, ...]] = {}
    sections: dict[str, Sections] = {}
    starts: dict[int, int] = {}
    padding: dict[int, int] = {}
    columns, firsts, stop = [], [], 0
    for record, file in members:
        own = record.piece_columns[file.columns_id]
        tensor = numbers[record.rank][own.tensor]
        nbytes = own.numel * item_bytes[tensor]
        begin = starts[record.rank] = stop
        firsts.append(len(entries))
        offsets = own.offset.astype(np.int64) + begin
        pieces = (tensor, own.start, own.numel, offsets, nbytes)
        for number, start, count, offset, size in zip(*(column.tolist() for column in pieces), strict=True):
            if offset > stop:
                entries.append(_filler(len(entries), stop, offset))
            name, (shape, dtype, grid) = tensors[number]
            stop = offset + size
            if count == numel[number] and not grid:
                entries.append((name, dtype, shape, offset, size))
                continue
            entries.append((partial_name(name, start, start + count), dtype, (count,), offset, size))
            shapes[name] = shape
            if grid:
                sections[name] = grid
        padding[record.rank] = 0 if record is members[-1][0] else -stop % DATA_ALIGNMENT_BYTES
        if padding[record.rank]:
            entries.append(_filler(len(entries), stop, stop + padding[record.rank]))
            stop += padding[record.rank]
        columns.append((tensor, own.start, own.numel, own.copy, offsets))
    if len({name for name, *_ in entries}) < len(entries):
        return None  # Several ranks have the same tensor without elements.
    used = np.unique(np.concatenate([tensor for tensor, *_ in columns]))
    if len({tensors[number][0] for number in used.tolist()}) < len(used):
        return None  # The ranks disagree about a tensor. In files of their own, an error names them.
    try:
        header = encode_header(data_file, entries, shapes, sections)
    except FormatError as error:
        error.hint = HINT
        raise
    # The digests are those of the blocks of the header, and then of each entry, in the order of the file.
    counts = block_count(np.array([len(header), *(size for *_, size in entries)], np.int64), block_bytes)
    first_block = (np.cumsum(counts) - counts)[1:]
    is_piece = np.array([not name.startswith(FILLER_PREFIX) for name, *_ in entries], bool)
    blocks = np.add.reduceat(counts[1:], firsts)
    blocks[0] += counts[0]
    table = [np.concatenate(column, dtype=np.int64) for column in zip(*columns, strict=True)]
    table.append(first_block[is_piece])
    place, first = (data_file.part, data_file.tier), members[0][0].rank
    ranges = {rank: Range(*place, b"", len(header) + start, padding[rank]) for rank, start in starts.items()}
    ranges[first] = ranges[first]._replace(header=header, start=0)
    return CommonFile(
        data_file, len(header) + stop, len(header), tensors, PieceColumns(*table), ranges,
        dict(zip(starts, blocks.tolist(), strict=True)),
    )  # fmt: skip


def _filler(number: int, start: int, stop: int) -> EntryFields:
    return f"{FILLER_PREFIX}{number}", "U8", (stop - start,), start, stop - start


def own_files(
    alone: Iterable[DataFilePlan], ranges: Sequence[Range], first_rank: int, *, block_bytes: int
) -> tuple[tuple[DataFilePlan, ...], tuple[DataFilePlan, ...]]:
    """Returns the files that a rank of a group writes alone, and the ranges of common files that it writes, in the
    order of their digests. ``alone``: what it would write alone. ``first_rank``: the first rank of the group."""
    plans = {(plan.id.part, int(plan.id.tier)): plan for plan in alone}
    to_share = [plans.pop((own.part, own.tier)) for own in ranges]
    files, shared, first_block = [], [], 0
    for plan in plans.values():
        files.append(replace(plan, first_block=first_block))
        first_block += plan.blocks
    for own, plan in zip(ranges, to_share, strict=True):
        place = own.header, own.start, own.padding, first_block
        of_range = plan_range(plan, replace(plan.id, rank=first_rank), *place, block_bytes=block_bytes)
        first_block += of_range.blocks
        if of_range.nbytes:
            shared.append(of_range)
    return tuple(files), tuple(shared)


def with_common_files(record: RankRecord, files: Sequence[CommonFile], first_block: int) -> RankRecord:
    """Returns the record of the first rank of a group, to which the common files belong. ``record`` has the files that
    this rank writes alone, and ``first_block`` digests. Mostly there are no common files."""
    if not files:
        return record
    tensors = {tensor: number for number, tensor in enumerate(record.tensors.rows())}
    piece_columns: dict[bytes, PieceColumns] = {}
    file_records = [*record.files]
    for file in files:
        numbers = np.array([tensors.setdefault(tensor, len(tensors)) for tensor in file.tensors], np.int64)
        columns = replace(file.pieces, tensor=numbers[file.pieces.tensor])
        key = b"".join(getattr(columns, name).tobytes() for name in columns.__dataclass_fields__)
        piece_columns.setdefault(key, columns)
        columns_id = len(record.piece_columns) + [*piece_columns].index(key)
        sizes = file.nbytes, file.data_start, first_block
        file_records.append(FileRecord(file.id.part, file.id.tier, *sizes, columns_id, ""))
        first_block += sum(file.blocks.values())
    return replace(
        record, tensors=Tensors.of(tensors), piece_columns=(*record.piece_columns, *piece_columns.values()),
        files=tuple(file_records),
    )  # fmt: skip


def joined_digests(files: Iterable[CommonFile], of_ranks: Mapping[int, bytes]) -> bytes:
    """Returns the digests of common files in the order of the digest table. ``of_ranks``: the digests of the ranges of
    each rank, one after the other."""
    at = dict.fromkeys(of_ranks, 0)
    joined = bytearray()
    for file in files:
        for rank, blocks in file.blocks.items():
            begin, at[rank] = at[rank], at[rank] + blocks * DIGEST_BYTES
            joined += of_ranks[rank][begin : at[rank]]
    return bytes(joined)
