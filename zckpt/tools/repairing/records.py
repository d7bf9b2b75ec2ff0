"""Makes the records of the ranks again from the headers of a checkpoint's data files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import digest
from zckpt.format.names import split_piece_name
from zckpt.format.rules import broken
from zckpt.plan.catalog import FileRecord, Kind, PieceColumns, RankRecord, Tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.checkpoint.listing.salvage import FoundFile
    from zckpt.format.data_file import HeaderEntry

_Copies = dict[tuple[str, str, int, int, int], int]
"""The copy that a piece belongs to, by part, name, rank, tier and first element."""


def rank_records(
    files: Mapping[int, Sequence[FoundFile]],
    first_blocks: Mapping[int, Sequence[int]],
    tables: Mapping[int, bytes],
    block_bytes: int,
) -> list[RankRecord]:
    """Returns a record for each rank, which says the same as the one that the rank made when it wrote its ``files``.
    Raises FormatError (I005) if the pieces of a tensor are neither one whole copy nor a whole copy of each of several
    ranks."""
    copies = _copies([file for of_rank in files.values() for file in of_rank])
    rank_records = []
    for rank, of_rank in sorted(files.items()):
        order = sorted(zip(first_blocks[rank], of_rank, strict=True), key=lambda pair: pair[0])
        tensors: dict[tuple[str, Kind], int] = {}
        columns, records = [], []
        for number, (first, file) in enumerate(order):
            header, rows = file.header, []
            for entry, block in zip(header.entries, header.first_blocks(block_bytes), strict=False):
                if not entry.is_filler:
                    name, start, length = _piece(entry)
                    tensor = tensors.setdefault(
                        (name, (header.whole_shape(entry), entry.dtype, header.grid(entry).sections)), len(tensors)
                    )
                    data_file = header.data_file
                    copy = copies[data_file.part, name, rank, data_file.tier, start]
                    rows.append((tensor, start, length, copy, entry.offset, block))
            columns.append(PieceColumns(*np.array(rows, np.int64).reshape(-1, 6).T))
            data_file = header.data_file
            size = (file.nbytes, header.data_start)
            records.append(FileRecord(data_file.part, data_file.tier, *size, first, number, data_file.origin))
        rank_records.append(RankRecord(rank, digest(tables[rank]), Tensors.of(tensors), tuple(columns), tuple(records)))
    return rank_records


def _piece(entry: HeaderEntry) -> tuple[str, int, int]:
    """Returns the name of the tensor of a piece, the first element of the piece, and its number of elements."""
    name, start, *_ = split_piece_name(entry.name) or (entry.name, 0)
    return name, start, math.prod(entry.shape)


def _copies(files: Sequence[FoundFile]) -> _Copies:
    """Returns the number of the copy that each piece belongs to. The headers do not have this number. If a tensor has
    several copies, each copy was written by one rank alone, and the copies are numbered in the order of these ranks."""
    pieces: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for file in files:
        data_file = file.header.data_file
        for entry in file.header.entries:
            if not entry.is_filler:
                name, start, length = _piece(entry)
                pieces.setdefault((data_file.part, name), []).append((data_file.rank, data_file.tier, start, length))
                sizes[data_file.part, name] = math.prod(file.header.whole_shape(entry))
    copies: _Copies = {}
    for (part, name), of_tensor in pieces.items():
        size = sizes[part, name]
        if size and sum(length for *_, length in of_tensor) == size:
            copies |= {(part, name, rank, tier, start): 0 for rank, tier, start, _ in of_tensor}
            continue
        groups: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for piece in of_tensor:
            groups.setdefault(piece[:2] if size == 0 else (piece[0], 0), []).append(piece)
        for copy, (_, group) in enumerate(sorted(groups.items())):
            if sum(length for *_, length in group) != size:
                raise broken("I005", "the pieces are neither one copy nor one of each rank", key=f"{part}/{name}")
            copies |= {(part, name, rank, tier, start): copy for rank, tier, start, _ in group}
    return copies
