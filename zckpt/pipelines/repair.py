"""A lost or damaged manifest, index or digest table, rebuilt from the data files themselves."""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zckpt.checkpoint import Checkpoint
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FeatureError,
    FormatError,
    MissingFileError,
    RankError,
    RepairError,
    VersionError,
)
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format import shard as shard_format
from zckpt.format.digest import DIGEST_BYTES, block_count, blocks, digest
from zckpt.io.budget import Budget
from zckpt.io.lock import WriteLock
from zckpt.io.memory import PAGE_BYTES, staging_for
from zckpt.io.read import ReadFile, read_op
from zckpt.io.store import open_store
from zckpt.pipelines.open import StrPath, open_checkpoint
from zckpt.pipelines.runs import not_a_checkpoint
from zckpt.pipelines.write import BLOCK_BYTES
from zckpt.plan import catalog, rebuild
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.rebuild import FoundFile
from zckpt.plan.reshard import file_extents
from zckpt.validation.check import Share, check_checkpoint
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.io.memory import Bytes
    from zckpt.io.store import Reader, Store
    from zckpt.plan.coalesce import ReadOp
    from zckpt.validation.report import Finding

LOST = ("step", "aliases of tied weights", "the tree of state: counters, param groups, scheduler, client_state")
"""What only the manifest has."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What ``zckpt.repair`` did."""

    path: str
    """The checkpoint that is whole now."""
    rebuilt: tuple[str, ...]
    """Files, relative to it. Empty if nothing was wrong with any of them."""
    kept: tuple[str, ...] = ()
    """Where the damaged ones are now."""
    lost: tuple[str, ...] = ()
    """What could not be recovered."""
    unverified: tuple[str, ...] = ()
    """Data that could not be compared with a digest, or that differs from it."""

    def __str__(self) -> str:
        lines = [f"rebuilt     {name}" for name in self.rebuilt]
        lines += [f"kept        {name}" for name in self.kept]
        lines += [f"lost        {what}" for what in self.lost]
        lines += [f"unverified  {what}" for what in self.unverified]
        verdict = f"{len(self.rebuilt)} files rebuilt" if self.rebuilt else "nothing to repair"
        return "\n".join([*lines, f"{self.path}: {verdict}"])


def repair(
    path: StrPath, *, output: StrPath | None = None, accept_unverified: bool = False, budget: Budget | None = None
) -> RepairReport:
    """Rebuilds the manifest, the index or digest tables of a checkpoint from the headers of its data files, where they
    are lost or damaged. All data is read, and compared with the digests that are left.

    ``path``: the directory of the checkpoint. ``output``: another directory, where a whole checkpoint is made, data and
    all; None: in place, where the damaged files stay under other names. ``accept_unverified``: go on although some data
    cannot be verified, or is damaged; what has a digest that it differs from stays so. ``budget``: memory, threads and
    kind of I/O. Call it on one rank.

    Without the manifest, step, aliases and the tree of non-tensor state are lost: tensors can be loaded, an engine
    cannot be restored. Damaged data cannot be repaired at all.

    Raises RepairError, which lists everything, if files are missing, damaged or of several saves; LockedError,
    CheckpointNotFoundError, CheckpointExistsError (``output``), VersionError, FeatureError, StorageError.
    """
    source = os.fspath(path)
    target = source if output is None else os.fspath(output)
    entries = open_store(source).entries() or ()
    if not any(name == names.MANIFEST or names.is_data_dir(name) for name in entries):
        raise not_a_checkpoint(source, entries, "this is not the directory of a checkpoint")
    if output is not None and open_store(target).exists(names.MANIFEST):
        raise CheckpointExistsError("there is already a checkpoint here", file=target, hint="choose another output")
    budget = budget or Budget.from_environment()
    with WriteLock(open_store(target)) as lock:
        old, finding = _manifest(source)
        if old is not None and output is None and not _findings(open_checkpoint(source, budget)):
            return RepairReport(target, ())
        found = _collect(source, old, finding)
        rebuilt = _rebuild(source, found, old, budget)
        if rebuilt.unverified and not accept_unverified:
            raise _refused(
                source, rebuilt.unverified, "to go on all the same, pass accept_unverified (--accept-unverified)"
            )
        _check_rebuilt(source, rebuilt, budget)
        store = open_store(target)
        if output is not None:
            _copy(open_store(source).reader(), store, found, budget)
        changed, kept = _put(store, rebuilt.files, lock.confirm)
        if old is None or output is not None or _differs(rebuilt.manifest, old):
            more = _put(store, {names.MANIFEST: rebuilt.manifest}, lock.confirm)
            changed, kept = changed + more[0], kept + more[1]
    return RepairReport(target, changed, kept, LOST if old is None else (), rebuilt.unverified)


