"""Finds what is left of a save whose manifest is lost. Its data files are known by their own headers."""

from __future__ import annotations

import re
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.contents import read_header
from zckpt.checkpoint.listing.runs import directories_of, names_in
from zckpt.errors import FormatError, MissingFileError, ZckptError
from zckpt.format import data_file as data_file_format
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES, blocks, digest
from zckpt.format.limits import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, WORLD_SIZE_MAX
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zckpt.format.data_file import Header
    from zckpt.format.manifest import Manifest
    from zckpt.format.names import Tier
    from zckpt.storage.contract import Reader, Store

ABSENT_SHOWN_MAX = 20
"""The largest number of ranks that an error names one by one."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A data file whose header is sound. ``raw``: the header as bytes. ``nbytes``: the size of the file."""

    header: Header
    raw: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class FoundSave:
    """All data files of one save."""

    save_id: str
    files: dict[int, list[FoundFile]]
    """The data files of each rank."""


def find_save(checkpoint: Store, save_id: str, old: Manifest | None) -> tuple[FoundSave | None, list[str]]:
    """Returns the data files of a save, or None if their headers do not agree on a world size, and what is missing or
    damaged among them, as far as the headers and, if there is one, the ``old`` manifest tell. Raises StorageError."""
    problems: list[str] = []
    raws: dict[tuple[int, str, Tier], tuple[bytes, int]] = {}
    ranks = set()
    data_dir = names.data_dir(save_id)
    with closing(checkpoint.reader()) as reader:
        for directory in directories_of(checkpoint.child(data_dir)):
            rank, place = names.split_rank_dir(directory), f"{data_dir}/{directory}"
            if rank is None:
                continue
            ranks.add(rank)
            for name in names_in(checkpoint.child(place)):
                part_and_tier = names.split_data_file_name(name)
                if part_and_tier is not None:
                    with _listed(problems):
                        data_file_path = f"{place}/{name}"
                        raws[(rank, *part_and_tier)] = read_header(reader, data_file_path), reader.size(data_file_path)
    origins = {} if old is None else {old.path(file): file.origin for file in old.files}
    world_sizes: dict[str, list[str]] = {}
    for (rank, part, tier), (raw, _) in raws.items():
        with _listed(problems):
            data_file_path = names.data_file_path(save_id, rank, part, tier)
            origin, told_ranks = data_file_format.save_of(raw, data_file_path)
            world_sizes.setdefault(told_ranks, []).append(data_file_path)
            if old is None and origin != save_id:
                names.check_save_id(origin, file=data_file_path)
                origins[data_file_path] = origin
    if old is not None:
        world_size = old.world_size
    elif len(world_sizes) == 1 and (told_size := _world_size(next(iter(world_sizes)))) is not None:
        world_size = told_size
    else:
        sizes = [f"world size {size}: {', '.join(paths[:3])}, ..." for size, paths in sorted(world_sizes.items())]
        return None, [*problems, "the files are of several saves, or of none", *sizes]
    files: dict[int, list[FoundFile]] = {rank: [] for rank in range(world_size)}
    for (rank, part, tier), (raw, nbytes) in raws.items():
        with _listed(problems):
            origin = origins.get(names.data_file_path(save_id, rank, part, tier), "")
            data_file = data_file_format.DataFileId(save_id, rank, world_size, part, tier, origin)
            header = data_file_format.decode_header(raw, nbytes, data_file)
            files.setdefault(rank, []).append(FoundFile(header, raw, nbytes))
    if old is None and origins:
        problems += _strangers(checkpoint, save_id, files)
    absent = [rank for rank in range(world_size) if rank not in ranks]
    problems += [f"rank {rank} of {world_size} is missing" for rank in absent[:ABSENT_SHOWN_MAX]]
    if len(absent) > ABSENT_SHOWN_MAX:
        problems.append(f"and so are {len(absent) - ABSENT_SHOWN_MAX} more ranks")
    if old is not None:
        there = {names.data_file_path(save_id, *place) for place in raws}
        listed = dict.fromkeys(map(old.path, old.files))
        problems += [f"{name} is missing" for name in listed if name not in there]
        files = {
            rank: [file for file in files_of_rank if file.header.data_file.path in listed]
            for rank, files_of_rank in files.items()
        }
    return FoundSave(save_id, files), problems


def _strangers(checkpoint: Store, save_id: str, files: dict[int, list[FoundFile]]) -> list[str]:
    """Returns the problems of files of other saves whose rank has no digest table that covers them. Without a manifest,
    only the digest table tells that such a file is shared by this save, and was not put there by mistake."""
    with closing(checkpoint.reader()) as reader:
        _, placed = fit_tables(files, read_tables(reader, save_id, files))
    unlisted = (file.header.data_file for rank, each in files.items() if placed[rank] is None for file in each)
    return [
        str(broken("S006", f"it is of the save {data_file.origin}, and no digest table lists it", file=data_file.path))
        for data_file in unlisted
        if data_file.origin
    ]


def _world_size(text: str) -> int | None:
    """Returns the number that the headers of data files tell, or None if it is not a number, or not a possible world
    size."""
    size = int(text) if re.fullmatch("[1-9][0-9]{0,6}", text, re.ASCII) else 0
    return size if 1 <= size <= WORLD_SIZE_MAX else None


@contextmanager
def _listed(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        problems.append(str(error).splitlines()[0])


def is_complete(checkpoint: Store, save_id: str) -> bool:
    """Returns whether the data files and the digest table of every rank are there, with sound headers that the table
    covers. It reads no tensor, and raises no error, because a file that cannot be read is not complete."""
    try:
        save, problems = find_save(checkpoint, save_id, None)
        if save is None or problems:
            return False
        with closing(checkpoint.reader()) as reader:
            _, placed = fit_tables(save.files, read_tables(reader, save_id, save.files))
    except ZckptError:
        return False
    return None not in placed.values()


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
