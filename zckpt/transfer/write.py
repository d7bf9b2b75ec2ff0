"""Carries out planned writes: computes digests, and writes large ranges straight from host memory or from staging
buffers, durably.

A state goes to the disk piece by piece from where it is, even from a device or a swap file. So a write needs no memory
for a whole state, and with direct I/O it leaves nothing in the page cache. If the file system can share pages between
files, bytes of a swap file are not written. They are only read, once, for their digests.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.rules import broken
from zckpt.plan.data_files import FILLER, HEADER
from zckpt.plan.inventory import FileRange
from zckpt.storage.buffers import PAGE_BYTES, whole_pages
from zckpt.storage.files import read_from
from zckpt.transfer.devices import FromDevice, byte_tensor
from zckpt.transfer.host_memory import gather, memory
from zckpt.transfer.pipeline import Pipeline
from zckpt.transfer.read import fill, read_staged
from zckpt.transfer.snapshot import Snapshot
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from zckpt.format.digest import ReadFile
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.plan.writes import WriteOp, WritePlan
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Creator, PageSharing, Reader, Store, Writer
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.staging import StagingBuffer, StagingPool

SAMPLES = 4
"""How many reads, spread over a file, are made first to find out whether the file has changed."""


@dataclass(frozen=True, slots=True)
class CopySource:
    """A checkpoint whose data files are copied. Every ``FileRange`` that is written is a range of one of these
    files."""

    store: Store
    """The directory of the checkpoint."""
    reader: Reader
    """The reader of the files of the checkpoint."""
    files: Mapping[str, ReadFile]
    """The files that are copied, by their paths in the checkpoint."""
    table: bytes
    """The digest table for the written files, made of the digests in the source checkpoint."""
    verify: bool
    """Whether bytes that are read are compared with these digests."""
    key_at: Callable[[str, int], str | None]
    """Returns the key of the tensor to which a byte of a file belongs, or None if it belongs to no tensor. The
    arguments are the path of the file and the number of the byte."""


@dataclass(frozen=True, slots=True)
class _FileOp:
    """An item of the pipeline: one write to one of the files, or a range of a file that is only compared with its
    digests."""

    file: Writer | None
    """The file to write to. None if the file exists already, or is not written at all."""
    plan: DataFilePlan
    op: WriteOp
    direct: bool
    """Whether whole pages of a swap file are read past the page cache."""
    shared: PageSharing | None = None
    """The object that has put the whole pages of this write into the file by sharing them. None if no pages are
    shared."""
    source: CopySource | None = None
    """The checkpoint to which the ranges of files belong. None if they are ranges of swap files."""

    @property
    def sources(self) -> Iterator[tuple[int, int, int]]:
        """An iterator over the sources: the number of each, the first byte in it, and the number of bytes."""
        op = self.op
        return zip(op.source.tolist(), op.source_start.tolist(), op.source_bytes.tolist(), strict=True)

    @property
    def starts(self) -> list[int]:
        """The bytes of a staging buffer at which the sources begin, and the byte at which the last one ends. The first
        source has the same place in a page there as in the file."""
        return [*itertools.accumulate(self.op.source_bytes.tolist(), initial=self.op.offset % PAGE_BYTES)]


def run_writes(
    store: Creator,
    plan: WritePlan,
    budget: Budget,
    staging: StagingPool,
    snapshot: Snapshot,
    advance: Callable[[int], None],
    source: CopySource | None = None,
    existing: Mapping[str, bytes] | None = None,
    snapshot_bytes: int = 0,
) -> bytes:
    """Carries out ``plan``: writes its files to ``store``, or its ranges of files that are there, and makes their data
    durable. Each write fits in a buffer of ``staging``, or is straight. The buffers take as many bytes as the budget
    allows, or ``snapshot_bytes`` if this is more.

    ``snapshot`` is told when the sources of the urgent writes have been read, and again when all sources have been
    read. ``advance`` is called with the number of tensor bytes that have been written. ``source`` is the checkpoint
    that is copied, if any. ``existing`` maps the path of each file that exists already to the digests of its blocks.
    These files are not written. They are read only if they are compared with the digests of ``source``.

    Returns the digest table, which is that of ``source`` if there is a source. Raises StorageError, FormatError (F001
    to F003, D003) if ``source`` is damaged, and ZckptError if the write was given up.
    """
    table = bytearray(plan.table_bytes)
    files: list[Writer | None] = []
    verify = source is not None and source.verify

    def put(item: _FileOp, stage: StagingBuffer) -> None:
        _put(item, stage)
        advance(int(item.op.source_bytes[item.op.source >= 0].sum()))

    try:
        for file_plan in plan.files:
            digests = (existing or {}).get(file_plan.id.path)
            if digests is None:
                path, reserve = file_plan.id.path, file_plan.reserves
                if file_plan.is_range:
                    files.append(store.open_range(path, direct=budget.direct))
                else:
                    files.append(store.create(path, file_plan.nbytes, direct=budget.direct, reserve=reserve))
                continue
            files.append(None)
            first_byte = file_plan.first_block * DIGEST_BYTES
            table[first_byte : first_byte + len(digests)] = digests
            if not verify:
                advance(int(file_plan.pieces.nbytes.sum()))
        numbers = [number for number, op in enumerate(plan.ops) if verify or files[op.file] is not None]
        items = [
            _FileOp(files[op.file], plan.files[op.file], op, budget.direct, source=source)
            for op in map(plan.ops.__getitem__, numbers)
        ]
        urgent = bisect_left(numbers, plan.urgent)
        record_digests = partial(_record_digests, table, plan.block_bytes)
        pipeline = Pipeline(
            items, _take, record_digests, put, _is_straight, staging, snapshot, urgent, is_next=_is_next
        )
        with staging.work(len(items)):
            pipeline.run(budget, snapshot_bytes)
        run_tasks((file.sync for file in files if file is not None), budget.threads)
    finally:
        for file in files:
            if file is not None:
                file.close()
    return source.table if source is not None else bytes(table)


def unchanged_files(
    plan: WritePlan,
    expected: Mapping[int, bytes],
    budget: Budget,
    staging: StagingPool,
    source: CopySource | None = None,
) -> set[int]:
    """Returns the numbers of those files of ``plan`` that have the ``expected`` digests. A few reads spread over each
    file come first, and nothing more of a file is read once a digest differs. So a file that has changed costs little
    time. ``source``: as for ``run_writes``."""
    changed: set[int] = set()

    def take(item: _FileOp, stage: StagingBuffer) -> _FileOp:
        return item if item.op.file in changed else _take(item, stage)

    def compare(item: _FileOp, stage: StagingBuffer) -> None:
        op = item.op
        if op.file not in changed:
            digests = _digests(item, stage, plan.block_bytes)
            first = (op.block - item.plan.first_block) * DIGEST_BYTES
            if digests != expected[op.file][first : first + len(digests)]:
                changed.add(op.file)

    turns = []
    for number in expected:
        ops = [op for op in plan.ops if op.file == number]
        stride = -(-len(ops) // SAMPLES)
        turns += [(i % stride, i // stride, number, op) for i, op in enumerate(ops)]
    turns.sort(key=lambda turn: turn[:3])
    items = [_FileOp(None, plan.files[number], op, budget.direct, source=source) for *_, number, op in turns]
    pipeline = Pipeline(items, take, compare, lambda item, stage: None, _is_straight, staging, Snapshot(), 0)
    with staging.work(len(items)):
        pipeline.run(budget)
    return expected.keys() - changed


def _take(item: _FileOp, stage: StagingBuffer) -> _FileOp:
    """Reads the sources of an item into its staging buffer, or shares their pages with the file. Returns the item. If
    the plan says that the bytes are written straight from host memory, they stay there."""
    op, sharing = item.op, None if item.file is None else item.file.sharing
    path, place = op.place or (None, 0)
    in_memory = op.address >= 0
    if _is_straight(item):
        return item
    if path is not None:
        if item.source is not None:
            file = item.source.files[path]
            read_staged(item.source.reader, place, op.nbytes, file, stage, item.direct)
            return item
        staged = _staged(item, stage)
        if sharing is None or not sharing.share(FileRange(path, place, op.nbytes), op.offset):
            read_from(path, place, staged, direct=item.direct)
            return item
        first, last = whole_pages(op.offset, op.nbytes)
        read_from(path, place, staged[:first])
        read_from(path, place + last, staged[last:])
        return replace(item, shared=sharing)
    starts = np.array(item.starts[:-1], np.int64)
    gather(op.address[in_memory], op.source_bytes[in_memory], starts[in_memory], stage.bytes)
    copies: defaultdict[torch.device, list[FromDevice]] = defaultdict(list)
    others = (column[~in_memory].tolist() for column in (starts, op.source, op.source_start, op.source_bytes))
    for position, source, start, nbytes in zip(*others, strict=True):
        _fill(stage, position, item, source, start, nbytes, copies)
    for device, queued in copies.items():
        stage.from_device(device, queued)
    return item


def _is_straight(item: _FileOp) -> bool:
    """Returns whether the bytes of an item are written from where they are in host memory, without a staging buffer."""
    return item.op.place is not None and item.op.place[0] == ""


def _is_next(item: _FileOp) -> bool:
    """Returns whether the file can pass on the bytes of an item now."""
    return item.file is None or item.file.is_next(item.op.offset)


def _record_digests(table: bytearray, block_bytes: int, item: _FileOp, stage: StagingBuffer) -> None:
    """Computes the digests of the bytes of an item, and puts them into ``table``. Pages that the file shares with
    another file are read from the disk for this."""
    if item.shared is not None:
        item.shared.read_back(_staged(item, stage), item.op.offset)
    first_byte = item.op.block * DIGEST_BYTES
    digests = _digests(item, stage, block_bytes)
    if item.source is not None and item.source.verify:
        _compare(item, item.source, digests, block_bytes)
    table[first_byte : first_byte + len(digests)] = digests


def _put(item: _FileOp, stage: StagingBuffer) -> None:
    """Writes the bytes of an item to its file. Their digests were computed before."""
    data = _data(item, stage)
    if item.shared is not None:
        item.shared.write_edges(data, item.op.offset)
    elif item.file is not None:
        item.file.write(data, item.op.offset)


def _data(item: _FileOp, stage: StagingBuffer) -> Bytes | memoryview:
    """Returns the bytes of an item after ``_take``. If its pages are shared, they must have been read back before."""
    place = item.op.place
    return _staged(item, stage) if place is None or place[0] else memory(place[1], item.op.nbytes)


def _staged(item: _FileOp, stage: StagingBuffer) -> Bytes:
    """Returns the part of a staging buffer that the bytes of an item take."""
    return stage.bytes[item.starts[0] : item.starts[-1]]


def _digests(item: _FileOp, stage: StagingBuffer, block_bytes: int) -> bytes:
    """Returns the digests of the bytes that ``_data`` returns, one after the other."""
    return b"".join(map(digest, _blocks(_data(item, stage), item.op, block_bytes)))


def _blocks(data: Bytes | memoryview, op: WriteOp, block_bytes: int) -> list[Bytes | memoryview]:
    """Returns the blocks of ``data``. Each source begins with a new block."""
    return [
        data[first : min(first + block_bytes, stop)]
        for start, stop in itertools.pairwise(itertools.accumulate(op.source_bytes.tolist(), initial=0))
        for first in range(start, stop, block_bytes)
    ]


def _fill(
    stage: StagingBuffer,
    position: int,
    item: _FileOp,
    source: int,
    start: int,
    nbytes: int,
    copies: Mapping[torch.device, list[FromDevice]],
) -> None:
    """Puts the bytes of one source, which are not in host memory, at byte ``position`` of ``stage``. Bytes on a device
    are not copied yet: their copy is added to ``copies`` of that device."""
    if source == FILLER:
        stage.bytes[position : position + nbytes] = 0
        return
    if source == HEADER:
        stage.bytes[position : position + nbytes] = np.frombuffer(item.plan.header, np.uint8, nbytes, start)
        return
    fragment = item.plan.fragments[source]
    data = fragment.data
    assert data is not None, "a fragment without data cannot be written"
    if isinstance(data, FileRange):
        room = stage.bytes[position : position + nbytes]
        if item.source is not None:
            fill(item.source.reader, item.source.files[data.path], data.offset + start, room)
        else:
            read_from(data.path, data.offset + start, room)
        return
    if nbytes < data.nbytes:
        data = byte_tensor(data)[start : start + nbytes]
    copies[data.device].append(FromDevice(position, data))


def _compare(item: _FileOp, source: CopySource, digests: bytes, block_bytes: int) -> None:
    """Raises FormatError (D003) unless ``digests`` are those that the source has for the blocks of ``item``. The error
    names the file and the range in the source."""
    first = item.op.block * DIGEST_BYTES
    if digests == source.table[first : first + len(digests)]:
        return
    position = first
    for number, start, nbytes in item.sources:
        for begin in range(start, start + nbytes, block_bytes):
            row, position = slice(position, position + DIGEST_BYTES), position + DIGEST_BYTES
            if digests[row.start - first : row.stop - first] == source.table[row]:
                continue
            if number == HEADER:
                raise broken("D003", "the header is damaged", file=item.plan.id.path)
            path, offset = item.plan.place_of(number)
            file_start, file_stop = offset + begin, offset + min(begin + block_bytes, start + nbytes)
            raise broken(
                "D003", "the data is damaged", file=path, key=source.key_at(path, file_start),
                start=file_start, stop=file_stop, hint="restore the file from a copy, or copy another checkpoint",
            )  # fmt: skip