@dataclass(frozen=True, slots=True)
class _Found:
    """All data files of one save."""

    save_id: str
    world_size: int
    files: dict[int, list[FoundFile]]
    """By rank."""


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    manifest: bytes
    files: dict[str, bytes]
    """Digest tables and index, by path."""
    unverified: tuple[str, ...]


def _refused(path: str, problems: Sequence[str], hint: str) -> RepairError:
    return RepairError("\n".join(["it cannot be rebuilt:", *(f"  {one}" for one in problems)]), file=path, hint=hint)


def _manifest(path: str) -> tuple[Manifest | None, str]:
    """The manifest if it is sound, else what is wrong with it. Raises VersionError, FeatureError: it may be sound to
    others."""
    try:
        return open_checkpoint(path).manifest, ""
    except (VersionError, FeatureError):
        raise
    except CheckpointNotFoundError:
        return None, "there is no manifest"
    except FormatError as error:
        return None, f"the manifest is damaged: {error.message}"


def _findings(checkpoint: Checkpoint) -> list[Finding]:
    """What is wrong with all but the data."""
    return check_checkpoint(checkpoint, "structure", Share())[0]


class _Rebuilding:
    """A Reader of a checkpoint as if what was rebuilt were in its place already."""

    def __init__(self, reader: Reader, files: Mapping[str, bytes]) -> None:
        self._reader = reader
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        if path in self._files:
            return self._files[path][offset : offset + nbytes]
        return self._reader.read(path, offset, nbytes)

    def size(self, path: str) -> int:
        return len(self._files[path]) if path in self._files else self._reader.size(path)


def _check_rebuilt(path: str, rebuilt: _Rebuilt, budget: Budget) -> None:
    """Raises RepairError unless it would be sound. An old manifest may contradict itself, or the files."""
    reader = cast("Reader", _Rebuilding(open_store(path).reader(), rebuilt.files))
    findings = _findings(Checkpoint(path, manifest_format.decode(rebuilt.manifest), reader, budget))
    if rebuilt.unverified:  # headers that differ from their digests stay so, as their data do
        findings = [finding for finding in findings if finding.rule != "D003"]
    if findings:
        hint = "take the manifest away if it contradicts the files: it is rebuilt from them then"
        raise _refused(path, sorted(map(str, findings)), hint)


