"""Runs planned writes: through aligned staging buffers, digests on the way, large positional writes, durable.

A state goes to disk piece by piece from where it is, a device or a swap file too: a write needs no memory for a whole
state, and by direct I/O it leaves nothing in the page cache.
"""

from __future__ import annotations

import ctypes
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
    from zckpt.io.memory import Stage
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
            for span, start in zip(op.spans, starts, strict=False):
                _fill(stage, start, plan, span)
        stage.wait()
        blocks = [
            stage.bytes[first : min(first + block_bytes, stop)]
            for start, stop in itertools.pairwise(starts)
            for first in range(start, stop, block_bytes)
        ]
        first_byte = op.spans[0].block * DIGEST_BYTES
        table[first_byte : first_byte + len(blocks) * DIGEST_BYTES] = b"".join(map(digest, blocks))
        file.write(stage.bytes, op.offset, op.nbytes)


def _fill(stage: Stage, start: int, plan: ShardPlan, span: WriteSpan) -> None:
    """Puts the bytes of ``span`` at byte ``start`` of ``stage``; from a device, the copy is queued on its stream."""
    if span.source < 0:
        stage.bytes[start : start + span.nbytes] = np.frombuffer(plan.header, np.uint8, span.nbytes, span.start)
        return
    piece = plan.pieces[span.source]
    data = piece.fragment.data
    assert data is not None, "a fragment without data cannot be written"
    if isinstance(data, FileSpan):
        read_from(data.path, data.offset + span.start, stage.bytes[start : start + span.nbytes])
    elif data.is_cpu:
        # By address: to make views of many small tensors would take longer than to copy them.
        assert data.nbytes == piece.nbytes and data.is_contiguous(), "a fragment's data are its elements, in order"
        ctypes.memmove(stage.address + start, data.data_ptr() + span.start, span.nbytes)
    else:
        source = byte_tensor(data)[span.start : span.start + span.nbytes]
        stage.tensor[start : start + span.nbytes].copy_(source, non_blocking=True)
