"""Every flipped bit, every changed length and every file of another rank or checkpoint is found."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from tests.support.states import Written, same_all, write_state
from zckpt.format import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

matrix = pytest.mark.matrix
MEMORY = Path("/dev/shm")
PADDING_STRIDE = 61
"""The distance in bytes between the spaces after a header that are flipped with every commit. Every other byte is
flipped."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """Yields a checkpoint that is in memory if possible, because it is opened many thousand times."""
    path = tmp_path_factory.mktemp("written")
    if os.access(MEMORY, os.W_OK):
        path = Path(tempfile.mkdtemp(dir=MEMORY))
    yield write(path / "c")
    shutil.rmtree(path)


def write(path: Path, seed: int = 0, b: int = 2) -> Written:
    shapes = {"a": (3, 3), "b": (b,)}
    return write_state(path, 2, shapes, parts=("master",), client_state={"x": torch.arange(2)}, seed=seed)


def read(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = zckpt.open(path)
    tensors = checkpoint.load()
    assert checkpoint.state["client_state"]["x"].tolist() == [0, 1]
    assert [checkpoint.rank_state(rank) for rank in range(checkpoint.world_size)] == [{"rank": 0}, {"rank": 1}]
    return tensors


def is_refused(path: Path) -> bool:
    try:
        read(path)
    except zckpt.FormatError:
        return True
    return False


def header_stop(file: Path) -> int:
    """Returns the end of a data file's header, which a load does not look at, and 0 for other files."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little") if file.suffix == ".safetensors" else 0


def check_flips(written: Written, file: Path, bits: Iterable[int]) -> int:
    """Checks that validation finds every flip, and that a load finds every flip that is not in a header.

    A load is tried only with one in 16 flips of a header. Returns the number of flips.
    """
    count, header = 0, header_stop(file)
    with file.open("r+b", buffering=0) as opened:
        sound = opened.read()
        for bit in bits:
            at = bit // 8
            opened.seek(at)
            opened.write(bytes([sound[at] ^ 1 << bit % 8]))
            assert not zckpt.validate(written.path).ok, f"bit {bit} of {file}"
            if at >= header or at % 16 == 0:
                assert is_refused(written.path) == (at >= header), f"bit {bit} of {file}"
            opened.seek(at)
            opened.write(sound[at : at + 1])
            count += 1
    assert zckpt.validate(written.path).ok
    return count


def sample(file: Path) -> Iterator[int]:
    """Yields one bit of every byte, each time the next of the eight, and of every ``PADDING_STRIDE``-th byte of
    padding.
    """
    raw, header = file.read_bytes(), header_stop(file)
    padding = len(raw[:header].rstrip(b" "))
    for at in range(len(raw)):
        if not padding <= at < header or at % PADDING_STRIDE == 0:
            yield 8 * at + at % 8


FILES = ["manifest.msgpack", "index.bin", "rank-00000/digests.bin", "rank-00001/digests.bin"]
FILES += [f"rank-0000{rank}/{name}.safetensors" for rank in (0, 1) for name in ("master", "host.state")]


def place(written: Written, name: str) -> Path:
    return written.path / (name if name == "manifest.msgpack" else f"{names.data_dir(written.save_id)}/{name}")


def test_the_list_has_all_files_of_the_checkpoint(written: Written) -> None:
    assert {place(written, name) for name in FILES} == {path for path in written.path.rglob("*") if path.is_file()}
    assert same_all(read(written.path), written.full)


@pytest.mark.parametrize("name", FILES)
def test_a_flip_in_any_byte_is_found(written: Written, name: str) -> None:
    file = place(written, name)
    assert check_flips(written, file, sample(file)) >= (file.stat().st_size - header_stop(file))


@matrix
@pytest.mark.parametrize("name", FILES)
def test_every_flip_is_found(written: Written, name: str) -> None:
    file = place(written, name)
    assert check_flips(written, file, range(8 * file.stat().st_size)) == 8 * file.stat().st_size


def check_lengths(written: Written, name: str, stride: int) -> int:
    file = place(written, name)
    sound = file.read_bytes()
    longer = {*range(len(sound) + 1, len(sound) + 18), len(sound) + 4096}
    lengths = sorted({*range(0, len(sound), stride), len(sound) - 16, len(sound) - 1, header_stop(file), *longer})
    for length in lengths:
        os.truncate(file, length)
        assert not zckpt.validate(written.path).ok, (file, length)
        is_read = name != "index.bin" or length < len(sound)  # bytes after the last chunk of the index are not read
        assert is_refused(written.path) == is_read, (file, length)
        file.write_bytes(sound)
    return len(lengths)


@pytest.mark.parametrize("name", FILES)
def test_other_lengths_are_found(written: Written, name: str) -> None:
    assert check_lengths(written, name, 97) > 20


@matrix
@pytest.mark.parametrize("name", FILES)
def test_every_length_is_found(written: Written, name: str) -> None:
    assert check_lengths(written, name, 1) > place(written, name).stat().st_size


def check_content(file: Path, content: bytes, path: Path) -> None:
    """Checks that validation finds other content of a file, and that a load finds it unless only a header differs."""
    sound, header = file.read_bytes(), header_stop(file)
    assert content != sound, file
    file.write_bytes(content)
    assert not zckpt.validate(path).ok, file
    assert is_refused(path) == (content[header:] != sound[header:]), file
    file.write_bytes(sound)


def test_any_two_files_that_are_swapped_are_found(written: Written) -> None:
    for name in FILES:
        for other in FILES:
            if name != other:
                check_content(place(written, name), place(written, other).read_bytes(), written.path)


def test_a_file_of_another_checkpoint_or_rank_is_found(written: Written, tmp_path: Path) -> None:
    """The other checkpoint has the same names and sizes, or is another save, whose index and tables are stale here."""
    foreign = write(tmp_path / "foreign", seed=1)
    for name in FILES[1:]:
        content = place(foreign, name).read_bytes()
        if content != place(written, name).read_bytes():  # equal layouts have the same index
            check_content(place(written, name), content, written.path)
    wider = write(tmp_path / "wider", b=4)
    for name in FILES[1:]:
        check_content(place(written, name), place(wider, name).read_bytes(), written.path)
    # All data of another save with the manifest of this one
    data = written.path / names.data_dir(written.save_id)
    aside = data.rename(written.path.parent / "aside")
    shutil.copytree(foreign.path / names.data_dir(foreign.save_id), data)
    assert not zckpt.validate(written.path).ok
    assert is_refused(written.path)
    shutil.rmtree(data)
    aside.rename(data)
    assert zckpt.validate(written.path).ok
