"""Which devices can be used, and what errors say about the others. ``test_copies_to_devices.py`` tests copies to
devices."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.states import write_state
from zckpt.transfer.devices import check_device, check_devices, devices_of, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOST, META = torch.zeros(3), torch.zeros(3, device="meta")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_cpu_and_meta_are_always_accepted(device: str) -> None:
    assert check_device(device) == check_device(torch.device(device)) == torch.device(device)


@pytest.mark.parametrize("device", ["xpu", "hpu:1", "nonsense", torch.device("xpu", 3)])
def test_a_missing_device_is_named_with_those_that_exist(device: torch.device | str) -> None:
    with pytest.raises(zckpt.DeviceError, match=f"device {device}: (.|\n)*there are: cpu"):
        check_device(device)


def test_memory_of_the_host_is_on_no_device() -> None:
    assert devices_of([HOST, META, HOST, META]) == (META.device,)
    assert check_devices([HOST]) == ()
    synchronize(devices_of([HOST, META]))  # does nothing, because there is nothing to wait for


def test_what_has_no_bytes_cannot_be_written() -> None:
    with pytest.raises(zckpt.DeviceError, match=r"device meta: .*no data"):
        check_devices([HOST, META])


LOADS: dict[str, Callable[[zckpt.Checkpoint, str], object]] = {
    "load": lambda checkpoint, device: checkpoint.load(device=device),
    "iter": lambda checkpoint, device: dict(checkpoint.iter(device=device)),
    "load_slice": lambda checkpoint, device: {"part": checkpoint.load_slice("master/big", slice(3, 7), device=device)},
    "load_pieces": lambda checkpoint, device: checkpoint.load_pieces(1, device=device),
    "state_dict": lambda checkpoint, device: checkpoint.state_dict(device=device),
}


@pytest.mark.parametrize("load", LOADS)
def test_a_load_to_what_is_not_there_is_refused_before_anything_is_read(tmp_path: Path, load: str) -> None:
    write_state(tmp_path / "c")
    checkpoint = zckpt.open(tmp_path / "c")
    before = replace(checkpoint.io)
    with pytest.raises(zckpt.DeviceError, match="there are: cpu"):
        LOADS[load](checkpoint, "xpu")
    assert checkpoint.io == before


@pytest.mark.parametrize("load", LOADS)
def test_nothing_is_read_for_tensors_without_bytes(tmp_path: Path, load: str) -> None:
    """``load_pieces`` reads the index, because its keys say where the pieces begin."""
    write_state(tmp_path / "c", parts=("master", "exp_avg"), buffers={"mean": [torch.ones(3)] * 3})
    expected = LOADS[load](zckpt.open(tmp_path / "c"), "cpu")
    for file in (tmp_path / "c").rglob("*.safetensors"):
        os.truncate(file, 0)
    checkpoint = zckpt.open(tmp_path / "c")
    before = replace(checkpoint.io)
    loaded = LOADS[load](checkpoint, "meta")
    assert isinstance(loaded, dict)
    assert isinstance(expected, dict)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in loaded.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in expected.items()
    }
    assert all(tensor.is_meta for tensor in loaded.values())
    assert load == "load_pieces" or checkpoint.io == before
    assert checkpoint.io.data_bytes == 0


def test_tensors_without_bytes_among_others(tmp_path: Path) -> None:
    """A load leaves tensors without bytes out, but reports progress for all tensors."""
    full = write_state(tmp_path / "c", 2, {"a": (1000,), "b": (3000,)}, parts=("master",)).full
    checkpoint = zckpt.open(tmp_path / "c")
    out = {"master/a": torch.empty(1000), "master/b": torch.empty(3000, dtype=torch.float16, device="meta")}
    reported: list[int] = []
    progress = SimpleNamespace(
        begin=lambda action, nbytes: reported.append(-nbytes), advance=reported.append, end=lambda: None
    )
    loaded = checkpoint.load(out=out, progress=progress)
    assert torch.equal(loaded["master/a"], full["master/a"])
    assert loaded["master/b"] is out["master/b"]
    assert sum(reported) == 0
    assert checkpoint.io.data_bytes < 4 * 3000


def test_targets_have_to_be_on_a_device_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path / "c")
    checkpoint = zckpt.open(tmp_path / "c")
    before = replace(checkpoint.io)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as if tensors were on a device that cannot be read
    monkeypatch.setattr(torch.Tensor, "cpu", mock.Mock(side_effect=RuntimeError("out of order")))
    with pytest.raises(zckpt.DeviceError, match="device cpu: out of order"):
        checkpoint.load(out={"master/one": torch.empty(1)})
    assert checkpoint.io == before
