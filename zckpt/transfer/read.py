"""Carries out planned reads: parallel positional I/O, with digests checked during the read.

Bytes that are in the page cache already are read from there, before all others, in no more threads than there are
processors: more threads do not copy faster, while a disk is faster if more threads wait for it. One thread does all the
work of such a read. It reads a portion, compares its digests while the bytes are still in the processor's cache, and
goes on to the next portion. Small reads of other bytes go through the page cache in the same way. Among the reads from
the page cache, and among all others, urgent reads come first.

All other reads use direct I/O, which evicts nothing from the page cache. Their bytes go straight into the target if the
plan says so, and otherwise into aligned staging buffers. The thread that has read the bytes begins its next read, while
another thread compares the digests.

Copies to a device are queued once their bytes are in a buffer. While these copies run, the next read fills another
buffer.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.format.digest import DIGEST_BYTES, check_block, digest
from zckpt.format.rules import broken
from zckpt.plan.reads import TargetPlaces, joined_copies
from zckpt.storage.buffers import PAGE_BYTES, after
from zckpt.storage.contract import read_portions
from zckpt.system.linux import processors
from zckpt.transfer.devices import synchronize
from zckpt.transfer.host_memory import copy_to, memories, memory
from zckpt.transfer.pipeline import Pipeline
from zckpt.transfer.snapshot import Snapshot
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.errors import FormatError
    from zckpt.format.digest import ReadFile
    from zckpt.plan.reads import Ranges, ReadOp, Segments
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import DirectReads, Reader
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.memory import Targets
    from zckpt.transfer.staging import StagingBuffer, StagingPool

DIRECT_BYTES_MIN = 256 << 10
"""The smallest read that uses direct I/O, in bytes. Smaller reads are faster through the page cache."""
PORTION_BYTES = 2 << 20
"""The number of bytes that are checked at a time, and read at a time if they come from the page cache. If the number
were larger, the bytes would no longer be in the processor's cache when they are checked. If it were smaller, Python
would take more time for each byte."""


def places_of(reader: Reader, targets: Targets, files: Mapping[int, ReadFile]) -> TargetPlaces:
    """Returns the addresses and alignments of ``targets`` for the planner. All ``files`` are on one file system, so one
    alignment applies to all of them."""
    direct, file = reader.direct, next(iter(files.values()), None)
    alignment = (PAGE_BYTES, PAGE_BYTES) if direct is None or file is None else direct.alignment(file.path)
    return TargetPlaces(targets.address, *alignment)


def run_reads(
    reader: Reader,
    ops: Sequence[ReadOp],
    files: Mapping[int, ReadFile],
    targets: Targets,
    budget: Budget,
    staging: StagingPool,
    advance: Callable[[int], None],
    after_urgent: Callable[[], None] = lambda: None,
    checks: Sequence[Callable[[], object]] = (),
) -> None:
    """Carries out ``ops``. Each of them fits in a buffer of ``staging`` with a page to spare at both ends, or is
    straight. ``advance`` is called with the number of bytes that are on their way to their targets. ``after_urgent`` is
    called once, when all bytes of urgent reads are in their targets, or at the beginning if there are no such reads.
    ``checks`` are called in further threads while the bytes are read. On return, all bytes are there, and all checks
    have returned.

    Raises FormatError (F001 to F003, D003), StorageError and what the checks raise. After an error, the targets have
    undefined values.
    """
    urgent = sum(op.is_urgent for op in ops)
    if not urgent:
        after_urgent()
    if not ops:
        run_tasks(checks, budget.threads)
        return
    target, start, run_bytes, runs, stride = (
        np.concatenate([getattr(op.segments.copies, name) for op in ops])
        for name in ("target", "target_offset", "run_bytes", "runs", "target_stride")
    )
    targets.check(target, start, (runs - 1) * stride + run_bytes)
    synchronize(targets.devices)

    finished = itertools.count(1)

    def finish_urgent() -> None:
        if next(finished) == urgent:  # ``next`` gives each number to one thread only.
            staging.wait()
            after_urgent()

    reads = _Reads(reader, files, targets, budget.direct, advance, finish_urgent)
    direct = reader.direct if budget.direct else None
    cached: list[ReadOp] = []
    others: list[ReadOp] = []
    for op in ops:
        is_cached = direct is not None and direct.is_cached(files[op.file].path, op.offset, op.nbytes)
        (cached if is_cached else others).append(op)
    with staging.work(len(ops)):
        tasks = [partial(reads.read_cached, op, staging) for op in cached]
        run_tasks(tasks, min(budget.threads, processors()))
        # A read has no snapshot that could learn which sources have been read, so none is urgent for the pipeline.
        pipeline = Pipeline(
            others,
            reads.take,
            reads.check,
            lambda op, stage: None,
            lambda op: op.is_straight,
            staging,
            Snapshot(),
            urgent=0,
        )
        pipeline.run(budget, beside=checks)


class _Views:
    """The memory into which the segments of one read are read."""

    def __init__(self, op: ReadOp, stage: StagingBuffer, key: Callable[[int], str], through_cache: bool) -> None:
        """``key`` returns the key of a target. ``through_cache`` says that the read goes through the store's caches.
        Then each segment that has an address is read to this address, and not only the straight segments."""
        segments = self._segments = op.segments
        self._key = key
        base = op.offset - op.offset % PAGE_BYTES  # the byte of the file with which the staging buffer begins
        self.starts = list(itertools.accumulate(segments.nbytes.tolist(), initial=op.offset))
        """The byte of the file at which each segment begins, and the one at which the last segment ends."""
        self.address = segments.address if through_cache else np.where(segments.straight, segments.address, -1)
        """The address of the memory of each segment, or -1 for a segment that goes to the staging buffer."""
        self.room = stage.bytes
        self.place = np.array(self.starts[:-1], np.int64) - base
        """The byte of the staging buffer at which each segment would begin. In the staging buffer, bytes have the same
        place in a page as in the file."""
        self.has_staged = bool((self.address < 0).any())
        self.blocks = segments.block.tolist()
        """The number of the digest of each segment, among the digests of the file."""
        self.first_copy = list(itertools.accumulate(segments.copy_count.tolist(), initial=0))
        """The number of the first copy of each segment, and that of the copy after the last one."""
        self.memory = memories(np.where(self.address < 0, stage.address + self.place, self.address), segments.nbytes)
        """The memory of each segment."""

    def portions(self, nbytes: int) -> Iterator[slice]:
        """Groups consecutive segments into portions of at most ``nbytes`` bytes, or of one segment that is larger.
        Yields the segments of each portion."""
        first = 0
        while first < len(self.memory):
            last = max(bisect_right(self.starts, self.starts[first] + nbytes) - 1, first + 1)
            yield slice(first, last)
            first = last

    def key_at(self, byte: int) -> str:
        """Returns the key of the tensor that has byte ``byte`` of the file."""
        segment = bisect_right(self.starts, byte) - 1
        return self._key(int(self._segments.copies.target[self.first_copy[segment]]))


@dataclass(frozen=True, slots=True)
class _Reads:
    """Carries out reads: a read from the store's caches as a whole, and all others as the steps ``take`` and ``digest``
    of a ``Pipeline``."""

    reader: Reader
    files: Mapping[int, ReadFile]
    targets: Targets
    direct: bool
    advance: Callable[[int], None]
    finish_urgent: Callable[[], None]
    """Is called after each urgent read, and tells the caller after the last one."""

    def read_cached(self, op: ReadOp, staging: StagingPool) -> None:
        """Reads the bytes of ``op`` through the store's caches, compares their digests, and moves them to their
        targets."""
        with staging.lend() as stage:
            self.check(op, stage, through_cache=True)

    def take(self, op: ReadOp, stage: StagingBuffer) -> ReadOp | None:
        """Reads the bytes of ``op``, and returns ``op`` for ``check``. If the read goes through the store's caches,
        calls ``check`` at once, while the bytes are in the processor's cache, and returns None. Also returns None after
        a read straight into device memory."""
        file, direct = self.files[op.file], _direct(self.reader, op.nbytes, self.direct)
        if direct is None:
            self.check(op, stage, through_cache=True)
            return None
        if not op.is_verified and _read_to_device(direct, op, file, self.targets):
            self._finish(op)
            return None
        filled = _read_direct(direct, op, file, stage)
        if filled < op.nbytes:
            views = _Views(op, stage, self.targets.key, through_cache=False)
            _fill(self.reader, file, op.offset, op.offset + op.nbytes, views.memory, views.key_at, filled)
        return op

    def check(self, op: ReadOp, stage: StagingBuffer, through_cache: bool = False) -> None:
        """Compares the digests of the bytes of ``op``, and copies the bytes from the staging buffer to their targets in
        host memory. Queues the copies to devices. With ``through_cache``, it first reads the bytes through the store's
        caches."""
        views = _Views(op, stage, self.targets.key, through_cache)
        portions = list(views.portions(PORTION_BYTES if op.is_verified else op.nbytes))
        # The traceback of an error keeps the functions that it has passed. A function that is defined here would refer
        # to the buffer even after ``StagingPool.work`` has cleared the traceback's variables.
        check = partial(self._check_portion, op, views, portions)
        if through_cache:
            file, start, stop = self.files[op.file], views.starts[0], views.starts[-1]
            rooms = [views.memory[portion] for portion in portions]
            position = start + read_portions(self.reader, file.path, rooms, start, check)
            if position < stop:
                raise _too_short(file, position, views.key_at(position), start, stop)
        else:
            self.reader.count.add(copied_bytes=int(op.edges.nbytes.sum()))
            for number in range(len(portions)):
                check(number)
        _queue(op.segments, op.offset % PAGE_BYTES, self.targets, stage)
        self._finish(op)

    def _finish(self, op: ReadOp) -> None:
        """Notes that the bytes of ``op`` are on their way to their targets. The last urgent read also tells the caller
        that all bytes of urgent reads are in their targets."""
        self.advance(int((op.segments.copies.run_bytes * op.segments.copies.runs).sum()))
        if op.is_urgent:
            self.finish_urgent()

    def _check_portion(self, op: ReadOp, views: _Views, portions: Sequence[slice], number: int) -> None:
        """Compares the digests of a portion, and copies staged bytes to their targets in host memory."""
        portion = portions[number]
        blocks, in_portion = views.blocks[portion], views.memory[portion]
        if op.is_verified and not _are_sound(self.files[op.file], blocks, in_portion):
            for view, block, start in zip(in_portion, blocks, views.starts[portion], strict=True):
                if block >= 0:  # A gap has no digest.
                    check_block(view, block, self.files[op.file], start, views.key_at(start))
        if views.has_staged:
            self.reader.count.add(copied_bytes=_copy_staged(op.segments, views, portion, self.targets))


def _read_to_device(direct: DirectReads, op: ReadOp, file: ReadFile, targets: Targets) -> bool:
    """Reads ``op`` straight into device memory. This is possible if all of its bytes go to devices unconverted, in
    ranges of at least ``DIRECT_BYTES_MIN`` bytes on average. Returns False if nothing was read."""
    if (op.segments.copy_count > 1).any() or (op.segments.copies.runs > 1).any():
        return False
    copies = joined_copies(op.segments, targets.device >= 0)
    if sum(copy.run_bytes for copy in copies) < op.nbytes or op.nbytes < DIRECT_BYTES_MIN * len(copies):
        return False
    views = []
    for copy in copies:
        view = targets.device_memory(copy.target, copy.target_offset, copy.run_bytes)
        if view is None:
            return False
        views.append(view)
    for number, (view, copy) in enumerate(zip(views, copies, strict=True)):
        start = op.offset + copy.source
        nbytes = direct.read_to_device(file.path, view, start)
        if nbytes < view.nbytes:
            if nbytes == 0 and number == 0:
                return False
            raise _too_short(file, start + nbytes, targets.key(copy.target), start, start + view.nbytes)
    return True


def read_op(
    reader: Reader, op: ReadOp, file: ReadFile, staging: StagingPool, direct: bool, consume: Callable[[Bytes], None]
) -> None:
    """Calls ``consume`` with the bytes of ``op``. Their digests are not checked. It must be called inside of
    ``staging.work``. Raises what ``run_reads`` raises."""
    with staging.lend() as stage:
        consume(read_staged(reader, op.offset, op.nbytes, file, stage, direct))


def read_staged(reader: Reader, offset: int, nbytes: int, file: ReadFile, stage: StagingBuffer, direct: bool) -> Bytes:
    """Reads ``nbytes`` bytes from byte ``offset`` of the file into ``stage`` and returns them. Their digests are not
    checked. They have the same place in a page as in the file. Raises what ``run_reads`` raises."""
    first = offset % PAGE_BYTES
    view = stage.bytes[first : first + nbytes]
    filled = 0
    direct_reads = _direct(reader, nbytes, direct)
    if direct_reads is not None and not direct_reads.is_cached(file.path, offset, nbytes):
        pages = stage.bytes[: -(-(first + nbytes) // PAGE_BYTES) * PAGE_BYTES]
        read_bytes = direct_reads.read_direct(file.path, [pages], offset - first)
        filled = min(max(read_bytes - first, 0), nbytes)
    _fill(reader, file, offset, offset + nbytes, [view], lambda byte: None, filled)
    return view


def _direct(reader: Reader, nbytes: int, direct: bool) -> DirectReads | None:
    """Returns the object that carries out a direct read of ``nbytes`` bytes that are not cached. Returns None if
    the read goes through the store's caches all the same: because ``direct`` forbids direct I/O, the store has none, or
    the read is small."""
    return reader.direct if direct and nbytes >= DIRECT_BYTES_MIN else None


def fill(reader: Reader, file: ReadFile, offset: int, room: Bytes) -> None:
    """Fills ``room`` with the bytes of the file from byte ``offset`` on, through the store's caches. Their digests are
    not checked. Raises what ``run_reads`` raises."""
    _fill(reader, file, offset, offset + len(room), [room], lambda byte: None)


def _fill(
    reader: Reader,
    file: ReadFile,
    start: int,
    stop: int,
    views: Sequence[Bytes | memoryview],
    key_at: Callable[[int], str | None],
    filled: int = 0,
) -> None:
    """Reads bytes ``start`` to ``stop`` of the file into ``views``, one after the other. The first ``filled`` bytes are
    there already, and are not read. Raises FormatError (F003), with the key of the byte at which the file ends, if the
    file is too short."""
    position = start + filled
    if position < stop:
        position += reader.read_into(file.path, after(views, position - start), position)
    if position < stop:
        raise _too_short(file, position, key_at(position), start, stop)


def _read_direct(direct: DirectReads, op: ReadOp, file: ReadFile, stage: StagingBuffer) -> int:
    """Reads ``op`` by direct I/O: the segments that are ``straight`` into their target, and all other bytes into the
    staging buffer. Returns how many bytes of ``op`` have been read: fewer than all of them if the file ends before, and
    0 if direct I/O is not possible."""
    base, stop = op.offset - op.offset % PAGE_BYTES, -(-(op.offset + op.nbytes) // PAGE_BYTES) * PAGE_BYTES
    straight, room = op.is_straight, stage.bytes
    # The bytes in the buffer lie there as in the file. But a straight read may be larger than the buffer: only its
    # edges are in the buffer, one after the other.
    views: list[Bytes | memoryview] = []
    position, place = base, 0
    for start, nbytes, address in _rows(op.inner):
        views += [room[place : place + start - position], memory(address, nbytes)]
        place += start - position + (0 if straight else nbytes)
        position = start + nbytes
    views.append(room[place : place + stop - position])
    read_bytes = direct.read_direct(file.path, [view for view in views if len(view)], base)
    for start, nbytes, address in _rows(op.edges):
        place = start - base - (int(op.inner.nbytes[op.inner.start < start].sum()) if straight else 0)
        copy_to(address, room[place : place + nbytes])
    return min(max(base + read_bytes - op.offset, 0), op.nbytes)


def _rows(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    return zip(ranges.start.tolist(), ranges.nbytes.tolist(), ranges.address.tolist(), strict=True)


def _too_short(file: ReadFile, nbytes: int, key: str | None, start: int, stop: int) -> FormatError:
    message = f"the file ends at byte {nbytes}, expected {file.nbytes}"
    return broken("F003", message, file=file.path, key=key, start=start, stop=stop)


def _copy_staged(segments: Segments, views: _Views, portion: slice, targets: Targets) -> int:
    """Copies the staged segments of a portion to their targets in host memory. Returns the number of bytes copied."""
    segment = np.repeat(np.arange(portion.start, portion.stop), segments.copy_count[portion])
    copy = np.arange(views.first_copy[portion.start], views.first_copy[portion.stop])
    which = (views.address[segment] < 0) & (targets.device[segments.copies.target[copy]] < 0)
    copies = segments.copies.take(copy[which])
    staged = copies._replace(source=copies.source + views.place[segment[which]])
    with torch.inference_mode(targets.inference):
        targets.put(staged, views.room)
    return int((staged.runs * staged.run_bytes).sum())


def _queue(segments: Segments, first: int, targets: Targets, stage: StagingBuffer) -> None:
    """Queues the copies from the staging buffer to devices. The bytes of the read begin at byte ``first`` of the
    buffer."""
    for number, device in enumerate(targets.devices):
        copies = joined_copies(segments, targets.device == number)
        with torch.inference_mode(targets.inference):
            if queued := [targets.to_device(copy, first) for copy in copies]:
                stage.to_device(device, queued)


def _are_sound(file: ReadFile, blocks: Sequence[int], views: Sequence[Bytes | memoryview]) -> bool:
    """Returns whether these blocks have the right digests. Returns False, without comparing, for blocks that are not
    adjacent, which is rare: then the caller checks each one."""
    first, last = blocks[0], blocks[-1]
    expected = file.digests[first * DIGEST_BYTES : (last + 1) * DIGEST_BYTES]
    return last - first == len(blocks) - 1 and b"".join(map(digest, views)) == expected
