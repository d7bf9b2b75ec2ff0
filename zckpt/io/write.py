"""Runs planned writes: through aligned staging buffers, digests on the way, large positional writes, durable.

A state goes to disk piece by piece from where it is, a device or a swap file too: a write needs no memory for a whole
state, and by direct I/O it leaves nothing in the page cache.
"""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.io.local import NewFile, read_from
from zckpt.io.memory import PAGE_BYTES, Staging, byte_tensor, cuda_device
from zckpt.plan.layout import plan_writes
from zckpt.state.inventory import FileSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.io.budget import Budget
    from zckpt.plan.layout import ShardPlan, WriteOp, WriteSpan


def write_shards(root: str, plans: Sequence[ShardPlan], budget: Budget, block_bytes: int) -> bytes:
    """Writes the files of one rank under ``root``, whose directories exist, and makes their data durable.

    Returns the digest table. Raises StorageError.
    """
    table = bytearray(sum(plan.blocks for plan in plans) * DIGEST_BYTES)
    batch_bytes = budget.batch_bytes(block_bytes)
    sources = (piece.fragment.data for plan in plans for piece in plan.pieces)
    staging = Staging(batch_bytes + PAGE_BYTES, cuda_device(data for data in sources if isinstance(data, torch.Tensor)))
    staging.begin()
    files: list[NewFile] = []
    try:
        tasks = []
        for plan in plans:
            files.append(NewFile(os.path.join(root, plan.shard.path), budget.direct))
            ops = plan_writes(plan, batch_bytes=batch_bytes, block_bytes=block_bytes)
            tasks += [partial(_run, files[-1], plan, op, table, staging, block_bytes) for op in ops]
        budget.run(tasks)
        budget.run(file.sync for file in files)
    finally:
        for file in files:
            file.close()
    return bytes(table)


def _run(file: NewFile, plan: ShardPlan, op: WriteOp, table: bytearray, staging: Staging, block_bytes: int) -> None:
    # As far behind the start of a page as the bytes will be in the file.
    starts = [*itertools.accumulate((span.nbytes for span in op.spans), initial=op.offset % PAGE_BYTES)]
    with staging.lend() as stage:
        with stage.stream():
            for span, (start, stop) in zip(op.spans, itertools.pairwise(starts), strict=True):
                _fill(stage.tensor[start:stop], plan, span)
        stage.wait()
        for span, (start, stop) in zip(op.spans, itertools.pairwise(starts), strict=True):
            for number, first in enumerate(range(start, stop, block_bytes), span.block):
                block = stage.bytes[first : min(first + block_bytes, stop)]
                table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = digest(block)
        file.write(stage.bytes, op.offset, op.nbytes)


def _fill(room: torch.Tensor, plan: ShardPlan, span: WriteSpan) -> None:
    """Puts the bytes of ``span`` into ``room``; from a device, the copy is queued on the current stream."""
    if span.source < 0:
        room.numpy()[:] = np.frombuffer(plan.header, np.uint8)[span.start : span.start + span.nbytes]
        return
    data = plan.pieces[span.source].fragment.data
    assert data is not None, "a fragment without data cannot be written"
    if isinstance(data, FileSpan):
        read_from(data.path, data.offset + span.start, room.numpy())
        return
    source = byte_tensor(data)[span.start : span.start + span.nbytes]
    if source.device.type == "cpu":
        room.numpy()[:] = source.numpy()  # torch's own copy would take threads that are at work
    else:
        room.copy_(source, non_blocking=True)
