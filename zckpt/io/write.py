"""Runs planned writes: large positional writes straight from the state's own memory, digests on the way, durable.

What lies on a device or in a swap file goes through staging buffers, so a write needs no memory for a whole state.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from zckpt.errors import from_os_error
from zckpt.format.digest import DIGEST_BYTES, block_count, digest
from zckpt.io.commit import fsync
from zckpt.io.local import read_from, write_from
from zckpt.io.memory import Staging, byte_tensor, host_view
from zckpt.plan.layout import plan_writes
from zckpt.state.inventory import FileSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from zckpt.io.budget import Budget
    from zckpt.plan.layout import ShardPlan, WriteOp

SPANS_MAX = 512
"""Per write: below the operating system's limit on vectors, 1024."""


def write_shards(root: str, plans: Sequence[ShardPlan], budget: Budget, block_bytes: int) -> bytes:
    """Writes the files of one rank under ``root``, whose directories exist, and makes their data durable.

    Returns the digest table. Raises StorageError.
    """
    table = bytearray(sum(plan.blocks for plan in plans) * DIGEST_BYTES)
    batch_bytes = budget.batch_bytes(block_bytes)
    sources = [_data(plan, i) for plan in plans for i in range(len(plan.pieces))]
    staging = Staging(batch_bytes, [source.device for source in sources if not isinstance(source, FileSpan)])
    files: list[tuple[int, str]] = []
    try:
        tasks = []
        for plan in plans:
            path = os.path.join(root, plan.shard.path)
            fd = _create(path)
            files.append((fd, path))
            ops = plan_writes(plan, batch_bytes=batch_bytes, batch_spans=SPANS_MAX, block_bytes=block_bytes)
            tasks += [partial(_run, fd, path, plan, op, table, staging, block_bytes) for op in ops]
        budget.run(tasks)
        budget.run(partial(fsync, fd, path) for fd, path in files)
    finally:
        for fd, _ in files:
            os.close(fd)
    return bytes(table)


def _create(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise from_os_error(error, "create", path) from error


def _data(plan: ShardPlan, source: int) -> torch.Tensor | FileSpan:
    data = plan.pieces[source].fragment.data
    assert data is not None, "a fragment without data cannot be written"
    return data


def _run(
    fd: int, path: str, plan: ShardPlan, op: WriteOp, table: bytearray, staging: Staging, block_bytes: int
) -> None:
    views: list[memoryview] = []
    swapped: list[tuple[FileSpan, memoryview]] = []
    used = 0
    with staging.stream():
        for span in op.spans:
            if span.source < 0:
                views.append(memoryview(plan.header)[span.start : span.start + span.nbytes])
                continue
            source = _data(plan, span.source)
            if isinstance(source, FileSpan):
                view = host_view(staging.buffer()[used : used + span.nbytes])
                used += span.nbytes
                swapped.append((source.narrow(span.start, span.nbytes), view))
                views.append(view)
                continue
            data = byte_tensor(source)[span.start : span.start + span.nbytes]
            if data.device.type != "cpu":
                staged = staging.buffer()[used : used + span.nbytes]
                used += span.nbytes
                staged.copy_(data, non_blocking=True)
                data = staged
            views.append(host_view(data))
    for source_path, spans in groupby(swapped, key=lambda read: read[0].path):
        read_from(source_path, [(source.offset, view) for source, view in spans])
    staging.wait()
    for span, view in zip(op.spans, views, strict=True):
        for number in range(block_count(span.nbytes, block_bytes)):
            at = (span.block + number) * DIGEST_BYTES
            table[at : at + DIGEST_BYTES] = digest(view[number * block_bytes : (number + 1) * block_bytes])
    write_from(fd, views, op.offset, path)
