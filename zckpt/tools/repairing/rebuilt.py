"""Rebuilds the manifest, the index and the digest tables from the data files of a save, checks them, and puts them in
place."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.contents import Contents, read_header
from zckpt.checkpoint.listing.salvage import fit_tables, read_if_there, read_tables
from zckpt.errors import FormatError, RankError, StorageError
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.digest import digest
from zckpt.format.rules import broken
from zckpt.plan import catalog
from zckpt.plan.inventory import MASTER, PARAM
from zckpt.plan.lineage import Lineage, Use
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.tools.repairing.records import rank_records
from zckpt.tools.repairing.save import refused
from zckpt.tools.repairing.tables import Tables, compute_tables, differences, in_a_row
from zckpt.tools.validating.check import ValidationShare, check_checkpoint
from zckpt.transfer.staging import host_pool
from zckpt.transfer.tasks import run_tasks
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.checkpoint.listing.salvage import FoundFile, FoundSave
    from zckpt.format.manifest import Manifest
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Reader, Store
    from zckpt.tools.validating.report import Finding
    from zckpt.transfer.budget import Budget


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The files that ``rebuild_from`` has made, and what it has found in the data."""

    manifest: bytes
    files: dict[str, bytes]
    """The digest tables and the index, by their paths."""
    unverified: tuple[str, ...]
    """Descriptions of the data that could not be compared with a digest, or that differ from it."""
    places: Tables
    computed: dict[int, bytes]
    """The digest table of each rank, computed from the data as they are now, damaged blocks included."""

    def differs_from(self, old: Manifest) -> bool:
        """Returns whether the manifest differs from ``old`` in any field but ``writer``."""
        return replace(manifest_format.decode(self.manifest), writer=old.writer) != old


def rebuild_from(store: Store, save: FoundSave, old: Manifest | None, budget: Budget) -> Rebuilt:
    """Rebuilds a checkpoint from the data files of a save. Reads and compares all data. Raises RepairError if the
    pieces do not make up whole tensors."""
    with closing(store.reader()) as reader:
        old_tables = read_tables(reader, save.save_id, save.files)
        block_bytes, placed = _placed(save, old_tables, old)
        first = {
            rank: placed[rank] or in_a_row(files_of_rank, block_bytes) for rank, files_of_rank in save.files.items()
        }
        places = Tables(save.files, block_bytes, first)
        all_computed = compute_tables(reader, places, budget)
    tables = dict(all_computed)
    unverified: list[str] = []
    for rank, computed in all_computed.items():
        table = old_tables[rank]
        if old is not None and digest(computed) == old.digests[rank]:
            continue
        if table is None or placed[rank] is None or (old is not None and digest(table) != old.digests[rank]):
            directory = names.rank_dir(save.save_id, rank)
            unverified.append(f"{directory}: it has no sound digest table, so none of its data is verified")
            continue
        tables[rank] = table  # the block stays damaged, and will be refused when it is read
        unverified += differences(places, rank, table, computed)
    writer = {"repaired": datetime.now(UTC).isoformat(timespec="seconds"), "repaired_by": __version__}
    metadata = (
        catalog.SaveMetadata(0, block_bytes, {}, b"\xc0", writer, Lineage("", _use(save)))
        if old is None
        else catalog.SaveMetadata(old.step, block_bytes, old.aliases, old.state, {**old.writer, **writer})
    )
    try:
        records = rank_records(save.files, first, tables, block_bytes)
        manifest, index = catalog.catalog(records, save.save_id, metadata)
    except (FormatError, RankError) as error:
        raise refused(store, [str(error)], "a file is missing or not the one that was written: restore it") from error
    files = {names.digests_path(save.save_id, rank): table for rank, table in tables.items()}
    files[names.index_path(save.save_id)] = index
    return Rebuilt(manifest, files, tuple(unverified), places, all_computed)


