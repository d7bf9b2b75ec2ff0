"""Storages without memory: what torch's tensors stand on while their bytes are on disk.

A storage keeps its identity and its size, so all tensors and views on it stay as they are and can still be asked for
their shape, dtype and place. Whoever changes one of them gets an error of torch's. To read one ends the process: there
is nothing to be read, and torch does not look. So ``Away`` watches the calls that would read one, and refuses them.
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

HUGE_BYTES_MIN = 4 << 20
"""The least memory for which huge pages are asked: smaller memory may be a part of malloc's heap, whose pages have
other users too."""


def check_supported() -> None:
    """Raises UnsupportedError where torch is too old, or the system is not Linux."""
    if not hasattr(os, "O_TMPFILE"):
        raise UnsupportedError("zckpt.offload needs Linux")
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        raise UnsupportedError(f"zckpt.offload needs torch 2.13 or newer; this is torch {torch.__version__}")


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a 1-D uint8 tensor that shares them."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_movable(storage: torch.UntypedStorage, locked: Collection[tuple[int, int]]) -> bool:
    """Whether it has bytes, no other process shares them, and torch can free them. ``locked``: the memory that the
    system has locked; what torch has not pinned of that, only DeepSpeed can free."""
    if storage.nbytes() == 0 or storage.device.type == "meta":
        return False
    return not _on_host(storage) or (not storage.is_shared() and (is_pinned(storage) or not is_locked(storage, locked)))


def is_locked(storage: torch.UntypedStorage, locked: Collection[tuple[int, int]]) -> bool:
    """Whether it begins in one of these ranges of addresses."""
    return any(first <= storage.data_ptr() < stop for first, stop in locked)


def is_pinned(storage: torch.UntypedStorage) -> bool:
    return _on_host(storage) and whole(storage).is_pinned()


def take_memory(storage: torch.UntypedStorage) -> None:
    """Frees the memory of a storage."""
    nothing: Any = torch._C._construct_storage_from_data_pointer(0, storage.device, storage.nbytes())
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(nothing, 0, (0,), (1,))
    torch._C._set_throw_on_mutable_data_ptr(empty)
    _swap(storage, nothing)  # and with `nothing` the memory goes


def fresh_memory(storage: torch.UntypedStorage, *, pinned: bool) -> torch.Tensor:
    """Uninitialised memory for a storage, like that which was taken, as a 1-D uint8 tensor. Raises DeviceError."""
    if pinned:
        return pinned_memory(storage.nbytes())
    memory = device_memory((storage.nbytes(),), torch.uint8, storage.device)
    if memory.is_cpu and memory.nbytes >= HUGE_BYTES_MIN:
        linux.ask_for_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory


def give_memory(storage: torch.UntypedStorage, memory: torch.Tensor) -> None:
    """Puts a storage on ``memory``, which is as long."""
    _swap(storage, memory.untyped_storage())


def give_back(devices: Collection[torch.device]) -> None:
    """Gives what was freed back to the system and to these devices. The allocators would keep it for themselves."""
    linux.trim_heap()
    give_back_memory(devices)


def _swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchanges the memory of two storages, which are on one device and equally long."""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def _on_host(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"
