"""Runs planned writes: from host memory itself or through staging buffers, digests first, large positional writes,
durable.

A state goes to disk piece by piece from where it is, a device or a swap file too: a write needs no memory for a whole
state, and by direct I/O it leaves nothing in the page cache. What lies in a swap file is not even written where the
file system can share pages between files; it is read, once, for its digests.
"""

from __future__ import annotations

import ctypes
import itertools
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.rules import broken
from zckpt.plan.layout import FILLER, HEADER
from zckpt.state.inventory import FileSpan
from zckpt.storage.buffers import PAGE_BYTES, whole_pages
from zckpt.storage.files import read_from
from zckpt.transfer.devices import FromDevice
from zckpt.transfer.host_memory import memory
from zckpt.transfer.memory import byte_tensor
from zckpt.transfer.pipeline import Pipeline
from zckpt.transfer.read import fill, read_staged
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.format.digest import ReadFile
    from zckpt.plan.layout import ShardPlan, WriteOp, WritePlan
    from zckpt.state.inventory import Fragment
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Creator, PageSharing, Reader, Writer
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.staging import StagingBuffer, StagingPool

SAMPLES = 4
"""How many reads all over a file come first, to learn whether it has changed."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose data files are copied. Every ``FileSpan`` of what is written is a range of one of its
    files."""

    reader: Reader
    """What reads the files of the checkpoint."""
    files: Mapping[str, ReadFile]
    """The files that are copied, by their paths in the checkpoint."""
    table: bytes
    """The digest table that the written files have to get, made of the digests in that checkpoint."""
    verify: bool
    """Whether what is read is compared with these digests."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One write to one of the files, or as many bytes of it that are only compared with digests."""

    file: Writer | None
    """None: the file is there already, or is not written at all."""
    plan: ShardPlan
    op: WriteOp
    direct: bool
    """Whether whole pages of a swap file are read past the page cache."""
    shared: PageSharing | None = None
    """By which its whole pages are in the file already; None: nothing of it is."""
    source: Source | None = None
    """The checkpoint that ranges of files are read from. None means that they are ranges of swap files."""

    @property
    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Source, first byte in it, and bytes of each span."""
        op = self.op
        return zip(op.source.tolist(), op.span_start.tolist(), op.span_bytes.tolist(), strict=True)

    @property
    def starts(self) -> list[int]:
        """Where each span begins in a staging buffer, and where the last one ends: as far behind the start of a page as
        in the file."""
        return [*itertools.accumulate(self.op.span_bytes.tolist(), initial=self.op.offset % PAGE_BYTES)]


def run_writes(
    store: Creator,
    plan: WritePlan,
    budget: Budget,
    staging: StagingPool,
    buffers: int,
    snapshot: Snapshot,
    advance: Callable[[int], None],
    source: Source | None = None,
    there: Mapping[str, bytes] | None = None,
) -> bytes:
    """Carries out ``plan``: writes its files to ``store``, where their directories exist, and makes their data durable.
    Each write fits in a buffer of ``staging``, of which up to ``buffers`` are in use.

    ``snapshot`` is told when the sources of the urgent writes have been read, and again when all sources have been
    read. ``advance`` is called with the number of tensor bytes that have been written. ``source``: the checkpoint that
    is copied. ``there``: by path, files that are there already, each with the digests of its blocks. They are not
    written, and read only to be compared with the digests of ``source``. Returns the digest table, which is that of
    ``source`` if there is one. Raises StorageError, FormatError (F001 to F003, D003) where ``source`` is damaged, and
    ZckptError if the write was given up.
    """
    table = bytearray(plan.table_bytes)
    files: list[Writer | None] = []
    verify = source is not None and source.verify

    def put(job: _Job, stage: StagingBuffer) -> None:
        _put(table, plan.block_bytes, job, stage)
        advance(int(job.op.span_bytes[job.op.source >= 0].sum()))

    try:
        for one in plan.files:
            digests = (there or {}).get(one.shard.path)
            if digests is None:
                files.append(store.create(one.shard.path, one.reserved_bytes, direct=budget.direct))
                continue
            files.append(None)
            first_byte = one.first_block * DIGEST_BYTES
            table[first_byte : first_byte + len(digests)] = digests
            if not verify:
                advance(int(one.pieces.nbytes.sum()))
        numbers = [number for number, op in enumerate(plan.ops) if verify or files[op.file] is not None]
        jobs = [
            _Job(files[op.file], plan.files[op.file], op, budget.direct, source=source)
            for op in map(plan.ops.__getitem__, numbers)
        ]
        _run(jobs, _take, put, budget, staging, buffers, snapshot, bisect_left(numbers, plan.urgent))
        budget.run(file.sync for file in files if file is not None)
    finally:
        for file in files:
            if file is not None:
                file.close()
    return source.table if source is not None else bytes(table)


def unchanged_files(
    plan: WritePlan, expected: Mapping[int, bytes], budget: Budget, staging: StagingPool, buffers: int
) -> set[int]:
    """Which files of ``plan``, by number, have the ``expected`` digests. A few reads all over each file come first, and
    once a digest differs, nothing more of the file is read: what has changed costs little."""
    changed: set[int] = set()

    def take(job: _Job, stage: StagingBuffer) -> _Job:
        return job if job.op.file in changed else _take(job, stage)

    def compare(job: _Job, stage: StagingBuffer) -> None:
        op = job.op
        if op.file not in changed:
            digests = b"".join(map(digest, _blocks(_data(job, stage), op, plan.block_bytes)))
            first = (op.block - job.plan.first_block) * DIGEST_BYTES
            if digests != expected[op.file][first : first + len(digests)]:
                changed.add(op.file)

    turns = []
    for number in expected:
        ops = [op for op in plan.ops if op.file == number]
        apart = -(-len(ops) // SAMPLES)
        turns += [(i % apart, i // apart, number, op) for i, op in enumerate(ops)]
    turns.sort(key=lambda turn: turn[:3])
    jobs = [_Job(None, plan.files[number], op, budget.direct) for *_, number, op in turns]
    _run(jobs, take, compare, budget, staging, buffers, Snapshot(), 0)
    return expected.keys() - changed


def _run(
    jobs: Sequence[_Job],
    take: Callable[[_Job, StagingBuffer], _Job],
    put: Callable[[_Job, StagingBuffer], None],
    budget: Budget,
    staging: StagingPool,
    buffers: int,
    snapshot: Snapshot,
    urgent: int,
) -> None:
    if not jobs:
        snapshot.end()
        return
    with staging.work(len(jobs)):
        pipeline = Pipeline(jobs, take, put, staging, buffers, snapshot, urgent)
        budget.run([pipeline.work] * budget.threads, lambda: snapshot.give_up("it was interrupted"))


def _take(job: _Job, stage: StagingBuffer) -> _Job:
    op, sharing = job.op, None if job.file is None else job.file.sharing
    path, place = op.place or (None, 0)
    if path == "":  # it is written from where it lies
        for fragment in (job.plan.fragments[source] for source in op.source.tolist()):
            assert isinstance(fragment.data, torch.Tensor)
            _check(fragment, fragment.data)
        return job
    if path is not None:
        if job.source is not None:
            file = job.source.files[path]
            read_staged(job.source.reader, place, op.nbytes, file, stage, job.direct)
            return job
        staged: Bytes = stage.bytes[job.starts[0] : job.starts[-1]]
        if sharing is None or not sharing.share(FileSpan(path, place, op.nbytes), op.offset):
            read_from(path, place, staged, direct=job.direct)
            return job
        first, last = whole_pages(op.offset, op.nbytes)
        read_from(path, place, staged[:first])
        read_from(path, place + last, staged[last:])
        return replace(job, shared=sharing)
    copies: defaultdict[torch.device, list[FromDevice]] = defaultdict(list)
    for span, at in zip(job.spans, job.starts, strict=False):
        _fill(stage, at, job, *span, copies)
    for device, queued in copies.items():
        stage.from_device(device, queued)
    return job


def _put(table: bytearray, block_bytes: int, job: _Job, stage: StagingBuffer) -> None:
    op, data = job.op, _data(job, stage)
    first_byte = op.block * DIGEST_BYTES
    digests = b"".join(map(digest, _blocks(data, op, block_bytes)))
    if job.source is not None and job.source.verify:
        _compare(job, job.source, digests, block_bytes)
    table[first_byte : first_byte + len(digests)] = digests
    if job.shared is not None:
        job.shared.write_edges(data, op.offset)
    elif job.file is not None:
        job.file.write(data, op.offset)


def _data(job: _Job, stage: StagingBuffer) -> Bytes | memoryview:
    """The bytes of a job that was taken."""
    op = job.op
    staged: Bytes = stage.bytes[job.starts[0] : job.starts[-1]]
    if job.shared is not None:
        job.shared.read_back(staged, op.offset)
    return staged if op.place is None or op.place[0] else memory(op.place[1], op.nbytes)


def _blocks(data: Bytes | memoryview, op: WriteOp, block_bytes: int) -> list[Bytes | memoryview]:
    return [
        data[first : min(first + block_bytes, stop)]
        for start, stop in itertools.pairwise(itertools.accumulate(op.span_bytes.tolist(), initial=0))
        for first in range(start, stop, block_bytes)
    ]


def _fill(
    stage: StagingBuffer,
    at: int,
    job: _Job,
    source: int,
    start: int,
    nbytes: int,
    copies: Mapping[torch.device, list[FromDevice]],
) -> None:
    """Puts one span at byte ``at`` of ``stage``. What comes from a device is added to the ``copies`` from there."""
    if source == FILLER:
        stage.bytes[at : at + nbytes] = 0
        return
    if source == HEADER:
        stage.bytes[at : at + nbytes] = np.frombuffer(job.plan.header, np.uint8, nbytes, start)
        return
    fragment = job.plan.fragments[source]
    data = fragment.data
    assert data is not None, "a fragment without data cannot be written"
    if isinstance(data, FileSpan):
        room = stage.bytes[at : at + nbytes]
        if job.source is not None:
            fill(job.source.reader, job.source.files[data.path], data.offset + start, room)
        else:
            read_from(data.path, data.offset + start, room)
        return
    _check(fragment, data)
    if data.is_cpu:
        # By address: to make views of many small tensors would take longer than to copy them.
        ctypes.memmove(stage.address + at, data.data_ptr() + start, nbytes)
    else:
        copies[data.device].append(FromDevice(at, byte_tensor(data)[start : start + nbytes]))


def _compare(job: _Job, source: Source, digests: bytes, block_bytes: int) -> None:
    """Raises FormatError (D003) unless ``digests`` are those that the source has for the blocks of ``job``. The error
    names the place in the source."""
    first = job.op.block * DIGEST_BYTES
    if digests == source.table[first : first + len(digests)]:
        return
    at = first
    for number, start, nbytes in job.spans:
        for begin in range(start, start + nbytes, block_bytes):
            own, at = slice(at, at + DIGEST_BYTES), at + DIGEST_BYTES
            if digests[own.start - first : own.stop - first] == source.table[own]:
                continue
            if number < 0:
                raise broken("D003", "the header is damaged", file=job.plan.shard.path)
            fragment = job.plan.fragments[number]
            assert isinstance(fragment.data, FileSpan)
            begins, ends = fragment.data.offset + begin, min(begin + block_bytes, start + nbytes)
            raise broken(
                "D003", "the data is damaged", file=fragment.data.path, key=fragment.key, start=begins,
                stop=fragment.data.offset + ends, hint="restore the file from a copy, or copy another checkpoint",
            )  # fmt: skip


def _check(fragment: Fragment, data: torch.Tensor) -> None:
    """Its bytes are read by their address."""
    assert data.numel() == fragment.stop - fragment.start, "a fragment's data are its elements"
    assert data.is_contiguous(), "a fragment's data lie in order"