def _use(save: FoundSave) -> Use:
    """Returns the use of a save whose manifest is lost. What a resume needs beside the tensors is lost with it."""
    parts = {file.header.data_file.part for files_of_rank in save.files.values() for file in files_of_rank}
    return Use.WEIGHTS if parts.intersection({MASTER, PARAM}) else Use.PART


def _placed(
    save: FoundSave, tables: Mapping[int, bytes | None], old: Manifest | None
) -> tuple[int, dict[int, list[int] | None]]:
    """Returns the size of a block in bytes, and for each rank the number of the first digest of each file, or None if
    it is not known."""
    if old is None:
        return fit_tables(save.files, tables)
    first = {old.path(file): file.first_block for file in old.files}
    return old.block_bytes, {
        rank: [first[file.header.data_file.path] for file in files_of_rank]
        for rank, files_of_rank in save.files.items()
    }


def check_rebuilt(store: Store, rebuilt: Rebuilt, budget: Budget) -> None:
    """Raises RepairError unless the rebuilt checkpoint would be sound. An old manifest may contradict itself, or the
    files."""
    with closing(store.reader()) as reader:
        overlaid = _Overlaid(reader, rebuilt.files)
        findings = structure_findings(Contents(manifest_format.decode(rebuilt.manifest), overlaid, store), budget)
    if rebuilt.unverified:  # headers and data that differ from their digests are kept as they are
        findings = [finding for finding in findings if finding.rule != "D003"]
    if findings:
        hint = "take the manifest away if it contradicts the files: it is rebuilt from them then"
        raise refused(store, sorted(map(str, findings)), hint)


def structure_findings(contents: Contents, budget: Budget) -> list[Finding]:
    """Returns what is wrong with a checkpoint, apart from its data."""
    return check_checkpoint(contents, budget, "structure", ValidationShare())[0]


class _Overlaid:
    """A Reader that reads a checkpoint as if ``files`` were in place already."""

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
        # Only data files are read in this way, and none of them is in ``files``.
        return self._reader.read_into(path, views, offset)

    def close(self) -> None:
        self._reader.close()


def put_files(
    store: Store, files: Mapping[str, bytes], confirm: Callable[[], None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Puts each file in its place so that it survives a loss of power, and keeps the file that was there under another
    name. Returns the names of the new files and of the files that were kept. ``confirm`` raises an error if this
    process has lost the right to do so."""
    changed, kept = [], []
    for path, data in files.items():
        with closing(store.reader()) as reader:
            present = read_if_there(reader, path)
        if present == data:
            continue
        if present is not None:
            kept.append(f"{path}.{secrets.token_hex(4)}.old")
            store.put_new(kept[-1], present)
        prepared = store.prepare(path, data)
        try:
            confirm()
            prepared.commit(present)
        except BaseException:
            prepared.discard()
            raise
        changed.append(path)
    return tuple(changed), tuple(kept)


def copy_data(source: Store, target: Store, save: FoundSave, budget: Budget) -> None:
    """Copies all data files so that the copies survive a loss of power."""
    batch_bytes = budget.batch_bytes(PAGE_BYTES)
    staging = host_pool(batch_bytes)

    def copy(file: FoundFile) -> None:
        path = file.header.data_file.path
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

    with closing(source.reader()) as reader, staging.work():
        tasks = [partial(copy, file) for files_of_rank in save.files.values() for file in files_of_rank]
        run_tasks(tasks, budget.threads)
    for rank in save.files:
        target.sync_names(names.rank_dir(save.save_id, rank))


def check_copy(store: Store, rebuilt: Rebuilt, budget: Budget) -> None:
    """Reads the copy of all data files, and compares it with what was read of the original. Raises StorageError if they
    differ."""
    try:
        with closing(store.reader()) as reader:
            files = [file for files_of_rank in rebuilt.places.files.values() for file in files_of_rank]
            differing = [
                f"{file.header.data_file.path}: its header or its length"
                for file in files
                if (read_header(reader, path := file.header.data_file.path), reader.size(path))
                != (file.raw, file.nbytes)
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
