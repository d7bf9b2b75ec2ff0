"""A lost or damaged manifest, index or digest table, rebuilt from the data files themselves."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zckpt.api.open import open_checkpoint
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FeatureError,
    FormatError,
    RankError,
    RepairError,
    StorageError,
    VersionError,
)
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format import shard as shard_format
from zckpt.format.digest import DIGEST_BYTES, block_count, blocks, digest
from zckpt.format.rules import broken
from zckpt.plan import catalog, rebuild
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.reshard import file_extents
from zckpt.reading.checkpoint import Checkpoint
from zckpt.reading.contents import read_header
from zckpt.reading.runs import not_a_checkpoint, nothing_at
from zckpt.repairing.salvage import FoundSave, find_save, fit_tables, read_if_there, read_tables
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.transfer.budget import Budget
from zckpt.transfer.read import ReadFile, read_op
from zckpt.transfer.staging import host_pool
from zckpt.validation.check import Share, check_checkpoint
from zckpt.version import __version__
from zckpt.writing.leftovers import leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.plan.coalesce import ReadOp
    from zckpt.plan.rebuild import FoundFile
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Reader, Store
    from zckpt.storage.location import StrPath
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
    all; the copy is read back and compared before it becomes a checkpoint. None: in place, where the damaged files stay
    under other names. ``accept_unverified``: go on although some data
    cannot be verified, or is damaged; what has a digest that it differs from stays so. ``budget``: memory, threads and
    kind of I/O. Call it on one rank.

    Without the manifest, step, aliases and the tree of non-tensor state are lost: tensors can be loaded, and an
    engine's weights restored (``parts``), but no training resumed. Damaged data cannot be repaired at all.

    Raises RepairError, which lists everything, if files are missing, damaged or of several saves; LockedError;
    CheckpointNotFoundError, which says what is there instead; CheckpointExistsError (``output``); VersionError;
    FeatureError; StorageError, also for a copy that differs, of which nothing is left then.
    """
    source = open_store(path)
    target = source if output is None else open_store(output)
    entries = source.entries()
    if entries is None:
        raise nothing_at(source)
    if not any(name == names.MANIFEST or names.is_data_dir(name) for name in entries):
        raise not_a_checkpoint(source, entries, "this is not the directory of a checkpoint")
    if output is not None and target.exists(names.MANIFEST):
        raise CheckpointExistsError(
            "there is already a checkpoint here", file=str(target.location), hint="choose another output"
        )
    budget = budget or Budget.from_environment()
    try:
        return _repair(source, target, output is not None, accept_unverified, budget)
    except BaseException:
        target.remove_if_empty("")
        raise


def _repair(source: Store, target: Store, elsewhere: bool, accept_unverified: bool, budget: Budget) -> RepairReport:
    path = str(target.location)
    with WriteLock(target) as lock:
        old, finding = _manifest(source)
        if old is not None and not elsewhere and not _findings(open_checkpoint(source, budget)):
            return RepairReport(path, ())
        found = _collect(source, old, finding)
        rebuilt = _rebuild(source, found, old, budget)
        if rebuilt.unverified and not accept_unverified:
            raise _refused(
                source, rebuilt.unverified, "to go on all the same, pass accept_unverified (--accept-unverified)"
            )
        _check_rebuilt(source, rebuilt, budget)
        data_dir = names.data_dir(found.save_id)
        if elsewhere and target.exists(data_dir):
            there = str(target.location.child(data_dir))
            raise CheckpointExistsError("the data of this save are here", file=there, hint="choose another output")
        try:
            if elsewhere:
                with closing(source.reader()) as reader:
                    _copy(reader, target, found, budget)
                _check_copy(target, found, rebuilt, budget)
            changed, kept = _put(target, rebuilt.files, lock.confirm)
            if old is None or elsewhere or _differs(rebuilt.manifest, old):
                more = _put(target, {names.MANIFEST: rebuilt.manifest}, lock.confirm)
                changed, kept = changed + more[0], kept + more[1]
        except BaseException:
            if elsewhere and data_dir in leftovers(target):
                target.remove(data_dir)
            raise
    return RepairReport(path, changed, kept, LOST if old is None else (), rebuilt.unverified)


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    manifest: bytes
    files: dict[str, bytes]
    """Digest tables and index, by path."""
    unverified: tuple[str, ...]
    block_bytes: int
    first_blocks: dict[int, list[int]]
    """The number of each file's first digest, by rank."""
    computed: dict[int, bytes]
    """The digest tables of the data as they are now, damaged blocks included."""


def _refused(store: Store, problems: Sequence[str], hint: str) -> RepairError:
    message = "\n".join(["it cannot be rebuilt:", *(f"  {one}" for one in problems)])
    return RepairError(message, file=str(store.location), hint=hint)


def _manifest(store: Store) -> tuple[Manifest | None, str]:
    """The manifest if it is sound, else what is wrong with it. Raises VersionError, FeatureError: it may be sound to
    others."""
    try:
        return open_checkpoint(store).manifest, ""
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


def _check_rebuilt(store: Store, rebuilt: _Rebuilt, budget: Budget) -> None:
    """Raises RepairError unless it would be sound. An old manifest may contradict itself, or the files."""
    reader = cast("Reader", _Rebuilding(store.reader(), rebuilt.files))
    findings = _findings(Checkpoint(str(store.location), manifest_format.decode(rebuilt.manifest), reader, budget))
    if rebuilt.unverified:  # headers that differ from their digests stay so, as their data do
        findings = [finding for finding in findings if finding.rule != "D003"]
    if findings:
        hint = "take the manifest away if it contradicts the files: it is rebuilt from them then"
        raise _refused(store, sorted(map(str, findings)), hint)


