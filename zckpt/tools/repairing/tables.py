"""The digest tables that a repair makes: their places, their computation from all data, and their differences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format import data_file as data_file_format
from zckpt.format.digest import DIGEST_BYTES, ReadFile, blocks, digest
from zckpt.plan.reads import plan_reads
from zckpt.plan.reshard import entry_ranges
from zckpt.transfer.read import read_op
from zckpt.transfer.staging import host_pool
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.checkpoint.listing.salvage import FoundFile
    from zckpt.plan.reads import ReadOp
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Reader
    from zckpt.transfer.budget import Budget


@dataclass(frozen=True, slots=True)
class Tables:
    """The places of the digests of a save's files in the digest tables of their ranks."""

    files: Mapping[int, Sequence[FoundFile]]
    """The data files of each rank."""
    block_bytes: int
    first_blocks: Mapping[int, Sequence[int]]
    """For each rank, the number of the first digest of each of its files."""


def in_a_row(files: Sequence[FoundFile], block_bytes: int) -> list[int]:
    """Returns the numbers of the first digests of files whose digests follow one another in a new digest table."""
    sizes = [file.header.first_blocks(block_bytes)[-1] for file in files]
    return [sum(sizes[:i]) for i in range(len(files))]


def compute_tables(reader: Reader, places: Tables, budget: Budget) -> dict[int, bytes]:
    """Computes the digest tables of all ranks from all of their data."""
    block_bytes, first_blocks = places.block_bytes, places.first_blocks
    tables = {
        rank: bytearray(DIGEST_BYTES * sum(file.header.first_blocks(block_bytes)[-1] for file in files_of_rank))
        for rank, files_of_rank in places.files.items()
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
        for rank, files_of_rank in places.files.items():
            headers = dict(enumerate(file.header for file in files_of_rank))
            for number, file in enumerate(files_of_rank):
                for block, start, stop in blocks(0, len(file.raw), 0, block_bytes):
                    put(rank, first_blocks[rank][number] + block, file.raw[start:stop])
            ops = plan_reads(
                entry_ranges(headers, block_bytes),
                data_starts=[header.data_start for header in headers.values()],
                block_bytes=block_bytes,
                verify=True,
                batch_bytes=budget.batch_bytes(block_bytes),
            )
            for op in ops:
                file = files_of_rank[op.file]
                source = ReadFile(file.header.data_file.path, file.nbytes)
                visit = partial(look, rank, first_blocks[rank][op.file], op)
                yield partial(read_op, reader, op, source, staging, budget.direct, visit)

    with staging.work():
        run_tasks(reads(), budget.threads)
    return {rank: bytes(table) for rank, table in tables.items()}


def differences(places: Tables, rank: int, table: bytes, computed: bytes) -> list[str]:
    """Returns the blocks of a rank's files whose digests differ between two tables, as lines of text."""
    damaged = []
    for file, first in zip(places.files[rank], places.first_blocks[rank], strict=True):
        within = (0, *file.header.first_blocks(places.block_bytes))
        for (start, stop), block in zip(data_file_format.regions(file.header), within, strict=False):
            for number, block_start, block_stop in blocks(start, stop - start, first + block, places.block_bytes):
                of_block = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
                if table[of_block] != computed[of_block]:
                    damaged.append(f"{file.header.data_file.path}: bytes [{block_start}, {block_stop}) are damaged")
    return damaged
