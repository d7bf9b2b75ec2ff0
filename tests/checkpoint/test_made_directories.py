"""A call that fails leaves no directory that was not there before, and removes none that was."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.crashes import Half
from tests.support.faults import NO_SPACE, Fault, faulty
from tests.support.litter import tree
from tests.support.plain_engine import Engine, engines_are_adapters
from tests.support.states import engine_state, write_state
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.usefixtures("engines_are_adapters")

TAKING_SPACE = ("create", "write", "sync", "put", "put_new", "prepare", "sync_names", "commit")
CALLS: dict[str, Callable[[Path, Path], object]] = {
    "write": lambda source, out: zckpt.write(Engine(), out),
    "write in the background": lambda source, out: zckpt.write(Engine(), out, background=True).wait(),
    "cp": lambda source, out: zckpt.cp(source / "c", out),
    "cp of a part": lambda source, out: zckpt.cp(source / "c", out, "master/*"),
    "convert": lambda source, out: zckpt.convert(source / "stock", out),
    "convert to deepspeed": lambda source, out: zckpt.convert(source / "c", out, to="deepspeed"),
    "export": lambda source, out: zckpt.export(source / "c", out),
    "export of one file": lambda source, out: zckpt.export(source / "c", out, format="pt"),
    "repair": lambda source, out: zckpt.repair(source / "lost", output=out),
    "report": lambda source, out: zckpt.report(source / "c", out),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    for name in ("c", "lost"):
        write_state(path / name, 2, {"a": (30, 50)}, engine_state=engine_state("a"))
    zckpt.convert(path / "c", path / "stock", to="deepspeed")
    next((path / "lost").glob("data-*/index.bin")).unlink()
    return path


@pytest.mark.parametrize("what", CALLS)
def test_a_full_disk_leaves_no_directory(tmp_path: Path, source: Path, what: str) -> None:
    """The first operation that takes space is refused, then the second, and so on, until the call succeeds."""
    for number in itertools.count():
        disk = tmp_path / str(number)
        disk.mkdir()
        with faulty(Fault(NO_SPACE, at=number, names=TAKING_SPACE, path=str(disk))) as operations:
            try:
                CALLS[what](source, disk / "run" / "of" / "mine")
                break
            except zckpt.NoSpaceError:
                committed = (disk / "run" / "of" / "mine" / "manifest.msgpack").exists()
                assert committed or tree(disk) == set(), operations.done[-3:]
    assert operations.matching == number > 2


def test_directories_that_were_there_stay(tmp_path: Path) -> None:
    for existing in ("run", "run/c"):
        (tmp_path / existing).mkdir()
        with faulty(Fault(NO_SPACE, names=("create",))), pytest.raises(zckpt.NoSpaceError):
            zckpt.write(Engine(), tmp_path / "run" / "c")
        assert tree(tmp_path) == {"run", existing}


def test_a_directory_that_another_writer_uses_stays(tmp_path: Path) -> None:
    """The writer that has made the run fails while another one writes there."""
    run = tmp_path / "run"
    first = WriteLock(open_store(run / "a"))
    first.acquire()
    with WriteLock(open_store(run / "b")):
        first.release()
        assert tree(run) == {"b", "b/write.lock"}
        zckpt.write(Engine(), run / "c")
    assert zckpt.validate(run).ok
    assert sorted(os.listdir(run)) == ["c", "latest"]


def test_a_directory_that_another_writer_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two calls of this writer, another one fails and removes the directory of the run, which it has made."""
    real = os.mkdir
    removed: list[str] = []

    def mkdir(path: str, *arguments: Any) -> None:
        if path.endswith("c") and not removed:
            os.rmdir(tmp_path / "run")
            removed.append("run")
        real(path, *arguments)

    monkeypatch.setattr(os, "mkdir", mkdir)
    store = open_store(tmp_path / "run")
    store.put_new("c/file", b"")
    assert removed == ["run"]
    assert (tmp_path / "run" / "c" / "file").is_file()
    store.remove("c/file")
    store.remove_made()
    assert tree(tmp_path) == set()


def fail_on_rank_1(path: str) -> str:
    fault = Fault(NO_SPACE, names=("create",)) if torch.distributed.get_rank() == 1 else None
    errors = (zckpt.NoSpaceError, zckpt.RankError)
    with engines_are_adapters(), faulty(fault), pytest.raises(errors) as caught:
        zckpt.write(Half(1), path)
    return type(caught.value).__name__


def test_a_failure_of_another_rank_leaves_no_directory(cluster: Cluster, tmp_path: Path) -> None:
    errors = cluster.run(fail_on_rank_1, 2, str(tmp_path / "run" / "of" / "mine"))
    assert errors == ["RankError", "NoSpaceError"]
    assert tree(tmp_path) == set()


def test_a_file_in_the_place_of_a_directory_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(zckpt.StorageError, match=r"(?s)cannot create the directory.*choose another path"):
        zckpt.write(Engine(), tmp_path / "file" / "c")
    assert tree(tmp_path) == {"file"}
    assert (tmp_path / "file").read_bytes() == b"kept"
