"""Runs planned reads: parallel positional I/O, digests checked on the way.

What is in the page cache is read from there, straight into the destination where that can be; the rest by direct I/O
into aligned staging buffers, so that it evicts nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.rules import broken
from zckpt.io.local import after
from zckpt.io.memory import PAGE_BYTES, wait_for_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.io.budget import Budget
    from zckpt.io.local import LocalReader
    from zckpt.io.memory import Bytes, Sink, Staging
    from zckpt.plan.coalesce import ReadOp, Segment

DIRECT_BYTES_MIN = 256 << 10
"""Smaller reads go through the page cache: the kernel serves them better."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A data file: its path, its size in bytes, and its blocks' digests, 16 bytes each (empty: not to be checked)."""

    path: str
    nbytes: int
    digests: memoryview


def run_reads(
    reader: LocalReader,
    ops: Sequence[ReadOp],
    files: Mapping[int, ReadFile],
    sinks: Sequence[Sink],
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
        advance(sum(copy.nbytes for segment in op.segments for copy in segment.copies))

    budget.run(partial(run, op) for op in ops)


def _run(
    reader: LocalReader, op: ReadOp, file: ReadFile, sinks: Sequence[Sink], staging: Staging, direct: bool
) -> None:
    base, stop = op.offset - op.offset % PAGE_BYTES, op.offset + op.nbytes  # the stage begins with byte `base`
    starts = [*itertools.accumulate((segment.nbytes for segment in op.segments), initial=op.offset)]
    places = [_destination(segment, sinks) for segment in op.segments]
    with staging.lend() as stage:
        staged = [stage.bytes[a - base : b - base] for a, b in itertools.pairwise(starts)]  # as they lie in the file
        got = op.offset
        if direct and op.nbytes >= DIRECT_BYTES_MIN and not reader.is_cached(file.path, op.offset, op.nbytes):
            places = [None] * len(places)
            pages = stage.bytes[: -(-stop // PAGE_BYTES) * PAGE_BYTES - base]
            got = min(max(got, base + reader.read_direct(file.path, pages, base)), stop)
        views = [room if place is None else place for place, room in zip(places, staged, strict=True)]
        if got < stop:
            got += reader.read_into(file.path, after(views, got - op.offset), got)
        if got < stop:
            raise broken(
                "F003", f"the file ends at byte {got}, expected {file.nbytes}", file=file.path,
                key=sinks[op.segments[0].copies[0].sink].key, start=op.offset, stop=stop,
            )  # fmt: skip
        with stage.stream():
            for segment, start, view, place in zip(op.segments, starts, views, places, strict=False):
                if segment.block >= 0:
                    check_block(view, segment.block, file, start, sinks[segment.copies[0].sink].key)
                if place is None:
                    for copy in segment.copies:
                        sinks[copy.sink].put(copy.target, view[copy.source : copy.source + copy.nbytes])


def _destination(segment: Segment, sinks: Sequence[Sink]) -> Bytes | None:
    """The destination's own memory, if the whole segment goes to one place in host memory as it is."""
    copy = segment.copies[0]
    if len(segment.copies) > 1 or copy.nbytes < segment.nbytes:
        return None
    return sinks[copy.sink].memory(copy.target, copy.target + copy.nbytes)


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
