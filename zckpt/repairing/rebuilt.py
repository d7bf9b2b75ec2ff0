"""Manifest, index and digest tables: rebuilt from the data files of a save, checked, and put in their places."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING

from zckpt.errors import FormatError, RankError, StorageError
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.digest import digest
from zckpt.format.rules import broken
from zckpt.listing.contents import Contents, read_header
from zckpt.plan import catalog, rebuild
from zckpt.reading.checkpoint import Checkpoint
from zckpt.repairing.digest_tables import Places, compute_tables, differences, fit_tables, read_if_there, read_tables
from zckpt.repairing.salvage import refused
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.transfer.staging import host_pool
from zckpt.validation.check import Share, check_checkpoint
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.plan.rebuild import FoundFile
    from zckpt.repairing.salvage import FoundSave
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Reader, Store
    from zckpt.transfer.budget import Budget
    from zckpt.validation.report import Finding


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What ``rebuild_from`` has made, and what it has found in the data."""

    manifest: bytes
    files: dict[str, bytes]
    """Digest tables and index, by path."""
    unverified: tuple[str, ...]
    """Data that could not be compared with a digest, or that differs from it."""
    places: Places
    computed: dict[int, bytes]
    """The digest tables of the data as they are now, damaged blocks included."""

    def differs_from(self, old: Manifest) -> bool:
        """Whether the manifest is another one than ``old``. Compares all fields but ``writer``."""
        return replace(manifest_format.decode(self.manifest), writer=old.writer) != old


def rebuild_from(store: Store, found: FoundSave, old: Manifest | None, budget: Budget) -> Rebuilt:
    """Reads and compares all data. Raises RepairError if the pieces do not make up whole tensors."""
    with closing(store.reader()) as reader:
        given = read_tables(reader, found.save_id, found.files)
        block_bytes, placed = _placed(found, given, old)
        first = {rank: placed[rank] or rebuild.in_a_row(own, block_bytes) for rank, own in found.files.items()}
        places = Places(found.files, block_bytes, first)
        all_computed = compute_tables(reader, places, budget)
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
        unverified += differences(places, rank, table, computed)
    writer = {"repaired": datetime.now(timezone.utc).isoformat(timespec="seconds"), "repaired_by": __version__}
    about = (
        catalog.About(0, block_bytes, {}, b"\xc0", writer)
        if old is None
        else catalog.About(old.step, block_bytes, old.aliases, old.state, {**old.writer, **writer})
    )
    try:
        receipts = rebuild.receipts(found.files, first, tables, block_bytes)
        manifest, index = catalog.catalog(receipts, found.save_id, about)
    except (FormatError, RankError) as error:
        raise refused(store, [str(error)], "a file is missing or not the one that was written: restore it") from error
    files = {names.digests_path(found.save_id, rank): table for rank, table in tables.items()}
    files[names.index_path(found.save_id)] = index
    return Rebuilt(manifest, files, tuple(unverified), places, all_computed)


def _placed(
    found: FoundSave, tables: Mapping[int, bytes | None], old: Manifest | None
) -> tuple[int, dict[int, list[int] | None]]:
    """The size of blocks, and for each rank the number of each file's first digest; None if that is not known."""
    if old is None:
        return fit_tables(found.files, tables)
    first = {old.path(file): file.first_block for file in old.files}
    return old.block_bytes, {rank: [first[file.header.shard.path] for file in own] for rank, own in found.files.items()}


def check_rebuilt(store: Store, rebuilt: Rebuilt, budget: Budget) -> None:
    """Raises RepairError unless it would be sound. An old manifest may contradict itself, or the files."""
    with closing(store.reader()) as reader:
        overlaid = _Overlaid(reader, rebuilt.files)
        findings = structure_findings(
            Checkpoint(str(store.location), Contents(manifest_format.decode(rebuilt.manifest), overlaid), budget)
        )
    if rebuilt.unverified:  # headers that differ from their digests stay so, as their data do
        findings = [finding for finding in findings if finding.rule != "D003"]
    if findings:
        hint = "take the manifest away if it contradicts the files: it is rebuilt from them then"
        raise refused(store, sorted(map(str, findings)), hint)


def structure_findings(checkpoint: Checkpoint) -> list[Finding]:
    """What is wrong with all but the data."""
    return check_checkpoint(checkpoint, "structure", Share())[0]


class _Overlaid:
    """A Reader of a checkpoint as if ``files`` were in their places already."""

    direct = None

    def __init__(self, reader: Reader, files: Mapping[str, bytes]) -> None:
        self.count = reader.count
        self._reader = reader
        self._files = files

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        if path in self._files:
            return self._files[path][offset : offset + nbytes]
        return self._reader.read(path, offset, nbytes)

    def size(self, path: str) -> int:
        return len(self._files[path]) if path in self._files else self._reader.size(path)

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        return self._reader.read_into(path, views, offset)  # of data files, none of which is in ``files``

    def close(self) -> None:
        self._reader.close()


def put_files(
    store: Store, files: Mapping[str, bytes], confirm: Callable[[], None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Puts each file in its place, durably, and keeps what was there under another name. Returns the names of the files
    and of what was kept. ``confirm`` raises if this process has lost the right to do so."""
    changed, kept = [], []
    for path, data in files.items():
        with closing(store.reader()) as reader:
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


def copy_data(source: Store, target: Store, found: FoundSave, budget: Budget) -> None:
    """Copies all data files, durably."""
    batch_bytes = budget.batch_bytes(PAGE_BYTES)
    staging = host_pool(batch_bytes)

    def copy(file: FoundFile) -> None:
        path = file.header.shard.path
        writer = target.create(path, file.nbytes, direct=budget.direct)
        try:
            with staging.lend() as stage:
                for offset in range(0, file.nbytes, batch_bytes):
                    data = stage.bytes[: min(batch_bytes, file.nbytes - offset)]
                    got = reader.read_into(path, [data], offset)
                    if got < len(data):
                        raise broken("F003", f"the file ends at byte {offset + got}, expected {file.nbytes}", file=path)
                    writer.write(data, offset)
            writer.sync()
        finally:
            writer.close()

    for rank in found.files:
        target.make_directories(names.rank_dir(found.save_id, rank))
    with closing(source.reader()) as reader, staging.work():
        budget.run([partial(copy, file) for own in found.files.values() for file in own])
    for rank in found.files:
        target.sync_names(names.rank_dir(found.save_id, rank))


def check_copy(store: Store, rebuilt: Rebuilt, budget: Budget) -> None:
    """Reads the copy of all data files, and compares it with what was read of the original. Raises StorageError."""
    try:
        with closing(store.reader()) as reader:
            files = [file for own in rebuilt.places.files.values() for file in own]
            differing = [
                f"{file.header.shard.path}: its header or its length"
                for file in files
                if (read_header(reader, path := file.header.shard.path), reader.size(path)) != (file.raw, file.nbytes)
            ]
            tables = compute_tables(reader, rebuilt.places, budget)
    except FormatError as error:
        differing, tables = [str(error)], rebuilt.computed
    for rank, table in tables.items():
        differing += differences(rebuilt.places, rank, rebuilt.computed[rank], table)
    if differing:
        raise StorageError(
            f"the copy differs from what was read: {differing[0]}{', and more' if differing[1:] else ''}",
            file=str(store.location),
            hint="the copy was removed; choose an output on another disk",
        )
