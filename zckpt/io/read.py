"""Runs planned reads: parallel positional I/O, digests checked on the way.

What is in the page cache is read from there, straight into the destination where that can be; the rest by direct I/O
into aligned staging buffers, so that it evicts nothing.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.rules import broken
from zckpt.io.local import after
from zckpt.io.memory import HOST_MEMORY, PAGE_BYTES, wait_for_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.io.budget import Budget
    from zckpt.io.memory import Bytes, Ints, Sinks, Stage, Staging
    from zckpt.io.store import Reader
    from zckpt.plan.coalesce import ReadOp, Segments

DIRECT_BYTES_MIN = 256 << 10
"""Smaller reads go through the page cache: the kernel serves them better."""
PORTION_BYTES = 1 << 20
"""What fits in a processor's own cache, and is worth a system call."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A data file: its path, its size in bytes, and its blocks' digests, 16 bytes each (empty: not to be checked)."""

    path: str
    nbytes: int
    digests: memoryview


def run_reads(
    reader: Reader,
    ops: Sequence[ReadOp],
    files: Mapping[int, ReadFile],
    sinks: Sinks,
    budget: Budget,
    staging: Staging,
    advance: Callable[[int], None],
) -> None:
    """Carries out ``ops``, each of which fits in a buffer of ``staging`` with a page to spare on either side.
    ``advance`` is told the bytes that have reached their sinks.

    Raises FormatError (F001 to F003, D003) and StorageError; the sinks then hold undefined values.
    """
    wait_for_caller(staging.device)

    def run(op: ReadOp) -> None:
        _run(reader, op, files[op.file], sinks, staging, budget.direct)
        advance(int(op.segments.copy_bytes.sum()))

    try:
        budget.run([partial(run, op) for op in ops])
    finally:
        staging.rest()


def _run(reader: Reader, op: ReadOp, file: ReadFile, sinks: Sinks, staging: Staging, direct: bool) -> None:
    segments = op.segments
    base = op.offset - op.offset % PAGE_BYTES  # the stage begins with it
    starts = [op.offset, *(op.offset + np.cumsum(segments.nbytes)).tolist()]
    cached = _is_cached(reader, op, file, direct)
    places: list[Bytes | None] = _destinations(segments, sinks) if cached else [None] * (len(starts) - 1)
    first_copy = np.cumsum(segments.copies) - segments.copies
    keys = [sinks.keys[sink] for sink in segments.sink[first_copy].tolist()]
    with staging.lend() as stage, stage.stream():
        views = [
            stage.bytes[start - base : end - base] if place is None else place  # staged as they lie in the file
            for (start, end), place in zip(itertools.pairwise(starts), places, strict=True)
        ]
        if not cached:
            _fill(reader, file, op.offset, starts[-1], views, stage, keys[0])
        for own in _portions(starts, segments.block):
            if cached:
                _fill(reader, file, starts[own.start], starts[own.stop], views[own], None, keys[own.start])
            _check_blocks(segments.block[own], views[own], file, starts[own], keys[own])
            _put(segments, range(own.start, own.stop), first_copy, views, places, sinks)


def _portions(starts: list[int], blocks: Ints) -> Iterator[slice]:
    """Of the segments. If they are blocks to be checked, so few of them at once that their bytes are fetched from
    memory but once."""
    count = len(blocks)
    portion_bytes = starts[-1] - starts[0] if blocks[0] < 0 else PORTION_BYTES
    first = 0
    while first < count:
        stop = max(bisect_right(starts, starts[first] + portion_bytes) - 1, first + 1)
        yield slice(first, stop)
        first = stop


def read_op(
    reader: Reader, op: ReadOp, file: ReadFile, staging: Staging, direct: bool, look: Callable[[Bytes], None]
) -> None:
    """Calls ``look`` with the bytes of ``op``, of which nothing has been checked. Raises as ``run_reads`` does."""
    with staging.lend() as stage:
        first = op.offset % PAGE_BYTES
        view = stage.bytes[first : first + op.nbytes]
        staged = None if _is_cached(reader, op, file, direct) else stage
        _fill(reader, file, op.offset, op.offset + op.nbytes, [view], staged, None)
        look(view)


def _is_cached(reader: Reader, op: ReadOp, file: ReadFile, direct: bool) -> bool:
    """Whether to read by way of the page cache."""
    return not direct or op.nbytes < DIRECT_BYTES_MIN or reader.is_cached(file.path, op.offset, op.nbytes)


def _fill(
    reader: Reader, file: ReadFile, start: int, stop: int, views: list[Bytes], stage: Stage | None, key: str | None
) -> None:
    """Reads bytes ``[start, stop)`` into ``views``, one after the other. ``stage``: what all of these lie in, to be
    filled by direct I/O where there is any. Raises FormatError (F003) if the file is too short."""
    base = start - start % PAGE_BYTES
    got = start
    if stage is not None:
        pages = stage.bytes[: -(-stop // PAGE_BYTES) * PAGE_BYTES - base]
        got = min(max(got, base + reader.read_direct(file.path, pages, base)), stop)
    if got < stop:
        got += reader.read_into(file.path, after(views, got - start), got)
    if got < stop:
        raise broken(
            "F003", f"the file ends at byte {got}, expected {file.nbytes}", file=file.path,
            key=key, start=start, stop=stop,
        )  # fmt: skip


def _destinations(segments: Segments, sinks: Sinks) -> list[Bytes | None]:
    """For each segment the destination's own memory, if all of it goes to one place in host memory as it is."""
    first = np.cumsum(segments.copies) - segments.copies
    base = sinks.places[segments.sink[first]]
    direct = (segments.copies == 1) & (segments.copy_bytes[first] == segments.nbytes) & (base >= 0)
    start = base + segments.target[first]
    columns = (direct.tolist(), start.tolist(), (start + segments.nbytes).tolist())
    return [HOST_MEMORY[at:stop] if alone else None for alone, at, stop in zip(*columns, strict=True)]


