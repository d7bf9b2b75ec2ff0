"""Leftovers of dead writers, and retention: what goes, what stays, and readers of what goes."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.faults import BROKEN, Fault, faulty
from tests.support.forks import in_processes, stopped_at
from tests.support.slow_writes import slow_write
from tests.support.states import write_state, write_through
from zckpt.cli import main
from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError, MissingFileError

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"w": (40, 50)}


def write(run: Path, *steps: int, commit_times: bool = True) -> None:
    for number, step in enumerate(steps):
        write_state(run / f"s{step}", 2, SHAPES, step=step, seed=step)
        if commit_times:
            os.utime(run / f"s{step}" / "manifest.msgpack", (1e9 + number,) * 2)


def tree(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*")}


def litter(checkpoint: Path) -> set[Path]:
    """What a dead writer may leave."""
    data = checkpoint / "data-0123456789abcdef" / "rank-00000"
    data.mkdir(parents=True)
    (data / "master.safetensors").write_bytes(bytes(5000))
    temporary = checkpoint / "manifest.msgpack.01234567.tmp"
    temporary.write_bytes(bytes(70))
    (checkpoint / "write.lock.89abcdef.tmp").write_bytes(b"")
    return {data.parent, temporary, checkpoint / "write.lock.89abcdef.tmp"}


def others(path: Path) -> set[Path]:
    """What is nobody's leftover."""
    found = {path / name for name in ("notes.txt", "data-notes", "manifest.msgpack.bak", "data-0123456789abcdeg")}
    for one in found:
        one.write_text("mine")
    return found


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    others(tmp_path)
    others(tmp_path / "s1")
    before = tree(tmp_path)
    removed = litter(tmp_path / "s1") | litter(tmp_path / "unfinished")
    (tmp_path / "latest.01234567.tmp").write_text("old")
    os.utime(tmp_path / "latest.01234567.tmp", (0, 0))
    removed.add(tmp_path / "latest.01234567.tmp")
    (tmp_path / "latest.00000000.tmp").write_text("a commit that is under way")
    with_litter = tree(tmp_path)

    found = zckpt.gc(tmp_path, dry_run=True)
    assert tree(tmp_path) == with_litter
    assert {one.path for one in found.removed} == set(map(str, removed))
    assert {one.reason for one in found.removed} == {"leftover"}
    assert found.nbytes == 2 * 5070 + 3
    assert zckpt.gc(tmp_path) == zckpt.Cleanup(found.removed, (), dry_run=False, checkpoints=3)
    assert tree(tmp_path) == before | {"latest.00000000.tmp"}
    assert zckpt.gc(tmp_path).removed == ()
    assert all(zckpt.validate(tmp_path / name).ok for name in ("s1", "s2"))


def test_no_lock_is_taken_where_nothing_is_to_be_done(tmp_path: Path) -> None:
    """It would be in the way of a write that begins just then."""
    write(tmp_path, 1, 2)
    litter(tmp_path / "s2")
    with faulty() as operations:
        zckpt.gc(tmp_path, keep=2)
    locked = {os.path.dirname(file) for name, file in operations.done if name == "claim"}
    assert locked == {str(tmp_path / "s2")}


def test_one_checkpoint_alone(tmp_path: Path) -> None:
    write(tmp_path, 1)
    before = tree(tmp_path)
    removed = litter(tmp_path / "s1")
    kept = litter(tmp_path / "s2")
    assert {one.path for one in zckpt.gc(tmp_path / "s1").removed} == set(map(str, removed))
    shutil.rmtree(tmp_path / "s2")
    assert kept
    assert tree(tmp_path) == before