def _collect(path: str, old: Manifest | None, finding: str) -> _Found:
    """Raises RepairError, which lists all that is missing or damaged."""
    store = open_store(path)
    saves = [name for name in store.directories() if names.is_data_dir(name)]
    if old is not None:
        saves = [name for name in saves if name == names.data_dir(old.save_id)]
    if len(saves) != 1:
        what = f"{finding}, and there are the data of {len(saves)} saves" if old is None else "its data are gone"
        raise _refused(path, [what, *saves], "leave the data directory of one save here, and take the others away")
    save_id = saves[0].removeprefix("data-")
    reader = store.reader()
    problems: list[str] = []
    raws: dict[tuple[int, str, str], tuple[bytes, int]] = {}
    ranks = set()
    for directory in open_store(os.path.join(path, saves[0])).directories():
        rank = names.split_rank_dir(directory)
        if rank is None or directory != os.path.basename(names.rank_dir(save_id, rank)):
            continue
        ranks.add(rank)
        for name in sorted(open_store(os.path.join(path, saves[0], directory)).entries() or ()):
            shard_name = names.split_shard_name(name)
            if shard_name is not None:
                with _listed(problems):
                    raws[(rank, *shard_name)] = _read_header(reader, f"{saves[0]}/{directory}/{name}")
    world_sizes: dict[str, list[str]] = {}
    for (rank, part, tier), (raw, _) in raws.items():
        with _listed(problems):
            shard_path = names.shard_path(save_id, rank, part, tier)
            world_sizes.setdefault(shard_format.world_size_of(raw, shard_path), []).append(shard_path)
    if old is not None:
        world_size = old.world_size
    elif len(world_sizes) == 1 and next(iter(world_sizes)).isdecimal():
        world_size = int(next(iter(world_sizes)))
    else:
        told = [f"world size {size}: {', '.join(paths[:3])}, ..." for size, paths in sorted(world_sizes.items())]
        raise _refused(path, [*problems, "the files are of several saves, or of none", *told], "restore the right ones")
    files: dict[int, list[FoundFile]] = {rank: [] for rank in range(world_size)}
    for (rank, part, tier), (raw, nbytes) in raws.items():
        with _listed(problems):
            shard = shard_format.ShardId(save_id, rank, world_size, part, tier)
            header = shard_format.decode_header(raw, nbytes, shard)
            files.setdefault(rank, []).append(FoundFile(header, raw, nbytes))
    problems += [f"rank {rank} of {world_size} is missing" for rank in range(world_size) if rank not in ranks]
    if old is not None:
        there = {names.shard_path(save_id, *place) for place in raws}
        problems += [f"{name} is missing" for name in map(old.path, old.files) if name not in there]
        listed = set(map(old.path, old.files))
        files = {rank: [file for file in own if file.header.shard.path in listed] for rank, own in files.items()}
    if problems:
        raise _refused(path, problems, "restore these files from a copy; they cannot be rebuilt")
    return _Found(save_id, world_size, files)


