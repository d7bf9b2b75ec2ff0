"""What is left of a save when its manifest is lost: its data files, known by their own headers."""

from __future__ import annotations

import re
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import FormatError, RepairError, ZckptError
from zckpt.format import names
from zckpt.format import shard as shard_format
from zckpt.format.limits import WORLD_SIZE_MAX
from zckpt.format.rules import broken
from zckpt.listing.contents import read_header
from zckpt.plan.rebuild import FoundFile
from zckpt.repairing.digest_tables import fit_tables, read_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Store

ABSENT_SHOWN_MAX = 20
"""An error names no more than this many ranks one by one."""


@dataclass(frozen=True, slots=True)
class FoundSave:
    """All data files of one save."""

    save_id: str
    files: dict[int, list[FoundFile]]
    """The data files of each rank."""


def the_save(store: Store, old: Manifest | None, finding: str) -> FoundSave:
    """The one save whose data are in ``store``, whole. ``finding``: what is wrong with the manifest, if there is none.

    Raises RepairError, which lists all that is missing or damaged."""
    saves = [name for name in store.directories() if names.is_data_dir(name)]
    if old is not None:
        saves = [name for name in saves if name == names.data_dir(old.save_id)]
    if len(saves) != 1:
        what = f"{finding}, and there are the data of {len(saves)} saves" if old is None else "its data are gone"
        raise refused(store, [what, *saves], "leave the data directory of one save here, and take the others away")
    found, problems = find_save(store, saves[0].removeprefix("data-"), old)
    if found is None or problems:
        raise refused(store, problems, "restore these files from a copy; they cannot be rebuilt")
    return found


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
    origins = {} if old is None else {old.path(file): file.origin for file in old.files}
    world_sizes: dict[str, list[str]] = {}
    for (rank, part, tier), (raw, _) in raws.items():
        with _listed(problems):
            shard_path = names.shard_path(save_id, rank, part, tier)
            origin, told_ranks = shard_format.save_of(raw, shard_path)
            world_sizes.setdefault(told_ranks, []).append(shard_path)
            if old is None and origin != save_id:
                names.check_save_id(origin, file=shard_path)
                origins[shard_path] = origin
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
            origin = origins.get(names.shard_path(save_id, rank, part, tier), "")
            shard = shard_format.ShardId(save_id, rank, world_size, part, tier, origin)
            header = shard_format.decode_header(raw, nbytes, shard)
            files.setdefault(rank, []).append(FoundFile(header, raw, nbytes))
    if old is None and origins:
        problems += _strangers(checkpoint, save_id, files)
    absent = [rank for rank in range(world_size) if rank not in ranks]
    problems += [f"rank {rank} of {world_size} is missing" for rank in absent[:ABSENT_SHOWN_MAX]]
    if len(absent) > ABSENT_SHOWN_MAX:
        problems.append(f"and so are {len(absent) - ABSENT_SHOWN_MAX} more ranks")
    if old is not None:
        there = {names.shard_path(save_id, *place) for place in raws}
        problems += [f"{name} is missing" for name in map(old.path, old.files) if name not in there]
        listed = set(map(old.path, old.files))
        files = {rank: [file for file in own if file.header.shard.path in listed] for rank, own in files.items()}
    return FoundSave(save_id, files), problems


def _strangers(checkpoint: Store, save_id: str, files: dict[int, list[FoundFile]]) -> list[str]:
    """What is said of the files of other saves whose rank has no digest table that covers them. Without a manifest,
    only the table says that such a file is one that this save shares, and was not put there by mistake."""
    with closing(checkpoint.reader()) as reader:
        _, placed = fit_tables(files, read_tables(reader, save_id, files))
    strangers = [file.header.shard for rank, own in files.items() if placed[rank] is None for file in own]
    return [
        str(broken("S006", f"it is of the save {shard.origin}, and no digest table lists it", file=shard.path))
        for shard in strangers
        if shard.origin
    ]


def _world_size(told: str) -> int | None:
    """A number that the headers of data files tell; None if it is not a number, or not a possible one."""
    size = int(told) if re.fullmatch("[1-9][0-9]{0,6}", told, re.ASCII) else 0
    return size if 1 <= size <= WORLD_SIZE_MAX else None


def refused(store: Store, problems: Sequence[str], hint: str) -> RepairError:
    """The error that lists all of ``problems``."""
    message = "\n".join(["it cannot be rebuilt:", *(f"  {one}" for one in problems)])
    return RepairError(message, file=str(store.location), hint=hint)


@contextmanager
def _listed(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        problems.append(str(error).splitlines()[0])


def is_complete(checkpoint: Store, save_id: str) -> bool:
    """Whether every rank's data files and digest table are there, with sound headers that the table covers. No tensor
    is read. Raises nothing: what cannot be read is not complete."""
    try:
        found, problems = find_save(checkpoint, save_id, None)
        if found is None or problems:
            return False
        with closing(checkpoint.reader()) as reader:
            _, placed = fit_tables(found.files, read_tables(reader, save_id, found.files))
    except ZckptError:
        return False
    return None not in placed.values()