def _collect(store: Store, old: Manifest | None, finding: str) -> FoundSave:
    """Raises RepairError, which lists all that is missing or damaged."""
    saves = [name for name in store.directories() if names.is_data_dir(name)]
    if old is not None:
        saves = [name for name in saves if name == names.data_dir(old.save_id)]
    if len(saves) != 1:
        what = f"{finding}, and there are the data of {len(saves)} saves" if old is None else "its data are gone"
        raise _refused(store, [what, *saves], "leave the data directory of one save here, and take the others away")
    found, problems = find_save(store, saves[0].removeprefix("data-"), old)
    if found is None or problems:
        raise _refused(store, problems, "restore these files from a copy; they cannot be rebuilt")
    return found


def _rebuild(store: Store, found: FoundSave, old: Manifest | None, budget: Budget) -> _Rebuilt:
    """Reads and compares all data. Raises RepairError if the pieces do not make up whole tensors."""
    reader = store.reader()
    given = read_tables(reader, found)
    block_bytes, placed = _places(found, given, old)
    first_blocks = {rank: placed[rank] or rebuild.in_a_row(own, block_bytes) for rank, own in found.files.items()}
    all_computed = compute_tables(reader, found.files, first_blocks, block_bytes, budget)
    tables = dict(all_computed)
    unverified: list[str] = []
    for rank, computed in all_computed.items():
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
        raise _refused(store, [str(error)], "a file is missing or not the one that was written: restore it") from error
    files = {names.digests_path(found.save_id, rank): table for rank, table in tables.items()}
    files[names.index_path(found.save_id)] = index
    return _Rebuilt(manifest, files, tuple(unverified), block_bytes, first_blocks, all_computed)


def _places(
    found: FoundSave, tables: Mapping[int, bytes | None], old: Manifest | None
) -> tuple[int, dict[int, list[int] | None]]:
    """The size of blocks, and for each rank the number of each file's first digest; None if that is not known."""
    if old is None:
        return fit_tables(found, tables)
    first = {old.path(file): file.first_block for file in old.files}
    return old.block_bytes, {rank: [first[file.header.shard.path] for file in own] for rank, own in found.files.items()}


def compute_tables(
    reader: Reader,
    files: Mapping[int, Sequence[FoundFile]],
    first_blocks: Mapping[int, Sequence[int]],
    block_bytes: int,
    budget: Budget,
) -> dict[int, bytes]:
    """The digest tables of all ranks, from all of their data."""
    tables = {
        rank: bytearray(DIGEST_BYTES * sum(file.header.first_blocks(block_bytes)[-1] for file in own))
        for rank, own in files.items()
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

    with staging.work():
        budget.run(reads())
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


def _put(
    store: Store, files: Mapping[str, bytes], confirm: Callable[[], None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Puts each file in its place, durably, and keeps what was there under another name. Returns the names of the files
    and of what was kept. ``confirm`` raises if this process has lost the right to do so."""
    reader = store.reader()
    changed, kept = [], []
    for path, data in files.items():
        present = read_if_there(reader, path)
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


def _copy(reader: Reader, store: Store, found: FoundSave, budget: Budget) -> None:
    """All data files, durable."""
    batch_bytes = budget.batch_bytes(PAGE_BYTES)
    staging = host_pool(batch_bytes)

    def copy(file: FoundFile) -> None:
        path = file.header.shard.path
        writer = store.create(path, file.nbytes, direct=budget.direct)
        try:
            with staging.lend() as stage:
                for offset in range(0, file.nbytes, batch_bytes):
                    nbytes = min(batch_bytes, file.nbytes - offset)
                    got = reader.read_into(path, [stage.bytes[:nbytes]], offset)
                    if got < nbytes:
                        raise broken("F003", f"the file ends at byte {offset + got}, expected {file.nbytes}", file=path)
                    writer.write(stage.bytes, offset, nbytes)
            writer.sync()
        finally:
            writer.close()

    for rank in found.files:
        store.make_directories(names.rank_dir(found.save_id, rank))
    with staging.work():
        budget.run([partial(copy, file) for own in found.files.values() for file in own])
    for rank in found.files:
        store.sync_names(names.rank_dir(found.save_id, rank))


def _check_copy(store: Store, found: FoundSave, rebuilt: _Rebuilt, budget: Budget) -> None:
    """Reads the copy of all data files, and compares it with what was read of the original. Raises StorageError."""
    try:
        with closing(store.reader()) as reader:
            files = [file for own in found.files.values() for file in own]
            differing = [
                f"{file.header.shard.path}: its header or its length"
                for file in files
                if (read_header(reader, path := file.header.shard.path), reader.size(path)) != (file.raw, file.nbytes)
            ]
            tables = compute_tables(reader, found.files, rebuilt.first_blocks, rebuilt.block_bytes, budget)
    except FormatError as error:
        differing, tables = [str(error)], rebuilt.computed
    for rank, own in found.files.items():
        tables_of_both = rebuilt.computed[rank], tables[rank]
        differing += _differences(own, rebuilt.first_blocks[rank], rebuilt.block_bytes, *tables_of_both)
    if differing:
        raise StorageError(
            f"the copy differs from what was read: {differing[0]}{', and more' if differing[1:] else ''}",
            file=str(store.location),
            hint="the copy was removed; choose an output on another disk",
        )
