"""Files outside of checkpoints: reads of swap files with and without direct I/O, and directories that replace
others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from zckpt.errors import StorageError
from zckpt.storage import files
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.files import put_in_place, read_from, take_back
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


@pytest.mark.parametrize("exchanges", [pytest.param(True, marks=pytest.mark.linux), False])
def test_a_directory_is_put_in_the_place_of_another_one(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for directory in (new, old):
        directory.mkdir()
        (directory / directory.name).touch()
    missing: list[bool] = []
    rename = os.rename

    def watched(source: str, destination: str) -> None:
        rename(source, destination)
        missing.append(not old.exists())

    monkeypatch.setattr(os, "rename", watched)
    if not exchanges:
        monkeypatch.setattr(linux, "exchange", lambda first, second: False)
    for names in (["new", "old"], ["old", "new"]):
        put_in_place(str(new), str(old))
        assert [os.listdir(old), os.listdir(new)] == [[names[0]], [names[1]]]
    take_back(str(new), str(old))
    assert os.listdir(old) == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert any(missing) != exchanges


def test_a_failed_exchange_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "exchange", lambda first, second: False)
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(str(tmp_path / "new"), str(tmp_path / "old"))
    assert os.listdir(tmp_path) == ["old"]
