"""Which devices can be used, and what is said of the others. ``test_device_path.py`` has what goes to them."""

from __future__ import annotations

import pytest
import torch

import zckpt
from zckpt.transfer.devices import check_device, check_devices, devices_of, wait_for_caller

HOST, META = torch.zeros(3), torch.zeros(3, device="meta")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_always_there(device: str) -> None:
    assert check_device(device) == check_device(torch.device(device)) == torch.device(device)


@pytest.mark.parametrize("device", ["xpu", "hpu:1", "nonsense", torch.device("xpu", 3)])
def test_what_is_not_there_is_named_with_what_is(device: torch.device | str) -> None:
    with pytest.raises(zckpt.DeviceError, match=f"cannot use the device {device}: (.|\n)*the devices there are: cpu"):
        check_device(device)


def test_memory_of_the_host_is_on_no_device() -> None:
    assert devices_of([HOST, META, HOST, META]) == (META.device,)
    assert check_devices([HOST]) == ()
    wait_for_caller(devices_of([HOST, META]))  # there is nothing to wait for


def test_what_has_no_bytes_cannot_be_written() -> None:
    with pytest.raises(zckpt.DeviceError, match=r"cannot use the device meta: .*no data"):
        check_devices([HOST, META])
