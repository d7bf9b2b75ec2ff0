"""Which devices there are, how to wait for them, and how copies to and from them are queued.

Only ``zckpt.storage.gpudirect`` asks for a particular type of accelerator.
"""

from __future__ import annotations

import math
import threading
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from zckpt.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

JOINED_BYTES = 256 << 10
"""If the copies of a batch are smaller than this many bytes on average, they go through a buffer on the device, so that
host and device exchange one copy."""


def check_device(device: torch.device | str) -> torch.device:
    """The device of this name; with the current index where the name has none, as in ``"cuda"``.

    Raises DeviceError, which names the devices there are, unless bytes can be copied to it and back. "meta" is accepted
    all the same: its tensors have no bytes.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _unusable(device, error) from error
    return found if found.type in ("cpu", "meta") else _tried(found)


def check_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The devices of these tensors, without the CPU. Raises DeviceError for a device that bytes cannot be copied from,
    such as "meta"."""
    return tuple(_tried(device) for device in devices_of(tensors))


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The devices of these tensors, without the CPU."""
    return tuple(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu))


def synchronize(devices: Iterable[torch.device]) -> None:
    """Returns when everything that was queued on these devices, on any stream, is done. Memory that is about to be read
    or written may have been used on a stream other than this thread's current one."""
    for device in devices:
        if _is_accelerator(device):
            torch.accelerator.synchronize(device)


def has_streams(device: torch.device) -> bool:
    """Whether copies between the device and pinned memory can be queued, so that the host goes on meanwhile."""
    if device not in _with_streams and _is_accelerator(device):
        try:
            torch.Stream(device).record_event().synchronize()
            if pinned_memory(1).is_pinned():
                _with_streams.add(device)
        except (RuntimeError, NotImplementedError):
            return False
        give_back_pinned_memory()
    return device in _with_streams


_with_streams: set[torch.device] = set()
"""The devices that have shown that they have streams. A failure may pass, such as too little memory: it is not kept."""


def device_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised contiguous tensor. Raises DeviceError if the device has too little memory."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except RuntimeError as error:
        nbytes = math.prod(shape) * dtype.itemsize
        raise DeviceError(
            f"cannot allocate {nbytes} bytes on the device {device}: {_first_sentence(error)}",
            hint="free memory there, load less at a time, or load to the CPU",
        ) from error


def used_bytes(device: torch.device) -> tuple[int, int] | None:
    """The bytes that torch's allocator has given to tensors of a device, and those that it has taken from the device.
    None for the CPU, and where torch does not tell."""
    if not _is_accelerator(device):
        return None
    try:
        return torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
    except (AttributeError, RuntimeError, NotImplementedError):  # an older torch, or a device without such an allocator
        return None


