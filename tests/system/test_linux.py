"""The calls that only Linux has, some of them on a kernel whose pages are longer than 4096 bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from zckpt.system import linux

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
LARGE = 1 << 16
"""The size in bytes of a page of memory on some processors, such as those of ARM."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Returns a mock of the C library of a Linux whose pages have ``LARGE`` bytes."""
    kernel = mock.Mock()
    kernel.fstatfs.return_value = 0
    kernel.syscall.return_value = -1
    monkeypatch.setattr(linux, "libc", kernel)
    monkeypatch.setattr(mmap, "PAGESIZE", LARGE)
    return kernel


def test_cached_bytes_are_counted_in_the_kernel_s_pages(tmp_path: Path, kernel: mock.Mock) -> None:
    def cachestat(number: int, fd: int, span: Any, counts: Any, flags: int) -> int:
        assert (number, list(span)) == (linux.CACHESTAT, [5 * LARGE + 7, 3 * LARGE])
        counts[0] = 4
        return 0

    kernel.syscall.side_effect = cachestat
    assert cached_bytes(tmp_path, 5 * LARGE + 7, 3 * LARGE) == 4 * LARGE


def test_an_older_kernel_counts_cached_bytes_in_its_pages_too(tmp_path: Path, kernel: mock.Mock) -> None:
    """The call mincore writes a byte for each page, and the buffer has room for exactly these bytes."""

    def mincore(address: ctypes.c_void_p, length: ctypes.c_size_t, vector: ctypes.c_void_p) -> None:
        assert length.value == 3 * LARGE + 7, "the range begins with a page"
        assert vector.value is not None
        ctypes.memmove(vector.value, bytes([1, 0, 1, 1]), -(-length.value // LARGE))

    kernel.mincore.side_effect = mincore
    assert cached_bytes(tmp_path, 5 * LARGE + 7, 3 * LARGE) == 3 * LARGE


def cached_bytes(directory: Path, offset: int, nbytes: int) -> int:
    (directory / "file").write_bytes(bytes(9 * LARGE))
    fd = os.open(directory / "file", os.O_RDONLY)
    try:
        return linux.cached_bytes(fd, offset, nbytes)
    finally:
        os.close(fd)


def test_only_whole_pages_are_given_back(kernel: mock.Mock) -> None:
    linux.free_lazily(10 * LARGE + 4096, 3 * LARGE)
    (address, nbytes, advice), _ = kernel.madvise.call_args
    assert (address.value, nbytes.value, advice) == (11 * LARGE, 2 * LARGE, linux.MADV_FREE)
    kernel.madvise.reset_mock()
    linux.free_lazily(10 * LARGE + 4096, LARGE)
    kernel.madvise.assert_not_called()


def test_the_kernel_of_this_machine_takes_back_only_the_pages_within_the_range() -> None:
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"\1" * len(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with mock.patch.object(linux, "MADV_FREE", mmap.MADV_DONTNEED):  # which takes the pages back at once
        linux.free_lazily(address + 1, 3 * mmap.PAGESIZE)
    page = mmap.PAGESIZE * b"\1"
    assert memory[:] == page + bytes(2 * mmap.PAGESIZE) + page
