"""Finds out which devices can be used, waits for them, and queues copies from and to them.

Only ``zckpt.storage.gpudirect`` depends on a particular type of accelerator.
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
    """Returns the device of this name. If the name has no index, as in ``"cuda"``, it is the current device of this
    type.

    Raises DeviceError, which names the usable devices, unless bytes can be copied to the device and back. The device
    "meta" is accepted, although its tensors have no bytes.
    """
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _unusable(device, error) from error
    return torch_device if torch_device.type in ("cpu", "meta") else _usable_device(torch_device)


def check_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Returns the devices of these tensors, without the CPU. Raises DeviceError if bytes cannot be copied from a
    device, such as "meta"."""
    return tuple(_usable_device(device) for device in devices_of(tensors))


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Returns the devices of these tensors, without the CPU."""
    return tuple(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu))


def synchronize(devices: Iterable[torch.device]) -> None:
    """Waits until everything that was queued on these devices, on any stream, is done. This is needed before memory is
    read or written that other code may have used on a stream other than this thread's current one."""
    for device in devices:
        if _is_accelerator(device):
            torch.accelerator.synchronize(device)


def has_streams(device: torch.device) -> bool:
    """Returns whether copies between the device and pinned memory can be queued, so that the host does not wait for
    them."""
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
"""The devices that are known to have streams. A failure is not kept here, because it may be temporary, such as a lack
of memory."""


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
    """Returns two numbers of bytes of a device: those that torch's allocator has given to tensors, and those that it
    has taken from the device. Returns None for the CPU, and if torch does not know."""
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
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise DeviceError(
            f"cannot pin {nbytes} bytes of host memory: {_first_sentence(error)}",
            hint="a smaller budget (ZCKPT_BUDGET_BYTES) needs less",
        ) from error


def give_back_pinned_memory() -> None:
    """Returns all unused pinned memory to the system. Otherwise torch's allocator would keep it for further tensors of
    the same size."""
    older_function = getattr(torch._C, "_host_emptyCache", lambda: None)  # in older versions of torch
    getattr(torch.accelerator, "empty_host_cache", older_function)()


def give_back_memory(devices: Iterable[torch.device]) -> None:
    """Returns unused memory of these devices to the devices, and unused pinned memory to the system. Otherwise torch's
    allocators would keep both for other tensors."""
    if any(map(_is_accelerator, devices)):
        torch.accelerator.empty_cache()
        give_back_pinned_memory()


def rows_of(flat: torch.Tensor, runs: int, run_numel: int, stride: int) -> torch.Tensor:
    """Returns ``runs`` runs of ``run_numel`` elements of a 1-D tensor as the rows of a view. The first run begins with
    the first element of ``flat``, and each further one ``stride`` elements later. If there is one run, the view has one
    dimension."""
    return flat[:run_numel] if runs == 1 else flat.as_strided((runs, run_numel), (stride, 1), flat.storage_offset())


