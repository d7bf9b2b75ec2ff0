"""Older checkpoints of a run: which go, which stay, and readers of what goes."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.faults import Fault, faulty
from tests.support.forks import in_processes, stopped_at
from tests.support.litter import SHAPES, kept, litter, tree, write_steps
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine, engines_are_adapters
from tests.support.slow_writes import slow_write
from tests.support.states import write_state, write_through
from zckpt.cleaning.work import Work
from zckpt.cli import main
from zckpt.errors import CheckpointNotFoundError, FormatError, MissingFileError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster
    from zckpt.storage.contract import Store


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_stay(tmp_path: Path, keep: int) -> None:
    """Newest by commit: a run that went back to step 2 has written 3 last."""
    write_steps(tmp_path, 1, 2, 8, 9, 3)
    found = zckpt.prune(tmp_path, keep_last=keep)
    assert kept(tmp_path) == sorted(["s1", "s2", "s8", "s9", "s3"][-keep:])
    assert {one.reason for one in found.removed} <= {"retention"}
    for name in kept(tmp_path):
        assert zckpt.validate(tmp_path / name).ok
    assert zckpt.open(tmp_path).step == 3
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="keep_last must be a whole number of 1 or more"):
            zckpt.prune(tmp_path, keep_last=wrong)  # type: ignore[arg-type]


def test_what_latest_names_stays(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("s1\n")
    assert {one.path for one in zckpt.prune(tmp_path, keep_last=1, dry_run=True).removed} == {
        str(path) for path in (tmp_path / "s2").iterdir()
    }
    assert zckpt.prune(tmp_path, keep_last=1).kept == (str(tmp_path / "s1"), str(tmp_path / "s3"))
    assert kept(tmp_path) == ["s1", "s3"]


def test_a_latest_that_names_no_checkpoint_is_in_nobody_s_way(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("nothing\n")
    zckpt.prune(tmp_path, keep_last=2)
    assert kept(tmp_path) == ["s2", "s3"]
    deepspeed = tmp_path / "stock" / "mp_rank_00_model_states.pt"
    deepspeed.parent.mkdir()
    deepspeed.write_bytes(b"")
    (tmp_path / "latest").write_text("stock\n")
    zckpt.prune(tmp_path, keep_last=1)
    assert kept(tmp_path) == ["s3", "stock"]
    assert deepspeed.exists()
    (tmp_path / "latest").write_text("../nothing\n")
    write_state(tmp_path / "s5", 1, SHAPES, latest=False)
    with pytest.raises(FormatError, match="L001"):
        zckpt.prune(tmp_path, keep_last=1)
    (tmp_path / "link").symlink_to("s3")
    (tmp_path / "latest").write_text("link\n")
    zckpt.prune(tmp_path, keep_last=1)
    assert kept(tmp_path) == ["link", "s3", "s5", "stock"], "what it names by a link stays too"


def test_checkpoints_in_directories_of_a_run(tmp_path: Path) -> None:
    """Those of nested tags, and those of another run, which are nobody's here."""
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


def test_the_manifest_goes_first_for_good(tmp_path: Path) -> None:
    """Whenever removal ends, what is left has no manifest, or all of its data."""
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
        if zckpt.gc(run).recoverable:  # it ended between the manifest and the data, and nobody knows why
            zckpt.gc(run, discard=["s1"])
        zckpt.prune(run, keep_last=1)
        assert kept(run) == ["s2"]
        number += 1
    done = [(name, os.path.basename(file)) for name, file in operations.done if "/s1" in file]
    order = [name for name, _ in done]
    assert done[order.index("remove")] == ("remove", "manifest.msgpack")
    assert order.index("sync_names") < len(order) - 1 - order[::-1].index("remove")
    assert number == 3


@pytest.mark.linux
def test_a_reader_of_what_is_removed_gets_right_bytes_or_an_error(tmp_path: Path) -> None:
    def work(number: int) -> set[str]:
        if number == 0:
            for step in range(1, 30):
                value = torch.from_numpy(np.full(100_000, step, np.float32))
                write_through(tmp_path / f"s{step}", value, step=step)
                zckpt.prune(tmp_path, keep_last=1)
            return set()
        seen = set()
        while "end" not in seen:
            try:
                checkpoint = zckpt.open(tmp_path)
                for _ in range(3):
                    found = np.unique(checkpoint.load()["master/w"].numpy()).tolist()
                    assert found == [checkpoint.step]
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
    if sys.platform == "linux":  # others keep no file open between two reads
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
    found = zckpt.prune(tmp_path, keep_last=last, keep_every=every, dry_run=True)
    assert len(kept(tmp_path)) == 6
    assert found.kept == tuple(str(tmp_path / f"s{step}") for step in stay)
    assert zckpt.prune(tmp_path, keep_last=last, keep_every=every).removed == found.removed
    assert kept(tmp_path) == sorted(f"s{step}" for step in stay)


