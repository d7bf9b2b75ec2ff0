"""Runs planned reads: parallel positional I/O, digests checked on the way.

What is mostly in the page cache is read from there, the rest by direct I/O, so that it evicts nothing: straight into
the destination where the plan says that it can be, else into aligned staging buffers. Copies to a device are queued
once their bytes are in a buffer; while they run, the next read fills another buffer.
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
    from zckpt.transfer.memory import Sinks
    from zckpt.transfer.staging import StagingBuffer, StagingPool

DIRECT_BYTES_MIN = 256 << 10
"""Smaller reads go through the page cache: the kernel serves them better."""
PORTION_BYTES = 2 << 20
"""This much is read from the page cache and checked before the next read, so that it stays in the processor's cache."""


def places_of(reader: Reader, sinks: Sinks, files: Mapping[int, ReadFile]) -> Places:
    """Where ``sinks`` lie, for the planner. All ``files`` lie on one file system, so that they are aligned alike."""
    direct, one = reader.direct, next(iter(files.values()), None)
    alignment = (PAGE_BYTES, PAGE_BYTES) if direct is None or one is None else direct.alignment(one.path)
    return Places(sinks.host.address, *alignment)


def run_reads(
    reader: Reader,
    ops: Sequence[ReadOp],
    files: Mapping[int, ReadFile],
    sinks: Sinks,
    budget: Budget,
    staging: StagingPool,
    advance: Callable[[int], None],
) -> None:
    """Carries out ``ops``, each of which fits in a buffer of ``staging`` with a page to spare on either side.
    ``advance`` is told the bytes that are on their way to their sinks; on return, all of them are there.

    Raises FormatError (F001 to F003, D003) and StorageError; the sinks then hold undefined values.
    """
    for op in ops:
        sinks.host.check(op.segments.sink, op.segments.target, op.segments.copy_bytes)
    synchronize(sinks.devices)

    def run(op: ReadOp) -> None:
        with torch.inference_mode(sinks.inference):
            _run(reader, op, files[op.file], sinks, staging, budget.direct)
        advance(int(op.segments.copy_bytes.sum()))

    with staging.work(len(ops)):
        budget.run([partial(run, op) for op in ops])


def _run(reader: Reader, op: ReadOp, file: ReadFile, sinks: Sinks, staging: StagingPool, direct: bool) -> None:
    segments = op.segments
    base = op.offset - op.offset % PAGE_BYTES  # the stage begins with it
    starts = [op.offset, *(op.offset + np.cumsum(segments.nbytes)).tolist()]
    first_copy = (np.cumsum(segments.copies) - segments.copies).tolist()
    blocks = segments.block.tolist()
    verify = blocks[0] >= 0
    cached = _is_cached(reader, op.offset, op.nbytes, file, direct)

    def key(number: int) -> str:
        return sinks.keys[int(segments.sink[first_copy[number]])]

    def key_at(byte: int) -> str:
        return key(bisect_right(starts, byte) - 1)

    if not (verify or cached) and _read_to_device(reader, op, file, sinks):
        return
    with staging.lend() as stage:
        places = np.where(cached | segments.straight, segments.address, -1).tolist()
        views = [
            stage.bytes[start - base : stop - base] if place < 0 else memory(place, stop - start)  # as in the file
            for (start, stop), place in zip(itertools.pairwise(starts), places, strict=True)
        ]
        if not cached:
            _fill(reader, file, op.offset, starts[-1], views, key_at, _read_direct(reader, op, file, stage))
        copied_bytes = 0 if cached else int(op.edges.nbytes.sum())
        for part in _portions(starts, PORTION_BYTES if verify else op.nbytes):
            if cached:
                _fill(reader, file, starts[part.start], starts[part.stop], views[part], key_at)
            if verify and not _are_sound(file, blocks[part], views[part]):
                for number in range(part.start, part.stop):
                    check_block(views[number], blocks[number], file, starts[number], key(number))
            for number in range(part.start, part.stop):
                if places[number] < 0:
                    staged = cast("Bytes", views[number])
                    copied_bytes += _put(segments, first_copy[number], int(segments.copies[number]), staged, sinks)
        reader.count.add(copied_bytes=copied_bytes)
        _queue(segments, op.offset - base, sinks, stage)


def _read_to_device(reader: Reader, op: ReadOp, file: ReadFile, sinks: Sinks) -> bool:
    """Reads straight into device memory, if all bytes of ``op`` go to devices unconverted, in pieces of
    ``DIRECT_BYTES_MIN`` on average, and the store can. Returns False if nothing was read."""
    if reader.direct is None or (op.segments.copies > 1).any():
        return False
    copies = joined_copies(op.segments, sinks.device >= 0)
    if int(copies.nbytes.sum()) < op.nbytes or op.nbytes < DIRECT_BYTES_MIN * len(copies.nbytes):
        return False
    columns = (copies.sink, copies.target, copies.nbytes)
    targets = []
    for place in zip(*(column.tolist() for column in columns), strict=True):
        target = sinks.device_memory(*place)
        if target is None:
            return False
        targets.append(target)
    for number, (target, at) in enumerate(zip(targets, copies.start.tolist(), strict=True)):
        start = op.offset + at
        got = reader.direct.read_to_device(file.path, target, start)
        if got < target.nbytes:
            if got == 0 and number == 0:
                return False
            raise _too_short(file, start + got, sinks.keys[int(copies.sink[number])], start, start + target.nbytes)
    return True


def _portions(starts: Sequence[int], nbytes: int) -> Iterator[slice]:
    """Cuts consecutive segments into runs of at most ``nbytes``, or of one segment. ``starts``: the bytes at which they
    begin, and where the last one ends."""
    first = 0
    while first < len(starts) - 1:
        last = max(bisect_right(starts, starts[first] + nbytes) - 1, first + 1)
        yield slice(first, last)
        first = last


