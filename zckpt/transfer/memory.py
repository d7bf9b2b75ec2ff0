"""Tensors as bytes: whether they lie in order, fresh memory, and the sinks that loaded bytes go to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.errors import CastError
from zckpt.plan.coalesce import STRAIGHT_BYTES_MIN
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.transfer.devices import ToDevice, device_memory, devices_of
from zckpt.transfer.host_memory import HostMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.storage.buffers import Bytes

_CACHE_LINE_BYTES = 64


def fresh_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, file_offset: int = 0
) -> torch.Tensor:
    """Returns an uninitialised contiguous tensor. Raises DeviceError if the device has too little memory.

    On the host its memory is numpy's, which asks for huge pages: first touched, it is several times faster than
    ``torch.empty``'s. If it is large, it begins as far behind the start of a page as byte ``file_offset`` of a
    file does, so that direct I/O can read straight into it what begins at that byte.
    """
    if torch.device(device).type != "cpu":
        return device_memory(shape, dtype, torch.device(device))
    nbytes = math.prod(shape) * dtype.itemsize
    within = file_offset % PAGE_BYTES
    if nbytes < STRAIGHT_BYTES_MIN or within % dtype.itemsize:
        alignment, within = _CACHE_LINE_BYTES, 0
    else:
        alignment = PAGE_BYTES
    room = torch.from_numpy(np.empty(nbytes + alignment, np.uint8))
    return aligned(room, nbytes, alignment, within).view(dtype).view(tuple(shape))


def aligned(room: torch.Tensor, nbytes: int, alignment_bytes: int, within: int = 0) -> torch.Tensor:
    """``nbytes`` of ``room`` from ``within`` bytes after a multiple of ``alignment_bytes`` on. It is uint8, 1-D, in
    host memory."""
    return room.narrow(0, (within - room.data_ptr()) % alignment_bytes, nbytes)


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-D uint8 tensor that shares its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` holds its elements as they are, one after the other: it is contiguous, and not a
    view that PyTorch conjugates or negates when it is read."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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
    """The targets of a load. Each is a contiguous tensor on any device, and is filled entirely; elements stored with
    another dtype are converted. ``keys`` name the targets in errors."""

    def __init__(self, keys: Sequence[str], targets: Sequence[torch.Tensor], stored: Sequence[torch.dtype]) -> None:
        if not all(target.is_contiguous() for target in targets):
            raise ValueError("what is filled by its address must have no gaps")
        self.keys = keys
        self._targets = targets
        self._stored = stored
        self.host = HostMemory(targets, stored)
        self.devices = devices_of(targets)
        numbers = {device: number for number, device in enumerate(self.devices)}
        self.device = np.array([-1 if target.is_cpu else numbers[target.device] for target in targets], np.int64)
        """Of each target: the position of its device in ``devices``; -1 for the host's memory."""
        self.inference = any(target.is_inference() for target in targets)
        """Whether some were made in ``torch.inference_mode()``: only a thread in that mode may change these."""

    def device_memory(self, sink: int, start: int, nbytes: int) -> torch.Tensor | None:
        """Returns the ``nbytes`` of device memory from byte ``start`` of the target on, as a 1-D uint8 tensor; None if
        the target is in host memory or has another dtype."""
        target = self._targets[sink]
        if target.dtype != self._stored[sink] or target.is_cpu:
            return None
        return byte_tensor(target)[start : start + nbytes]

    def to_device(self, sink: int, start: int, nbytes: int, staged_at: int) -> ToDevice:
        """Returns the copy that brings stored bytes, from byte ``staged_at`` of a staging buffer on, to byte ``start``
        of a target on a device. Both are counted in stored bytes."""
        dtype = self._stored[sink]
        first = start // dtype.itemsize
        flat = self._targets[sink].detach().reshape(-1)
        return ToDevice(staged_at, dtype, flat[first : first + nbytes // dtype.itemsize])

    def put(self, sink: int, start: int, staged: Bytes) -> None:
        """Copies stored bytes to byte ``start`` of a target in host memory."""
        if self.host.put(sink, start, staged):
            return
        dtype = self._stored[sink]
        values = torch.from_numpy(staged).view(dtype)  # a stage begins with a page, so its elements lie in line
        first = start // dtype.itemsize
        self._targets[sink].detach().reshape(-1)[first : first + values.numel()].copy_(values)
