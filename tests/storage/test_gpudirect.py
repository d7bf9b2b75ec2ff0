"""Which reads go straight to a device, past the host's memory, and which do not. The device is the simulated
accelerator, for which the host does these reads."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.states import write_state
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.storage import gpudirect
from zckpt.storage.local_reader import LocalReader
from zckpt.transfer.memory import host_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUMEL = {"a": 3_000_001, "b": 7, "c": 5_000_003, "d": 1}


@contextmanager
def direct(cached: bool = False) -> Iterator[list[int]]:
    """Simulates GPUDirect Storage. Yields a list that collects the number of bytes of each read that goes straight to
    the device."""
    lengths: list[int] = []

    def read_to_device(reader: LocalReader, path: str, target: torch.Tensor, offset: int) -> int:
        assert target.device == torch.device("sim:0")
        with reader.file(path) as fd:
            content = os.pread(fd, target.nbytes, offset)
        target[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        lengths.append(len(content))
        return len(content)

    with (
        mock.patch.object(LocalReader, "read_to_device", read_to_device),
        mock.patch.object(LocalReader, "is_cached", return_value=cached),
    ):
        yield lengths


def write(path: Path) -> dict[str, torch.Tensor]:
    """Writes the pieces of two ranks. The small tensors ``b`` and ``d`` are stored between the large ones."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(numel) for name, numel in NUMEL.items()}
    write_state(path, 2, tensors, parts=["master"], block_bytes=1 << 20)
    return tensors


def check(loaded: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, tensor in tensors.items():
        assert loaded[f"master/{name}"].device == torch.device("sim:0")
        assert torch.equal(loaded[f"master/{name}"].cpu(), tensor.to(dtype))


@pytest.mark.sim
def test_unverified_loads_go_straight_to_the_device(tmp_path: Path) -> None:
    tensors = write(tmp_path / "c")
    with direct() as reads:
        check(zckpt.open(tmp_path / "c").load(device="sim", verify=False), tensors, torch.float32)
    assert sum(reads) == 4 * sum(NUMEL.values())


@pytest.mark.sim
@pytest.mark.parametrize(
    ("dtype", "verify", "cached"),
    [(torch.float32, True, False), (torch.bfloat16, False, False), (torch.float32, False, True)],
    ids=["checked", "converted", "cached"],
)
def test_checked_converted_or_cached_loads_are_staged(
    tmp_path: Path, dtype: torch.dtype, verify: bool, cached: bool
) -> None:
    tensors = write(tmp_path / "c")
    with direct(cached) as reads:
        check(zckpt.open(tmp_path / "c").load(device="sim", dtype=dtype, verify=verify), tensors, dtype)
    assert not reads


@pytest.mark.sim
def test_a_read_that_also_fills_host_memory_is_staged(tmp_path: Path) -> None:
    """If some bytes of a read go to the host, the whole read goes through a staging buffer."""
    tensors = write(tmp_path / "c")
    checkpoint = zckpt.open(tmp_path / "c")
    out = {
        f"master/{name}": torch.empty(NUMEL[name], device=device) for name, device in {"a": "sim", "b": "cpu"}.items()
    }
    with direct() as reads:
        checkpoint.load(out=out, verify=False)
    assert not reads
    for name in ("a", "b"):
        assert torch.equal(out[f"master/{name}"].cpu(), tensors[name])


@pytest.mark.sim
def test_without_gpudirect_a_load_is_staged(tmp_path: Path) -> None:
    """kvikio is asked only about CUDA devices. Without kvikio or its driver, no device has GPUDirect Storage."""
    tensors = write(tmp_path / "c")
    with mock.patch.object(gpudirect, "_kvikio", return_value=None) as kvikio:
        check(zckpt.open(tmp_path / "c").load(device="sim", verify=False), tensors, torch.float32)
        kvikio.assert_not_called()
        assert not gpudirect.serves(torch.device("cuda:0"))
        kvikio.assert_called_once_with()


@pytest.mark.sim
def test_a_file_that_has_become_too_short(tmp_path: Path) -> None:
    write(tmp_path / "c")
    checkpoint = zckpt.open(tmp_path / "c")
    file = tmp_path / "c" / checkpoint["master/c"].files[1]
    # The sizes of files are not checked here, as if the file became too short just after the check.
    with (
        direct(),
        mock.patch.object(loader_of(checkpoint).contents, "check_sizes", return_value=0),
    ):
        os.truncate(file, file.stat().st_size - 1000)
        with pytest.raises(zckpt.FormatError, match=r"F003.*rank-00001.*key master/c"):
            checkpoint.load(device="sim", verify=False)


def test_a_driver_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))

    class CuFile:
        """Replaces kvikio's class of the same name, which opens a path and raises RuntimeError."""

        def __init__(self, path: str) -> None:
            self.fd = os.open(path, os.O_RDONLY)

        def __enter__(self) -> CuFile:
            return self

        def __exit__(self, *error: object) -> None:
            os.close(self.fd)

        def raw_read(self, target: torch.Tensor, nbytes: int, offset: int) -> int:
            read_bytes = os.preadv(self.fd, [host_bytes(target)[:nbytes]], offset)
            if read_bytes < nbytes:
                raise RuntimeError("EOF")
            return read_bytes

    monkeypatch.setattr(gpudirect, "_kvikio", lambda: SimpleNamespace(CuFile=CuFile))
    monkeypatch.setattr(gpudirect, "serves", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    reader, target = LocalReader(str(tmp_path)), torch.zeros(40, dtype=torch.uint8)
    assert reader.read_to_device("file", target, 17) == 40
    assert target.tolist() == list(range(17, 57))
    with pytest.raises(zckpt.StorageError, match=r"EOF .*file, bytes \[61, 101\)"):
        reader.read_to_device("file", target, 61)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(zckpt.FormatError, match="F002"):
        reader.read_to_device("link", target, 0)
