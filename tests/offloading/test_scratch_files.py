"""The scratch files of ``zckpt.offload``: how long they take space, and what a process that died leaves."""

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
from tests.support.offloaded_engine import SHAPES, assert_as_before, trained
from tests.support.reference_engine import held
from zckpt.offloading import away as away_module
from zckpt.offloading.away import away, storages
from zckpt.state.inventory import Holding
from zckpt.storage import scratch
from zckpt.system import linux
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux


@pytest.mark.parametrize("times", [40, pytest.param(200, marks=pytest.mark.matrix)])
def test_many_times_and_nothing_grows(tmp_path: Path, times: int) -> None:
    gc.collect()  # what tests before have left open
    engine = ReferenceEngine({"wide": (600, 601), "frozen": (63, 63)})
    engine.train(1)
    before = held(engine)
    for number in range(times):
        if number == times // 2:
            scratch.wait_for_closing()
            resident, files = memory("VmRSS"), os.listdir("/proc/self/fd")
        with zckpt.offloaded(engine, tmp_path):
            pass
    scratch.wait_for_closing()
    assert os.listdir("/proc/self/fd") == files
    assert memory("VmRSS") - resident < 32 << 20  # twenty states are 100 MiB
    assert_as_before(engine, before)


def test_the_space_is_free_before_the_next_offload_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()
    before = held(engine)
    closing = threading.Event()
    close, create = scratch.ScratchFile.close, scratch.ScratchStore.create

    def late_close(self: Any) -> None:
        if self._fd >= 0:
            closing.wait()
        close(self)

    def created(self: Any, *args: Any, **options: Any) -> Any:
        assert closing.is_set()
        return create(self, *args, **options)

    zckpt.offload(engine, tmp_path)
    files = os.listdir("/proc/self/fd")
    monkeypatch.setattr(scratch.ScratchFile, "close", late_close)
    monkeypatch.setattr(scratch.ScratchStore, "create", created)
    zckpt.reload(engine)  # does not wait
    assert {*files} <= {*os.listdir("/proc/self/fd")}
    threading.Timer(0.1, closing.set).start()
    with zckpt.offloaded(engine, tmp_path):
        pass
    assert_as_before(engine, before)


def test_memory_is_workspace_only_if_nobody_needs_anything_in_it() -> None:
    memory = torch.ones(1000)
    for needed in (False, True):
        holdings = [Holding("gradient", "bucket", memory, memory.dtype, workspace=True)]
        holdings += [Holding("gradient", "weight", memory[:5], memory.dtype)] if needed else []
        adapter: Any = SimpleNamespace(memory=lambda found=holdings: found)
        assert [one.workspace for one in storages(adapter, ["gradient"])] == [not needed]


def test_an_engine_that_is_gone_leaves_nothing_open(tmp_path: Path) -> None:
    gc.collect()
    files = os.listdir("/proc/self/fd")
    zckpt.offload(trained(), tmp_path)
    gc.collect()
    assert os.listdir("/proc/self/fd") == files


def test_a_forked_process_changes_nothing(tmp_path: Path) -> None:
    engine = trained()
    before = held(engine)
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
    """A file system where a file needs a name as long as it is open."""
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
def test_what_a_killed_process_leaves_by_name_is_removed(tmp_path: Path, remover: str) -> None:
    directory = tmp_path / "scratch"
    killed_while_offloaded(directory)
    left = os.listdir(directory)
    assert len(left) == 4  # one for each part
    engine = trained()
    before = held(engine)
    elsewhere = directory / left[0].replace(left[0].split("-")[2], "0" * 16)  # of another machine
    elsewhere.touch()
    zckpt.offload(engine, directory if remover == "offload" else tmp_path / "other", parts=["master"])
    if remover == "gc":
        assert {one.path for one in zckpt.gc(directory).removed} == {str(directory / name) for name in left}
        assert zckpt.gc(tmp_path / "other").removed == ()
    assert not {*left} & {*os.listdir(directory)}
    assert elsewhere.exists()
    zckpt.reload(engine)
    scratch.wait_for_closing()
    assert os.listdir(directory) == [elsewhere.name]
    assert_as_before(engine, before)


def test_what_comes_next_is_read_ahead(tmp_path: Path) -> None:
    engine = trained()
    before = held(engine)
    zckpt.offload(engine, tmp_path)
    zckpt.reload(engine, ["param"])
    out = away(engine)
    assert out is not None
    for worker in out._ahead:
        worker.wait()
    cached = {}
    for one in out.moved:
        if one.name == "wide":
            assert one.saved is not None
            fd = one.saved.file.open(os.O_RDONLY)
            cached[one.parts[0]] = linux.cached_bytes(fd, one.start, one.nbytes) / one.nbytes
            os.close(fd)
    assert cached["master"] > 0.9
    assert cached["exp_avg"] < 0.1
    zckpt.reload(engine, prefetch=0)
    assert_as_before(engine, before)


def test_nothing_is_read_ahead_where_there_is_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()
    before = held(engine)
    zckpt.offload(engine, tmp_path)

    stock = away_module.Worker.start

    def start(self: Any) -> None:
        if self._thread.name == "zckpt-read-ahead":
            raise RuntimeError("can't start new thread")
        stock(self)

    with monkeypatch.context() as patched:
        patched.setattr(away_module.Worker, "start", start)
        zckpt.reload(engine, ["param"])
    zckpt.reload(engine)
    assert_as_before(engine, before)
