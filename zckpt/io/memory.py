"""Tensors as bytes: views of host memory, staging buffers, and sinks that loaded bytes go to."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from zckpt.errors import CastError

if TYPE_CHECKING:
    from collections.abc import Sequence


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-D uint8 tensor that shares its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def host_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    return memoryview(byte_tensor(tensor).numpy())  # type: ignore[arg-type]


def check_cast(stored: torch.dtype, wanted: torch.dtype, key: str) -> None:
    """Raises CastError unless both are the same, or both are floating point, or both are integers."""
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
    if stored != wanted and (kinds[0] != kinds[1] or kinds[0] in ("bool", "complex")):
        raise CastError(
            f"cannot load {stored} as {wanted}", key=key, hint="load it without dtype and convert it yourself"
        )


class Sink:
    """Where loaded elements go: all of ``target``, a contiguous tensor on any device. Stored elements of another dtype
    are converted on the way. ``key`` names it in errors."""

    def __init__(self, key: str, target: torch.Tensor, stored: torch.dtype) -> None:
        self.key = key
        self._target = target.detach().reshape(-1)
        self._stored = stored
        self._bytes = (
            host_view(target) if target.device.type == "cpu" and target.dtype == stored and target.numel() else None
        )

    @property
    def device(self) -> torch.device:
        return self._target.device

    def memory(self, start: int, stop: int) -> memoryview | None:
        """The host memory for the stored bytes ``[start, stop)``, if they can be read straight into it."""
        return None if self._bytes is None else self._bytes[start:stop]

    def put(self, start: int, staged: torch.Tensor) -> None:
        """Copies stored bytes (uint8, 1-D, host) to byte ``start``; on a device, queued on the current stream."""
        if staged.storage_offset() % self._stored.itemsize:
            staged = staged.clone()  # behind smaller elements in a file that another writer has ordered
        values = staged.view(self._stored)
        first = start // self._stored.itemsize
        self._target[first : first + values.numel()].copy_(values, non_blocking=True)


class Staging:
    """One reused host buffer of ``nbytes`` per thread, pinned if a device takes part, and a stream beside it."""

    def __init__(self, nbytes: int, devices: Sequence[torch.device]) -> None:
        self._nbytes = nbytes
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._local = threading.local()
        if self._device is not None:
            # What runs on the caller's stream must be done before another stream touches the memory
            torch.cuda.current_stream(self._device).synchronize()

    def buffer(self) -> torch.Tensor:
        """uint8, 1-D."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._device is not None)
        buffer: torch.Tensor = self._local.buffer
        return buffer

    def stream(self) -> AbstractContextManager[object]:
        """Context in which copies between this thread's buffer and the device are queued; a no-op without a device."""
        if self._device is None:
            return nullcontext()
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._local.stream)

    def wait(self) -> None:
        """Until the copies that this thread queued are done, so that its buffer may be used again."""
        if self._device is not None:
            self._local.stream.synchronize()
