"""zckpt.prune removes older checkpoints of a run. Others stay, and a reader of a removed one gets right bytes or an
error."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.faults import Fault, faulty
from tests.support.forks import in_processes, stopped_at
from tests.support.litter import SHAPES, directory_names, litter, tree, write_steps
from tests.support.slow_writes import slow_write
from tests.support.states import EngineOfAnAdapter, write_state, write_through
from zckpt.checkpoint.cleaning.work import Work
from zckpt.cli import main
from zckpt.errors import CheckpointNotFoundError, FormatError, MissingFileError
from zckpt.storage.local_store import LocalStore
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zckpt.storage.contract import Store


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_checkpoints_stay(tmp_path: Path, keep: int) -> None:
    """The newest is the one that was committed last. A run that went back to step 2 has written step 3 last."""
    write_steps(tmp_path, 1, 2, 8, 9, 3)
    cleanup = zckpt.prune(tmp_path, keep_last=keep)
    assert directory_names(tmp_path) == sorted(["s1", "s2", "s8", "s9", "s3"][-keep:])
    assert {removal.reason for removal in cleanup.removed} <= {"retention"}
    for name in directory_names(tmp_path):
        assert zckpt.validate(tmp_path / name).ok
    assert zckpt.open(tmp_path).step == 3
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="keep_last must"):
            zckpt.prune(tmp_path, keep_last=wrong)  # type: ignore[arg-type]


def test_the_checkpoint_that_latest_names_stays(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("s1\n")
    assert {removal.path for removal in zckpt.prune(tmp_path, keep_last=1, dry_run=True).removed} == {
        str(path) for path in (tmp_path / "s2").iterdir()
    }
    assert zckpt.prune(tmp_path, keep_last=1).kept == (str(tmp_path / "s1"), str(tmp_path / "s3"))
    assert directory_names(tmp_path) == ["s1", "s3"]


def test_a_latest_that_names_no_checkpoint_of_zckpt(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("nothing\n")
    zckpt.prune(tmp_path, keep_last=2)
    assert directory_names(tmp_path) == ["s2", "s3"]
    deepspeed = tmp_path / "stock" / "mp_rank_00_model_states.pt"
    deepspeed.parent.mkdir()
    deepspeed.write_bytes(b"")
    (tmp_path / "latest").write_text("stock\n")
    zckpt.prune(tmp_path, keep_last=1)
    assert directory_names(tmp_path) == ["s3", "stock"]
    assert deepspeed.exists()
    (tmp_path / "latest").write_text("../nothing\n")
    write_state(tmp_path / "s5", 1, SHAPES, latest=False)
    with pytest.raises(FormatError, match="L001"):
        zckpt.prune(tmp_path, keep_last=1)
    (tmp_path / "link").symlink_to("s3")
    (tmp_path / "latest").write_text("link\n")
    zckpt.prune(tmp_path, keep_last=1)
    assert directory_names(tmp_path) == ["link", "s3", "s5", "stock"], "what it names by a link stays too"


def test_checkpoints_in_directories_of_a_run(tmp_path: Path) -> None:
    """The checkpoints are those of nested tags, and those of another run, which prune must not touch."""
    for number, name in enumerate(["e0/s1", "e0/s2", "e1/s3", "e1/s4", "other/s5", "other/s6"]):
        write_state(tmp_path / name, 1, SHAPES, step=number, latest=name.startswith("other"))
        os.utime(tmp_path / name / "manifest.msgpack", (1e9 + number,) * 2)
    assert zckpt.prune(tmp_path, keep_last=1).removed == (), "without a `latest` nobody has said that these are one run"
    (tmp_path / "latest").write_text("e0/s1\n")
    zckpt.prune(tmp_path, keep_last=1)
    there = {os.path.relpath(path.parent, tmp_path) for path in tmp_path.rglob("manifest.msgpack")}
    assert there == {"e0/s1", "e1/s4", "other/s5", "other/s6"}


def test_the_output_of_a_trainer(tmp_path: Path) -> None:
    for number in (5, 10, 15):
        folder = tmp_path / f"checkpoint-{number}"
        write_state(folder / f"global_step{number}", 1, SHAPES, step=number)
        os.utime(folder / f"global_step{number}" / "manifest.msgpack", (1e9 + number,) * 2)
        (folder / "trainer_state.json").write_text("{}")
    zckpt.prune(tmp_path, keep_last=2)
    assert sorted(path.name for path in (tmp_path / "checkpoint-5").iterdir()) == ["trainer_state.json"]
    for number in (10, 15):
        assert zckpt.open(tmp_path / f"checkpoint-{number}").step == number


def test_the_manifest_is_removed_durably_before_the_data(tmp_path: Path) -> None:
    """Whenever the removal stops, what is left has no manifest, or has all of its data."""
    number = 0
    while True:
        run = tmp_path / str(number)
        write_steps(run, 1, 2)

        def die(operation: Any, file: str) -> None:
            raise KeyboardInterrupt

        try:
            with faulty(Fault(die, at=number, names=("remove", "sync_names"), path="s1")) as operations:
                zckpt.prune(run, keep_last=1)
            break
        except KeyboardInterrupt:
            pass
        manifest = run / "s1" / "manifest.msgpack"
        assert not manifest.exists() or zckpt.validate(run / "s1").ok
        if zckpt.gc(run).recoverable:  # only the manifest was removed, and gc cannot know why
            zckpt.gc(run, discard=["s1"])
        zckpt.prune(run, keep_last=1)
        assert [name for name in directory_names(run) if os.listdir(run / name)] == ["s2"]
        number += 1
    done = [(name, os.path.basename(file)) for name, file in operations.done if "/s1" in file]
    order = [name for name, _ in done]
    assert done[order.index("remove")] == ("remove", "manifest.msgpack")
    assert order.index("sync_names") < len(order) - 1 - order[::-1].index("remove")
    assert number > 5


@pytest.mark.linux
def test_a_reader_of_what_is_removed_gets_right_bytes_or_an_error(tmp_path: Path) -> None:
    def work(number: int) -> set[str]:
        if number == 0:
            engine = EngineOfAnAdapter()
            for step in range(1, 30):
                value = torch.from_numpy(np.full(100_000, step, np.float32))
                write_through(tmp_path / f"s{step}", value, step=step, engine=engine)
                zckpt.prune(tmp_path, keep_last=1)
            return set()
        seen = set()
        while "end" not in seen:
            try:
                checkpoint = zckpt.open(tmp_path)
                for _ in range(3):
                    values = np.unique(checkpoint.load()["master/w"].numpy()).tolist()
                    assert values == [checkpoint.step]
                    seen.add("right")
                if checkpoint.step == 29:
                    seen.add("end")
            except (MissingFileError, CheckpointNotFoundError) as error:
                seen.add(type(error).__name__)
        return seen

    write_through(tmp_path / "s0", torch.zeros(10), step=0)
    _, *readers = in_processes(3, work)
    assert all(seen >= {"right", "end"} for seen in readers), readers


def test_a_reader_that_holds_a_checkpoint_open_while_it_is_removed(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    opened, other = zckpt.open(tmp_path / "s1"), zckpt.open(tmp_path / "s1")
    before = {key: tensor.clone() for key, tensor in opened.load().items()}
    zckpt.prune(tmp_path, keep_last=1)
    assert not (tmp_path / "s1").exists()
    if sys.platform == "linux":  # other systems keep no file open between two reads
        assert all(torch.equal(tensor, before[key]) for key, tensor in opened.load().items()), "its files are open"
        opened = other
    with pytest.raises(MissingFileError, match="F001"):
        opened.load()


@pytest.mark.parametrize(
    ("last", "every", "stay"),
    [
        (1, None, [30]),
        (1, 10, [10, 20, 30]),
        (2, 20, [20, 25, 30]),
        (1, 1000, [30]),
        (9, 1000, [5, 10, 15, 20, 25, 30]),
    ],
)
def test_every_so_many_steps_stay(tmp_path: Path, last: int, every: int | None, stay: list[int]) -> None:
    write_steps(tmp_path, 5, 10, 15, 20, 25, 30)
    cleanup = zckpt.prune(tmp_path, keep_last=last, keep_every=every, dry_run=True)
    assert len(directory_names(tmp_path)) == 6
    assert cleanup.kept == tuple(str(tmp_path / f"s{step}") for step in stay)
    assert zckpt.prune(tmp_path, keep_last=last, keep_every=every).removed == cleanup.removed
    assert directory_names(tmp_path) == sorted(f"s{step}" for step in stay)


@pytest.mark.linux
def test_a_checkpoint_that_is_being_replaced_stays(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    with stopped_at(lambda wait: slow_write(tmp_path / "s1", wait, 1, overwrite=True, latest=False)) as (_, go_on):
        for dry_run in (True, False):
            assert zckpt.prune(tmp_path, keep_last=1, dry_run=dry_run).in_use == (str(tmp_path / "s1"),)
        assert directory_names(tmp_path) == ["s1", "s3"]
        assert go_on() == str(tmp_path / "s1")
    assert zckpt.validate(tmp_path / "s1").ok


def test_an_unreadable_checkpoint_stays_and_does_not_count(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "s4" / "manifest.msgpack").write_bytes(b"damaged")
    (tmp_path / "latest").unlink()
    before = tree(tmp_path / "s4")
    cleanup = zckpt.prune(tmp_path, keep_last=1)
    assert cleanup.unreadable == (str(tmp_path / "s4"),)
    assert directory_names(tmp_path) == ["s3", "s4"]
    assert tree(tmp_path / "s4") == before


@pytest.mark.parametrize("damage", ["gone", "cut off"])
def test_an_incomplete_checkpoint_stays_and_does_not_count(tmp_path: Path, damage: str) -> None:
    write_steps(tmp_path, 1, 2, 3, 4)
    for file in tmp_path.glob("s[34]/data-*/rank-00001/*"):
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "latest").unlink()
    cleanup = zckpt.prune(tmp_path, keep_last=1)
    assert cleanup.unreadable == (str(tmp_path / "s3"), str(tmp_path / "s4"))
    assert cleanup.kept == (str(tmp_path / "s2"),)
    assert directory_names(tmp_path) == ["s2", "s3", "s4"]


def test_a_checkpoint_that_was_committed_after_the_run_was_listed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, 1, 2)
    clean = Work.clean

    def after_an_overwrite(self: Work, store: Store, *arguments: Any) -> None:
        write_state(tmp_path / "s1", 2, SHAPES, step=3, overwrite=True, latest=False)
        clean(self, store, *arguments)

    monkeypatch.setattr(Work, "clean", after_an_overwrite)
    cleanup = zckpt.prune(tmp_path, keep_last=1)
    assert cleanup.in_use == (str(tmp_path / "s1"),)
    assert cleanup.removed == ()
    assert zckpt.validate(tmp_path / "s1").ok


def test_a_full_disk_can_be_freed(tmp_path: Path) -> None:
    """The lock of a dead process is there too, so the time of the store has to be found out."""
    write_steps(tmp_path, 1, 2)
    removed = litter(tmp_path / "s2")
    (tmp_path / "s1" / "write.lock").write_text(json.dumps({"machine": "another", "pid": 1}))
    os.utime(tmp_path / "s1" / "write.lock", (0, 0))
    full = mock.patch("os.write", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with full, pytest.raises(zckpt.NoSpaceError), WriteLock(open_store(tmp_path / "s2")):
        pass
    with full:
        zckpt.prune(tmp_path, keep_last=1)
        zckpt.gc(tmp_path)
    assert directory_names(tmp_path) == ["s2"]
    assert not any(path.exists() for path in removed)
    assert not list(tmp_path.rglob("write.lock*"))
    assert zckpt.validate(tmp_path / "s2").ok


@pytest.mark.linux
def test_a_removal_that_was_killed_is_finished_by_gc(tmp_path: Path) -> None:
    """The process dies when the manifest is removed and all of the data are there. Such data are not recoverable."""
    write_steps(tmp_path, 1, 2)

    def prune(wait: Callable[[], None]) -> None:
        with mock.patch.object(LocalStore, "sync_names", side_effect=lambda path: wait()):
            zckpt.prune(tmp_path, keep_last=1)

    with stopped_at(prune):
        pass
    assert not (tmp_path / "s1" / "manifest.msgpack").exists()
    assert zckpt.validate(tmp_path / "s2").ok
    cleanup = zckpt.gc(tmp_path)
    assert cleanup.recoverable == ()
    assert directory_names(tmp_path) == ["s2"]


def test_only_the_leftovers_of_removed_checkpoints_are_removed(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    stay = litter(tmp_path / "s2") | litter(tmp_path / "unfinished")
    litter(tmp_path / "s1")
    dry = zckpt.prune(tmp_path, keep_last=1, dry_run=True)
    cleanup = zckpt.prune(tmp_path, keep_last=1)
    assert cleanup.removed == dry.removed
    assert len({removal.path for removal in cleanup.removed}) == len(cleanup.removed) == 5
    assert not (tmp_path / "s1").exists()
    assert all(path.exists() for path in stay)


def test_the_path_of_one_checkpoint_is_refused(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    with pytest.raises(CheckpointNotFoundError, match="not of a run") as caught:
        zckpt.prune(tmp_path / "s1", keep_last=1)
    assert str(tmp_path) in str(caught.value.hint)
    with pytest.raises(CheckpointNotFoundError):
        zckpt.prune(tmp_path / "nothing", keep_last=1)
    with pytest.raises(ValueError, match="keep_every must"):
        zckpt.prune(tmp_path, keep_last=1, keep_every=0)
    assert zckpt.validate(tmp_path).ok


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 1, 2, 3, 4)
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--keep-every", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would remove 4 files" in out
    assert f"kept                        {tmp_path / 's4'}" in out
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--keep-every", "2", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["kept"] == [str(tmp_path / "s2"), str(tmp_path / "s4")]
    assert {removal["reason"] for removal in output["removed"]} == {"retention"}
    assert directory_names(tmp_path) == ["s2", "s4"]
    for wrong in (["--keep-last=0"], ["--keep-last=-1"], ["--keep-last=x"], []):
        with pytest.raises(SystemExit) as caught:
            main(["prune", str(tmp_path), *wrong])
        assert caught.value.code == 2
