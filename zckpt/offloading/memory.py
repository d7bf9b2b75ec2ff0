"""Storages without memory: the storages of torch's tensors while their bytes are on disk.

Such a storage keeps its identity and its size, so all tensors and views of it stay as they are, and still tell their
shape, dtype and device. To change one of them is an error of torch. To read one ends the process, because torch does
not notice that there is no memory. So ``MovedStorages`` watches the calls that would read one, and refuses them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from zckpt.errors import UnsupportedError
from zckpt.system import linux
from zckpt.transfer.devices import device_memory, give_back_memory, pinned_memory

if TYPE_CHECKING:
    from collections.abc import Collection


def check_supported() -> None:
    """Raises UnsupportedError if torch is too old, or if the system is not Linux."""
    if not hasattr(os, "O_TMPFILE"):
        raise UnsupportedError("zckpt.offload needs Linux")
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        raise UnsupportedError(f"zckpt.offload needs torch 2.13 or newer; this is torch {torch.__version__}")


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns all bytes of a storage as a 1-D uint8 tensor that shares them."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_movable(storage: torch.UntypedStorage, locked: Collection[tuple[int, int]]) -> bool:
    """Returns whether a storage has bytes, no other process shares them, and torch can free them. ``locked`` has the
    memory that the system has locked. If torch has not pinned such memory itself, only DeepSpeed can free it."""
    if storage.nbytes() == 0 or storage.device.type == "meta":
        return False
    return not _on_host(storage) or (not storage.is_shared() and (is_pinned(storage) or not is_locked(storage, locked)))


def is_locked(storage: torch.UntypedStorage, locked: Collection[tuple[int, int]]) -> bool:
    """Returns whether a storage begins in one of these ranges of addresses."""
    return any(first <= storage.data_ptr() < stop for first, stop in locked)


def is_pinned(storage: torch.UntypedStorage) -> bool:
    return _on_host(storage) and whole(storage).is_pinned()


def take_memory(storage: torch.UntypedStorage) -> torch.Tensor:
    """Takes the memory away from a storage. Returns it as a 1-D uint8 tensor. The memory is freed with this tensor."""
    nothing: Any = torch._C._construct_storage_from_data_pointer(0, storage.device, storage.nbytes())
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(nothing, 0, (0,), (1,))
    torch._C._set_throw_on_mutable_data_ptr(empty)
    _swap(storage, nothing)
    return whole(nothing)


def fresh_memory(storage: torch.UntypedStorage, *, pinned: bool) -> torch.Tensor:
    """Returns uninitialised memory for a storage, of the kind that was freed, as a 1-D uint8 tensor. Raises
    DeviceError."""
    if pinned:
        return pinned_memory(storage.nbytes())
    # The memory comes from torch's own allocator, like the memory that was freed. `fresh_tensor`, which loads use, will
    # not do: torch may resize the storage later, and it can only resize memory of its own allocator.
    memory = device_memory((storage.nbytes(),), torch.uint8, storage.device)
    if memory.is_cpu and memory.nbytes >= linux.HUGE_BYTES_MIN:
        linux.ask_for_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory


def give_memory(storage: torch.UntypedStorage, memory: torch.Tensor) -> None:
    """Gives ``memory`` to a storage. It is as long as the storage."""
    _swap(storage, memory.untyped_storage())


def give_back(devices: Collection[torch.device]) -> None:
    """Returns freed memory to the system and to these devices. Otherwise, the allocators would keep it for
    themselves."""
    linux.trim_heap()
    give_back_memory(devices)


def _swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchanges the memory of two storages, which are on one device and of equal length."""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def _on_host(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"
