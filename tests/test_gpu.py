"""The device path, where there is a GPU: tensors through pinned memory, both ways, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from states import write_state
from zckpt.io import gpudirect
from zckpt.io.local import LocalReader

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

SHAPES = {"matrix": (1500, 2100), "vector": (63,), "one": (1,), "scalar": (), "empty": (0, 3)}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}


def test_device_tensors_come_back_as_they_were(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_state(tmp_path / "checkpoint", 3, tensors)
    checkpoint = zckpt.open(tmp_path / "checkpoint")
    for device in ("cuda", "cpu"):
        loaded = checkpoint.load(device=device)
        for name, tensor in tensors.items():
            assert loaded[f"master/{name}"].device.type == device
            assert torch.equal(loaded[f"master/{name}"], tensor.to(device))


def test_conversion_on_the_way(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_state(tmp_path / "checkpoint", 2, tensors)
    loaded = zckpt.open(tmp_path / "checkpoint").load("master/*", device="cuda", dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[f"master/{name}"], tensor.to(torch.bfloat16))


def test_gpudirect_storage(tmp_path: Path) -> None:
    """Without digests, from the disk straight to the device; so do pieces that begin anywhere in a page."""
    if not gpudirect.is_available():
        pytest.skip("no kvikio, or no driver for GPUDirect Storage")
    numels = {"a": 3_000_001, "b": 7, "c": 5_000_003}
    tensors = {name: torch.randn(numel, device="cuda") for name, numel in numels.items()}
    write_state(tmp_path / "checkpoint", 2, tensors, block_bytes=1 << 20)
    checkpoint = zckpt.open(tmp_path / "checkpoint")  # written past the page cache: nothing of it is there
    direct: list[int] = []
    read = LocalReader.read_to_device

    def counted(reader: LocalReader, path: str, target: torch.Tensor, offset: int) -> int:
        direct.append(read(reader, path, target, offset))
        return direct[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalReader, "read_to_device", counted)
        loaded = checkpoint.load(device="cuda", verify=False)
    assert sum(direct) == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert torch.equal(loaded[f"master/{name}"], tensor)


def test_loading_waits_for_what_the_memory_was_used_for(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The allocator hands out memory that a queued kernel may still write; the loaded values must win."""
    write_state(tmp_path / "checkpoint", 2, tensors)
    checkpoint = zckpt.open(tmp_path / "checkpoint")
    for _ in range(5):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 64
        scratch = torch.empty(1500, 2100, device="cuda")
        scratch.copy_(busy[:1500, :2100])
        del scratch
        loaded = checkpoint.load("master/matrix", device="cuda")["master/matrix"]
        assert torch.equal(loaded, tensors["matrix"])
