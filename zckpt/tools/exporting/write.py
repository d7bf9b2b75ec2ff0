"""Writes the files of an export, one window at a time. Each window is filled with tensors of a checkpoint."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.storage.buffers import PAGE_BYTES
from zckpt.tools.exporting.plan import windows
from zckpt.transfer.memory import fresh_tensor, host_bytes
from zckpt.transfer.staging import host_pool
from zckpt.transfer.tasks import run_tasks
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Store, Writer
    from zckpt.tools.exporting.checkpoint_source import CheckpointFiller
    from zckpt.tools.exporting.plan import Conversion, Extent, OutputFile, SourceTensor, Window
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.staging import StagingPool

WINDOW_BYTES_MAX = 16 << 20
"""The largest size of a window in bytes."""


def write_files(
    store: Store,
    files: Sequence[OutputFile],
    sources: Mapping[str, SourceTensor],
    filler: CheckpointFiller,
) -> None:
    """Writes ``files`` to ``store``. Their content is durable afterwards, but their names are not yet. ``sources``: the
    tensors of which conversions read elements, with the dtypes in which they read them. Windows take one half of the
    budget of ``filler``, and the other half is left to reading. In addition, the tensors of one conversion at a time
    are in memory.

    Raises StorageError, and the errors of ``filler``.
    """
    budget = filler.budget.serving(store)
    window_bytes = min(WINDOW_BYTES_MAX, budget.nbytes // budget.threads // 2 - 2 * PAGE_BYTES)
    staging = host_pool(window_bytes)
    new_files: list[NewFile] = []
    try:
        for file in files:
            new_files.append(NewFile(store.create(file.name, file.nbytes, direct=budget.direct)))
        places: dict[Conversion, list[tuple[NewFile, int, str]]] = {}
        for new_file, file in zip(new_files, files, strict=True):
            for conversion, made in file.conversions.items():
                new_file.expect(len(made))
                places.setdefault(conversion, []).extend((new_file, *place) for place in made)

        def tasks() -> Iterator[Callable[[], None]]:
            for new_file, file in zip(new_files, files, strict=True):
                new_file.expect(1)
                for window in windows(file, window_bytes, filler.cut):
                    new_file.expect(1)
                    yield partial(_put, new_file, window, filler, staging)
                yield new_file.done

        with staging.work():
            run_tasks(tasks(), budget.threads)
            elements: dict[Extent, torch.Tensor] = {}
            for conversion, made_places in places.items():
                converted = _convert(conversion, elements, sources, filler)
                for new_file, offset, name in made_places:
                    put_whole(new_file.writer, offset, converted.pop(name), budget, staging)
                    new_file.done()
                converted.clear()  # What this rank does not write may be in the memory of the elements.
    finally:
        for new_file in new_files:
            new_file.close()


class NewFile:
    """A file that several threads write. It is made durable and closed as soon as all of it is written, because an
    object store keeps a part of an open file in memory."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._expected = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def expect(self, number: int) -> None:
        """Says that so many calls of ``done`` will follow."""
        with self._lock:
            self._expected += number

    def done(self) -> None:
        """Says that a part is written. Raises StorageError."""
        with self._lock:
            self._expected -= 1
            is_whole = not self._expected
        if is_whole:
            self.writer.sync()
            self.close()

    def close(self) -> None:
        """Closes the file. It may be called several times, but not while another thread writes."""
        if not self._is_closed:
            self._is_closed = True
            self.writer.close()


def _put(new_file: NewFile, window: Window, filler: CheckpointFiller, staging: StagingPool) -> None:
    with staging.lend() as stage:
        first = window.start % PAGE_BYTES  # Direct I/O needs the same offset within a page in memory and in the file.
        targets = []
        for part in window.parts:
            start, stop = first + part.offset, first + part.offset + part.nbytes
            if isinstance(part.content, bytes):
                stage.bytes[start:stop] = np.frombuffer(part.content, np.uint8)
            else:
                targets.append((part.content, stage.tensor[start:stop].view(TORCH_DTYPES[part.dtype])))
        filler.fill(targets)
        new_file.writer.write(stage.bytes[first : first + window.nbytes], window.start)
    new_file.done()


def _convert(
    conversion: Conversion,
    elements: dict[Extent, torch.Tensor],
    sources: Mapping[str, SourceTensor],
    filler: CheckpointFiller,
) -> dict[str, torch.Tensor]:
    """Returns what the conversion makes. Afterwards, ``elements`` holds the elements that it takes and no others. What
    ``elements`` holds before, as the last conversion has taken it too, is not read again."""
    for extent in set(elements).difference(conversion.sources):
        del elements[extent]
    new = [extent for extent in dict.fromkeys(conversion.sources) if extent not in elements]
    for extent in new:
        elements[extent] = fresh_tensor((extent.span.numel,), TORCH_DTYPES[sources[extent.source].dtype], "cpu")
    filler.fill([(extent, elements[extent]) for extent in new])
    return dict(conversion.convert([elements[extent] for extent in conversion.sources]))


def put_whole(writer: Writer, offset: int, tensor: torch.Tensor, budget: Budget, staging: StagingPool) -> None:
    """Writes a tensor that is in host memory as a whole to the file, from the byte ``offset`` on. This must be called
    within ``staging.work``."""
    data = host_bytes(tensor.contiguous())
    tasks = (
        partial(_put_bytes, writer, data[start : start + staging.batch_bytes], offset + start, staging)
        for start in range(0, len(data), staging.batch_bytes)
    )
    run_tasks(tasks, budget.threads)


def _put_bytes(writer: Writer, data: Bytes, offset: int, staging: StagingPool) -> None:
    with staging.lend() as stage:
        first = offset % PAGE_BYTES
        buffer = stage.bytes[first : first + len(data)]
        buffer[:] = data
        writer.write(buffer, offset)
