"""Writes the files of an export, one window at a time. A ``Filler`` fills each window with tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zckpt.exporting.plan import windows
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.transfer.memory import fresh_tensor, host_bytes
from zckpt.transfer.staging import host_pool
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from zckpt.exporting.plan import Conversion, OutputFile, SourceTensor, Window
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Store, Writer
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.staging import StagingPool

WINDOW_BYTES_MAX = 16 << 20


class Filler(Protocol):
    """What the tensors of an export come from. Several threads call it."""

    @property
    def sources(self) -> Mapping[str, SourceTensor]:
        """The tensors that it has, by name."""

    def fill(self, targets: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Fills each target with elements of a source. A target is the name of the source, the element to begin with,
        and a 1-D tensor in host memory, to whose dtype the elements are converted."""

    def cut(self, source: str, start: int, stop: int) -> int:
        """Returns where a part had better end, as ``zckpt.exporting.plan.windows`` asks for it."""


def write_files(
    store: Store,
    files: Sequence[OutputFile],
    conversions: Sequence[Conversion],
    filler: Filler,
    budget: Budget,
) -> None:
    """Writes ``files`` to ``store``. Their content is durable afterwards, but their names are not yet. Windows take one
    half of the budget; the other half is left to ``filler``. What a conversion needs is in memory in addition to that,
    for one conversion at a time.

    Raises StorageError, and what ``filler`` raises.
    """
    window_bytes = min(WINDOW_BYTES_MAX, budget.nbytes // budget.threads // 2 - 2 * PAGE_BYTES)
    staging = host_pool(window_bytes)
    writers: list[Writer] = []
    try:
        for file in files:
            writers.append(store.create(file.name, file.nbytes, direct=budget.direct))
        places = {
            tensor.name: (writer, offset)
            for writer, file in zip(writers, files, strict=True)
            for offset, tensor in file.tensors.items()
        }
        with staging.work():
            budget.run(
                partial(_put, writer, window, filler, staging)
                for writer, file in zip(writers, files, strict=True)
                for window in windows(file, window_bytes, filler.cut)
            )
            for conversion in conversions:
                _convert(conversion, places, filler, budget, staging)
        budget.run(writer.sync for writer in writers)
    finally:
        for writer in writers:
            writer.close()


def _put(writer: Writer, window: Window, filler: Filler, staging: StagingPool) -> None:
    with staging.lend() as stage:
        first = window.start % PAGE_BYTES  # the window lies in memory as it lies in a page of the file
        targets = []
        for one in window.parts:
            start, stop = first + one.offset, first + one.offset + one.nbytes
            if one.known is not None:
                stage.bytes[start:stop] = np.frombuffer(one.known, np.uint8)
            else:
                target = stage.tensor[start:stop].view(TORCH_DTYPES[one.dtype])
                targets.append((one.source, one.start, target))
        filler.fill(targets)
        writer.write(stage.bytes[first : first + window.nbytes], window.start)


def _convert(
    conversion: Conversion,
    places: Mapping[str, tuple[Writer, int]],
    filler: Filler,
    budget: Budget,
    staging: StagingPool,
) -> None:
    outputs = [name for name in conversion.outputs if name in places]
    if not outputs:
        return
    sources = filler.sources
    tensors = {
        name: fresh_tensor(sources[name].shape, TORCH_DTYPES[sources[name].dtype], "cpu") for name in conversion.sources
    }
    filler.fill([(name, 0, tensor.view(-1)) for name, tensor in tensors.items()])
    converted = conversion.convert(tensors)
    tensors.clear()
    for name in outputs:
        put_whole(*places[name], converted.pop(name), budget, staging)


def put_whole(writer: Writer, offset: int, tensor: torch.Tensor, budget: Budget, staging: StagingPool) -> None:
    """Writes a tensor that is whole in host memory. To be called inside of ``staging.work``."""
    data = host_bytes(tensor.contiguous())
    budget.run(
        partial(_put_bytes, writer, data[start : start + staging.batch_bytes], offset + start, staging)
        for start in range(0, len(data), staging.batch_bytes)
    )


def _put_bytes(writer: Writer, data: Bytes, offset: int, staging: StagingPool) -> None:
    with staging.lend() as stage:
        first = offset % PAGE_BYTES
        room = stage.bytes[first : first + len(data)]
        room[:] = data
        writer.write(room, offset)
