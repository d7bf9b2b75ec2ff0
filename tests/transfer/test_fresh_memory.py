"""The memory that a load allocates for a tensor: its address, the size of its pages, and the size of its storage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zckpt
from tests.support.states import write_state
from zckpt.plan.coalesce import STRAIGHT_BYTES_MIN
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.system.linux import HUGE_BYTES_MIN, HUGE_PAGE_BYTES
from zckpt.transfer.memory import fresh_tensor

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 8, 5000, STRAIGHT_BYTES_MIN, 4 * MIB, 5 * MIB + 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("file_offset", [0, 64, 3 * PAGE_BYTES - 8, 12345])
def test_the_address_fits_the_file_and_the_storage_fits_the_tensor(
    nbytes: int, dtype: torch.dtype, file_offset: int
) -> None:
    tensor = fresh_tensor((nbytes // dtype.itemsize,), dtype, "cpu", file_offset)
    assert tensor.nbytes == tensor.untyped_storage().nbytes() == nbytes
    assert tensor.storage_offset() == 0
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % dtype.itemsize == 0
    if nbytes >= STRAIGHT_BYTES_MIN:
        within = file_offset % PAGE_BYTES if file_offset % dtype.itemsize == 0 else 0
        alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_BYTES_MIN else PAGE_BYTES
        assert tensor.data_ptr() % alignment == within
    assert (tensor.fill_(3) == 3).all()


def test_a_tensor_without_dimensions_has_one_element() -> None:
    assert fresh_tensor((), torch.float32, "cpu").shape == ()


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="needs transparent huge pages"
)
def test_all_but_the_last_bytes_of_large_tensors_are_in_huge_pages() -> None:
    """A new process allocates the tensors, because in this process malloc may give them memory that was used before.
    The tensors are so large that malloc asks the system for new memory."""
    code = """
import re, torch
from zckpt.transfer.memory import fresh_tensor

def huge_kib():
    return int(re.search(r"AnonHugePages: +([0-9]+) kB", open("/proc/self/smaps_rollup").read())[1])

before = huge_kib()
tensors = [fresh_tensor((33 << 20,), torch.uint8, "cpu", 64).fill_(1) for _ in range(8)]
print(huge_kib() - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) << 10 >= 8 * (33 * MIB // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)


def test_torch_saves_the_bytes_of_a_loaded_tensor_and_nothing_else(tmp_path: Path) -> None:
    state = {"large": torch.randn(2 * MIB), "small": torch.randn(3)}
    write_state(tmp_path / "c", 1, state, parts=["master"])
    loaded = zckpt.open(tmp_path / "c").load()
    torch.save(loaded, tmp_path / "saved.pt")
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert (tmp_path / "saved.pt").stat().st_size < nbytes + 4096
