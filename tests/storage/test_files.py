"""Reads of files outside of checkpoints, such as swap files, with and without direct I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from zckpt.errors import StorageError
from zckpt.storage import files
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.files import read_from
from zckpt.system import linux
from zckpt.transfer.memory import aligned

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = np.random.default_rng(0).integers(0, 256, 20 * PAGE_BYTES + 77, np.uint8).tobytes()


def room_for(offset: int, nbytes: int) -> np.ndarray:
    """Returns ``nbytes`` of memory. It begins at the same place in a page of memory as ``offset`` does in a page of a
    file."""
    first = offset % PAGE_BYTES
    room = torch.zeros(first + nbytes + PAGE_BYTES, dtype=torch.uint8)
    return aligned(room, first + nbytes, PAGE_BYTES)[first:].numpy()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, PAGE_BYTES), (64, 5 * PAGE_BYTES), (4095, 2), (100, 17), (PAGE_BYTES, 0), (3 * PAGE_BYTES + 512, 0), (7, 0)],
)
def test_any_range_is_read(tmp_path: Path, offset: int, nbytes: int, direct: bool) -> None:
    (tmp_path / "swap").write_bytes(CONTENT)
    nbytes = nbytes or len(CONTENT) - offset
    room = room_for(offset, nbytes)
    read_from(str(tmp_path / "swap"), offset, room, direct=direct)
    assert room.tobytes() == CONTENT[offset : offset + nbytes]


@pytest.mark.skipif(not linux.O_DIRECT, reason="needs Linux")
def test_whole_pages_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swap").write_bytes(CONTENT)
    read: dict[int, int] = {}
    fill = files._fill

    def counted(path: str, offset: int, room: np.ndarray, flags: int = 0) -> None:
        read[flags] = read.get(flags, 0) + len(room)
        fill(path, offset, room, flags)

    monkeypatch.setattr(files, "_fill", counted)
    read_from(str(tmp_path / "swap"), 100, room_for(100, 10 * PAGE_BYTES), direct=True)
    assert read[linux.O_DIRECT] == 9 * PAGE_BYTES
    # If the file system has refused direct I/O, all ten pages are read through the page cache.
    assert read[0] in (PAGE_BYTES, 10 * PAGE_BYTES)


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_that_is_too_short_is_an_error(tmp_path: Path, direct: bool) -> None:
    (tmp_path / "swap").write_bytes(CONTENT)
    with pytest.raises(StorageError, match="ends too early") as error:
        read_from(str(tmp_path / "swap"), 64, room_for(64, len(CONTENT)), direct=direct)
    assert error.value.start == len(CONTENT)
