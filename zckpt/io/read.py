"""Runs planned reads: parallel positional I/O, digests checked on the way.

What is mostly in the page cache is read from there, straight into the destination where that can be; the rest by direct
I/O into aligned staging buffers, so that it evicts nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.rules import broken
from zckpt.io.local import after
from zckpt.io.memory import HOST_MEMORY, PAGE_BYTES, wait_for_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.io.budget import Budget
    from zckpt.io.memory import Bytes, Sinks, Stage, Staging
    from zckpt.io.store import Reader
    from zckpt.plan.coalesce import ReadOp, Segments

DIRECT_BYTES_MIN = 256 << 10
"""Smaller reads go through the page cache: the kernel serves them better."""


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
    for op in ops:
        sinks.check(op.segments.sink, op.segments.target + op.segments.copy_bytes)
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
    with staging.lend() as stage:
        views = [
            stage.bytes[start - base : end - base] if place is None else place  # staged as they lie in the file
            for (start, end), place in zip(itertools.pairwise(starts), places, strict=True)
        ]
        _fill(reader, op, file, views, None if cached else stage, sinks.keys[segments.sink[0]])
        _check_blocks(segments, views, file, starts, sinks)
        with stage.stream():
            _put(segments, views, places, sinks)


def read_op(
    reader: Reader, op: ReadOp, file: ReadFile, staging: Staging, direct: bool, look: Callable[[Bytes], None]
) -> None:
    """Calls ``look`` with the bytes of ``op``, of which nothing has been checked. Raises as ``run_reads`` does."""
    with staging.lend() as stage:
        first = op.offset % PAGE_BYTES
        view = stage.bytes[first : first + op.nbytes]
        _fill(reader, op, file, [view], None if _is_cached(reader, op, file, direct) else stage, None)
        look(view)


def _is_cached(reader: Reader, op: ReadOp, file: ReadFile, direct: bool) -> bool:
    """Whether to read by way of the page cache."""
    return not direct or op.nbytes < DIRECT_BYTES_MIN or reader.is_cached(file.path, op.offset, op.nbytes)


def _fill(reader: Reader, op: ReadOp, file: ReadFile, views: list[Bytes], stage: Stage | None, key: str | None) -> None:
    """Reads the bytes of ``op`` into ``views``, one after the other. ``stage``: what all of these lie in, to be filled
    by direct I/O where there is any. Raises FormatError (F003) if the file is too short."""
    base, stop = op.offset - op.offset % PAGE_BYTES, op.offset + op.nbytes
    got = op.offset
    if stage is not None:
        pages = stage.bytes[: -(-stop // PAGE_BYTES) * PAGE_BYTES - base]
        got = min(max(got, base + reader.read_direct(file.path, pages, base)), stop)
    if got < stop:
        got += reader.read_into(file.path, after(views, got - op.offset), got)
    if got < stop:
        raise broken(
            "F003", f"the file ends at byte {got}, expected {file.nbytes}", file=file.path,
            key=key, start=op.offset, stop=stop,
        )  # fmt: skip


def _destinations(segments: Segments, sinks: Sinks) -> list[Bytes | None]:
    """For each segment the destination's own memory, if all of it goes to one place in host memory as it is."""
    first = np.cumsum(segments.copies) - segments.copies
    base = sinks.places[segments.sink[first]]
    direct = (segments.copies == 1) & (segments.copy_bytes[first] == segments.nbytes) & (base >= 0)
    start = base + segments.target[first]
    columns = (direct.tolist(), start.tolist(), (start + segments.nbytes).tolist())
    return [HOST_MEMORY[at:stop] if alone else None for alone, at, stop in zip(*columns, strict=True)]


def _put(segments: Segments, views: list[Bytes], places: list[Bytes | None], sinks: Sinks) -> None:
    """Brings what was staged to its sinks."""
    last = np.cumsum(segments.copies).tolist()
    for number, (view, place) in enumerate(zip(views, places, strict=True)):
        if place is None:
            for copy in range(last[number] - int(segments.copies[number]), last[number]):
                start = int(segments.source[copy])
                staged = view[start : start + int(segments.copy_bytes[copy])]
                sinks.put(int(segments.sink[copy]), int(segments.target[copy]), staged)


def _check_blocks(segments: Segments, views: list[Bytes], file: ReadFile, starts: list[int], sinks: Sinks) -> None:
    """Raises FormatError (D001, D003) unless every segment that is a block has the block's digest."""
    first, last = int(segments.block[0]), int(segments.block[-1])
    if first < 0:
        return
    if last - first == len(views) - 1:  # neighbours, as mostly: all at once
        expected = file.digests[first * DIGEST_BYTES : (last + 1) * DIGEST_BYTES]
        if b"".join(map(digest, views)) == expected:
            return
    owner = segments.sink[np.cumsum(segments.copies) - segments.copies].tolist()
    for view, block, start, sink in zip(views, segments.block.tolist(), starts, owner, strict=False):
        check_block(view, block, file, start, sinks.keys[sink])


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
