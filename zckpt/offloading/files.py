"""The bytes of storages, written to scratch files and read back, by the planner and the executors of checkpoints."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.errors import FormatError, NoSpaceError, StorageError
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES, ReadFile
from zckpt.offloading.memory import fresh_memory, whole
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.layout import plan_shards, plan_writes
from zckpt.plan.reshard import Extents
from zckpt.state.inventory import Fragment
from zckpt.storage.scratch import ScratchReader, ScratchSpan, ScratchStore
from zckpt.transfer.devices import devices_of, synchronize
from zckpt.transfer.memory import Sinks
from zckpt.transfer.read import places_of, run_reads
from zckpt.transfer.staging import pool_for
from zckpt.transfer.write import run_writes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.plan.layout import ShardPlan
    from zckpt.storage.scratch import ScratchFile
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class Saved:
    """A scratch file that holds whole storages of the same parts, each as a tensor of bytes, and its digests."""

    file: ScratchFile
    shard: ShardPlan
    digests: bytes

    @property
    def path(self) -> str:
        return self.shard.shard.path


@dataclass(eq=False)
class Moved:
    """A storage, and where its bytes are once they have been written."""

    storage: torch.UntypedStorage
    parts: tuple[str, ...]
    """All parts of the state that have tensors on it."""
    name: str
    """The name of the first tensor on it."""
    pinned: bool
    workspace: bool = False
    """Whether nobody needs its values. Then it is not written, and comes back as fresh memory."""
    saved: Saved | None = field(default=None, init=False)
    number: int = field(default=0, init=False)
    """Its position among the pieces of the file."""

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    @property
    def start(self) -> int:
        """Where it begins in the file, in bytes."""
        assert self.saved is not None
        shard = self.saved.shard
        return len(shard.header) + int(shard.pieces.start[self.number])

    def drop(self) -> None:
        """Gives up what was written."""
        if self.saved is not None:
            self.saved.file.close()

    def span(self, offset: int, nbytes: int) -> ScratchSpan:
        """Where these bytes of the storage are."""
        assert self.saved is not None
        file = self.saved.file
        return ScratchSpan(file.path, self.start + offset, nbytes, file)


def write_out(moved: Sequence[Moved], directory: str, budget: Budget, snapshot: Snapshot) -> None:
    """Writes the bytes of all of these to new scratch files, one for each combination of parts. They are not durable.
    Nothing may change these bytes meanwhile. Raises StorageError, and ZckptError if the snapshot is given up; then
    nothing is left on the disk."""
    moved = [one for one in moved if not one.workspace]
    tensors = [whole(one.storage) for one in moved]
    devices = devices_of(tensors)
    synchronize(devices)
    fragments = [
        Fragment("+".join(one.parts), str(number), (one.nbytes,), "U8", 0, one.nbytes, "host", data=tensor)
        for number, (one, tensor) in enumerate(zip(moved, tensors, strict=True))
    ]
    shards = plan_shards(fragments, secrets.token_hex(8), 0, 1, block_bytes=BLOCK_BYTES)
    staging = pool_for(devices, budget, BLOCK_BYTES)
    parts = {shard.shard.part for shard in shards}
    plan = plan_writes(shards, batch_bytes=staging.batch_bytes, block_bytes=BLOCK_BYTES, straight=parts)
    store = ScratchStore(directory)
    buffers = staging.buffers or budget.threads
    try:
        table = run_writes(store, plan, budget, staging, buffers, snapshot, lambda nbytes: None)
    except BaseException as error:
        for file in store.files.values():
            file.close()  # whoever keeps the error
        if isinstance(error, StorageError):
            error.file = directory
        if isinstance(error, NoSpaceError):
            error.hint = "free space or offload to another directory; the state is still in memory"
        raise
    for shard in shards:
        first = shard.first_block * DIGEST_BYTES
        digests = table[first : first + shard.blocks * DIGEST_BYTES]
        saved = Saved(store.files[shard.shard.path], shard, digests)
        for number, fragment in enumerate(shard.fragments):
            one = moved[int(fragment.name)]
            one.saved, one.number = saved, number


def read_back(moved: Sequence[Moved], budget: Budget, *, verify: bool) -> list[torch.Tensor]:
    """New memory for each storage, filled with its bytes unless it is workspace. Raises FormatError (F001, F003, D003)
    and StorageError, whose byte ranges are those of the scratch file, and DeviceError."""
    memory = [fresh_memory(one.storage, pinned=one.pinned) for one in moved]
    targets = [own for own, one in zip(memory, moved, strict=True) if not one.workspace]
    if not targets:
        return memory
    moved = [one for one in moved if not one.workspace]
    files: dict[Saved, int] = {}
    rows = []
    for sink, one in enumerate(moved):
        assert one.saved is not None
        pieces = one.saved.shard.pieces
        file = files.setdefault(one.saved, len(files))
        start, block = int(pieces.start[one.number]), int(pieces.block[one.number])
        rows.append((file, start, one.nbytes, block, 0, one.nbytes, sink, 0))
    sinks = Sinks([str(number) for number in range(len(moved))], targets, [torch.uint8] * len(moved))
    read_files = {n: ReadFile(one.path, one.shard.nbytes, memoryview(one.digests)) for one, n in files.items()}
    staging = pool_for(sinks.devices, budget, BLOCK_BYTES)
    with closing(ScratchReader({saved.path: saved.file for saved in files})) as reader:
        try:
            ops = plan_reads(
                Extents(*np.array(rows, np.int64).reshape(-1, 8).T),
                data_starts=[len(saved.shard.header) for saved in files],
                block_bytes=BLOCK_BYTES,
                verify=verify,
                batch_bytes=staging.batch_bytes,
                places=places_of(reader, sinks, read_files),
            )
            run_reads(reader, ops, read_files, sinks, budget, staging, lambda nbytes: None)
        except BaseException as error:
            memory.clear()  # as long as somebody keeps the error, it would stay
            targets.clear()
            if isinstance(error, FormatError | StorageError):
                error.file = next(iter(files)).file.directory
            raise
    synchronize(sinks.devices)
    return memory
