"""Tensors as bytes: contiguous memory, fresh memory, the targets that loaded bytes go to, and the check of tensors that
other code has made."""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from contextlib import suppress
from functools import cache
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zckpt.errors import CastError, StateError, ZckptError
from zckpt.geometry import runs_of_equal
from zckpt.plan.data_files import FragmentPlaces
from zckpt.plan.reads import STRAIGHT_BYTES_MIN
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.system import linux
from zckpt.transfer.devices import ToDevice, byte_tensor, check_devices, device_memory, devices_of, rows_of
from zckpt.transfer.host_memory import copy_spaced, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zckpt.geometry import Ints
    from zckpt.plan.inventory import Fragment
    from zckpt.plan.reads import Copies, StridedCopy
    from zckpt.storage.buffers import Bytes

SHARED_BYTES = linux.HUGE_PAGE_BYTES
"""The most bytes of new small tensors that share memory. If it were more, one tensor that is kept could keep more
memory in use. If it were less, they could not fill a huge page."""
ROOMS_TOGETHER = 16
"""How many rooms of small tensors are in one mapping. One tensor that is kept keeps the addresses of all of them in
use, although not their memory."""
PLAIN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
"""The classes of initialized tensors that have no operations of their own."""
TENSOR_ALIGNMENT_BYTES = 64
"""The addresses of new tensors that share memory have the same remainder, divided by this, as their places in a file.
It is a multiple of the size of every element."""


def fresh_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, file_offset: int = 0
) -> torch.Tensor:
    """Returns an uninitialised contiguous tensor, as ``fresh_tensors`` does."""
    return fresh_tensors([shape], [dtype], torch.device(device), [file_offset])[0]


