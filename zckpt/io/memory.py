"""Tensors as bytes: fresh and staging memory, views of host memory, and sinks that loaded bytes go to."""

from __future__ import annotations

import ctypes
import math
import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.errors import CastError
from zckpt.io import linux

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Ints = NDArray[np.int64]

PAGE_BYTES = 4096
"""Direct I/O wants file offsets, lengths and memory addresses to be multiples of it."""
_CACHE_LINE_BYTES = 64
HOST_MEMORY: Bytes = np.frombuffer((ctypes.c_uint8 * (1 << 57)).from_address(PAGE_BYTES), np.uint8)
"""The memory of this process from its second page on: nothing lies in the first, and no processor's addresses are
longer. A view of it keeps nothing alive."""
HOST_VIEW = memoryview(HOST_MEMORY)
"""The same; slices of it are made in half the time."""


def fresh_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An uninitialised contiguous tensor.

    On the host its memory is numpy's, which asks for huge pages: first touched, it is several times faster than
    ``torch.empty``'s.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    return (
        _aligned(torch.from_numpy(np.empty(nbytes + _CACHE_LINE_BYTES, np.uint8)), nbytes, _CACHE_LINE_BYTES)
        .view(dtype)
        .view(tuple(shape))
    )


def _aligned(room: torch.Tensor, nbytes: int, alignment_bytes: int) -> torch.Tensor:
    return room.narrow(0, -room.data_ptr() % alignment_bytes, nbytes)


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-D uint8 tensor that shares its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def host_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor in host memory, shared."""
    array: Bytes = byte_tensor(tensor).numpy()
    return array


def check_cast(stored: torch.dtype, wanted: torch.dtype, key: str) -> None:
    """Raises CastError unless both are the same, or both are floating point, or both are integers."""
    if stored == wanted:
        return
    kinds = [
        "floating point"
        if d.is_floating_point
        else "complex"
        if d.is_complex
        else "bool"
        if d is torch.bool
        else "integer"
        for d in (stored, wanted)
    ]
    if kinds[0] != kinds[1] or kinds[0] in ("bool", "complex"):
        raise CastError(
            f"cannot load {stored} as {wanted}", key=key, hint="load it without dtype and convert it yourself"
        )


class Sinks:
    """Where loaded elements go: all of each target, a contiguous tensor on any device. Stored elements of another dtype
    are converted on the way. ``keys`` name them in errors.

    A target's memory is found by its address: to make views of many small tensors would take longer than to fill them.
    """

    def __init__(self, keys: Sequence[str], targets: Sequence[torch.Tensor], stored: Sequence[torch.dtype]) -> None:
        self.keys = keys
        self._targets = targets
        self._stored = stored
        self.places = np.array(
            [
                target.data_ptr() - PAGE_BYTES if target.is_cpu and target.dtype == dtype else -1
                for target, dtype in zip(targets, stored, strict=True)
            ],
            np.int64,
        )
        """Where in HOST_MEMORY stored bytes can be read straight into; less than 0 where they cannot."""
        self._nbytes = np.array([t.numel() * d.itemsize for t, d in zip(targets, stored, strict=True)], np.int64)
        if not all(target.is_contiguous() for target in targets):
            raise ValueError("what is filled by its address must have no gaps")

    def wait_for_caller(self) -> None:
        """Until what this thread has queued on the targets' devices is done."""
        for device in {target.device for target in self._targets if is_on_gpu(target)}:
            wait_for_caller(device)

    def check(self, sink: Ints, stop: Ints) -> None:
        """Raises ValueError where a stored byte is meant for a place behind its target: an address has no bounds."""
        if not (stop <= self._nbytes[sink]).all():
            raise ValueError("a span is longer than the memory that it goes to")

    def device_memory(self, sink: int, start: int, nbytes: int) -> torch.Tensor | None:
        """Where on a device stored bytes from byte ``start`` go as they are, 1-D uint8; None where they do not."""
        target = self._targets[sink]
        if target.dtype != self._stored[sink] or not is_on_gpu(target):
            return None
        return byte_tensor(target)[start : start + nbytes]

    def put(self, sink: int, start: int, staged: Bytes) -> None:
        """Copies stored bytes in host memory to byte ``start``; to a device, queued on the current stream."""
        place = int(self.places[sink]) + start
        if self.places[sink] >= 0:
            HOST_MEMORY[place : place + len(staged)] = staged
            return
        values, dtype = torch.from_numpy(staged), self._stored[sink]
        if values.data_ptr() % dtype.itemsize:
            values = values.clone()  # behind smaller elements in a file that another writer has ordered
        values = values.view(dtype)
        first = start // dtype.itemsize
        flat = self._targets[sink].detach().reshape(-1)
        # Where the target is on another device than the stage's stream, that does not wait for the copy
        queued = is_on_gpu(flat) and flat.get_device() == torch.cuda.current_device()
        flat[first : first + values.numel()].copy_(values, non_blocking=queued)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def cuda_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device that staging has to serve, if any of ``tensors`` is on one."""
    return next((tensor.device for tensor in tensors if is_on_gpu(tensor)), None)


def wait_for_caller(device: torch.device | None) -> None:
    """Until what this thread has queued on the device is done: no other stream may touch the memory before."""
    if device is not None:
        torch.cuda.current_stream(device).synchronize()


class Stage:
    """One staging buffer of ``nbytes``, and the stream on which copies between it and the device are queued."""

    def __init__(self, nbytes: int, device: torch.device | None) -> None:
        self._nbytes = nbytes
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @cached_property
    def tensor(self) -> torch.Tensor:
        """uint8, 1-D, aligned for direct I/O, pinned if there is a device. Allocated when it is first asked for."""
        nbytes = self._nbytes + PAGE_BYTES
        if self._stream is not None:
            return _aligned(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), self._nbytes, PAGE_BYTES)
        return _aligned(torch.from_numpy(np.empty(nbytes, np.uint8)), self._nbytes, PAGE_BYTES)

    @cached_property
    def bytes(self) -> Bytes:
        """The same memory."""
        array: Bytes = self.tensor.numpy()
        return array

    @cached_property
    def address(self) -> int:
        """Of the same memory."""
        return self.tensor.data_ptr()

    def stream(self) -> AbstractContextManager[object]:
        """Context in which copies are queued; a no-op without a device."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def rest(self) -> None:
        """Its content is not needed any more: the system may take the memory, and does when it runs short. What it
        leaves is as quick to write to as it was."""
        if self._stream is None:
            linux.free_lazily(self.address, self._nbytes)

    def wait(self) -> None:
        """Until the queued copies are done, so that the buffer may be used again."""
        if self._stream is not None:
            self._stream.synchronize()


