"""The memory that a load allocates for a tensor: its address, the size of its pages, and the size of its storage."""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.states import write_state
from zckpt.plan.reads import STRAIGHT_BYTES_MIN
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.system.linux import HUGE_BYTES_MIN, HUGE_PAGE_BYTES
from zckpt.transfer.memory import SHARED_BYTES, fresh_tensor, fresh_tensors
from zckpt.transfer.staging import StagingPool

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


def test_small_tensors_that_are_adjacent_in_a_file_are_adjacent_in_memory() -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.float32, torch.uint8] * 100
    shapes = [(number % 7, 3 * number) for number in range(len(dtypes))]
    nbytes = [shape[0] * shape[1] * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    offsets = (12288 + np.cumsum(nbytes) - nbytes).tolist()
    tensors = fresh_tensors(shapes, dtypes, torch.device("cpu"), offsets)
    for number, tensor in enumerate(tensors):
        assert tensor.shape == shapes[number]
        assert tensor.dtype == dtypes[number]
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == nbytes[number]
        assert tensor.data_ptr() % tensor.itemsize == 0
        tensor.fill_(number % 200)
    assert all((tensor == number % 200).all() for number, tensor in enumerate(tensors))

    equal = fresh_tensors([(5000,)] * 500, [torch.float32] * 500, torch.device("cpu"), range(4096, 10004096, 20000))
    addresses = np.array([tensor.data_ptr() for tensor in equal])
    apart = np.flatnonzero(np.diff(addresses) != 20000)
    assert len(apart) == 500 * 20000 // SHARED_BYTES
    assert (addresses[apart + 1] % HUGE_PAGE_BYTES == (4096 + (apart + 1) * 20000) % PAGE_BYTES).all()


@pytest.mark.linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_tensor_that_is_kept_keeps_little_memory(dtype: torch.dtype) -> None:
    numel, count = 20000 // dtype.itemsize, 32 * MIB // 20000
    before = huge_and_all_bytes()[1]
    tensors = fresh_tensors([(numel,)] * count, [dtype] * count, torch.device("cpu"), range(0, 20000 * count, 20000))
    for tensor in tensors:
        tensor.fill_(1)
    assert huge_and_all_bytes()[1] - before > 31 * MIB
    kept = tensors[count // 2]
    del tensors, tensor
    assert huge_and_all_bytes()[1] - before < 2 * SHARED_BYTES
    assert (kept == 1).all()
    another = fresh_tensors([(numel,)] * count, [dtype] * count, torch.device("cpu"), [0] * count)
    for tensor in another:
        tensor.fill_(2)
    assert (kept == 1).all()


def test_a_tensor_without_dimensions_has_one_element() -> None:
    assert fresh_tensor((), torch.float32, "cpu").shape == ()


@pytest.mark.skipif(
    sys.platform != "linux" or not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(),
    reason="needs huge pages on request",
)
def test_large_tensors_are_in_huge_pages_without_wasting_memory() -> None:
    fresh_tensor((8 * MIB,), torch.uint8, "cpu").fill_(1)  # torch starts its threads, which need memory of their own
    before = huge_and_all_bytes()
    for _ in range(2):  # malloc would give the second tensors memory of the first ones, with small pages in it
        tensors = [fresh_tensor((nbytes,), torch.uint8, "cpu", 64).fill_(1) for nbytes in range(5 * MIB, 9 * MIB, MIB)]
        in_huge_pages = sum(tensor.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES for tensor in tensors)
        huge, resident = huge_and_all_bytes() - before
        assert huge >= in_huge_pages
        assert resident < sum(tensor.nbytes for tensor in tensors) + MIB
        del tensors
        # Only the memory is compared, because the system makes huge pages of other memory whenever it likes.
        _, resident = huge_and_all_bytes() - before
        assert resident < MIB


def huge_and_all_bytes() -> np.ndarray:
    """Returns how many bytes of this process are in huge pages, and how many are in memory at all."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return np.array([int(re.findall(rf"{name}: +([0-9]+) kB", text)[0]) << 10 for name in ("AnonHugePages", "Rss")])


@pytest.mark.linux
def test_staging_buffers_take_no_memory_that_was_used_before() -> None:
    """Memory that malloc has kept is in small pages, even if the system has huge ones."""
    for _ in range(2):  # malloc keeps the memory of the second tensor
        torch.empty(20 * MIB, dtype=torch.uint8).fill_(1)
    pool = StagingPool(8 * MIB)
    with pool.work(), pool.lend() as stage:
        before = huge_and_all_bytes()
        stage.tensor.fill_(1)
        _, resident = huge_and_all_bytes() - before
    assert resident >= 8 * MIB


@pytest.mark.linux
def test_a_large_tensor_needs_at_most_one_mapping() -> None:
    """The system limits the number of mappings of memory in a process."""
    before = mappings()
    tensors = [fresh_tensor((4 * MIB + number,), torch.uint8, "cpu", number) for number in range(500)]
    assert mappings() - before <= len(tensors) + 5
    del tensors[::2]
    assert mappings() - before <= len(tensors) + 5
    tensors.clear()
    assert mappings() - before <= 5


@pytest.mark.linux
def test_the_mapping_of_a_large_tensor_ends_with_it() -> None:
    """The system may later make a huge page of small ones, but only within a mapping. If the mapping went on after the
    tensor, the rest of such a page would be wasted."""
    tensors = [fresh_tensor((5 * MIB + number,), torch.uint8, "cpu", 64).fill_(1) for number in range(9)]
    lines = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [int(last, 16) for _, last in lines]
    for tensor in tensors:
        assert -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE in ends


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_if_the_system_refuses_a_mapping_malloc_provides_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.mmap", mock.Mock(side_effect=OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))))
    tensor = fresh_tensor((5 * MIB,), torch.uint8, "cpu", 64).fill_(3)
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 64
    assert (tensor == 3).all()


def test_torch_saves_the_bytes_of_a_loaded_tensor_and_nothing_else(tmp_path: Path) -> None:
    state = {"large": torch.randn(2 * MIB), "small": torch.randn(3)}
    write_state(tmp_path / "c", 1, state, parts=["master"])
    loaded = zckpt.open(tmp_path / "c").load()
    torch.save(loaded, tmp_path / "saved.pt")
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert (tmp_path / "saved.pt").stat().st_size < nbytes + 4096