def read_op(
    reader: Reader, op: ReadOp, file: ReadFile, staging: StagingPool, direct: bool, look: Callable[[Bytes], None]
) -> None:
    """Calls ``look`` with the bytes of ``op``, of which nothing has been checked. To be called inside of
    ``staging.work``. Raises as ``run_reads`` does."""
    with staging.lend() as stage:
        look(read_staged(reader, op.offset, op.nbytes, file, stage, direct))


def read_staged(reader: Reader, offset: int, nbytes: int, file: ReadFile, stage: StagingBuffer, direct: bool) -> Bytes:
    """Reads ``nbytes`` bytes from byte ``offset`` of the file into ``stage`` and returns them. Their digests are not
    checked. They lie as far behind the start of a page as they do in the file. Raises what ``run_reads`` raises."""
    first = offset % PAGE_BYTES
    view = stage.bytes[first : first + nbytes]
    done = 0
    if reader.direct is not None and not _is_cached(reader, offset, nbytes, file, direct):
        pages = stage.bytes[: -(-(first + nbytes) // PAGE_BYTES) * PAGE_BYTES]
        got = reader.direct.read_direct(file.path, [pages], offset - first)
        done = min(max(got - first, 0), nbytes)
    _fill(reader, file, offset, offset + nbytes, [view], lambda byte: None, done)
    return view


def _is_cached(reader: Reader, offset: int, nbytes: int, file: ReadFile, direct: bool) -> bool:
    """Whether to read by way of the store's caches, such as the page cache."""
    if not direct or reader.direct is None or nbytes < DIRECT_BYTES_MIN:
        return True
    return reader.direct.is_cached(file.path, offset, nbytes)


def fill(reader: Reader, file: ReadFile, offset: int, room: Bytes) -> None:
    """Fills ``room`` with the bytes of the file from byte ``offset`` on, by way of the store's caches. Their digests
    are not checked. Raises what ``run_reads`` raises."""
    _fill(reader, file, offset, offset + len(room), [room], lambda byte: None)


def _fill(
    reader: Reader,
    file: ReadFile,
    start: int,
    stop: int,
    views: Sequence[Bytes | memoryview],
    key_at: Callable[[int], str | None],
    done: int = 0,
) -> None:
    """Reads bytes ``start`` to ``stop`` of the file into ``views``, one after the other, but for the first ``done``,
    which are there. Raises FormatError (F003) if the file is too short; it names the key of the byte at which it
    ends."""
    got = start + done
    if got < stop:
        got += reader.read_into(file.path, after(views, got - start), got)
    if got < stop:
        raise _too_short(file, got, key_at(got), start, stop)


def _read_direct(reader: Reader, op: ReadOp, file: ReadFile, stage: StagingBuffer) -> int:
    """Brings the bytes of ``op`` to their places by direct I/O, and to the stage what does not go straight there.
    Returns how many there are: fewer at the end of the file, or 0 where this cannot be done."""
    if reader.direct is None:
        return 0
    base, stop = op.offset - op.offset % PAGE_BYTES, op.offset + op.nbytes
    pages = stage.bytes[: -(-stop // PAGE_BYTES) * PAGE_BYTES - base]
    views: list[Bytes | memoryview] = []
    done = 0
    for start, nbytes, address in _rows(op.inner):
        views += [pages[done : start - base], memory(address, nbytes)]
        done = start - base + nbytes
    views.append(pages[done:])
    got = reader.direct.read_direct(file.path, [view for view in views if len(view)], base)
    for start, nbytes, address in _rows(op.edges):
        copy_to(address, pages[start - base : start - base + nbytes])
    return min(max(base + got - op.offset, 0), op.nbytes)


def _rows(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    return zip(ranges.start.tolist(), ranges.nbytes.tolist(), ranges.address.tolist(), strict=True)


def _too_short(file: ReadFile, nbytes: int, key: str | None, start: int, stop: int) -> FormatError:
    what = f"the file ends at byte {nbytes}, expected {file.nbytes}"
    return broken("F003", what, file=file.path, key=key, start=start, stop=stop)


def _put(segments: Segments, first: int, copies: int, staged: Bytes, sinks: Sinks) -> int:
    """Brings a segment that was staged to its sinks on the host. Returns how many bytes it has copied."""
    copied_bytes = 0
    for copy in range(first, first + copies):
        sink, start = int(segments.sink[copy]), int(segments.source[copy])
        if sinks.device[sink] < 0:
            own = staged[start : start + int(segments.copy_bytes[copy])]
            sinks.put(sink, int(segments.target[copy]), own)
            copied_bytes += len(own)
    return copied_bytes


def _queue(segments: Segments, first: int, sinks: Sinks, stage: StagingBuffer) -> None:
    """Queues the copies to devices of what was staged from byte ``first`` of the stage on."""
    for number, device in enumerate(sinks.devices):
        copies = joined_copies(segments, sinks.device == number)
        columns = (copies.sink, copies.target, copies.nbytes, first + copies.start)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        if queued := [sinks.to_device(*row) for row in rows]:
            stage.to_device(device, queued)


def _are_sound(file: ReadFile, blocks: Sequence[int], views: Sequence[Bytes | memoryview]) -> bool:
    """Whether these blocks are neighbours, as mostly, and have their digests."""
    first, last = blocks[0], blocks[-1]
    expected = file.digests[first * DIGEST_BYTES : (last + 1) * DIGEST_BYTES]
    return last - first == len(blocks) - 1 and b"".join(map(digest, views)) == expected
