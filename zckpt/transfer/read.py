"""Carries out planned reads: parallel positional I/O, with digests checked during the read.

Small reads go through the page cache, and so do reads of bytes that are mostly there already. All other reads use
direct I/O, which evicts nothing from the page cache. Their bytes go straight into the target if the plan says so, and
otherwise into aligned staging buffers. Copies to a device are queued once their bytes are in a buffer. While these
copies run, the next read fills another buffer.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from zckpt.format.digest import DIGEST_BYTES, check_block, digest
from zckpt.format.rules import broken
from zckpt.plan.coalesce import Places, joined_copies
from zckpt.storage.buffers import PAGE_BYTES, after
from zckpt.transfer.devices import synchronize
from zckpt.transfer.host_memory import copy_to, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.errors import FormatError
    from zckpt.format.digest import ReadFile
    from zckpt.plan.coalesce import Ranges, ReadOp, Segments
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Reader
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.memory import Targets
    from zckpt.transfer.staging import StagingBuffer, StagingPool

DIRECT_BYTES_MIN = 256 << 10
"""The smallest read that uses direct I/O, in bytes. Smaller reads are faster through the page cache."""
PORTION_BYTES = 2 << 20
"""How many bytes are read from the page cache and checked before the next read, so that they are still in the
processor's cache when they are checked."""


def places_of(reader: Reader, targets: Targets, files: Mapping[int, ReadFile]) -> Places:
    """Returns the addresses and alignments of ``targets`` for the planner. All ``files`` are on one file system, so one
    alignment applies to all of them."""
    direct, file = reader.direct, next(iter(files.values()), None)
    alignment = (PAGE_BYTES, PAGE_BYTES) if direct is None or file is None else direct.alignment(file.path)
    return Places(targets.host.address, *alignment)


def run_reads(
    reader: Reader,
    ops: Sequence[ReadOp],
    files: Mapping[int, ReadFile],
    targets: Targets,
    budget: Budget,
    staging: StagingPool,
    advance: Callable[[int], None],
) -> None:
    """Carries out ``ops``, each of which fits in a buffer of ``staging`` with a page to spare at both ends. ``advance``
    is called with the number of bytes that are on their way to their targets. On return, all bytes are there.

    Raises FormatError (F001 to F003, D003) and StorageError. After an error, the targets have undefined values.
    """
    for op in ops:
        targets.host.check(op.segments.target, op.segments.target_offset, op.segments.copy_bytes)
    synchronize(targets.devices)

    def run(op: ReadOp) -> None:
        with torch.inference_mode(targets.inference):
            _run(reader, op, files[op.file], targets, staging, budget.direct)
        advance(int(op.segments.copy_bytes.sum()))

    with staging.work(len(ops)):
        budget.run([partial(run, op) for op in ops])


def _run(reader: Reader, op: ReadOp, file: ReadFile, targets: Targets, staging: StagingPool, direct: bool) -> None:
    """Carries out one read: reads, compares digests, and copies or queues copies to the targets."""
    segments = op.segments
    base = op.offset - op.offset % PAGE_BYTES  # the byte of the file with which the staging buffer begins
    starts = [op.offset, *(op.offset + np.cumsum(segments.nbytes)).tolist()]
    first_copy = (np.cumsum(segments.copies) - segments.copies).tolist()
    blocks = segments.block.tolist()
    verify = blocks[0] >= 0
    cached = _goes_through_cache(reader, op.offset, op.nbytes, file, direct)

    def key(number: int) -> str:
        return targets.keys[int(segments.target[first_copy[number]])]

    def key_at(byte: int) -> str:
        return key(bisect_right(starts, byte) - 1)

    if not (verify or cached) and _read_to_device(reader, op, file, targets):
        return
    with staging.lend() as stage:
        places = np.where(cached | segments.straight, segments.address, -1).tolist()
        views = [
            # In the staging buffer, bytes have the same place in a page as in the file.
            stage.bytes[start - base : stop - base] if place < 0 else memory(place, stop - start)
            for (start, stop), place in zip(itertools.pairwise(starts), places, strict=True)
        ]
        if not cached:
            _fill(reader, file, op.offset, starts[-1], views, key_at, _read_direct(reader, op, file, stage))
        copied_bytes = 0 if cached else int(op.edges.nbytes.sum())
        for portion in _portions(starts, PORTION_BYTES if verify else op.nbytes):
            if cached:
                _fill(reader, file, starts[portion.start], starts[portion.stop], views[portion], key_at)
            if verify and not _are_sound(file, blocks[portion], views[portion]):
                for number in range(portion.start, portion.stop):
                    check_block(views[number], blocks[number], file, starts[number], key(number))
            for number in range(portion.start, portion.stop):
                if places[number] < 0:
                    staged = cast("Bytes", views[number])
                    copied_bytes += _put(segments, first_copy[number], int(segments.copies[number]), staged, targets)
        reader.count.add(copied_bytes=copied_bytes)
        _queue(segments, op.offset - base, targets, stage)


