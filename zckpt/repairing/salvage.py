"""What is left of a save when its manifest is lost: its data files, known by their own headers."""

from __future__ import annotations

import re
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import FormatError, MissingFileError, ZckptError
from zckpt.format import names
from zckpt.format import shard as shard_format
from zckpt.format.digest import BLOCK_BYTES
from zckpt.format.limits import WORLD_SIZE_MAX
from zckpt.plan import rebuild
from zckpt.plan.rebuild import FoundFile
from zckpt.reading.contents import read_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Reader, Store

ABSENT_SHOWN_MAX = 20
"""An error names no more than this many ranks one by one."""


@dataclass(frozen=True, slots=True)
class FoundSave:
    """All data files of one save."""

    save_id: str
    world_size: int
    files: dict[int, list[FoundFile]]
    """The data files of each rank."""


def find_save(checkpoint: Store, save_id: str, old: Manifest | None) -> tuple[FoundSave | None, list[str]]:
    """The data files of a save in a checkpoint, and everything that is missing or damaged among them, as
    far as headers and, if there is one, the ``old`` manifest say. None if they do not even agree on a world size.

    Raises StorageError.
    """
    problems: list[str] = []
    raws: dict[tuple[int, str, str], tuple[bytes, int]] = {}
    ranks = set()
    data_dir = names.data_dir(save_id)
    with closing(checkpoint.reader()) as reader:
        for directory in checkpoint.child(data_dir).directories():
            rank, place = names.split_rank_dir(directory), f"{data_dir}/{directory}"
            if rank is None or place != names.rank_dir(save_id, rank):
                continue
            ranks.add(rank)
            for name in sorted(checkpoint.child(place).entries() or ()):
                shard_name = names.split_shard_name(name)
                if shard_name is not None:
                    with _listed(problems):
                        shard_path = f"{place}/{name}"
                        raws[(rank, *shard_name)] = read_header(reader, shard_path), reader.size(shard_path)
    world_sizes: dict[str, list[str]] = {}
    for (rank, part, tier), (raw, _) in raws.items():
        with _listed(problems):
            shard_path = names.shard_path(save_id, rank, part, tier)
            world_sizes.setdefault(shard_format.world_size_of(raw, shard_path), []).append(shard_path)
    if old is not None:
        world_size = old.world_size
    elif len(world_sizes) == 1 and (told_size := _world_size(next(iter(world_sizes)))) is not None:
        world_size = told_size
    else:
        told = [f"world size {size}: {', '.join(paths[:3])}, ..." for size, paths in sorted(world_sizes.items())]
        return None, [*problems, "the files are of several saves, or of none", *told]
    files: dict[int, list[FoundFile]] = {rank: [] for rank in range(world_size)}
    for (rank, part, tier), (raw, nbytes) in raws.items():
        with _listed(problems):
            shard = shard_format.ShardId(save_id, rank, world_size, part, tier)
            header = shard_format.decode_header(raw, nbytes, shard)
            files.setdefault(rank, []).append(FoundFile(header, raw, nbytes))
    absent = [rank for rank in range(world_size) if rank not in ranks]
    problems += [f"rank {rank} of {world_size} is missing" for rank in absent[:ABSENT_SHOWN_MAX]]
    if len(absent) > ABSENT_SHOWN_MAX:
        problems.append(f"and so are {len(absent) - ABSENT_SHOWN_MAX} more ranks")
    if old is not None:
        there = {names.shard_path(save_id, *place) for place in raws}
        problems += [f"{name} is missing" for name in map(old.path, old.files) if name not in there]
        listed = set(map(old.path, old.files))
        files = {rank: [file for file in own if file.header.shard.path in listed] for rank, own in files.items()}
    return FoundSave(save_id, world_size, files), problems


def _world_size(told: str) -> int | None:
    """A number that the headers of data files tell; None if it is not a number, or not a possible one."""
    size = int(told) if re.fullmatch("[1-9][0-9]{0,6}", told, re.ASCII) else 0
    return size if 1 <= size <= WORLD_SIZE_MAX else None


@contextmanager
def _listed(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        problems.append(str(error).splitlines()[0])


def read_tables(reader: Reader, found: FoundSave) -> dict[int, bytes | None]:
    """The digest table of each rank; None where there is none."""
    return {rank: read_if_there(reader, names.digests_path(found.save_id, rank)) for rank in found.files}


def read_if_there(reader: Reader, path: str) -> bytes | None:
    try:
        return reader.read(path, 0, reader.size(path))
    except MissingFileError:
        return None


def fit_tables(found: FoundSave, tables: Mapping[int, bytes | None]) -> tuple[int, dict[int, list[int] | None]]:
    """The size of blocks with which most digest tables fit the files, and for each rank the number of each file's first
    digest; None for a rank whose table does not fit."""
    best: tuple[int, dict[int, list[int] | None]] | None = None
    for block_bytes in rebuild.block_sizes(BLOCK_BYTES):
        placed = {
            rank: None if table is None else rebuild.fit_table(found.files[rank], table, block_bytes)
            for rank, table in tables.items()
        }
        fitting = sum(one is not None for one in placed.values())
        if best is None or fitting > sum(one is not None for one in best[1].values()):
            best = block_bytes, placed
    assert best is not None
    return best


def is_complete(checkpoint: Store, save_id: str) -> bool:
    """Whether every rank's data files and digest table are there, with sound headers that the table covers. No tensor
    is read. Raises nothing: what cannot be read is not complete."""
    try:
        found, problems = find_save(checkpoint, save_id, None)
        if found is None or problems:
            return False
        with closing(checkpoint.reader()) as reader:
            _, placed = fit_tables(found, read_tables(reader, found))
    except ZckptError:
        return False
    return None not in placed.values()