def test_a_damaged_manifest_may_name_anything(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    litter(tmp_path / "s1")
    manifest = tmp_path / "s1" / "manifest.msgpack"
    raw = manifest.read_bytes()
    manifest.write_bytes(raw[:-1])
    before = tree(tmp_path)
    assert zckpt.gc(tmp_path, keep=1).removed == ()
    assert tree(tmp_path) == before
    manifest.write_bytes(raw)
    assert len(zckpt.gc(tmp_path).removed) == 3


def test_nothing_behind_a_link_is_touched(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", 1)
    litter(tmp_path / "elsewhere" / "s1")
    write(tmp_path / "run", 5)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere" / "s1")
    linked = tmp_path / "run" / "s5" / "data-fedcba9876543210"
    linked.symlink_to(tmp_path / "elsewhere" / "s1")
    before = tree(tmp_path / "elsewhere")
    zckpt.gc(tmp_path / "run", keep=1)
    assert tree(tmp_path / "elsewhere") == before
    assert not linked.is_symlink()


def test_a_file_of_another_program_with_the_name_of_a_lock_stays(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "write.lock").write_text("4711")
    os.utime(tmp_path / "other" / "write.lock", (0, 0))
    assert zckpt.gc(tmp_path) == zckpt.Cleanup((), (), dry_run=False, checkpoints=1)
    assert (tmp_path / "other" / "write.lock").read_text() == "4711"


@pytest.mark.linux
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_live_write_keeps_its_files(tmp_path: Path, dry_run: bool) -> None:
    write(tmp_path, 1, 2)
    with stopped_at(lambda wait: slow_write(tmp_path / "s9", wait, 9)) as (_, go_on):
        found = zckpt.gc(tmp_path, keep=2, dry_run=dry_run)
        assert (found.removed, found.in_use) == ((), (str(tmp_path / "s9"),))
        assert go_on() == str(tmp_path / "s9")
    assert zckpt.validate(tmp_path / "s9").ok
    with stopped_at(lambda wait: slow_write(tmp_path / "s1", wait, 1, overwrite=True, latest=False)) as (_, go_on):
        assert zckpt.gc(tmp_path, keep=1).in_use == (str(tmp_path / "s1"),), "it would go, were it not replaced now"
        assert not (tmp_path / "s2").exists()
        assert go_on() == str(tmp_path / "s1")
    assert zckpt.validate(tmp_path / "s1").ok


@pytest.mark.linux
def test_a_killed_write_leaves_nothing_after_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    before = tree(tmp_path)
    with stopped_at(lambda wait: slow_write(tmp_path / "s9", wait, 9)):
        pass  # it is killed
    assert tree(tmp_path) > before
    found = zckpt.gc(tmp_path)
    assert (found.in_use, found.removed, found.recoverable) == ((), (), (str(tmp_path / "s9"),)), "it had all data"
    with stopped_at(lambda wait: slow_write(tmp_path / "s9", wait, 9)):
        pass  # it has not committed, so that it is in nobody's way
    found = zckpt.gc(tmp_path, discard="s9")
    assert (found.in_use, found.recoverable) == ((), ())
    assert found.nbytes > 1_200_000
    assert tree(tmp_path) == before


# Retention


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.is_dir())


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_stay(tmp_path: Path, keep: int) -> None:
    """Newest by commit: a run that went back to step 2 has written 3 last."""
    write(tmp_path, 1, 2, 8, 9, 3)
    found = zckpt.gc(tmp_path, keep=keep)
    assert kept(tmp_path) == sorted(["s1", "s2", "s8", "s9", "s3"][-keep:])
    assert {one.reason for one in found.removed} <= {"retention"}
    for name in kept(tmp_path):
        assert zckpt.validate(tmp_path / name).ok
    assert zckpt.open(tmp_path).step == 3
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="keep must be 1 or more"):
            zckpt.gc(tmp_path, keep=wrong)


