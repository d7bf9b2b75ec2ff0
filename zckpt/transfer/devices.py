"""Finds out which devices can be used, waits for them, and queues copies from and to them.

Only ``zckpt.storage.gpudirect`` depends on a particular type of accelerator.
"""

from __future__ import annotations

import math
import threading
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from zckpt.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor as a 1-D uint8 tensor that shares its memory."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.detach().reshape(-1).view(torch.uint8)


def rows_of(flat: torch.Tensor, runs: int, run_numel: int, stride: int) -> torch.Tensor:
    """Returns ``runs`` runs of ``run_numel`` elements of a 1-D tensor as the rows of a view. The first run begins with
    the first element of ``flat``, and each further one ``stride`` elements later. If there is one run, the view has one
    dimension."""
    return flat[:run_numel] if runs == 1 else flat.as_strided((runs, run_numel), (stride, 1), flat.storage_offset())


class ToDevice(NamedTuple):
    """One copy from a staging buffer to a device. The copied elements have the dtype ``dtype``, begin at byte ``start``
    of the buffer, and fill ``target``, which is contiguous. They are converted to the dtype of ``target``. With a
    ``source_stride``, ``target`` is what ``rows_of`` returns instead, and its rows begin every ``source_stride`` bytes
    in the buffer."""

    start: int
    dtype: torch.dtype
    target: torch.Tensor
    source_stride: int = 0

    @property
    def stop(self) -> int:
        """The byte of the buffer after the last element."""
        if not self.source_stride:
            return self.start + self.target.numel() * self.dtype.itemsize
        runs, run_numel = self.target.shape
        return self.start + (runs - 1) * self.source_stride + run_numel * self.dtype.itemsize

    @property
    def is_adjacent(self) -> bool:
        """Whether both memories have the bytes one after the other, unconverted, so that the device can copy them
        without a buffer of its own."""
        return self.dtype == self.target.dtype and not self.source_stride

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the copied elements, in the buffer and on the device."""
        return self.dtype, self.target.dtype

    def of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the target and the part of ``buffer`` that is copied to it, as two tensors of one shape. They have
        one dtype unless the elements are converted."""
        stored = buffer[self.start : self.stop]
        if self.is_adjacent:
            return byte_tensor(self.target), stored
        stored = stored.view(self.dtype)
        if not self.source_stride:
            return self.target.view(-1), stored
        runs, run_numel = self.target.shape
        return self.target, rows_of(stored, runs, run_numel, self.source_stride // self.dtype.itemsize)


class FromDevice(NamedTuple):
    """One copy from a device to a staging buffer. The bytes of ``source``, which is contiguous, go to the buffer from
    byte ``start`` on."""

    start: int
    source: torch.Tensor

    @property
    def stop(self) -> int:
        """The byte of the buffer after the last one that is copied."""
        return self.start + self.source.nbytes

    @property
    def dtypes(self) -> tuple[torch.dtype]:
        """The dtype of the copied elements."""
        return (self.source.dtype,)

    def of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the part of ``buffer`` that is filled, and the bytes that it is filled with."""
        return buffer[self.start : self.stop], byte_tensor(self.source)


Copy = TypeVar("Copy", ToDevice, FromDevice)


class CopyQueue:
    """Copies between staging buffers and one device, in the order of the calls. Several threads may use it at once.

    If the buffers are pinned and the device has streams, copies are queued on a stream of their own. Otherwise each
    copy is done when its method returns. PyTorch's allocators do not know that this stream uses the tensors, so the
    caller keeps them alive until the copies are done.

    Small tensors go through a buffer on the device, so that host and device exchange one copy. A few calls of torch put
    all of them into this buffer, or move them out of it. With a call for each of them, the threads that read or write
    would mostly wait for each other's turn in Python. If the device has no memory for the buffer, the tensors are
    copied one by one.

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

    @torch.no_grad()
    def to_device(self, buffer: torch.Tensor, copies: Sequence[ToDevice]) -> torch.Event | None:
        """Copies from the buffer to targets that do not overlap. If the device has streams, elements are converted on
        the device, unless it has too little memory."""
        if self._stream is None:
            _copy_each((copy.of(buffer) for copy in copies), non_blocking=False)
            return None
        is_direct = all(copy.is_adjacent for copy in copies) and _are_large(copies)
        with self._queueing, self._stream:
            if is_direct or self._mirror is None:
                _copy_each((copy.of(buffer) for copy in copies), non_blocking=True)
            else:
                start, stop = min(copy.start for copy in copies), max(copy.stop for copy in copies)
                self._mirror[start:stop].copy_(buffer[start:stop], non_blocking=True)
                spaced = (copy.of(self._mirror) for copy in copies if copy.source_stride)
                _copy_each(spaced, non_blocking=True)
                for run in runs_of([copy for copy in copies if not copy.source_stride]):
                    stored = self._mirror[run[0].start : run[-1].stop].view(run[0].dtype)
                    _fill_together([copy.target for copy in run], stored)
            return self._stream.record_event()

    @torch.no_grad()
    def from_device(self, buffer: torch.Tensor, copies: Sequence[FromDevice]) -> torch.Event | None:
        """Copies to parts of the buffer that do not overlap."""
        if self._stream is None:
            _copy_each((copy.of(buffer) for copy in copies), non_blocking=False)
            return None
        with self._queueing, self._stream:
            joined = copies if _are_large(copies) else _joined(copies)
            _copy_each((copy.of(buffer) for copy in joined), non_blocking=True)
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
    def _mirror(self) -> torch.Tensor | None:
        """A buffer on the device, as large as a staging buffer, or None if the device has no memory for it. One is
        enough for all staging buffers, because the copies through it follow each other on one stream. It is allocated
        while this stream is current. Otherwise torch's allocator might return memory that another stream still uses."""
        try:
            with torch.inference_mode(False):  # What is made in this mode can only be changed in it.
                return device_memory((self._buffer_bytes,), torch.uint8, self.device)
        except DeviceError:
            return None


_idle_streams: dict[torch.device, list[torch.Stream]] = {}
"""The streams that no queue uses now. They are used again, because torch's allocators keep separate memory for each
stream."""


def _take_stream(device: torch.device) -> torch.Stream:
    idle = _idle_streams.setdefault(device, [])
    try:
        return idle.pop()
    except IndexError:
        return torch.Stream(device)


def _are_large(copies: Sequence[ToDevice] | Sequence[FromDevice]) -> bool:
    """Returns whether copies are large enough to be made one by one."""
    return len(copies) == 1 or sum(copy.stop - copy.start for copy in copies) >= JOINED_BYTES * len(copies)


def runs_of(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Yields runs of copies of the same dtypes that are adjacent in the buffer, one after the other."""
    run: list[Copy] = []
    for copy in sorted(copies, key=lambda copy: copy.start):
        if run and (copy.start != run[-1].stop or copy.dtypes != run[-1].dtypes):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run


def _joined(copies: Sequence[FromDevice]) -> Iterator[FromDevice]:
    """Yields copies that do the same as ``copies``, with one for each run. The elements of a run are first put into one
    new tensor. If the device has no memory for it, the copies of the run stay as they are."""
    for run in runs_of(copies):
        try:
            yield FromDevice(run[0].start, torch._C._nn.flatten_dense_tensors([copy.source for copy in run]))
        except torch.OutOfMemoryError:
            yield from run


def _fill_together(targets: list[torch.Tensor], stored: torch.Tensor) -> None:
    """Fills tensors of one dtype with the elements of ``stored``, a 1-D tensor on the same device."""
    if stored.dtype == targets[0].dtype and stored.dtype not in (torch.float32, torch.float64):
        # Where torch copies many tensors by one call, it has 16-bit floats converted to fp32 and back, which changes
        # NaNs, and it does not know all dtypes.
        stored = stored.view(_INTEGERS[stored.itemsize])
        targets = [target.view(stored.dtype) for target in targets]
    torch._foreach_copy_(targets, torch._C._nn.unflatten_dense_tensors(stored, targets))


_INTEGERS = {dtype.itemsize: dtype for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)}


def _copy_each(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, non_blocking: bool) -> None:
    """Copies tensors one by one. Each pair is a target and a source."""
    for target, source in pairs:
        target.copy_(source, non_blocking=non_blocking)


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
