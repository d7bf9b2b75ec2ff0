"""The scratch files of ``zckpt.offload``: how long they take space, and what is left of them after a process has
died."""

from __future__ import annotations

import gc
import os
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.memory import memory
from tests.support.no_threads import no_further_threads
from tests.support.offloaded_engine import SHAPES, assert_as_before, trained
from tests.support.reference_engine import tensors_of
from zckpt.offloading import scratch
from zckpt.offloading.away import away_of, storages
from zckpt.plan.inventory import Holding
from zckpt.system import linux
from zckpt.system.threads import Worker
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from pathlib import Path

    from zckpt.offloading.away import MovedStorages

pytestmark = [pytest.mark.linux, pytest.mark.offload]


def open_files() -> list[str]:
    """Returns the open file descriptors, once no thread opens or closes scratch files any more."""
    scratch.wait_for_closing()
    for thread in threading.enumerate():
        if thread.name == "zckpt-read-ahead":
            thread.join()
    return os.listdir("/proc/self/fd")


@pytest.mark.parametrize("times", [40, pytest.param(200, marks=pytest.mark.matrix)])
def test_after_many_offloads_neither_memory_nor_open_files_grow(tmp_path: Path, times: int) -> None:
    gc.collect()  # this closes what earlier tests have left open
    engine = ReferenceEngine({"wide": (600, 601), "frozen": (63, 63)})
    engine.train(1)
    before = tensors_of(engine)
    for number in range(times):
        if number == times // 2:
            files, resident = open_files(), memory("VmRSS")
        with zckpt.offloaded(engine, tmp_path):
            pass
    assert open_files() == files
    assert memory("VmRSS") - resident < 32 << 20  # twenty states have 100 MiB
    assert_as_before(engine, before)


def test_the_space_is_free_before_the_next_offload_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # this closes what earlier tests have left open
    engine = trained()
    before = tensors_of(engine)
    closing = threading.Event()
    close, create = scratch.ScratchFile.close, scratch.ScratchStore.create

    def late_close(self: Any) -> None:
        if self._fd in own_files:
            closing.wait()
        close(self)

    def created(self: Any, *args: Any, **options: Any) -> Any:
        assert closing.is_set()
        return create(self, *args, **options)

    zckpt.offload(engine, tmp_path)
    own_files = {storage.saved.file._fd for storage in away_of(engine).moved if storage.saved is not None}  # type: ignore[union-attr]
    files = open_files()
    monkeypatch.setattr(scratch.ScratchFile, "close", late_close)
    monkeypatch.setattr(scratch.ScratchStore, "create", created)
    zckpt.reload(engine)  # does not wait for the closing
    assert {*files} <= {*os.listdir("/proc/self/fd")}
    threading.Timer(0.1, closing.set).start()
    with zckpt.offloaded(engine, tmp_path):
        pass
    assert_as_before(engine, before)


def test_memory_is_workspace_only_if_nothing_in_it_is_needed() -> None:
    memory = torch.ones(1000)
    for needed in (False, True):
        holdings = [Holding("gradient", "bucket", memory, memory.dtype, workspace=True)]
        holdings += [Holding("gradient", "weight", memory[:5], memory.dtype)] if needed else []
        adapter: Any = SimpleNamespace(memory=lambda held=holdings: held)
        assert [storage.workspace for storage in storages(adapter, ["gradient"])] == [not needed]


def test_an_engine_that_is_gone_leaves_nothing_open(tmp_path: Path) -> None:
    gc.collect()
    files = open_files()
    zckpt.offload(trained(), tmp_path)
    gc.collect()
    assert open_files() == files


def test_a_forked_process_does_not_harm_its_parent(tmp_path: Path) -> None:
    engine = trained()
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path)
    if (child := os.fork()) == 0:
        vars(engine).clear()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    zckpt.reload(engine)
    assert_as_before(engine, before)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a file system on which a file needs a name as long as it is open."""
    stock = os.open

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not supported")
        return stock(path, flags, *args, **options)

    def unlink(path: Any, **options: Any) -> None:
        fds = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        ]
        if os.fspath(path) in fds:
            raise OSError(16, "busy")
        os.remove(path, **options)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "unlink", unlink)


def killed_while_offloaded(directory: Path) -> None:
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        zckpt.offload(ReferenceEngine(SHAPES), directory, budget=zckpt.Budget(threads=1))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    killed_while_offloaded(tmp_path / "scratch")
    assert os.listdir(tmp_path / "scratch") == []


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("remover", ["offload", "gc"])
def test_named_files_of_a_killed_process_are_removed(tmp_path: Path, remover: str) -> None:
    directory = tmp_path / "scratch"
    killed_while_offloaded(directory)
    names = os.listdir(directory)
    assert len(names) == 4  # one file for each part
    engine = trained()
    before = tensors_of(engine)
    elsewhere = directory / names[0].replace(names[0].split("-")[2], "0" * 16)  # a file of another machine
    elsewhere.touch()
    zckpt.offload(engine, directory if remover == "offload" else tmp_path / "other", parts=["master"])
    if remover == "gc":
        assert {removal.path for removal in zckpt.gc(directory).removed} == {str(directory / name) for name in names}
        assert zckpt.gc(tmp_path / "other").removed == ()
    assert not {*names} & {*os.listdir(directory)}
    assert elsewhere.exists()
    zckpt.reload(engine)
    scratch.wait_for_closing()
    assert os.listdir(directory) == [elsewhere.name]
    assert_as_before(engine, before)


def cached_shares(out: MovedStorages) -> dict[str, float]:
    """Returns, for each offloaded part of the parameter ``wide``, how much of its file is in the page cache, from 0 to
    1."""
    shares = {}
    for storage in out.moved:
        if storage.name == "wide":
            assert storage.saved is not None
            fd = storage.saved.file.open(os.O_RDONLY)
            shares[storage.parts[0]] = linux.cached_bytes(fd, storage.start, storage.nbytes) / storage.nbytes
            os.close(fd)
    return shares


def test_an_offload_of_any_part_goes_past_the_page_cache(tmp_path: Path) -> None:
    engine = ReferenceEngine({"wide": (2000, 1000)})
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path)
    out = away_of(engine)
    assert out is not None
    shares = cached_shares(out)
    assert shares.keys() >= {"param", "master", "exp_avg"}
    assert max(shares.values()) < 0.1
    zckpt.reload(engine)
    assert_as_before(engine, before)


def test_the_next_part_is_read_ahead(tmp_path: Path) -> None:
    engine = trained()
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path)
    zckpt.reload(engine, ["param"])
    out = away_of(engine)
    assert out is not None
    for worker in out._ahead:
        worker.wait()
    cached = cached_shares(out)
    assert cached["master"] > 0.9
    assert cached["exp_avg"] < 0.1
    zckpt.reload(engine, prefetch=0)
    assert_as_before(engine, before)


def test_a_reload_works_without_a_thread_that_reads_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path)

    stock = Worker.start

    def start(self: Any) -> None:
        if self._thread.name == "zckpt-read-ahead":
            with no_further_threads():
                stock(self)
        stock(self)

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", start)
        zckpt.reload(engine, ["param"])
    zckpt.reload(engine)
    assert_as_before(engine, before)