def _put(
    segments: Segments, own: range, first_copy: Ints, views: list[Bytes], places: list[Bytes | None], sinks: Sinks
) -> None:
    """Brings what was staged of some segments to its sinks."""
    for number in own:
        if places[number] is None:
            first = int(first_copy[number])
            for copy in range(first, first + int(segments.copies[number])):
                start = int(segments.source[copy])
                staged = views[number][start : start + int(segments.copy_bytes[copy])]
                sinks.put(int(segments.sink[copy]), int(segments.target[copy]), staged)


def _check_blocks(blocks: Ints, views: list[Bytes], file: ReadFile, starts: list[int], keys: list[str]) -> None:
    """Raises FormatError (D001, D003) unless every view that is a block has the block's digest."""
    first, last = int(blocks[0]), int(blocks[-1])
    if first < 0:
        return
    if last - first == len(views) - 1:  # neighbours, as mostly: all at once
        expected = file.digests[first * DIGEST_BYTES : (last + 1) * DIGEST_BYTES]
        if b"".join(map(digest, views)) == expected:
            return
    for view, block, start, key in zip(views, blocks.tolist(), starts, keys, strict=True):
        check_block(view, block, file, start, key)


def check_block(view: Bytes | memoryview, block: int, file: ReadFile, start: int, key: str | None) -> None:
    """Raises FormatError (D001, D003) unless ``view`` has the digest of ``block``."""
    expected = file.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
    if len(expected) != DIGEST_BYTES:
        raise broken("D001", f"the table has no digest of block {block}", file=file.path, key=key)
    if digest(view) != expected:
        raise broken(
            "D003", "the data is damaged", file=file.path, key=key, start=start, stop=start + view.nbytes,
            hint="restore the file from a copy, or load from another checkpoint",
        )  # fmt: skip
