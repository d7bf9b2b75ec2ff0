"""Other programs may change the files of a source while zckpt.convert reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from tests.support.deepspeed_folders import MODEL, OPTIMIZER, make_folder
from tests.support.progress import RecordedProgress
from zckpt.tools.converting.restricted_pickle import load
from zckpt.transfer.stored import with_values

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Changes(RecordedProgress):
    """A progress that changes the source when the first byte is going to be converted."""

    def __init__(self, change: Callable[[], object]) -> None:
        super().__init__()
        self._change = change

    def begin(self, action: str, nbytes: int) -> None:
        self._change()
        super().begin(action, nbytes)


def large_folder(folder: Path) -> Path:
    """Makes a folder with a buffer and a ``client_state`` of 4 MB each."""
    module = {"weight": torch.ones(4, 2, dtype=torch.bfloat16), "mean": torch.ones(1 << 20)}
    return make_folder(folder, module=module, average=torch.ones(1 << 20))


def test_a_file_that_is_cut_off_after_it_was_loaded(tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    path = tmp_path / "file.pt"
    torch.save({"long": torch.ones(1 << 20), "turned": torch.ones(1 << 10, 1 << 10).t()}, path)
    loaded = load(str(path))
    os.truncate(path, 20_000)
    for tensor in loaded.values():
        with pytest.raises(zckpt.StorageError, match="ends too early") as raised:
            with_values(tensor)
        error = raised.value
        assert error.file == str(path)
        assert error.start is not None
        assert error.stop is not None
        assert 20_000 <= error.start < error.stop


@pytest.mark.parametrize("name", [MODEL, f"bf16_{OPTIMIZER}"])
def test_a_source_that_is_cut_off_while_it_is_converted(tmp_path: Path, name: str) -> None:
    source = large_folder(tmp_path / "source")
    changes = Changes(lambda: os.truncate(source / name, 700))
    with pytest.raises(zckpt.StorageError, match="ends too early") as raised:
        zckpt.convert(source, tmp_path / "converted", progress=changes)
    error = raised.value
    assert error.file == str(source / name)
    assert error.start is not None
    assert error.stop is not None
    assert 700 <= error.start < error.stop
    assert not (tmp_path / "converted").exists()


def test_a_source_that_is_written_again_while_it_is_converted(tmp_path: Path) -> None:
    """The new checkpoint would have the tree of one step, and tensors of another one."""
    source = large_folder(tmp_path / "source")
    for change in (lambda: os.utime(source / MODEL), lambda: (source / MODEL).write_bytes(bytes(1 << 24))):
        with pytest.raises(zckpt.StorageError, match="was changed") as raised:
            zckpt.convert(source, tmp_path / "converted", progress=Changes(change))
        assert raised.value.file == str(source / MODEL)
        assert not (tmp_path / "converted").exists()
