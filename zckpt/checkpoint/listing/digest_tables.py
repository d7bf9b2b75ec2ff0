"""The digest tables of a save whose manifest is lost: they are read, and matched with its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import MissingFileError
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES, blocks, digest
from zckpt.format.limits import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zckpt.format.data_file import Header
    from zckpt.storage.contract import Reader


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A data file whose header is sound. ``raw``: the header as bytes. ``nbytes``: the size of the file."""

    header: Header
    raw: bytes
    nbytes: int


def read_tables(reader: Reader, save_id: str, ranks: Iterable[int]) -> dict[int, bytes | None]:
    """Returns the digest table of each rank, or None for a rank that has none."""
    return {rank: read_if_there(reader, names.digests_path(save_id, rank)) for rank in ranks}


def read_if_there(reader: Reader, path: str) -> bytes | None:
    try:
        return reader.read(path, 0, reader.size(path))
    except MissingFileError:
        return None


def fit_tables(
    files: Mapping[int, Sequence[FoundFile]], tables: Mapping[int, bytes | None]
) -> tuple[int, dict[int, list[int] | None]]:
    """Returns the size of a block in bytes with which the most digest tables fit the files. Also returns, for each
    rank, the number of the first digest of each file, or None if the rank's table does not fit."""

    def placed(block_bytes: int) -> tuple[int, dict[int, list[int] | None]]:
        return block_bytes, {
            rank: None if table is None else _fit_table(files[rank], table, block_bytes)
            for rank, table in tables.items()
        }

    others = (BLOCK_BYTES_MIN << power for power in range((BLOCK_BYTES_MAX // BLOCK_BYTES_MIN).bit_length()))
    sizes = (BLOCK_BYTES, *others)  # ``max`` takes the first of equally good ones, and this one is the most likely.
    return max(map(placed, sizes), key=lambda found: -[*found[1].values()].count(None))


def _fit_table(files: Sequence[FoundFile], table: bytes, block_bytes: int) -> list[int] | None:
    """Returns the number of the first digest of each file in the digest table of its rank. Returns None if the files do
    not fill the table without a gap. The place of a file in the table is found by the digests of its header."""
    first_blocks = []
    for file in files:
        digests = [digest(file.raw[start:stop]) for _, start, stop in blocks(0, len(file.raw), 0, block_bytes)]
        at = table.find(b"".join(digests))
        while at % DIGEST_BYTES and at >= 0:
            at = table.find(b"".join(digests), at + 1)
        first_blocks.append(at // DIGEST_BYTES)
    stop = 0
    for first, file in sorted(zip(first_blocks, files, strict=True), key=lambda pair: pair[0]):
        if first != stop:
            return None
        stop += file.header.first_blocks(block_bytes)[-1]
    return first_blocks if stop * DIGEST_BYTES == len(table) else None