@contextmanager
def _listed(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        problems.append(str(error).splitlines()[0])


def _read_header(reader: Reader, path: str) -> tuple[bytes, int]:
    """Its bytes, and those of the file."""
    data_start = shard_format.header_bytes(reader.read(path, 0, shard_format.LENGTH_BYTES), path)
    return reader.read(path, 0, data_start), reader.size(path)


def _rebuild(path: str, found: _Found, old: Manifest | None, budget: Budget) -> _Rebuilt:
    """Reads and compares all data. Raises RepairError if the pieces do not make up whole tensors."""
    reader = open_store(path).reader()
    given = {rank: _read(reader, names.digests_path(found.save_id, rank)) for rank in found.files}
    block_bytes, placed = _places(found, given, old)
    first_blocks = {rank: placed[rank] or rebuild.in_a_row(own, block_bytes) for rank, own in found.files.items()}
    tables = compute_tables(reader, found.files, first_blocks, block_bytes, budget)
    unverified: list[str] = []
    for rank, computed in tables.items():
        table = given[rank]
        if old is not None and digest(computed) == old.digests[rank]:
            continue
        if table is None or placed[rank] is None or (old is not None and digest(table) != old.digests[rank]):
            directory = names.rank_dir(found.save_id, rank)
            unverified.append(f"{directory}: it has no sound digest table, so none of its data is verified")
            continue
        tables[rank] = table  # the block remains damaged, and is refused when it is read
        unverified += _differences(found.files[rank], first_blocks[rank], block_bytes, table, computed)
    writer = {"repaired": datetime.now(timezone.utc).isoformat(timespec="seconds"), "repaired_by": __version__}
    about = (
        catalog.About(0, block_bytes, {}, b"\xc0", writer)
        if old is None
        else catalog.About(old.step, block_bytes, old.aliases, old.state, {**old.writer, **writer})
    )
    try:
        receipts = rebuild.receipts(found.files, first_blocks, tables, block_bytes)
        manifest, index = catalog.catalog(receipts, found.save_id, about)
    except (FormatError, RankError) as error:
        raise _refused(path, [str(error)], "a file is missing or not the one that was written: restore it") from error
    files = {names.digests_path(found.save_id, rank): table for rank, table in tables.items()}
    return _Rebuilt(manifest, {**files, names.index_path(found.save_id): index}, tuple(unverified))


def _places(
    found: _Found, tables: Mapping[int, bytes | None], old: Manifest | None
) -> tuple[int, dict[int, list[int] | None]]:
    """The size of blocks, and for each rank the number of each file's first digest; None if that is not known."""
    if old is not None:
        first = {old.path(file): file.first_block for file in old.files}
        return old.block_bytes, {
            rank: [first[file.header.shard.path] for file in own] for rank, own in found.files.items()
        }
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


def compute_tables(
    reader: Reader,
    files: Mapping[int, Sequence[FoundFile]],
    first_blocks: Mapping[int, Sequence[int]],
    block_bytes: int,
    budget: Budget,
) -> dict[int, bytes]:
    """The digest tables of all ranks, from all of their data."""
    tables = {
        rank: bytearray(DIGEST_BYTES * sum(file.block_count(block_bytes) for file in own))
        for rank, own in files.items()
    }
    staging = staging_for(budget.batch_bytes(block_bytes), None)

    def put(rank: int, block: int, data: Bytes | bytes) -> None:
        tables[rank][block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = digest(data)

    def look(rank: int, first: int, op: ReadOp, data: Bytes) -> None:
        stops = np.cumsum(op.segments.nbytes)
        bounds = zip((stops - op.segments.nbytes).tolist(), stops.tolist(), op.segments.block.tolist(), strict=True)
        for start, stop, block in bounds:
            put(rank, first + block, data[start:stop])

    def reads() -> Iterator[Callable[[], None]]:
        for rank, own in files.items():
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

    try:
        budget.run(reads())
    finally:
        staging.rest()
    return {rank: bytes(table) for rank, table in tables.items()}


def _differences(
    files: Sequence[FoundFile], first_blocks: Sequence[int], block_bytes: int, table: bytes, computed: bytes
) -> list[str]:
    """The blocks that differ from their digests."""
    found = []
    for file, first in zip(files, first_blocks, strict=True):
        block = first
        for start, stop in shard_format.regions(file.header):
            for number, block_start, block_stop in blocks(start, stop - start, block, block_bytes):
                own = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
                if table[own] != computed[own]:
                    found.append(f"{file.header.shard.path}: bytes [{block_start}, {block_stop}) are damaged")
            block += block_count(stop - start, block_bytes)
    return found


def _differs(raw: bytes, old: Manifest) -> bool:
    """Whether a manifest says something else than the old one, but for who has written it."""
    return replace(manifest_format.decode(raw), writer=old.writer) != old


def _read(reader: Reader, path: str) -> bytes | None:
    try:
        return reader.read(path, 0, reader.size(path))
    except MissingFileError:
        return None


def _put(
    store: Store, files: Mapping[str, bytes], confirm: Callable[[], None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Each in its place, durable, what was there under another name: the names of both. ``confirm`` raises where this
    process has no right to do so any more."""
    reader = store.reader()
    changed, kept = [], []
    for path, data in files.items():
        present = _read(reader, path)
        if present == data:
            continue
        if present is not None:
            kept.append(f"{path}.{secrets.token_hex(4)}.old")
            store.put(kept[-1], present)
        prepared = store.prepare(path, data)
        try:
            confirm()
            store.commit(path, prepared)
        except BaseException:
            store.remove(prepared)
            raise
        changed.append(path)
    return tuple(changed), tuple(kept)


def _copy(reader: Reader, store: Store, found: _Found, budget: Budget) -> None:
    """All data files, durable."""
    batch_bytes = budget.batch_bytes(PAGE_BYTES)
    staging = staging_for(batch_bytes, None)

    def copy(file: FoundFile) -> None:
        path = file.header.shard.path
        writer = store.create(path, file.nbytes, direct=budget.direct)
        try:
            with staging.lend() as stage:
                for offset in range(0, file.nbytes, batch_bytes):
                    nbytes = min(batch_bytes, file.nbytes - offset)
                    reader.read_into(path, [stage.bytes[:nbytes]], offset)
                    writer.write(stage.bytes, offset, nbytes)
            writer.sync()
        finally:
            writer.close()

    for rank in found.files:
        store.make_directories(names.rank_dir(found.save_id, rank))
    try:
        budget.run([partial(copy, file) for own in found.files.values() for file in own])
    finally:
        staging.rest()
    for rank in found.files:
        store.sync_names(names.rank_dir(found.save_id, rank))