class Staging:
    """Staging buffers of ``nbytes``, made as they are needed and used again. Safe to use from several threads.

    ``staging_for`` keeps them for the life of the process: to write to memory for the first time takes several times
    longer than to write to it again.
    """

    def __init__(self, nbytes: int, device: torch.device | None) -> None:
        self.nbytes = nbytes
        self.device = device
        self._idle: list[Stage] = []
        self._resting = 0
        """Of these, the first ones: nobody has used them since they were put to rest."""
        self._lock = threading.Lock()

    def acquire(self) -> Stage:
        """A buffer for the caller alone, until it is released."""
        with self._lock:
            stage = self._idle.pop() if self._idle else None
            self._resting = min(self._resting, len(self._idle))
        return stage or Stage(self.nbytes, self.device)

    def release(self, stage: Stage) -> None:
        """Waits until every copy that was queued on it is done."""
        stage.wait()
        with self._lock:
            self._idle.append(stage)

    def rest(self) -> None:
        """To be called when the work is done. What is pinned goes back to torch, which keeps it for the next."""
        with self._lock:
            if self.device is not None:
                self._idle.clear()
            for stage in self._idle[self._resting :]:
                stage.rest()
            self._resting = len(self._idle)

    @contextmanager
    def lend(self) -> Iterator[Stage]:
        """A buffer for the duration of a context."""
        stage = self.acquire()
        try:
            yield stage
        finally:
            self.release(stage)


@lru_cache(maxsize=4)
def staging_for(batch_bytes: int, device: torch.device | None) -> Staging:
    """Buffers that hold a read or a write of ``batch_bytes``, with a page to spare on either side."""
    return Staging(batch_bytes + 2 * PAGE_BYTES, device)
