"""The digest tables of a save: read, fitted to its files, computed from its data, compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import MissingFileError
from zckpt.format import names
from zckpt.format import shard as shard_format
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES, ReadFile, blocks, digest
from zckpt.plan import rebuild
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.reshard import file_extents
from zckpt.transfer.read import read_op
from zckpt.transfer.staging import host_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zckpt.plan.coalesce import ReadOp
    from zckpt.plan.rebuild import FoundFile
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Reader
    from zckpt.transfer.budget import Budget


@dataclass(frozen=True, slots=True)
class Places:
    """Where the digests of a save's files are in the tables of their ranks."""

    files: Mapping[int, Sequence[FoundFile]]
    """By rank."""
    block_bytes: int
    first_blocks: Mapping[int, Sequence[int]]
    """By rank, the number of each file's first digest."""


def read_tables(reader: Reader, save_id: str, ranks: Iterable[int]) -> dict[int, bytes | None]:
    """The digest table of each rank; None where there is none."""
    return {rank: read_if_there(reader, names.digests_path(save_id, rank)) for rank in ranks}


def read_if_there(reader: Reader, path: str) -> bytes | None:
    try:
        return reader.read(path, 0, reader.size(path))
    except MissingFileError:
        return None


def fit_tables(
    files: Mapping[int, Sequence[FoundFile]], tables: Mapping[int, bytes | None]
) -> tuple[int, dict[int, list[int] | None]]:
    """The size of blocks with which most digest tables fit the files, and for each rank the number of each file's first
    digest; None for a rank whose table does not fit."""
    best: tuple[int, dict[int, list[int] | None]] | None = None
    for block_bytes in rebuild.block_sizes(BLOCK_BYTES):
        placed = {
            rank: None if table is None else rebuild.fit_table(files[rank], table, block_bytes)
            for rank, table in tables.items()
        }
        fitting = sum(one is not None for one in placed.values())
        if best is None or fitting > sum(one is not None for one in best[1].values()):
            best = block_bytes, placed
    assert best is not None
    return best


def compute_tables(reader: Reader, places: Places, budget: Budget) -> dict[int, bytes]:
    """The digest tables of all ranks, from all of their data."""
    block_bytes, first_blocks = places.block_bytes, places.first_blocks
    tables = {
        rank: bytearray(DIGEST_BYTES * sum(file.header.first_blocks(block_bytes)[-1] for file in own))
        for rank, own in places.files.items()
    }
    staging = host_pool(budget.batch_bytes(block_bytes))

    def put(rank: int, block: int, data: Bytes | bytes) -> None:
        tables[rank][block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = digest(data)

    def look(rank: int, first: int, op: ReadOp, data: Bytes) -> None:
        stops = np.cumsum(op.segments.nbytes)
        bounds = zip((stops - op.segments.nbytes).tolist(), stops.tolist(), op.segments.block.tolist(), strict=True)
        for start, stop, block in bounds:
            put(rank, first + block, data[start:stop])

    def reads() -> Iterator[Callable[[], None]]:
        for rank, own in places.files.items():
            headers = dict(enumerate(file.header for file in own))
            for number, file in enumerate(own):
                for block, start, stop in blocks(0, len(file.raw), 0, block_bytes):
                    put(rank, first_blocks[rank][number] + block, file.raw[start:stop])
            ops = plan_reads(
                file_extents(headers, block_bytes),
                data_starts=[header.data_start for header in headers.values()],
                block_bytes=block_bytes,
                verify=True,
                batch_bytes=budget.batch_bytes(block_bytes),
            )
            for op in ops:
                file = own[op.file]
                source = ReadFile(file.header.shard.path, file.nbytes, memoryview(b""))
                visit = partial(look, rank, first_blocks[rank][op.file], op)
                yield partial(read_op, reader, op, source, staging, budget.direct, visit)

    with staging.work():
        budget.run(reads())
    return {rank: bytes(table) for rank, table in tables.items()}


def differences(places: Places, rank: int, table: bytes, computed: bytes) -> list[str]:
    """The blocks of a rank's files that differ between two tables."""
    found = []
    for file, first in zip(places.files[rank], places.first_blocks[rank], strict=True):
        within = (0, *file.header.first_blocks(places.block_bytes))
        for (start, stop), block in zip(shard_format.regions(file.header), within, strict=False):
            for number, block_start, block_stop in blocks(start, stop - start, first + block, places.block_bytes):
                own = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
                if table[own] != computed[own]:
                    found.append(f"{file.header.shard.path}: bytes [{block_start}, {block_stop}) are damaged")
    return found