def fresh_tensors(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    file_offsets: Sequence[int] | Ints,
) -> list[torch.Tensor]:
    """Returns uninitialised contiguous tensors, each with a storage of its own. Raises DeviceError if the device has
    too little memory, and MemoryError if the host has.

    In host memory, tensors of fewer than ``STRAIGHT_BYTES_MIN`` bytes that follow each other share rooms of up to
    ``SHARED_BYTES`` bytes. A room goes back to the system when the last of its tensors is gone. A larger tensor has a
    room of its own. The address of a room has the same remainder, divided by the size of a page, as the file offset of
    its first tensor, unless its elements would then not be aligned. The others are as far from it as in the file, if
    they are adjacent there. So direct I/O can read bytes of the file straight into a large tensor, or into many small
    ones at once.

    A room of ``HUGE_BYTES_MIN`` bytes or more is memory of its own from the system, and begins in the first small page
    of a huge page. So does each room of small tensors if several rooms follow each other. malloc could return memory
    that was used before, and that is not in huge pages. A disk of a virtual machine reads into small pages more slowly.
    """
    if device.type != "cpu":
        return [device_memory(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    item = np.array([dtype.itemsize for dtype in dtypes], np.int64)
    nbytes = np.array([math.prod(shape) for shape in shapes], np.int64) * item
    within = np.array(file_offsets, np.int64) % PAGE_BYTES
    within[within % item > 0] = 0
    # The distance of each tensor from the first one, if there were only one room.
    place = np.zeros_like(nbytes)
    place[1:] = np.cumsum(nbytes[:-1] + (np.diff(within) - nbytes[:-1]) % TENSOR_ALIGNMENT_BYTES)
    is_large = nbytes >= STRAIGHT_BYTES_MIN
    begins = is_large.copy()  # where rooms begin that cannot share a mapping with the room before
    begins[1:] |= is_large[:-1]
    tensors: list[torch.Tensor] = []
    for first, stop in runs_of_equal(np.cumsum(begins)):
        if stop - first == 1 and not is_large[first]:
            tensors.append(torch.empty(shapes[first], dtype=dtypes[first], device="cpu"))
            continue
        ends, bounds = (place + nbytes)[:stop], [first]
        while bounds[-1] < stop:
            fits = ends.searchsorted(place[bounds[-1]] + SHARED_BYTES - within[bounds[-1]], "right")
            bounds.append(max(int(fits), bounds[-1] + 1))
        lasts = np.array(bounds[1:]) - 1
        rooms = _rooms((ends[lasts] - place[bounds[:-1]]).tolist(), within[bounds[:-1]].tolist())
        for room, (one, end) in zip(rooms, pairwise(bounds), strict=True):
            starts = (place[one:end] - place[one]).tolist()
            tensors += map(_tensor_in, repeat(room), starts, shapes[one:end], dtypes[one:end])
    return tensors


def _rooms(nbytes: Sequence[int], within: Sequence[int]) -> list[Bytes]:
    """Returns what ``_room`` does for each of these sizes. Up to ``ROOMS_TOGETHER`` rooms lie in one mapping of memory,
    in a huge page each."""
    if len(nbytes) > ROOMS_TOGETHER:
        return [
            room
            for first in range(0, len(nbytes), ROOMS_TOGETHER)
            for room in _rooms(nbytes[first:][:ROOMS_TOGETHER], within[first:][:ROOMS_TOGETHER])
        ]
    if len(nbytes) == 1:
        return [_room(nbytes[0], within[0])]
    huge = linux.HUGE_PAGE_BYTES
    mapped = _room((len(nbytes) - 1) * huge + within[-1] + nbytes[-1], 0)
    rooms = []
    for number, (first, size) in enumerate(zip(within, nbytes, strict=True)):
        # numpy would let the views of a mere slice refer to ``mapped`` instead of the slice.
        room: Bytes = np.asarray(memoryview(mapped[number * huge + first :][:size]))
        page = mapped[number * huge :][:huge]
        weakref.finalize(room, linux.free, page.ctypes.data, page.nbytes).atexit = False
        rooms.append(room)
    return rooms


def _tensor_in(room: Bytes, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor whose elements begin at byte ``start`` of ``room``. ``torch.save`` writes the whole storage of a
    tensor, so the storage has the bytes of the tensor and no others."""
    tensor = torch.from_numpy(np.ndarray(shape, _numpy_dtype(dtype), room, start))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns the dtype of numpy that is ``dtype``, or integers of this size if numpy has no such dtype."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return np.dtype(f"i{dtype.itemsize}")


def _room(nbytes: int, within: int) -> Bytes:
    """Returns new memory as a 1-D uint8 array. Its address is ``within`` bytes after the start of a page, or of a huge
    page if it has ``HUGE_BYTES_MIN`` bytes or more."""
    is_huge = nbytes >= linux.HUGE_BYTES_MIN
    alignment = linux.HUGE_PAGE_BYTES if is_huge else PAGE_BYTES
    room = _map_memory(nbytes, within) if is_huge else np.empty(nbytes + alignment, np.uint8)
    first = (within - room.ctypes.data) % alignment
    if is_huge:
        linux.ask_for_huge_pages(room.ctypes.data, room.nbytes)
    return room[first : first + nbytes]


def _map_memory(nbytes: int, within: int) -> Bytes:
    """Returns new memory of this process as a 1-D uint8 array. From ``within`` bytes after the start of its first huge
    page on, it has at least ``nbytes`` bytes. It goes back to the system as soon as nothing refers to it any more. If
    the system refuses a mapping of memory, because a process may have only so many of them, malloc provides the memory.
    Raises MemoryError."""
    room_bytes = _whole_pages(nbytes + linux.HUGE_PAGE_BYTES)
    try:
        if sys.platform == "win32":
            mapped = mmap.mmap(-1, room_bytes)
        else:
            mapped = mmap.mmap(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return np.empty(room_bytes, np.uint8)
    if sys.platform == "linux":
        # A huge page lies within one mapping. So a mapping that ends with the tensor has small pages after the last
        # whole huge page, and the rest of another huge page is not wasted. If the mapping cannot be cut, it stays as
        # long as it is, which does no other harm.
        # Nothing may refer to the mapping when it is cut. ``ctypes.data`` is a function of Python, and a profiler that
        # looks at its frame would keep the array.
        address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        first = (within - address) % linux.HUGE_PAGE_BYTES
        with suppress(OSError):
            mapped.resize(_whole_pages(first + nbytes))
    return np.frombuffer(mapped, np.uint8)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def aligned(room: torch.Tensor, nbytes: int, alignment_bytes: int) -> torch.Tensor:
    """Returns ``nbytes`` bytes of ``room`` as a view. Their address is a multiple of ``alignment_bytes``. ``room`` is a
    1-D uint8 tensor in host memory."""
    return room.narrow(0, -room.data_ptr() % alignment_bytes, nbytes)


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of ``tensor`` has its elements unchanged, one after the other: the tensor is
    contiguous, and is not a view that PyTorch conjugates or negates when it is read."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def host_bytes(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a contiguous tensor in host memory as an array that shares them."""
    array: Bytes = byte_tensor(tensor).numpy()
    return array


def has_own_operations(tensor: torch.Tensor) -> bool:
    """Returns whether the class of a tensor has operations of its own, as that of a DTensor or of a quantized tensor of
    torchao. The values of such a tensor are in other tensors, or they are encoded."""
    return type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__


def not_plain(tensor: torch.Tensor) -> str | None:
    """Returns why the values of a tensor cannot be in memory that is its own, one element after the other, such as "is
    a tensor of layout torch.sparse_coo". Returns None if they can. Does not look at the memory."""
    is_usual = type(tensor) in PLAIN_CLASSES  # There may be very many tensors.
    if not is_usual and torch.nn.parameter.is_lazy(tensor):
        return "is not initialized yet"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"is a tensor of layout {'nested' if tensor.is_nested else tensor.layout}: only dense ones can be kept"
    if not is_usual and has_own_operations(tensor):
        return f"is of the class {type(tensor).__qualname__}, whose values are not in memory of their own"
    if tensor.is_quantized:
        return f"is a quantized tensor, of dtype {tensor.dtype}"
    return None


def check_memory(
    tensors: Iterable[tuple[str, torch.Tensor]], error: type[ZckptError] = StateError
) -> tuple[torch.device, ...]:
    """Checks tensors that zckpt has not made, before their memory is read or written by its address. ``tensors`` has a
    pair for each: its name in errors, and the tensor. Returns their devices, without the CPU. Raises an error of the
    class ``error`` for a tensor whose values are not in its memory, and DeviceError if bytes cannot be copied from a
    device."""
    checked = []
    for name, tensor in tensors:
        if why := why_no_memory(tensor):
            raise _no_memory(name, why, error)
        checked.append(tensor)
    return check_devices(checked)


def _no_memory(name: str, why: str, error: type[ZckptError]) -> ZckptError:
    return error(
        f"{name} {why}", key=name,
        hint="keep a dense copy of it, such as its to_dense(), dequantize() or full_tensor(), or the tensors that it "
        "is made of; give memory to a tensor that has none yet (torch.empty_like(tensor, device=...)). What an "
        "optimizer keeps can be saved if its class has __tensor_flatten__ and __tensor_unflatten__",
    )  # fmt: skip


def check_fragments(fragments: Iterable[Fragment]) -> FragmentPlaces:
    """Checks the tensors of fragments that an engine has handed over, as ``check_memory`` does, and that each of them
    has the elements of its fragment as they are. Returns where the bytes are. Raises StateError and DeviceError."""
    devices: dict[torch.device, torch.Tensor] = {}
    places = FragmentPlaces.of(_checked(fragments, devices))
    check_devices(devices.values())
    return places


def _checked(fragments: Iterable[Fragment], devices: dict[torch.device, torch.Tensor]) -> Iterator[Fragment]:
    """Yields fragments once they are checked. ``devices`` gets a tensor on each device but the CPU."""
    for fragment in fragments:
        part, name, _, span, _, _, data, _ = fragment
        if isinstance(data, torch.Tensor):
            if why := why_no_memory(data):
                raise _no_memory(f"{part}/{name}", why, StateError)
            if data.numel() != span.stop - span.start or not lies_in_order(data):
                view = "conjugated or negated view" if data.is_conj() or data.is_neg() else "tensor"
                raise StateError(
                    f"{part}/{name}: elements {span.start} to {span.stop} do not lie one after the other in a {view} "
                    f"of shape {list(data.shape)} with strides {list(data.stride())}", key=f"{part}/{name}",
                    hint="make it contiguous, by contiguous(), resolve_conj() or resolve_neg()",
                )  # fmt: skip
            if not data.is_cpu:
                devices[data.device] = data
        yield fragment


def why_no_memory(tensor: torch.Tensor) -> str | None:
    """Returns why the values of a tensor are not in memory that is its own, as ``not_plain`` does, or why it has less
    memory than elements. Returns None if it has enough. Only looks at the memory's size."""
    if why := not_plain(tensor):
        return why
    if tensor.is_meta:
        return "is on the device meta, which keeps no values"
    numel = tensor.numel()
    if not numel:
        return None
    try:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError:  # The memory is on disk (``zckpt.offload``), or torch knows of another reason.
        return "has no memory now; zckpt.reload brings back what zckpt.offload has moved to disk"
    if not tensor.is_contiguous():
        numel = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    needed_bytes = (int(tensor.storage_offset()) + numel) * tensor.itemsize
    return None if nbytes >= needed_bytes else f"needs {needed_bytes} bytes of memory, and its storage has {nbytes}"


def check_cast(stored: torch.dtype, requested: torch.dtype, key: str) -> None:
    """Raises CastError unless both dtypes are the same, or both are floating point, or both are integers."""
    if stored == requested or (stored.is_floating_point and requested.is_floating_point):
        return
    if any(dtype.is_floating_point or dtype.is_complex or dtype is torch.bool for dtype in (stored, requested)):
        raise CastError(
            f"cannot load {stored} as {requested}", key=key, hint="load it without dtype and convert it yourself"
        )


class Targets:
    """The targets of a load. Each is a contiguous tensor on any device, and is filled entirely. Elements that are
    stored with another dtype are converted. ``key`` returns the name of a target in errors, by its number."""

    def __init__(
        self, key: Callable[[int], str], targets: Sequence[torch.Tensor], stored: Sequence[torch.dtype]
    ) -> None:
        if not all(target.is_contiguous() for target in targets):
            raise ValueError("what is filled by its address must have no gaps")
        self.key = key
        self._tensors = targets
        self._stored = stored
        self.address = np.array(
            [
                target.data_ptr() if target.is_cpu and target.dtype == dtype else -1
                for target, dtype in zip(targets, stored, strict=True)
            ],
            np.int64,
        )
        """The address of each target, or -1 if stored bytes cannot go there unconverted: the target is on a device, or
        has another dtype."""
        self._nbytes = np.array([t.numel() * d.itemsize for t, d in zip(targets, stored, strict=True)], np.int64)
        """The number of stored bytes that fill each target."""
        self.devices = devices_of(targets)
        numbers = {device: number for number, device in enumerate(self.devices)}
        self.device = np.array([-1 if target.is_cpu else numbers[target.device] for target in targets], np.int64)
        """The position of each target's device in ``devices``, or -1 for host memory."""
        self.inference = any(target.is_inference() for target in targets)
        """Whether some targets were made in ``torch.inference_mode()``. Operations of torch may change them only in a
        thread in this mode."""

    def check(self, target: Ints, start: Ints, nbytes: Ints) -> None:
        """Raises ValueError unless all of these ranges of stored bytes are within their targets. The three arrays have
        one element for each range."""
        if (start < 0).any() or (start + nbytes > self._nbytes[target]).any():
            raise ValueError("a range is longer than the memory that it goes to")

    def device_memory(self, target: int, start: int, nbytes: int) -> torch.Tensor | None:
        """Returns ``nbytes`` bytes of device memory from byte ``start`` of the target on, as a 1-D uint8 tensor.
        Returns None if the target is in host memory or has another dtype than the file."""
        tensor = self._tensors[target]
        if tensor.dtype != self._stored[target] or tensor.is_cpu:
            return None
        return byte_tensor(tensor)[start : start + nbytes]

    def to_device(self, copy: StridedCopy, first: int) -> ToDevice:
        """Returns ``copy`` as a copy from a staging buffer to a target on a device. ``first``: the byte of the buffer
        with which the source begins."""
        target, dtype = self._tensors[copy.target], self._stored[copy.target]
        if copy.run_bytes == target.numel() * dtype.itemsize:
            return ToDevice(first + copy.source, dtype, target)
        source_stride = copy.source_stride if copy.runs > 1 else 0
        return ToDevice(first + copy.source, dtype, self._rows(copy), source_stride)

    def put(self, copies: Copies, staged: Bytes) -> None:
        """Carries out ``copies`` from ``staged``, which has the bytes of the sources, to targets in host memory."""
        address = self.address[copies.target]
        is_converted, is_spaced = address < 0, copies.runs > 1
        for copy in copies.take(is_spaced & ~is_converted).rows():
            copy_spaced(int(self.address[copy.target]), copy, staged)
        single = ~is_spaced & ~is_converted
        put((address + copies.target_offset)[single], copies.run_bytes[single], copies.source[single], staged)
        for copy in copies.take(is_converted).rows():
            dtype = self._stored[copy.target]
            # A staging buffer begins with a page, so its elements are aligned.
            values = torch.from_numpy(staged[copy.source : copy.source + copy.source_bytes]).view(dtype)
            run_numel, source_stride = copy.run_bytes // dtype.itemsize, copy.source_stride // dtype.itemsize
            self._rows(copy).copy_(rows_of(values, copy.runs, run_numel, source_stride))

    def _rows(self, copy: StridedCopy) -> torch.Tensor:
        """Returns the elements of a target that ``copy`` fills, with a row for each run."""
        item_bytes = self._stored[copy.target].itemsize
        flat = self._tensors[copy.target].detach().reshape(-1)[copy.target_offset // item_bytes :]
        return rows_of(flat, copy.runs, copy.run_bytes // item_bytes, copy.target_stride // item_bytes)
