"""What Linux alone has, where a page of the kernel's is not 4096 bytes long, and where it refuses."""

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

LARGE = 1 << 16
"""The size in bytes of a page of memory on some processors, such as those of ARM."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """A C library of a Linux with such pages."""
    kernel = mock.Mock()
    kernel.fstatfs.return_value = 0
    kernel.syscall.return_value = -1
    monkeypatch.setattr(linux, "libc", kernel)
    monkeypatch.setattr(mmap, "PAGESIZE", LARGE)
    return kernel


def test_cached_bytes_are_counted_in_the_kernel_s_pages(tmp_path: Path, kernel: mock.Mock) -> None:
    def cachestat(number: int, fd: int, span: Any, found: Any, flags: int) -> int:
        assert (number, list(span)) == (linux.CACHESTAT, [5 * LARGE + 7, 3 * LARGE])
        found[0] = 4
        return 0

    kernel.syscall.side_effect = cachestat
    assert cached_bytes(tmp_path, 5 * LARGE + 7, 3 * LARGE) == 4 * LARGE


def test_an_older_kernel_tells_by_the_page_too(tmp_path: Path, kernel: mock.Mock) -> None:
    """It writes a byte for each page, and not one more than there is room for."""

    def mincore(address: ctypes.c_void_p, length: ctypes.c_size_t, vector: ctypes.c_void_p) -> None:
        assert length.value == 3 * LARGE + 7, "from the page on in which it begins"
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


def test_whole_pages_alone_are_given_back(kernel: mock.Mock) -> None:
    linux.free_lazily(10 * LARGE + 4096, 3 * LARGE)
    (address, nbytes, advice), _ = kernel.madvise.call_args
    assert (address.value, nbytes.value, advice) == (11 * LARGE, 2 * LARGE, linux.MADV_FREE)
    kernel.madvise.reset_mock()
    linux.free_lazily(10 * LARGE + 4096, LARGE)
    kernel.madvise.assert_not_called()


def test_what_is_given_back_is_the_callers_and_no_more() -> None:
    """By the kernel that is here."""
    room = mmap.mmap(-1, 4 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room[:] = b"\1" * len(room)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    with mock.patch.object(linux, "MADV_FREE", mmap.MADV_DONTNEED):  # at once, so that it shows
        linux.free_lazily(address + 1, 3 * mmap.PAGESIZE)
    kept = mmap.PAGESIZE * b"\1"
    assert room[:] == kept + bytes(2 * mmap.PAGESIZE) + kept