class ToDevice(NamedTuple):
    """One copy from a staging buffer to a device. The copied elements have the dtype ``dtype``, begin at byte ``start``
    of the buffer, and fill ``target``. They are converted to the dtype of ``target``. ``target`` has one dimension, or
    is what ``rows_of`` returns. Then its rows begin every ``source_stride`` bytes in the buffer."""

    start: int
    dtype: torch.dtype
    target: torch.Tensor
    source_stride: int = 0

    @property
    def runs_and_numel(self) -> tuple[int, int]:
        """The number of runs, and the number of elements of each."""
        runs, run_numel = (1, *self.target.shape)[-2:]
        return runs, run_numel

    @property
    def nbytes(self) -> int:
        """The number of bytes of the buffer from the first element to the last one."""
        runs, run_numel = self.runs_and_numel
        return (runs - 1) * self.source_stride + run_numel * self.dtype.itemsize

    @property
    def is_adjacent(self) -> bool:
        """Whether both memories have the bytes one after the other, unconverted, so that the device can copy them
        without a buffer of its own."""
        return self.dtype == self.target.dtype and self.target.dim() == 1

    def of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the target and the part of ``buffer`` that is copied to it, as two tensors of one dtype unless the
        elements are converted."""
        stored = buffer[self.start : self.start + self.nbytes]
        if self.is_adjacent:
            return self.target.view(torch.uint8), stored
        stride = self.source_stride // self.dtype.itemsize
        return self.target, rows_of(stored.view(self.dtype), *self.runs_and_numel, stride)


class FromDevice(NamedTuple):
    """One copy from a device to a staging buffer. The bytes of ``source``, a 1-D uint8 tensor, go to the buffer from
    byte ``start`` on."""

    start: int
    source: torch.Tensor


class CopyQueue:
    """Copies between staging buffers and one device, in the order of the calls. Several threads may use it at once.

    If the buffers are pinned and the device has streams, copies are queued on a stream of their own. Otherwise each
    copy is done when its method returns. PyTorch's allocators do not know that this stream uses the tensors, so the
    caller keeps them alive until the copies are done.

    ``to_device`` and ``from_device`` return an event that happens when their copies are done, or None if they are done
    already.
    """

    def __init__(self, device: torch.device, buffer_bytes: int, *, pinned: bool) -> None:
        """Makes a queue for staging buffers of ``buffer_bytes`` bytes each. ``pinned`` says whether the buffers are
        pinned."""
        self.device = device
        self._buffer_bytes = buffer_bytes
        self._stream = _take_stream(device) if pinned and has_streams(device) else None
        self._queueing = threading.Lock()

    def to_device(self, buffer: torch.Tensor, copies: Sequence[ToDevice]) -> torch.Event | None:
        """Copies from the buffer to targets that do not overlap. If the device has streams, elements are converted on
        the device."""
        if self._stream is None:
            for copy in copies:
                target, stored = copy.of(buffer)
                target.copy_(stored)
            return None
        with self._queueing, self._stream:
            if all(copy.is_adjacent for copy in copies) and _are_large([copy.target.nbytes for copy in copies]):
                for copy in copies:
                    target, stored = copy.of(buffer)
                    target.copy_(stored, non_blocking=True)
            else:
                start = min(copy.start for copy in copies)
                stop = max(copy.start + copy.nbytes for copy in copies)
                self._mirror[start:stop].copy_(buffer[start:stop], non_blocking=True)
                targets, stored_parts = zip(*(copy.of(self._mirror) for copy in copies), strict=True)
                torch._foreach_copy_(targets, stored_parts)
            return self._stream.record_event()

    def from_device(self, buffer: torch.Tensor, copies: Sequence[FromDevice]) -> torch.Event | None:
        """Copies to parts of the buffer that do not overlap. ``copies`` are in the order of these parts."""
        parts = [slice(copy.start, copy.start + len(copy.source)) for copy in copies]
        if self._stream is None:
            for part, copy in zip(parts, copies, strict=True):
                buffer[part].copy_(copy.source)
            return None
        with self._queueing, self._stream:
            if _are_large([len(copy.source) for copy in copies]):
                for part, copy in zip(parts, copies, strict=True):
                    buffer[part].copy_(copy.source, non_blocking=True)
            else:
                torch._foreach_copy_([self._mirror[part] for part in parts], [copy.source for copy in copies])
                for part in _joined(parts):
                    buffer[part].copy_(self._mirror[part], non_blocking=True)
            return self._stream.record_event()

    def wait(self) -> None:
        """Waits for all copies that were queued before this call."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Keeps the stream for the next queue. All copies are done by then."""
        if self._stream is not None:
            _idle_streams.setdefault(self.device, []).append(self._stream)
            self._stream = None

    @cached_property
    def _mirror(self) -> torch.Tensor:
        """A buffer on the device, as large as a staging buffer. One is enough for all staging buffers, because the
        copies through it follow each other on one stream. It is allocated while this stream is current. Otherwise
        torch's allocator might return memory that another stream still uses."""
        return device_memory((self._buffer_bytes,), torch.uint8, self.device)


_idle_streams: dict[torch.device, list[torch.Stream]] = {}
"""The streams that no queue uses now. They are used again, because torch's allocators keep separate memory for each
stream."""


def _take_stream(device: torch.device) -> torch.Stream:
    idle = _idle_streams.setdefault(device, [])
    try:
        return idle.pop()
    except IndexError:
        return torch.Stream(device)


def _are_large(sizes: Sequence[int]) -> bool:
    """Returns whether copies of these sizes, in bytes, are large enough to be made one by one."""
    return len(sizes) == 1 or sum(sizes) >= JOINED_BYTES * len(sizes)


def _joined(parts: Sequence[slice]) -> list[slice]:
    """Returns these slices of a buffer, with adjacent ones joined into one."""
    joined = [parts[0]]
    for part in parts[1:]:
        if part.start == joined[-1].stop:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _usable_device(device: torch.device) -> torch.device:
    """Returns the device with its index. Raises DeviceError unless a byte can be copied to the device and back."""
    try:
        tensor = torch.zeros(1, dtype=torch.uint8, device=device)
        tensor.cpu()
    except Exception as error:  # each kind of device fails in its own way
        raise _unusable(device, error) from error
    return tensor.device


def _is_accelerator(device: torch.device) -> bool:
    """Returns whether the device is of the one type that ``torch.accelerator`` serves in this process."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _unusable(device: object, error: Exception) -> DeviceError:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    devices = ["cpu", *(f"{accelerator}:{index}" for index in range(count))]
    return DeviceError(
        f"cannot use the device {device}: {_first_sentence(error)}", hint=f"the devices there are: {', '.join(devices)}"
    )


def _first_sentence(error: Exception) -> str:
    """Returns the first sentence of torch's error message, without its stack trace and advice, which can be pages
    long."""
    return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
