"""What was rebuilt put in its place, and data files copied to another one."""

from __future__ import annotations

import secrets
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from zckpt.errors import FormatError, StorageError
from zckpt.format import names
from zckpt.format.rules import broken
from zckpt.reading.contents import read_header
from zckpt.repairing.digest_tables import compute_tables, differences, read_if_there
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.transfer.staging import host_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zckpt.plan.rebuild import FoundFile
    from zckpt.repairing.rebuilt import Rebuilt
    from zckpt.repairing.salvage import FoundSave
    from zckpt.storage.contract import Store
    from zckpt.transfer.budget import Budget


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
                    nbytes = min(batch_bytes, file.nbytes - offset)
                    got = reader.read_into(path, [stage.bytes[:nbytes]], offset)
                    if got < nbytes:
                        raise broken("F003", f"the file ends at byte {offset + got}, expected {file.nbytes}", file=path)
                    writer.write(stage.bytes, offset, nbytes)
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