@pytest.mark.linux
def test_what_is_being_replaced_stays(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    with stopped_at(lambda wait: slow_write(tmp_path / "s1", wait, 1, overwrite=True, latest=False)) as (_, go_on):
        for dry_run in (True, False):
            assert zckpt.prune(tmp_path, keep_last=1, dry_run=dry_run).in_use == (str(tmp_path / "s1"),)
        assert kept(tmp_path) == ["s1", "s3"]
        assert go_on() == str(tmp_path / "s1")
    assert zckpt.validate(tmp_path / "s1").ok


def test_what_cannot_be_read_stays_and_does_not_count(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "s4" / "manifest.msgpack").write_bytes(b"damaged")
    (tmp_path / "latest").unlink()
    before = tree(tmp_path / "s4")
    found = zckpt.prune(tmp_path, keep_last=1)
    assert found.unreadable == (str(tmp_path / "s4"),)
    assert kept(tmp_path) == ["s3", "s4"]
    assert tree(tmp_path / "s4") == before


@pytest.mark.parametrize("damage", ["gone", "cut off"])
def test_what_is_incomplete_stays_and_does_not_count(tmp_path: Path, damage: str) -> None:
    write_steps(tmp_path, 1, 2, 3, 4)
    for file in tmp_path.glob("s[34]/data-*/rank-00001/*"):
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "latest").unlink()
    found = zckpt.prune(tmp_path, keep_last=1)
    assert found.unreadable == (str(tmp_path / "s3"), str(tmp_path / "s4"))
    assert found.kept == (str(tmp_path / "s2"),)
    assert kept(tmp_path) == ["s2", "s3", "s4"]


def test_what_was_committed_after_the_run_was_listed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, 1, 2)
    clean = Work.clean

    def after_an_overwrite(self: Work, store: Store, *arguments: Any) -> None:
        write_state(tmp_path / "s1", 2, SHAPES, step=3, overwrite=True, latest=False)
        clean(self, store, *arguments)

    monkeypatch.setattr(Work, "clean", after_an_overwrite)
    found = zckpt.prune(tmp_path, keep_last=1)
    assert found.in_use == (str(tmp_path / "s1"),)
    assert found.removed == ()
    assert zckpt.validate(tmp_path / "s1").ok


def test_leftovers_stay_but_for_those_of_what_goes(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    stay = litter(tmp_path / "s2") | litter(tmp_path / "unfinished")
    litter(tmp_path / "s1")
    dry = zckpt.prune(tmp_path, keep_last=1, dry_run=True)
    found = zckpt.prune(tmp_path, keep_last=1)
    assert found.removed == dry.removed
    assert len({one.path for one in found.removed}) == len(found.removed) == 5
    assert not (tmp_path / "s1").exists()
    assert all(one.exists() for one in stay)


def test_one_checkpoint_is_no_run(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    with pytest.raises(CheckpointNotFoundError, match="not of a run") as caught:
        zckpt.prune(tmp_path / "s1", keep_last=1)
    assert str(tmp_path) in str(caught.value.hint)
    with pytest.raises(CheckpointNotFoundError):
        zckpt.prune(tmp_path / "nothing", keep_last=1)
    with pytest.raises(ValueError, match="keep_every must be a whole number"):
        zckpt.prune(tmp_path, keep_last=1, keep_every=0)
    assert zckpt.validate(tmp_path).ok


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 1, 2, 3, 4)
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--keep-every", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would remove 4 files" in out
    assert f"kept                        {tmp_path / 's4'}" in out
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--keep-every", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kept"] == [str(tmp_path / "s2"), str(tmp_path / "s4")]
    assert {one["reason"] for one in found["removed"]} == {"retention"}
    assert kept(tmp_path) == ["s2", "s4"]
    for wrong in (["--keep-last=0"], ["--keep-last=-1"], ["--keep-last=x"], []):
        with pytest.raises(SystemExit) as caught:
            main(["prune", str(tmp_path), *wrong])
        assert caught.value.code == 2


# By a write


@pytest.mark.parametrize("background", [False, True])
def test_a_write_removes_what_is_not_to_be_kept(tmp_path: Path, background: bool) -> None:
    with engines_are_adapters():
        for step in range(1, 8):
            zckpt.write(Engine(step=step), tmp_path / f"s{step}", keep_last=2, keep_every=3, background=background)
        zckpt.wait()
        assert kept(tmp_path) == ["s3", "s6", "s7"]
        zckpt.write(Engine(step=8), tmp_path / "s8")
        assert kept(tmp_path) == ["s3", "s6", "s7", "s8"], "nothing is removed unasked"


@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_cannot_remove_older_ones_is_committed(tmp_path: Path, background: bool) -> None:
    write_steps(tmp_path, 1, 2)
    (tmp_path / "latest").write_text("../nothing\n")

    def write() -> None:
        with engines_are_adapters():
            zckpt.write(Engine(step=3), tmp_path / "s3", keep_last=1, latest=False, background=background)
        zckpt.wait()

    with pytest.warns(UserWarning, match=r"s3 is written, but older .* not be removed: .*L001"):
        write()
    assert kept(tmp_path) == ["s1", "s2", "s3"]
    assert zckpt.validate(tmp_path / "s3").ok


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ({"keep_last": 0}, "keep_last must be a whole number"),
        ({"keep_last": 2, "keep_every": 1.5}, "keep_every must be a whole number"),
        ({"keep_every": 10}, "pass keep_last too"),
    ],
)
def test_a_write_refuses_numbers_before_it_begins(tmp_path: Path, numbers: dict[str, Any], why: str) -> None:
    with engines_are_adapters(), pytest.raises(ValueError, match=why):
        zckpt.write(Engine(), tmp_path / "s1", **numbers)
    assert kept(tmp_path) == []


def save_often(run: str) -> list[str]:
    engine = make_engine(stage=1)
    with pytest.raises(ValueError, match="pass keep_last too"):
        zckpt.attach(engine, keep_every=2)
    zckpt.attach(engine, keep_last=1, keep_every=2)
    for _ in range(5):
        train(engine, 1)
        engine.save_checkpoint(run)
    return sorted(one for one in os.listdir(run) if one != "latest")


def test_saves_of_an_attached_engine_remove_what_is_not_to_be_kept(cluster: Cluster, tmp_path: Path) -> None:
    found, _ = cluster.run(save_often, 2, str(tmp_path))
    assert found == ["global_step2", "global_step4", "global_step5"]
    assert zckpt.open(tmp_path).step == 5