def pinned_memory(nbytes: int) -> torch.Tensor:
    """Returns a 1-D uint8 tensor in pinned host memory. torch's allocator rounds ``nbytes`` up to a power of two.

    Raises DeviceError if so much cannot be pinned.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise DeviceError(
            f"cannot pin {nbytes} bytes of host memory: {_first_sentence(error)}",
            hint="a smaller budget (ZCKPT_BUDGET_BYTES) and a smaller snapshot_bytes need less",
        ) from error


def give_back_pinned_memory() -> None:
    """Gives the system all pinned memory that is not in use: torch's allocator would keep it for the next tensors of
    the same size."""
    before = getattr(torch._C, "_host_emptyCache", lambda: None)  # in older versions of torch
    getattr(torch.accelerator, "empty_host_cache", before)()


def give_back_memory(devices: Iterable[torch.device]) -> None:
    """Gives memory of these devices that is not in use back to them, and pinned memory to the system: torch's
    allocators would keep both for other tensors."""
    if any(map(_is_accelerator, devices)):
        torch.accelerator.empty_cache()
        give_back_pinned_memory()


class ToDevice(NamedTuple):
    """One copy from a staging buffer to a device: elements of ``dtype``, stored from byte ``start`` of the buffer on,
    fill ``target``, a 1-D tensor, and are converted to its dtype."""

    start: int
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of the stored elements."""
        return self.target.numel() * self.dtype.itemsize

    def of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the target, and the part of ``buffer`` that is copied to it."""
        stored = buffer[self.start : self.start + self.nbytes]
        if self.dtype == self.target.dtype:
            return self.target.view(torch.uint8), stored
        return self.target, stored.view(self.dtype)


class FromDevice(NamedTuple):
    """One copy from a device: the bytes of ``source``, a 1-D uint8 tensor, go to the staging buffer from byte ``start``
    on."""

    start: int
    source: torch.Tensor


class CopyQueue:
    """Copies between staging buffers and one device, in the order of the calls. Safe to use from several threads.

    Where the buffers are pinned and the device has streams, copies are queued on a side stream. Elsewhere each copy is
    done when its method returns. PyTorch's allocators do not know that this stream uses the tensors: the caller keeps
    them until the copies are done.

    ``to_device`` and ``from_device`` return the event that happens when their copies are done; None if they are.
    """

    def __init__(self, device: torch.device, buffer_bytes: int, *, pinned: bool) -> None:
        """``buffer_bytes``: the size of each buffer. ``pinned``: whether the buffers are pinned."""
        self.device = device
        self._buffer_bytes = buffer_bytes
        self._stream = _take_stream(device) if pinned and has_streams(device) else None
        self._queueing = threading.Lock()

    def to_device(self, buffer: torch.Tensor, copies: Sequence[ToDevice]) -> torch.Event | None:
        """Copies to targets that do not overlap. Their dtype is converted on the device, if it has streams."""
        if self._stream is None:
            for one in copies:
                target, stored = one.of(buffer)
                target.copy_(stored)
            return None
        with self._queueing, self._stream:
            same = all(one.dtype == one.target.dtype for one in copies)
            if same and _are_large([one.target.nbytes for one in copies]):
                for one in copies:
                    target, stored = one.of(buffer)
                    target.copy_(stored, non_blocking=True)
            else:
                first = min(one.start for one in copies)
                stop = max(one.start + one.nbytes for one in copies)
                self._mirror[first:stop].copy_(buffer[first:stop], non_blocking=True)
                targets, stored_there = zip(*(one.of(self._mirror) for one in copies), strict=True)
                torch._foreach_copy_(targets, stored_there)
            return self._stream.record_event()

    def from_device(self, buffer: torch.Tensor, copies: Sequence[FromDevice]) -> torch.Event | None:
        """Copies to places in the buffer that do not overlap, in their order."""
        places = [slice(one.start, one.start + len(one.source)) for one in copies]
        if self._stream is None:
            for place, one in zip(places, copies, strict=True):
                buffer[place].copy_(one.source)
            return None
        with self._queueing, self._stream:
            if _are_large([len(one.source) for one in copies]):
                for place, one in zip(places, copies, strict=True):
                    buffer[place].copy_(one.source, non_blocking=True)
            else:
                torch._foreach_copy_([self._mirror[place] for place in places], [one.source for one in copies])
                for place in _joined(places):
                    buffer[place].copy_(self._mirror[place], non_blocking=True)
            return self._stream.record_event()

    def wait(self) -> None:
        """Waits for all copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Leaves the stream to the next queue. All copies are done."""
        if self._stream is not None:
            _idle_streams.setdefault(self.device, []).append(self._stream)
            self._stream = None

    @cached_property
    def _mirror(self) -> torch.Tensor:
        """A buffer on the device, as large as a staging buffer. There is one for all of them: the copies through it
        follow each other on one stream. It is allocated while that stream is current, because torch's allocator may
        hand out memory that another stream still uses."""
        return device_memory((self._buffer_bytes,), torch.uint8, self.device)


_idle_streams: dict[torch.device, list[torch.Stream]] = {}
"""Streams that no queue uses now. They are used again, because torch's allocators keep separate memory for each
stream."""


def _take_stream(device: torch.device) -> torch.Stream:
    idle = _idle_streams.setdefault(device, [])
    try:
        return idle.pop()
    except IndexError:
        return torch.Stream(device)


def _are_large(sizes: Sequence[int]) -> bool:
    """Whether copies of these sizes, in bytes, are large enough to be made one by one."""
    return len(sizes) == 1 or sum(sizes) >= JOINED_BYTES * len(sizes)


def _joined(places: Sequence[slice]) -> list[slice]:
    """Returns these places, with adjacent ones joined into one."""
    joined = [places[0]]
    for place in places[1:]:
        if place.start == joined[-1].stop:
            joined[-1] = slice(joined[-1].start, place.stop)
        else:
            joined.append(place)
    return joined


def _tried(device: torch.device) -> torch.device:
    """The device, with its index. Raises DeviceError unless a byte can be copied to it and back."""
    try:
        tensor = torch.zeros(1, dtype=torch.uint8, device=device)
        tensor.cpu()
    except Exception as error:  # each kind of device fails in its own way
        raise _unusable(device, error) from error
    return tensor.device


def _is_accelerator(device: torch.device) -> bool:
    """Whether it is of the one type of devices that ``torch.accelerator`` serves in this process."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _unusable(device: object, error: Exception) -> DeviceError:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    there = ["cpu", *(f"{accelerator}:{index}" for index in range(count))]
    return DeviceError(
        f"cannot use the device {device}: {_first_sentence(error)}", hint=f"the devices there are: {', '.join(there)}"
    )


def _first_sentence(error: Exception) -> str:
    """What torch says, without its stack and its advice, which can be pages long."""
    return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
