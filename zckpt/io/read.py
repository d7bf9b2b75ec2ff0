"""Runs planned reads: parallel positional I/O, straight into the destination where that can be, digests checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.rules import broken
from zckpt.io.memory import Sink, Staging, host_view

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from zckpt.io.budget import Budget
    from zckpt.io.local import LocalReader
    from zckpt.plan.coalesce import ReadOp, Segment


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
    batch_bytes: int,
) -> None:
    """Carries out ``ops``.

    Raises FormatError (F001 to F003, D003) and StorageError; the sinks then hold undefined values.
    """
    staging = Staging(batch_bytes, [sink.device for sink in sinks])

    budget.run(partial(_run, reader, op, files[op.file], sinks, staging) for op in ops)


def _run(reader: LocalReader, op: ReadOp, file: ReadFile, sinks: Sequence[Sink], staging: Staging) -> None:
    views: list[memoryview] = []
    staged: list[tuple[Segment, torch.Tensor]] = []
    used = 0
    for segment in op.segments:
        view = _direct(segment, sinks)
        if view is None:
            part = staging.buffer()[used : used + segment.nbytes]
            used += segment.nbytes
            staged.append((segment, part))
            view = host_view(part)
        views.append(view)
    with reader.file(file.path) as fd:
        got = reader.read_into(fd, views, op.offset, file.path)
    if got < op.nbytes:
        raise broken(
            "F003", f"the file ends at byte {op.offset + got}, expected {file.nbytes}", file=file.path,
            key=sinks[op.segments[0].copies[0].sink].key, start=op.offset, stop=op.offset + op.nbytes,
        )  # fmt: skip
    position = op.offset
    for segment, view in zip(op.segments, views, strict=True):
        if segment.block >= 0:
            check_block(view, segment.block, file, position, sinks[segment.copies[0].sink].key)
        position += segment.nbytes
    if staged:
        with staging.stream():
            for segment, part in staged:
                for copy in segment.copies:
                    sinks[copy.sink].put(copy.target, part[copy.source : copy.source + copy.nbytes])
        staging.wait()


def _direct(segment: Segment, sinks: Sequence[Sink]) -> memoryview | None:
    """The destination's own memory, if the whole segment goes to one place in host memory as it is."""
    copy = segment.copies[0]
    if len(segment.copies) > 1 or copy.nbytes < segment.nbytes:
        return None
    return sinks[copy.sink].memory(copy.target, copy.target + copy.nbytes)


def check_block(view: memoryview, block: int, file: ReadFile, start: int, key: str | None) -> None:
    """Raises FormatError (D001, D003) unless ``view`` has the digest of ``block``."""
    expected = file.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
    if len(expected) != DIGEST_BYTES:
        raise broken("D001", f"the table has no digest of block {block}", file=file.path, key=key)
    if digest(view) != expected:
        raise broken(
            "D003", "the data is damaged", file=file.path, key=key, start=start, stop=start + view.nbytes,
            hint="restore the file from a copy, or load from another checkpoint",
        )  # fmt: skip
