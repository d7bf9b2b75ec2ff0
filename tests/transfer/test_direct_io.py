"""Direct I/O: which bytes go past the page cache and which do not, and file systems without direct I/O."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import resource
import subprocess
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.memory import uncache
from tests.support.states import PARTS, same_all, write_state
from tests.support.waiting import wait_until
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.checkpoint.reading.loader import ReadRequest
from zckpt.geometry import all_of
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_writer import LocalWriter
from zckpt.system import linux
from zckpt.testing import ReferenceEngine
from zckpt.transfer.staging import StagingPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zckpt.storage.contract import IOCount

MIB = 1 << 20
SHAPES = {"large": (1500, 1009), "larger": (2_200_001,), "one": (1,), "none": (0, 3)}


def cached_bytes(path: Path) -> int:
    """Returns how many bytes of a file are in the page cache."""
    libc = ctypes.CDLL(None)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        pages = np.zeros(-(-len(mapped) // PAGE_BYTES), np.uint8)
        assert (
            libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages.ctypes.data_as(ctypes.c_void_p))
            == 0
        )
        return int((pages & 1).sum()) * PAGE_BYTES


def data_files(checkpoint: Path) -> list[Path]:
    return [file for file in checkpoint.rglob("*.safetensors") if file.stat().st_size > MIB]


def has_direct_io(directory: Path) -> bool:
    """Returns whether files in the directory have direct I/O. tmpfs takes the flag too, but keeps all data in the
    cache."""
    path = directory / "probe"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    path.write_bytes(bytes(MIB))
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return cached_bytes(path) == 0


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Returns a directory whose files have direct I/O."""
    if not has_direct_io(tmp_path):
        pytest.skip("the file system has no direct I/O")
    return tmp_path


