"""Each store passes the contract of stores."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import zckpt
from tests.support.faults import faulty
from tests.support.states import write_state
from zckpt.storage import local_store
from zckpt.storage.schemes import open_store
from zckpt.system import linux
from zckpt.testing import StoreContract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zckpt.storage.contract import Store


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "run" / "c")


def test_only_a_file_is_shared(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "directory").mkdir()
    for source in ("link", "directory"):
        assert not store.share("new", store.location.child(source))
        assert store.entry("new") is None
    assert store.share("new", store.location.child("file"))
    assert (tmp_path / "new").read_bytes() == b"mine"


def test_a_path_is_a_file_or_a_directory(tmp_path: Path) -> None:
    """What would make a path both is an error that names the path, and changes nothing."""
    store = open_store(tmp_path)
    (tmp_path / "data" / "rank").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"a")
    actions: dict[str, Callable[[], object]] = {
        "a": lambda: store.create("a", 0, direct=False),
        "a/b/c": lambda: store.put_new("a/b/c", b""),
        "a/b": lambda: store.put("a/b", b""),
        "data": lambda: store.put_new("data", b""),
        "data ": store.prepare("data", b"", "01234567").commit,
    }
    for path, action in actions.items():
        with pytest.raises(zckpt.StorageError) as caught:
            action()
        assert str(tmp_path / path.strip().split("/")[0]) in (caught.value.file or "")
    assert not store.put("data", b"")
    assert not store.put("a", b"")
    temporary = "data.01234567.tmp"
    assert sorted(os.listdir(tmp_path)) == ["a", "data", temporary]
    assert (tmp_path / "a").read_bytes() == b"a"
    assert os.listdir(tmp_path / "data") == ["rank"]


def test_what_cannot_be_prepared_leaves_nothing(tmp_path: Path) -> None:
    """A ``prepare`` that fails, because the temporary file exists already, leaves no file of its own."""
    store = open_store(tmp_path)
    store.prepare("a", b"one", "01234567")
    with pytest.raises(zckpt.StorageError):
        store.prepare("a", b"two", "01234567")
    assert {*os.listdir(tmp_path)} <= {"a.01234567.tmp"}


def test_a_store_that_is_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    open_store(tmp_path / "link").remove("")
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]


@pytest.mark.linux
class TestLocalStoreInMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield open_store(Path(directory) / "run" / "c")


class TestLocalStoreWithoutLinks(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with mock.patch("os.link", side_effect=PermissionError(errno.EPERM, "no links here")):
            yield open_store(tmp_path / "run" / "c")

    @pytest.mark.skip(reason="there, others may see the file before its content")
    def test_a_put_has_its_bytes_from_its_first_instant(self, store: Store) -> None: ...


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with faulty() as operations:
            store = open_store(str(tmp_path / "run" / "c"))
            assert store.entry("") is None
            yield store
        assert operations.done


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL])
def test_a_file_system_without_links(tmp_path: Path, number: int) -> None:
    """File systems without links have several error numbers for this."""
    store = open_store(tmp_path)
    with mock.patch("os.link", side_effect=OSError(number, "no links here")):
        assert store.put("lock", b"mine")
        assert not store.put("lock", b"yours")
    assert (tmp_path / "lock").read_bytes() == b"mine"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_syncs_no_directories(tmp_path: Path, number: int) -> None:
    with only_directories_fail_to_sync(number):
        write_state(tmp_path / "run" / "c", 1, {"w": (2,)})
    assert zckpt.validate(tmp_path / "run" / "c").ok


def test_a_directory_that_could_not_be_synced_is_an_error(tmp_path: Path) -> None:
    with only_directories_fail_to_sync(errno.EIO), pytest.raises(zckpt.StorageError, match="cannot fsync"):
        open_store(tmp_path).put_new("a/b", b"")


@contextmanager
def only_directories_fail_to_sync(number: int) -> Iterator[None]:
    if sys.platform != "linux":
        pytest.skip("they are not synced here, or not by fsync")
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    with mock.patch("os.fsync", fsync):
        yield


@pytest.mark.skipif(sys.platform == "darwin", reason="simulates Windows")
def test_a_rename_waits_for_readers_on_windows(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put_new("a", b"old")
    real, refused = os.replace, iter([PermissionError(errno.EACCES, "somebody reads it")] * 3)

    def replace(old: str, new: str) -> None:
        for error in refused:
            raise error
        real(old, new)

    with mock.patch("os.replace", replace), mock.patch("sys.platform", "win32"):
        at_once = mock.patch.object(local_store, "RENAME_WAIT_SECONDS", 0)
        with at_once, pytest.raises(zckpt.StorageError, match="rename"):
            store.prepare("a", b"new").commit()
        assert store.reader().read("a", 0, 9) == b"old"
        with mock.patch.object(local_store, "RENAME_WAIT_SECONDS", 600):
            store.prepare("a", b"new").commit()
    assert store.reader().read("a", 0, 9) == b"new"


def test_without_positional_reads_each_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may return only a few bytes at a time, so each read goes on where the last one ended."""

    class Few(io.FileIO):
        def readinto(self, view: Any) -> int:
            return super().readinto(memoryview(view)[:7])

    data = bytes(range(100))
    (tmp_path / "a").write_bytes(data)
    monkeypatch.setattr(linux, "HAS_POSITIONAL_IO", False)
    views = [memoryview(bytearray(nbytes)) for nbytes in (0, 5, 20, 0, 30)]
    with mock.patch.object(io, "FileIO", Few):
        assert open_store(tmp_path).reader().read_into("a", views, 13) == 55
    assert b"".join(views) == data[13:68]


def test_files_of_an_open_checkpoint_can_be_replaced_and_removed(tmp_path: Path) -> None:
    """On Windows, an open file could be neither replaced nor removed, so a reader keeps no file open there."""
    paths = [tmp_path / "c", tmp_path / "other"]
    checkpoints = [zckpt.open(write_state(path, 1, {"w": (2,)}).path) for path in paths]
    for checkpoint in checkpoints:
        assert checkpoint.load()
        assert zckpt.validate(checkpoint.path).ok
    os.replace(paths[0] / "manifest.msgpack", paths[1] / "manifest.msgpack")
    for path in paths:
        shutil.rmtree(path)


@pytest.mark.linux
@pytest.mark.parametrize(("number", "told"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.ENOTSUP, False)])
def test_a_disk_that_fails_to_sync_on_macos_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    import fcntl

    def refuse(fd: int, command: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    store = open_store(tmp_path)
    if told:
        with pytest.raises(zckpt.StorageError):
            store.put_new("file", b"content")
    else:
        store.put_new("file", b"content")