def _read_to_device(reader: Reader, op: ReadOp, file: ReadFile, targets: Targets) -> bool:
    """Reads ``op`` straight into device memory. This is possible if all of its bytes go to devices unconverted, in
    ranges of at least ``DIRECT_BYTES_MIN`` bytes on average, and if the store offers such reads. Returns False if
    nothing was read."""
    if reader.direct is None or (op.segments.copies > 1).any():
        return False
    copies = joined_copies(op.segments, targets.device >= 0)
    if int(copies.nbytes.sum()) < op.nbytes or op.nbytes < DIRECT_BYTES_MIN * len(copies.nbytes):
        return False
    columns = (copies.target, copies.target_offset, copies.nbytes)
    views = []
    for row in zip(*(column.tolist() for column in columns), strict=True):
        view = targets.device_memory(*row)
        if view is None:
            return False
        views.append(view)
    for number, (view, first) in enumerate(zip(views, copies.start.tolist(), strict=True)):
        start = op.offset + first
        nbytes = reader.direct.read_to_device(file.path, view, start)
        if nbytes < view.nbytes:
            if nbytes == 0 and number == 0:
                return False
            raise _too_short(file, start + nbytes, targets.keys[int(copies.target[number])], start, start + view.nbytes)
    return True


def _portions(starts: Sequence[int], nbytes: int) -> Iterator[slice]:
    """Groups consecutive segments into portions of at most ``nbytes`` bytes, or of one segment that is larger. Yields
    the segments of each portion. ``starts`` has the first byte of each segment, and the end of the last one."""
    first = 0
    while first < len(starts) - 1:
        last = max(bisect_right(starts, starts[first] + nbytes) - 1, first + 1)
        yield slice(first, last)
        first = last


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
    if reader.direct is not None and not _goes_through_cache(reader, offset, nbytes, file, direct):
        pages = stage.bytes[: -(-(first + nbytes) // PAGE_BYTES) * PAGE_BYTES]
        read_bytes = reader.direct.read_direct(file.path, [pages], offset - first)
        filled = min(max(read_bytes - first, 0), nbytes)
    _fill(reader, file, offset, offset + nbytes, [view], lambda byte: None, filled)
    return view


def _goes_through_cache(reader: Reader, offset: int, nbytes: int, file: ReadFile, direct: bool) -> bool:
    """Returns whether a read goes through the store's caches, such as the page cache, and not by direct I/O. It does if
    ``direct`` forbids direct I/O, if the store or the file system has none, if the read is small, or if most of its
    bytes are in the cache already."""
    if not direct or reader.direct is None or nbytes < DIRECT_BYTES_MIN:
        return True
    return reader.direct.is_cached(file.path, offset, nbytes)


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


def _read_direct(reader: Reader, op: ReadOp, file: ReadFile, stage: StagingBuffer) -> int:
    """Reads ``op`` by direct I/O: the segments that are ``straight`` into their target, and all other bytes into the
    staging buffer. Returns how many bytes of ``op`` have been read: fewer than all of them if the file ends before, and
    0 if direct I/O is not possible."""
    if reader.direct is None:
        return 0
    base, stop = op.offset - op.offset % PAGE_BYTES, op.offset + op.nbytes
    pages = stage.bytes[: -(-stop // PAGE_BYTES) * PAGE_BYTES - base]
    views: list[Bytes | memoryview] = []
    covered = 0
    for start, nbytes, address in _rows(op.inner):
        views += [pages[covered : start - base], memory(address, nbytes)]
        covered = start - base + nbytes
    views.append(pages[covered:])
    read_bytes = reader.direct.read_direct(file.path, [view for view in views if len(view)], base)
    for start, nbytes, address in _rows(op.edges):
        copy_to(address, pages[start - base : start - base + nbytes])
    return min(max(base + read_bytes - op.offset, 0), op.nbytes)


def _rows(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    return zip(ranges.start.tolist(), ranges.nbytes.tolist(), ranges.address.tolist(), strict=True)


def _too_short(file: ReadFile, nbytes: int, key: str | None, start: int, stop: int) -> FormatError:
    message = f"the file ends at byte {nbytes}, expected {file.nbytes}"
    return broken("F003", message, file=file.path, key=key, start=start, stop=stop)


def _put(segments: Segments, first: int, copies: int, staged: Bytes, targets: Targets) -> int:
    """Copies a segment from a staging buffer to its targets in host memory. Returns the number of bytes copied."""
    copied_bytes = 0
    for copy in range(first, first + copies):
        target, start = int(segments.target[copy]), int(segments.source[copy])
        if targets.device[target] < 0:
            data = staged[start : start + int(segments.copy_bytes[copy])]
            targets.put(target, int(segments.target_offset[copy]), data)
            copied_bytes += len(data)
    return copied_bytes


def _queue(segments: Segments, first: int, targets: Targets, stage: StagingBuffer) -> None:
    """Queues the copies from the staging buffer to devices. The bytes of the read begin at byte ``first`` of the
    buffer."""
    for number, device in enumerate(targets.devices):
        copies = joined_copies(segments, targets.device == number)
        columns = (copies.target, copies.target_offset, copies.nbytes, first + copies.start)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        if queued := [targets.to_device(*row) for row in rows]:
            stage.to_device(device, queued)


def _are_sound(file: ReadFile, blocks: Sequence[int], views: Sequence[Bytes | memoryview]) -> bool:
    """Returns whether these blocks have the right digests. Returns False, without comparing, for blocks that are not
    adjacent, which is rare: then the caller checks each one."""
    first, last = blocks[0], blocks[-1]
    expected = file.digests[first * DIGEST_BYTES : (last + 1) * DIGEST_BYTES]
    return last - first == len(blocks) - 1 and b"".join(map(digest, views)) == expected
