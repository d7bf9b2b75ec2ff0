"""The one module that knows devices: which there are, and when what was queued on them is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zckpt.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable


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
