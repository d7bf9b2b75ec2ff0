"""Writes the bytes of storages to scratch files and reads them back, by the planner and the executors of
checkpoints."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from zckpt.errors import FormatError, NoSpaceError, StorageError
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES, ReadFile
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.offloading.memory import fresh_memory, whole
from zckpt.offloading.scratch import ScratchRange, ScratchReader, ScratchStore
from zckpt.plan.data_files import plan_data_files
from zckpt.plan.inventory import Fragment
from zckpt.plan.reads import plan_reads
from zckpt.plan.reshard import PieceRanges
from zckpt.plan.writes import plan_writes
from zckpt.storage.files import free_bytes
from zckpt.transfer.devices import devices_of, synchronize
from zckpt.transfer.memory import Targets
from zckpt.transfer.read import places_of, run_reads
from zckpt.transfer.staging import pool_for
from zckpt.transfer.write import run_writes, unchanged_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.offloading.scratch import ScratchFile
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class SavedStorages:
    """A scratch file that has whole storages of the same parts, each as a tensor of bytes, and the digests of its
    blocks."""

    file: ScratchFile
    data_file: DataFilePlan
    digests: bytes

    @property
    def path(self) -> str:
        return self.data_file.id.path

    def table(self) -> memoryview:
        return memoryview(self.digests)


@dataclass(eq=False)
class Moved:
    """A storage, and the place of its bytes once they have been written."""

    storage: torch.UntypedStorage
    parts: tuple[str, ...]
    """All parts of the state that have tensors in the storage."""
    name: str
    """The name of the first tensor in the storage."""
    pinned: bool
    workspace: bool = False
    """Whether nobody needs the values of the storage. Then it is not written, and gets fresh memory later."""
    saved: SavedStorages | None = field(default=None, init=False)
    number: int = field(default=0, init=False)
    """The position of the storage among the pieces of the scratch file."""
    memory: torch.Tensor | None = field(default=None, init=False)
    """The memory that was taken away from the storage and is not free yet, as a 1-D uint8 tensor."""

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    @property
    def start(self) -> int:
        """The byte of the scratch file at which the storage begins."""
        assert self.saved is not None
        data_file = self.saved.data_file
        return len(data_file.header) + int(data_file.pieces.start[self.number])

    def file_range(self, offset: int, nbytes: int) -> ScratchRange:
        """Returns the range of the scratch file that has these bytes of the storage."""
        assert self.saved is not None
        file = self.saved.file
        return ScratchRange(file.path, self.start + offset, nbytes, file)


def write_out(
    moved: Sequence[Moved], directory: str, budget: Budget, snapshot: Snapshot, *, copied: bool = False
) -> None:
    """Writes the bytes of all storages to new scratch files, one for each combination of parts. The files do not
    survive a loss of power. Nothing may change these bytes meanwhile, except with ``copied``: then all bytes are copied
    before their digests are computed. Raises StorageError, and ZckptError if the snapshot is given up. After an error,
    nothing is left on disk."""
    moved = [record for record in moved if not record.workspace]
    tensors = [whole(record.storage) for record in moved]
    devices = devices_of(tensors)
    synchronize(devices)
    fragments = [
        Fragment("+".join(record.parts), str(number), "U8", all_of((record.nbytes,)), Tier.HOST, data=tensor)
        for number, (record, tensor) in enumerate(zip(moved, tensors, strict=True))
    ]
    data_files = plan_data_files(fragments, secrets.token_hex(8), 0, 1, block_bytes=BLOCK_BYTES, copied=())
    staging = pool_for(devices, budget, BLOCK_BYTES)
    parts = () if copied else {data_file.id.part for data_file in data_files}
    plan = plan_writes(data_files, batch_bytes=staging.batch_bytes, block_bytes=BLOCK_BYTES, straight=parts)
    store = ScratchStore(directory)
    try:
        table = run_writes(store, plan, budget, staging, snapshot, lambda nbytes: None)
    except BaseException as error:
        for file in store.files.values():
            file.close()  # otherwise, it would stay open as long as somebody keeps the error
        if isinstance(error, StorageError):
            error.file = directory
        if isinstance(error, NoSpaceError):
            needed_bytes, free = sum(record.nbytes for record in moved), free_bytes(directory)
            is_free = f", and {free:,} are free" if free is not None else ""
            error.hint = (
                f"{needed_bytes:,} bytes are needed on this rank{is_free}; "
                "free space or offload to another directory; the state is still in memory"
            )
        raise
    for data_file in data_files:
        first = data_file.first_block * DIGEST_BYTES
        digests = table[first : first + data_file.blocks * DIGEST_BYTES]
        saved = SavedStorages(store.files[data_file.id.path], data_file, digests)
        for number, fragment in enumerate(data_file.fragments):
            record = moved[int(fragment.name)]
            record.saved, record.number = saved, number


def unchanged(moved: Sequence[Moved], budget: Budget) -> list[Moved]:
    """Returns the storages whose ``memory`` still has the bytes that were written. All storages of a file have changed
    if one of them has. Raises DeviceError."""
    written = [record for record in moved if record.saved is not None]
    if not written:
        return [*moved]
    files: dict[SavedStorages, list[Fragment]] = {}
    for record in written:
        assert record.saved is not None
        fragments = files.setdefault(record.saved, [*record.saved.data_file.fragments])
        fragments[record.number] = fragments[record.number]._replace(data=record.memory)
    data_files = [saved.data_file.reading(fragments) for saved, fragments in files.items()]
    tensors = [record.memory for record in written if record.memory is not None]
    staging = pool_for(devices_of(tensors), budget, BLOCK_BYTES)
    parts = {data_file.id.part for data_file in data_files}
    plan = plan_writes(data_files, batch_bytes=staging.batch_bytes, block_bytes=BLOCK_BYTES, straight=parts)
    expected = {number: saved.digests for number, saved in enumerate(files)}
    numbers = unchanged_files(plan, expected, budget, staging)
    same = {saved for number, saved in enumerate(files) if number in numbers}
    return [record for record in moved if record.saved is None or record.saved in same]


def read_back(moved: Sequence[Moved], budget: Budget, *, verify: bool) -> list[torch.Tensor]:
    """Returns new memory for each storage, filled with its bytes unless it is workspace. Raises FormatError (F001,
    F003, D003) and StorageError, whose byte ranges are those of the scratch file, and DeviceError."""
    memory = [fresh_memory(record.storage, pinned=record.pinned) for record in moved]
    tensors = [fresh for fresh, record in zip(memory, moved, strict=True) if not record.workspace]
    if not tensors:
        return memory
    moved = [record for record in moved if not record.workspace]
    files: dict[SavedStorages, int] = {}
    rows = []
    for record in moved:
        assert record.saved is not None
        pieces = record.saved.data_file.pieces
        file = files.setdefault(record.saved, len(files))
        start, block = int(pieces.start[record.number]), int(pieces.block[record.number])
        rows.append((file, start, record.nbytes, block))
    targets = Targets(str, tensors, [torch.uint8] * len(moved))
    read_files = {number: ReadFile(saved.path, saved.data_file.nbytes, saved.table) for saved, number in files.items()}
    staging = pool_for(targets.devices, budget, BLOCK_BYTES)
    with closing(ScratchReader({saved.path: saved.file for saved in files})) as reader:
        try:
            ops = plan_reads(
                PieceRanges.whole(rows),
                data_starts=[len(saved.data_file.header) for saved in files],
                block_bytes=BLOCK_BYTES,
                verify=verify,
                batch_bytes=staging.batch_bytes,
                places=places_of(reader, targets, read_files),
            )
            run_reads(reader, ops, read_files, targets, budget, staging, lambda nbytes: None)
        except BaseException as error:
            memory.clear()  # otherwise, it would exist as long as somebody keeps the error
            tensors.clear()
            if isinstance(error, FormatError | StorageError):
                error.file = next(iter(files)).file.directory
            raise
    synchronize(targets.devices)
    return memory
