"""What goes past the host's memory, and what does not: here that memory itself stands in for the device's.

``test_gpu.py`` has the same with a GPU and kvikio.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from states import write_state
from zckpt.io import gpudirect, memory
from zckpt.io.local import LocalReader
from zckpt.io.memory import host_bytes

if TYPE_CHECKING:
    from pathlib import Path

NUMEL = {"a": 3_000_001, "b": 7, "c": 5_000_003, "d": 1}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(memory, "wait_for_caller", lambda device: None)
    monkeypatch.setattr(zckpt.checkpoint, "cuda_device", lambda tensors: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(LocalReader, "is_cached", lambda *args: False)


@pytest.fixture
def direct(device: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every read past the host's memory."""
    found: list[int] = []

    def read_to_device(reader: LocalReader, path: str, target: torch.Tensor, offset: int) -> int:
        with reader.file(path) as fd:
            found.append(os.preadv(fd, [host_bytes(target)], offset))
        return found[-1]

    monkeypatch.setattr(LocalReader, "read_to_device", read_to_device)
    return found


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two ranks' pieces; ``b`` and ``d`` lie between the large ones."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(numel) for name, numel in NUMEL.items()}
    write_state(tmp_path / "checkpoint", 2, tensors, parts=["master"], block_bytes=1 << 20)
    return tmp_path / "checkpoint", tensors


def check(loaded: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, tensor in tensors.items():
        assert torch.equal(loaded[f"master/{name}"], tensor.to(dtype))


def test_all_of_it_without_digests(written: tuple[Path, dict[str, torch.Tensor]], direct: list[int]) -> None:
    path, tensors = written
    check(zckpt.open(path).load(verify=False), tensors, torch.float32)
    assert sum(direct) == 4 * sum(NUMEL.values())


@pytest.mark.parametrize(("dtype", "verify"), [(torch.float32, True), (torch.bfloat16, False)])
def test_not_what_is_checked_or_converted(
    written: tuple[Path, dict[str, torch.Tensor]], direct: list[int], dtype: torch.dtype, verify: bool
) -> None:
    path, tensors = written
    check(zckpt.open(path).load(dtype=dtype, verify=verify), tensors, dtype)
    assert not direct


def test_not_what_is_cached(
    written: tuple[Path, dict[str, torch.Tensor]], direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = written
    monkeypatch.setattr(LocalReader, "is_cached", lambda *args: True)
    check(zckpt.open(path).load(verify=False), tensors, torch.float32)
    assert not direct


def test_a_store_that_cannot(
    written: tuple[Path, dict[str, torch.Tensor]], device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(gpudirect, "_kvikio", lambda: asked.append(1))  # and returns None: it is not there
    path, tensors = written
    check(zckpt.open(path).load(verify=False), tensors, torch.float32)
    assert asked


def test_a_driver_that_fails(tmp_path: Path, device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))

    class CuFile:
        """As kvikio's: by a path, with errors that are RuntimeError."""

        def __init__(self, path: str) -> None:
            self.fd = os.open(path, os.O_RDONLY)

        def __enter__(self) -> CuFile:
            return self

        def __exit__(self, *error: object) -> None:
            os.close(self.fd)

        def raw_read(self, target: torch.Tensor, nbytes: int, offset: int) -> int:
            got = os.preadv(self.fd, [host_bytes(target)[:nbytes]], offset)
            if got < nbytes:
                raise RuntimeError("EOF")
            return got

    monkeypatch.setattr(gpudirect, "_kvikio", lambda: SimpleNamespace(CuFile=CuFile))
    monkeypatch.setattr(gpudirect, "wait_for_caller", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    reader, target = LocalReader(str(tmp_path)), torch.zeros(40, dtype=torch.uint8)
    assert reader.read_to_device("file", target, 17) == 40
    assert target.tolist() == list(range(17, 57))
    with pytest.raises(zckpt.StorageError, match=r"GPUDirect Storage: EOF .*file .*file, bytes \[61, 101\)"):
        reader.read_to_device("file", target, 61)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(zckpt.FormatError, match="F002"):
        reader.read_to_device("link", target, 0)


def test_a_file_that_has_become_too_short(
    written: tuple[Path, dict[str, torch.Tensor]], direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written
    checkpoint = zckpt.open(path)
    monkeypatch.setattr(checkpoint.contents, "check_sizes", lambda infos: None)  # as if it happened just after
    file = path / checkpoint["master/c"].files[1]
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(zckpt.FormatError, match=r"the file ends at byte .*rule F003.*rank-00001.*key master/c"):
        checkpoint.load(verify=False)
