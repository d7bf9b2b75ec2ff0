"""From the headers of a checkpoint's data files to what its ranks said when they wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import DIGEST_BYTES, blocks, digest
from zckpt.format.limits import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN
from zckpt.format.names import split_piece_name
from zckpt.format.rules import broken
from zckpt.plan.catalog import Geometry, Receipt, ShardReceipt
from zckpt.state.inventory import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.format.shard import Entry, Header

_Copies = dict[tuple[str, str, int, int, int], int]
"""The copy that a piece belongs to, by part, name, rank, number of its tier and first element."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A data file whose header is sound. ``raw`` are the header's bytes, ``nbytes`` those of the file."""

    header: Header
    raw: bytes
    nbytes: int


def fit_table(files: Sequence[FoundFile], table: bytes, block_bytes: int) -> list[int] | None:
    """The number of each file's first digest in the table of its rank; None if they do not fill it without a gap. A
    file is found by the digests of its header."""
    found = []
    for file in files:
        parts = [digest(file.raw[start:stop]) for _, start, stop in blocks(0, len(file.raw), 0, block_bytes)]
        at = table.find(b"".join(parts))
        while at % DIGEST_BYTES and at >= 0:
            at = table.find(b"".join(parts), at + 1)
        found.append(at // DIGEST_BYTES)
    stop = 0
    for first, file in sorted(zip(found, files, strict=True), key=lambda pair: pair[0]):
        if first != stop:
            return None
        stop += file.header.first_blocks(block_bytes)[-1]
    return found if stop * DIGEST_BYTES == len(table) else None


def in_a_row(files: Sequence[FoundFile], block_bytes: int) -> list[int]:
    """The same for a table that is yet to be made."""
    sizes = [file.header.first_blocks(block_bytes)[-1] for file in files]
    return [sum(sizes[:i]) for i in range(len(files))]


def block_sizes(usual: int) -> Iterator[int]:
    """That may have been used, the likely one first."""
    yield usual
    size = BLOCK_BYTES_MIN
    while size <= BLOCK_BYTES_MAX:
        yield size
        size *= 2


def receipts(
    files: Mapping[int, Sequence[FoundFile]],
    first_blocks: Mapping[int, Sequence[int]],
    tables: Mapping[int, bytes],
    block_bytes: int,
) -> list[Receipt]:
    """One for each rank, as if it had just written its ``files``. Raises FormatError (I005) if the pieces of a tensor
    are not one whole copy, or one from each of some ranks."""
    copies = _copies([file for own in files.values() for file in own])
    found = []
    for rank, own in sorted(files.items()):
        order = sorted(zip(first_blocks[rank], own, strict=True), key=lambda pair: pair[0])
        tensors: dict[tuple[str, tuple[int, ...], str], int] = {}
        geometries, shards = [], []
        for number, (first, file) in enumerate(order):
            header, rows = file.header, []
            for entry, block in zip(header.entries, header.first_blocks(block_bytes), strict=False):
                if not entry.is_filler:
                    name, start, length = _piece(entry)
                    tensor = tensors.setdefault((name, header.whole_shape(entry), entry.dtype), len(tensors))
                    shard = header.shard
                    copy = copies[shard.part, name, rank, TIERS.index(shard.tier), start]
                    rows.append((tensor, copy, start, length, entry.offset, block))
            geometries.append(Geometry(*np.array(rows, np.int64).reshape(-1, 6).T))
            shard = header.shard
            size = (file.nbytes, header.data_start)
            shards.append(ShardReceipt(shard.part, shard.tier, *size, first, number, shard.origin))
        found.append(Receipt(rank, digest(tables[rank]), tuple(tensors), tuple(geometries), tuple(shards)))
    return found


def _piece(entry: Entry) -> tuple[str, int, int]:
    """Name of its tensor, first element, number of elements."""
    name, start, *_ = split_piece_name(entry.name) or (entry.name, 0)
    return name, start, math.prod(entry.shape)


def _copies(files: Sequence[FoundFile]) -> _Copies:
    """Which copy each piece belongs to. The headers do not say. If there is more than one, each has to be one rank's
    alone, and they are in the order of the ranks, as they were written."""
    pieces: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for file in files:
        shard = file.header.shard
        for entry in file.header.entries:
            if not entry.is_filler:
                name, start, length = _piece(entry)
                pieces.setdefault((shard.part, name), []).append((shard.rank, TIERS.index(shard.tier), start, length))
                sizes[shard.part, name] = math.prod(file.header.whole_shape(entry))
    copies: _Copies = {}
    for (part, name), own in pieces.items():
        size = sizes[part, name]
        if size and sum(length for *_, length in own) == size:
            copies |= {(part, name, rank, tier, start): 0 for rank, tier, start, _ in own}
            continue
        groups: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for piece in own:
            groups.setdefault(piece[:2] if size == 0 else (piece[0], 0), []).append(piece)
        for copy, (_, group) in enumerate(sorted(groups.items())):
            if sum(length for *_, length in group) != size:
                raise broken("I005", "the pieces are neither one copy nor one of each rank", key=f"{part}/{name}")
            copies |= {(part, name, rank, tier, start): copy for rank, tier, start, _ in group}
    return copies