@pytest.fixture(params=["its own", (4, 512), (512, 4096), (4096, 512), (4096, 4096)])
def alignment(request: pytest.FixtureRequest, disk: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Sets the alignment of addresses and of offsets for direct I/O, in bytes, and returns both. They are those of the
    file system, or larger ones."""
    (disk / "file").write_bytes(b"x")
    of_file_system = LocalReader(str(disk)).alignment("file")
    used = of_file_system if request.param == "its own" else tuple(map(max, request.param, of_file_system))
    monkeypatch.setattr(linux, "direct_alignment", lambda fd: used)
    return used


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """Yields a directory of an overlay file system, such as containers have."""
    directories = [tmp_path / name for name in ("lower", "upper", "work", "merged")]
    for directory in directories:
        directory.mkdir()
    options = "lowerdir={},upperdir={},workdir={}".format(*directories)
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(directories[3])]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount an overlay: {mounted.stderr.strip()}")
    try:
        yield directories[3]
    finally:
        subprocess.run(["umount", "--lazy", directories[3]], check=True)


def test_direct_io_leaves_the_page_cache_alone(disk: Path) -> None:
    tmp_path = disk
    state = write_state(tmp_path / "c", 2, SHAPES)
    files = data_files(tmp_path / "c")
    # Pages that two writes share, small reads, and what the kernel reads ahead of these go through the page cache.
    edges = MIB // 2
    assert files
    assert all(file.stat().st_size > 6 * MIB for file in files)
    assert all(cached_bytes(file) <= edges for file in files)
    assert same_all(zckpt.open(tmp_path / "c").load(), state.full)
    assert all(cached_bytes(file) <= edges for file in files)
    assert same_all(zckpt.open(tmp_path / "c", budget=zckpt.Budget(direct=False)).load(), state.full)
    assert any(cached_bytes(file) > edges for file in files)


@pytest.mark.parametrize("budget", [zckpt.Budget(), zckpt.Budget(2 * MIB, 1)], ids=["default", "smaller buffers"])
@pytest.mark.parametrize("verify", [True, False])
def test_large_tensors_are_read_straight_into_their_memory(
    disk: Path, alignment: tuple[int, int], verify: bool, budget: zckpt.Budget
) -> None:
    state = write_state(disk / "c", 1, SHAPES, block_bytes=MIB)
    uncache(disk / "c")
    checkpoint = zckpt.open(disk / "c", budget=budget)
    assert same_all(checkpoint.load(verify=verify), state.full)
    edges = 2 * max(*alignment, PAGE_BYTES) * checkpoint.io.reads
    assert 0 < checkpoint.io.copied_bytes <= edges < checkpoint.nbytes // 100
    part = checkpoint.load_slice("master/larger", slice(1001, 2_100_009), verify=verify)
    assert torch.equal(part, state.full["master/larger"][1001:2_100_009])


def test_a_restore_into_memory_with_the_same_alignment_copies_only_edges(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"large": (1031, 1009), "larger": (3, 700_001), "last": (600_000,)}
    engine = ReferenceEngine(shapes)
    engine.train(1)
    zckpt.write(engine, disk / "c")
    before = {
        part: {name: tensor.clone() for name, tensor in tensors_of_part.items()}
        for part, tensors_of_part in engine.tensors.items()
    }
    engine.train(1)
    uncache(disk / "c")
    counts: list[IOCount] = []
    monkeypatch.setattr(LocalReader, "close", lambda self: counts.append(self.count))
    zckpt.restore(engine, disk / "c")
    for part, tensors in before.items():
        assert same_all(engine.tensors[part], tensors)
    large = sum(tensor.nbytes for part in PARTS for tensor in before[part].values())
    assert sum(count.data_bytes for count in counts) >= large
    assert sum(count.copied_bytes for count in counts) < 2 * PAGE_BYTES * sum(count.reads for count in counts)


def test_bytes_that_go_through_a_buffer_are_counted(disk: Path) -> None:
    write_state(disk / "c", 1, SHAPES, parts=("master",), block_bytes=MIB)
    for copied in (False, True):
        uncache(disk / "c")
        checkpoint = zckpt.open(disk / "c")
        checkpoint.load("master/larger", dtype=torch.bfloat16 if copied else None)
        nbytes = checkpoint["master/larger"].nbytes
        assert checkpoint.io.copied_bytes == nbytes if copied else checkpoint.io.copied_bytes < nbytes // 100
        before = checkpoint.io.copied_bytes
        for file in data_files(disk / "c"):
            file.read_bytes()
        checkpoint.load("master/larger")
        assert checkpoint.io.copied_bytes == before, "nothing of what is read from the page cache"


@pytest.mark.parametrize("shift", [0, 1, 16, 127, 128, 1024])
def test_no_read_changes_memory_next_to_a_tensor(disk: Path, alignment: tuple[int, int], shift: int) -> None:
    """The tensors begin anywhere in a page. They are neighbours in memory, in the reverse order of the file. Each read
    has 1 MiB, so four threads fill neighbouring ranges."""
    shapes = {"a": (1_000_003,), "b": (300_001,), "c": (700_000,)}
    state = write_state(disk / "c", 1, shapes, parts=("master",), block_bytes=MIB)
    memory = torch.from_numpy(np.full(sum(map(sum, shapes.values())) + 4096, 7, np.float32))
    at = (-memory.data_ptr() % PAGE_BYTES) // 4 + shift
    guard = memory[:at], memory[at + sum(map(sum, shapes.values())) :]
    out = {}
    for name in reversed(shapes):
        out[f"master/{name}"] = memory[at : at + shapes[name][0]]
        at += shapes[name][0]
    uncache(disk / "c")
    checkpoint = zckpt.open(disk / "c", budget=zckpt.Budget(nbytes=8 * MIB))
    checkpoint.load(out=out)
    assert same_all(out, state.full)
    assert all(bool((elements == 7).all()) for elements in guard)


def test_each_flipped_bit_of_what_is_read_straight_is_found(disk: Path) -> None:
    """The flipped bits are at the edges of reads, of blocks of the disk, and of blocks with a digest."""
    write_state(disk / "c", 1, {"a": (2_200_001,), "b": (300_003,)}, parts=("master",), block_bytes=MIB)
    (path,) = data_files(disk / "c")
    checkpoint = zckpt.open(disk / "c", budget=zckpt.Budget(nbytes=8 * MIB))
    content = path.read_bytes()
    pieces = {info.key: info.pieces[0] for info in checkpoint.values()}
    for key, piece in pieces.items():
        stop, step = piece.offset + piece.nbytes, 512
        marks = [piece.offset, *range(piece.offset + MIB, stop, 3 * MIB), stop]
        marks += [mark // step * step for mark in marks] + [-(-mark // step) * step for mark in marks]
        for byte in sorted(
            {mark + shift for mark in marks for shift in (-1, 0) if piece.offset <= mark + shift < stop}
        ):
            with path.open("rb+") as file:
                file.seek(byte)
                file.write(bytes([content[byte] ^ 1]))
            uncache(disk / "c")
            with pytest.raises(zckpt.DigestError) as caught:
                checkpoint.load()
            error: Any = caught.value
            assert (error.key, error.rule) == (key, "D003")
            assert error.start <= byte < error.stop <= error.start + MIB
            with path.open("rb+") as file:
                file.seek(byte)
                file.write(content[byte : byte + 1])
    uncache(disk / "c")
    checkpoint.load()
    assert checkpoint.io.copied_bytes < checkpoint.io.data_bytes // 50


@pytest.mark.parametrize("percent", [0, 30, 60, 100])
@pytest.mark.parametrize("verify", [True, False])
def test_cached_bytes_are_read_from_the_cache_and_the_rest_once(tmp_path: Path, percent: int, verify: bool) -> None:
    state = write_state(tmp_path / "c", 1, SHAPES, parts=("master",))
    for file in data_files(tmp_path / "c"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            opened.read(file.stat().st_size * percent // 100)
    checkpoint = zckpt.open(tmp_path / "c")
    loaded = checkpoint.load(verify=verify)
    assert same_all(loaded, state.full)
    total = sum(info.nbytes for info in checkpoint.values())
    whole_pages = 2 * PAGE_BYTES * checkpoint.io.reads  # at both ends of each read
    assert total <= checkpoint.io.data_bytes <= total + whole_pages < 1.02 * total


def test_no_byte_is_read_past_the_end_of_its_target(tmp_path: Path) -> None:
    write_state(tmp_path / "c", 1, {"w": (8,)}, parts=("master",))
    checkpoint = zckpt.open(tmp_path / "c")
    room = torch.zeros(8)
    request = ReadRequest(checkpoint["master/w"], all_of((8,)), room[:7])
    with pytest.raises(ValueError, match="longer than the memory"):
        loader_of(checkpoint).read([request])
    with pytest.raises(ValueError, match="no gaps"):
        loader_of(checkpoint).read([request._replace(target=torch.zeros(16)[::2])])
    assert not room.any()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_what_is_mostly_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_kernel: bool) -> None:
    if old_kernel:
        monkeypatch.setattr(linux, "CACHESTAT", 1 << 20)
    check_what_is_mostly_cached(tmp_path)


@pytest.mark.parametrize(("processors", "threads", "expected"), [(1, 4, 1), (2, 4, 2), (8, 3, 3)])
def test_what_is_cached_is_read_first_by_no_more_threads_than_processors(
    disk: Path, processors: int, threads: int, expected: int
) -> None:
    """Every second read of 16 MiB is cached. Each thread that reads from the cache waits until all of them do."""
    tensors = {"large": torch.arange(24 * MIB, dtype=torch.float32)}
    write_state(disk / "c", 1, tensors, parts=["master"], block_bytes=MIB)
    calls: list[tuple[str, threading.Thread]] = []
    read_portions, read_direct = LocalReader.read_portions, LocalReader.read_direct

    def is_cached(reader: LocalReader, path: str, offset: int, nbytes: int) -> bool:
        return nbytes < MIB or offset // (16 * MIB) % 2 == 0

    def from_cache(reader: LocalReader, path: str, portions: Any, offset: int, use: Any) -> int:
        calls.append(("cache", threading.current_thread()))
        wait_until(lambda: len({thread for _, thread in calls}) >= expected)
        return read_portions(reader, path, portions, offset, use)

    def from_disk(reader: LocalReader, path: str, views: Any, offset: int) -> int:
        calls.append(("disk", threading.current_thread()))
        return read_direct(reader, path, views, offset)

    checkpoint = zckpt.open(disk / "c", budget=zckpt.Budget(threads=threads))
    with (
        mock.patch("zckpt.transfer.read.processors", return_value=processors),
        mock.patch.multiple(LocalReader, is_cached=is_cached, read_portions=from_cache, read_direct=from_disk),
    ):
        loaded = checkpoint.load()
    assert same_all(loaded, {"master/large": tensors["large"]})
    places = [place for place, _ in calls]
    assert places == sorted(places)
    assert places.count("cache") > 2
    assert places.count("disk") > 2
    assert len({thread for place, thread in calls if place == "cache"}) == expected


def test_what_is_mostly_cached_below_an_overlay(overlay: Path) -> None:
    check_what_is_mostly_cached(overlay)


def check_what_is_mostly_cached(directory: Path) -> None:
    if not has_direct_io(directory):
        pytest.skip("the file system has no direct I/O")
    path = directory / "file"
    path.write_bytes(bytes(4 * MIB))
    reader = LocalReader(str(directory))
    assert reader.is_cached("file", 0, 4 * MIB)
    with path.open("rb+") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, MIB, os.POSIX_FADV_DONTNEED)
        assert reader.is_cached("file", 0, 4 * MIB)  # three of four samples are still cached
        os.posix_fadvise(opened.fileno(), 0, 3 * MIB, os.POSIX_FADV_DONTNEED)
        assert not reader.is_cached("file", 0, 4 * MIB)
        assert reader.is_cached("file", 3 * MIB - 5, MIB + 5)
        assert not reader.is_cached("file", 0, MIB)
        opened.truncate(2 * MIB)
    assert not reader.is_cached("file", 2 * MIB, MIB)


@pytest.mark.parametrize("refused", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("when", ["open", "use"])
def test_a_file_system_without_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, when: str
) -> None:
    """A file system refuses direct I/O when a file is opened, or when the file is first read or written."""
    direct: set[int] = set()

    def opened(*args: Any, **kwargs: Any) -> int:
        if args[1] & os.O_DIRECT and when == "open":
            raise OSError(refused, os.strerror(refused))
        fd = real["open"](*args, **kwargs)
        (direct.add if args[1] & os.O_DIRECT else direct.discard)(fd)
        return fd

    def used(name: str) -> Callable[..., int]:
        def call(fd: int, views: Any, offset: int, flags: int = 0) -> int:
            if fd in direct or flags:
                raise OSError(refused, os.strerror(refused))
            return real[name](fd, views, offset, flags)

        return call

    real = {name: getattr(os, name) for name in ("open", "preadv", "pwritev")}
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", used("preadv"))
    monkeypatch.setattr(os, "pwritev", used("pwritev"))
    state = write_state(tmp_path / "c", 2, SHAPES)
    uncache(tmp_path / "c")
    assert same_all(zckpt.open(tmp_path / "c").load(), state.full)
    monkeypatch.undo()
    assert zckpt.validate(tmp_path / "c").ok


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    """The file ends in the middle of a direct read. It was cut after its size was checked."""
    for number, nbytes in enumerate((-1, MIB + 17, PAGE_BYTES)):
        path = tmp_path / str(number)
        write_state(path, 1, SHAPES, parts=("master",))
        (file,) = data_files(path)
        checkpoint = zckpt.open(path)
        checkpoint.load("master/one")
        os.truncate(file, nbytes if nbytes > 0 else file.stat().st_size + nbytes)
        with pytest.raises(zckpt.SizeError, match="ends at byte"):
            checkpoint.load()


def test_a_write_of_any_offset_and_length(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    content = random.integers(0, 256, 300_000, dtype=np.uint8)
    for direct in (True, False):
        file = LocalWriter(str(tmp_path / f"file{direct}"), len(content), direct)
        cuts = [0, *sorted(random.choice(len(content), 40, replace=False).tolist()), 8192, 12288, len(content)]
        cuts = sorted(set(cuts))
        ranges = list(itertools.pairwise(cuts))
        for start, stop in random.permutation(ranges).tolist():
            stage = StagingPool(stop - start).acquire()
            data = stage.bytes[start % PAGE_BYTES :][: stop - start]
            data[:] = content[start:stop]
            file.write(data, start)
            data[:] = 0
        file.sync()
        file.close()
        assert (tmp_path / f"file{direct}").read_bytes() == content.tobytes()


def test_pages_that_are_written_in_parts_go_with_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is written once. Only the last page of the file has a write of its own, which goes through the page
    cache."""
    if not has_direct_io(tmp_path):
        pytest.skip("the file system has no direct I/O")
    content = np.random.default_rng(0).integers(0, 256, 50_001, dtype=np.uint8)
    done: list[tuple[bool, int, int]] = []
    real, file = os.pwritev, LocalWriter(str(tmp_path / "file"), len(content), True)

    def counted(fd: int, views: Any, offset: int) -> int:
        done.append((fd == file._direct_fd, offset, offset + sum(map(len, views))))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", counted)
    stage = StagingPool(len(content)).acquire().bytes[: len(content)]
    stage[:] = content
    for start, stop in itertools.pairwise([0, 10_000, 10_010, 30_000, 40_960, 50_001]):
        file.write(stage[start:stop], start)
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == content.tobytes()
    pages = [(True, *bounds) for bounds in [(0, 8192), (8192, 28672), (28672, 40960), (40960, 49152)]]
    assert done == [*pages, (False, 49152, 50_001)]


def test_no_space_is_noticed_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stops the allocation, as a full disk would."""
    written = mock.Mock(side_effect=AssertionError("a byte was written"))
    monkeypatch.setattr(os, "pwritev", written)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(zckpt.NoSpaceError, match="cannot allocate"):
            write_state(tmp_path / "c", 1, SHAPES, parts=("master",))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    written.assert_not_called()


def test_an_error_of_the_disk_is_not_taken_for_a_missing_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path / "c", 1, SHAPES, parts=("master",))

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpoint = zckpt.open(tmp_path / "c")
    assert checkpoint["master/large"].pieces
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(zckpt.StorageError, match=r"master\.safetensors"):
        checkpoint.load("master/large", verify=False)


def test_files_stay_open_for_a_while(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    reader = LocalReader(str(tmp_path))
    assert reader.read("a", 0, 10) == reader.read("a", 0, 20) == bytes(10)
    (tmp_path / "a").unlink()
    assert reader.read("a", 2, 3) == bytes(3)
    reader.close()
