"""The one module that knows devices: which there are, when they are done, and how copies to and from them are queued.

All of it is generic: ``torch.accelerator``, ``torch.Stream`` and the tensor's own device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from zckpt.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

JOINED_BYTES = 256 << 10
"""Copies that are smaller than this on average go to or from a device as one copy, through a buffer there."""


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
    """The devices that these are on, host memory left out. Raises DeviceError for one that bytes cannot be copied from,
    such as "meta"."""
    return tuple(_tried(device) for device in devices_of(tensors))


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The devices that these are on, host memory left out."""
    return tuple(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu))


def wait_for_caller(devices: Iterable[torch.device]) -> None:
    """Until all that was queued on these devices is done, on any stream: memory that is to be read or written may have
    been used on another stream than the current one of this thread."""
    for device in devices:
        if _is_accelerator(device):
            torch.accelerator.synchronize(device)


@lru_cache
def has_streams(device: torch.device) -> bool:
    """Whether copies between the device and pinned memory can be queued, so that the host goes on meanwhile."""
    if not _is_accelerator(device):
        return False
    try:
        torch.Stream(device).synchronize()
        found = pinned_memory(1).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False
    give_back_pinned_memory()
    return found


def pinned_memory(nbytes: int) -> torch.Tensor:
    """uint8, 1-D. torch's allocator takes the next power of two of it."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def give_back_pinned_memory() -> None:
    """Gives the system all pinned memory that is not in use: torch's allocator would keep it for the next tensors of
    the same size."""
    before = getattr(torch._C, "_host_emptyCache", lambda: None)  # in older versions of torch
    getattr(torch.accelerator, "empty_host_cache", before)()


class ToDevice(NamedTuple):
    """Stored elements of ``dtype`` from byte ``start`` of a staging buffer on, and the 1-D tensor that they fill. They
    are converted to its dtype."""

    start: int
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """As stored."""
        return self.target.numel() * self.dtype.itemsize

    def of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target, and what of the buffer is copied to it."""
        stored = buffer[self.start : self.start + self.nbytes]
        if self.dtype == self.target.dtype:
            return self.target.view(torch.uint8), stored
        return self.target, stored.view(self.dtype)


class FromDevice(NamedTuple):
    """1-D uint8 on a device, and the byte of a staging buffer from which on its bytes go there."""

    start: int
    source: torch.Tensor


class CopyQueue:
    """Copies between one staging buffer and one device, in their order.

    Where the buffer is pinned and the device has streams, they are queued on a stream that no other queue uses;
    elsewhere each is done when its function returns. PyTorch's allocators do not know that this stream uses the
    tensors: whoever calls keeps them, and calls ``wait`` before he gives them to anybody else.
    """

    def __init__(self, staged: torch.Tensor, device: torch.device) -> None:
        """``staged``: the buffer, uint8, 1-D, in host memory."""
        self._staged = staged
        self._device = device
        self._stream = _take_stream(device) if staged.is_pinned() and has_streams(device) else None

    def to_device(self, copies: Sequence[ToDevice]) -> None:
        """Copies to targets that do not overlap. Their dtype is converted on the device, if it has streams."""
        with self._queueing():
            same = all(one.dtype == one.target.dtype for one in copies)
            if self._stream is None or (same and _are_large([one.target.nbytes for one in copies])):
                for one in copies:
                    target, stored = one.of(self._staged)
                    target.copy_(stored, non_blocking=self._stream is not None)
                return
            first = min(one.start for one in copies)
            stop = max(one.start + one.nbytes for one in copies)
            self._mirror[first:stop].copy_(self._staged[first:stop], non_blocking=True)
            targets, stored_there = zip(*(one.of(self._mirror) for one in copies), strict=True)
            torch._foreach_copy_(targets, stored_there)

    def from_device(self, copies: Sequence[FromDevice]) -> None:
        """Copies to places in the buffer that do not overlap, in their order."""
        places = [slice(one.start, one.start + len(one.source)) for one in copies]
        with self._queueing():
            if self._stream is None or _are_large([len(one.source) for one in copies]):
                for place, one in zip(places, copies, strict=True):
                    self._staged[place].copy_(one.source, non_blocking=self._stream is not None)
                return
            torch._foreach_copy_([self._mirror[place] for place in places], [one.source for one in copies])
            for place in _joined(places):
                self._staged[place].copy_(self._mirror[place], non_blocking=True)

    def is_done(self) -> bool:
        return self._stream is None or self._stream.query()

    def wait(self) -> None:
        """Until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Leaves the stream to the next queue. All copies are done."""
        if self._stream is not None:
            _idle_streams.setdefault(self._device, []).append(self._stream)
            self._stream = None

    def _queueing(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else self._stream

    @cached_property
    def _mirror(self) -> torch.Tensor:
        """As large as the buffer, on the device. It belongs to this stream, on which it is first asked for: torch's
        allocator may give out what another stream still uses, to that stream alone."""
        return torch.empty_like(self._staged, device=self._device, pin_memory=False)


_idle_streams: dict[torch.device, list[torch.Stream]] = {}
"""Used again: torch's allocators keep memory apart for each stream that there has been."""


def _take_stream(device: torch.device) -> torch.Stream:
    idle = _idle_streams.setdefault(device, [])
    try:
        return idle.pop()
    except IndexError:
        return torch.Stream(device)


def _are_large(sizes: Sequence[int]) -> bool:
    """Whether these copies, of so many bytes each, are worth to be made one by one."""
    return len(sizes) == 1 or sum(sizes) >= JOINED_BYTES * len(sizes)


def _joined(places: Sequence[slice]) -> list[slice]:
    """One for each run of adjacent ones."""
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
    return DeviceError(f"cannot use the device {device}: {error}", hint=f"the devices there are: {', '.join(there)}")