def test_what_latest_names_stays(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("s1\n")
    assert {one.path for one in zckpt.gc(tmp_path, keep=1, dry_run=True).removed} == {
        str(path) for path in (tmp_path / "s2").iterdir()
    }
    zckpt.gc(tmp_path, keep=1)
    assert kept(tmp_path) == ["s1", "s3"]


def test_a_latest_that_names_no_checkpoint_is_in_nobody_s_way(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("nothing\n")
    zckpt.gc(tmp_path, keep=2)
    assert kept(tmp_path) == ["s2", "s3"]
    deepspeed = tmp_path / "stock" / "mp_rank_00_model_states.pt"
    deepspeed.parent.mkdir()
    deepspeed.write_bytes(b"")
    (tmp_path / "latest").write_text("stock\n")
    zckpt.gc(tmp_path, keep=1)
    assert kept(tmp_path) == ["s3", "stock"]
    assert deepspeed.exists()
    (tmp_path / "latest").write_text("../nothing\n")
    write_state(tmp_path / "s5", 1, SHAPES, latest=False)
    with pytest.raises(FormatError, match="L001"):
        zckpt.gc(tmp_path, keep=1)
    (tmp_path / "link").symlink_to("s3")
    (tmp_path / "latest").write_text("link\n")
    zckpt.gc(tmp_path, keep=1)
    assert kept(tmp_path) == ["link", "s3", "s5", "stock"], "what it names by a link stays too"


def test_checkpoints_in_directories_of_a_run(tmp_path: Path) -> None:
    """Those of nested tags, and those of another run, which are nobody's here."""
    for number, name in enumerate(["e0/s1", "e0/s2", "e1/s3", "e1/s4", "other/s5", "other/s6"]):
        write_state(tmp_path / name, 1, SHAPES, step=number, latest=name.startswith("other"))
        os.utime(tmp_path / name / "manifest.msgpack", (1e9 + number,) * 2)
    assert zckpt.gc(tmp_path, keep=1).removed == (), "without a `latest` nobody has said that these are one run"
    (tmp_path / "latest").write_text("e0/s1\n")
    removed = litter(tmp_path / "e1" / "s4") | litter(tmp_path / "e1" / "half")
    found = zckpt.gc(tmp_path, keep=1)
    assert {one.path for one in found.removed if one.reason == "leftover"} == set(map(str, removed))
    there = {os.path.relpath(path.parent, tmp_path) for path in tmp_path.rglob("manifest.msgpack")}
    assert there == {"e0/s1", "e1/s4", "other/s5", "other/s6"}


def test_the_output_of_a_trainer(tmp_path: Path) -> None:
    for number in (5, 10, 15):
        folder = tmp_path / f"checkpoint-{number}"
        write_state(folder / f"global_step{number}", 1, SHAPES, step=number)
        os.utime(folder / f"global_step{number}" / "manifest.msgpack", (1e9 + number,) * 2)
        (folder / "trainer_state.json").write_text("{}")
    removed = litter(tmp_path / "checkpoint-10" / "global_step10")
    assert {one.path for one in zckpt.gc(tmp_path).removed} == set(map(str, removed))
    zckpt.gc(tmp_path, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoint-5").iterdir()) == ["trainer_state.json"]
    for number in (10, 15):
        assert zckpt.open(tmp_path / f"checkpoint-{number}").step == number


# What could be repaired


def test_what_could_be_repaired_stays_unless_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, 2, 3)
    for name in ("s1", "s2"):
        (tmp_path / name / "manifest.msgpack").unlink()
    before = tree(tmp_path)
    removed = litter(tmp_path / "s2")
    found = zckpt.gc(tmp_path, keep=1)
    assert {one.path for one in found.removed} == set(map(str, removed))
    assert found.recoverable == (str(tmp_path / "s1"), str(tmp_path / "s2"))
    assert tree(tmp_path) == before
    zckpt.repair(tmp_path / "s1")
    assert zckpt.validate(tmp_path / "s1").ok
    for wrong, error in (("s1", CheckpointExistsError), ("s4", CheckpointNotFoundError), ("s3", CheckpointExistsError)):
        with pytest.raises(error):
            zckpt.gc(tmp_path, discard=["s2", wrong])
    assert main(["gc", str(tmp_path), "--dry-run"]) == 0
    assert f"recoverable                 {tmp_path / 's2'}" in capsys.readouterr().out
    assert main(["gc", str(tmp_path), "--discard", str(tmp_path / "s2"), "--dry-run"]) == 0
    assert "discarded" in capsys.readouterr().out
    assert (tmp_path / "s2").exists()
    assert main(["gc", str(tmp_path), "--discard", "s2"]) == 0
    assert kept(tmp_path) == ["s1", "s3"]


@pytest.mark.parametrize("lost", ["rank", "table", "header", "file", "length"])
def test_what_could_not_be_repaired_goes(tmp_path: Path, lost: str) -> None:
    write(tmp_path, 1)
    (tmp_path / "s1" / "manifest.msgpack").unlink()
    (rank,) = (tmp_path / "s1").glob("data-*/rank-00001")
    if lost == "rank":
        shutil.rmtree(rank)
    elif lost == "table":
        (rank / "digests.bin").unlink()
    elif lost == "header":
        (rank / "master.safetensors").write_bytes(bytes(5000))
    elif lost == "file":
        (rank / "master.safetensors").unlink()
    else:
        os.truncate(rank / "master.safetensors", 5000)
    assert zckpt.gc(tmp_path, dry_run=True).recoverable == ()
    assert zckpt.gc(tmp_path).recoverable == ()
    assert kept(tmp_path) == []


def test_a_write_replaces_what_could_be_repaired_only_when_it_may(tmp_path: Path) -> None:
    path = tmp_path / "s1"
    write(tmp_path, 1)
    (path / "manifest.msgpack").unlink()
    before = tree(tmp_path)
    with pytest.raises(CheckpointExistsError, match=r"(?s)manifest was lost.*zckpt\.repair"):
        write_through(path, torch.ones(9))
    assert tree(tmp_path) == before
    with faulty(Fault(BROKEN, names=("sync_names",), path="rank-")), pytest.raises(zckpt.StorageError):
        write_through(path, torch.ones(9), overwrite=True)
    assert tree(tmp_path) == before, "the new one was not committed"
    write_through(path, torch.ones(9), overwrite=True)
    assert zckpt.validate(path).ok
    assert len(list(path.glob("data-*"))) == 1


def test_the_manifest_goes_first_for_good(tmp_path: Path) -> None:
    """Whenever removal ends, what is left has no manifest, or all of its data."""
    number = 0
    while True:
        run = tmp_path / str(number)
        write(run, 1, 2)

        def die(operation: Any, file: str) -> None:
            raise KeyboardInterrupt

        try:
            with faulty(Fault(die, at=number, names=("remove", "sync_names"), path="s1")) as operations:
                zckpt.gc(run, keep=1)
            break
        except KeyboardInterrupt:
            pass
        manifest = run / "s1" / "manifest.msgpack"
        assert not manifest.exists() or zckpt.validate(run / "s1").ok
        if zckpt.gc(run, keep=1).recoverable:  # it ended between the manifest and the data, and nobody knows why
            zckpt.gc(run, keep=1, discard=["s1"])
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
                zckpt.gc(tmp_path, keep=1)
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
    write(tmp_path, 1, 2)
    opened, other = zckpt.open(tmp_path / "s1"), zckpt.open(tmp_path / "s1")
    before = {key: tensor.clone() for key, tensor in opened.load().items()}
    zckpt.gc(tmp_path, keep=1)
    assert not (tmp_path / "s1").exists()
    if sys.platform == "linux":  # others keep no file open between two reads
        assert all(torch.equal(tensor, before[key]) for key, tensor in opened.load().items()), "its files are open"
        opened = other
    with pytest.raises(MissingFileError, match="F001"):
        opened.load()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, 2, 3)
    litter(tmp_path / "s3")
    assert main(["gc", str(tmp_path), "--keep", "2", "--dry-run"]) == 0
    assert "would remove 5" in capsys.readouterr().out
    assert main(["gc", str(tmp_path), "--keep", "2"]) == 0
    out = capsys.readouterr().out
    assert "retention" in out
    assert "leftover" in out
    assert kept(tmp_path) == ["s2", "s3"]
    assert main(["gc", str(tmp_path / "nothing")]) == 2
    assert "no checkpoint was found" not in out
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert main(["gc", str(tmp_path / "empty")]) == 0
    assert "no checkpoint was found there" in capsys.readouterr().out
    for wrong in ("0", "-1", "x"):
        with pytest.raises(SystemExit) as caught:
            main(["gc", str(tmp_path), f"--keep={wrong}"])
        assert caught.value.code == 2
        assert "must be a whole number of 1 or more" in capsys.readouterr().err
