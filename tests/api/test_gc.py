"""Leftovers of dead writers: what goes, and what stays."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from tests.support.faults import BROKEN, Fault, faulty
from tests.support.forks import stopped_at
from tests.support.litter import SHAPES, kept, litter, tree, write_steps
from tests.support.slow_writes import slow_write
from tests.support.states import write_state, write_through
from zckpt.cli import main
from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError

if TYPE_CHECKING:
    from pathlib import Path


def others(path: Path) -> set[Path]:
    """What is nobody's leftover."""
    found = {path / name for name in ("notes.txt", "data-notes", "manifest.msgpack.bak", "data-0123456789abcdeg")}
    for one in found:
        one.write_text("mine")
    return found


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
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
    write_steps(tmp_path, 1, 2)
    litter(tmp_path / "s2")
    with faulty() as operations:
        zckpt.gc(tmp_path)
    locked = {os.path.dirname(file) for name, file in operations.done if name == "claim"}
    assert locked == {str(tmp_path / "s2")}


def test_one_checkpoint_alone(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    before = tree(tmp_path)
    removed = litter(tmp_path / "s1")
    kept = litter(tmp_path / "s2")
    assert {one.path for one in zckpt.gc(tmp_path / "s1").removed} == set(map(str, removed))
    shutil.rmtree(tmp_path / "s2")
    assert kept
    assert tree(tmp_path) == before


def test_a_damaged_manifest_may_name_anything(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    litter(tmp_path / "s1")
    manifest = tmp_path / "s1" / "manifest.msgpack"
    raw = manifest.read_bytes()
    manifest.write_bytes(raw[:-1])
    before = tree(tmp_path)
    assert zckpt.gc(tmp_path).removed == ()
    assert tree(tmp_path) == before
    manifest.write_bytes(raw)
    assert len(zckpt.gc(tmp_path).removed) == 3


def test_nothing_behind_a_link_is_touched(tmp_path: Path) -> None:
    write_steps(tmp_path / "elsewhere", 1)
    litter(tmp_path / "elsewhere" / "s1")
    write_steps(tmp_path / "run", 5)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere" / "s1")
    linked = tmp_path / "run" / "s5" / "data-fedcba9876543210"
    linked.symlink_to(tmp_path / "elsewhere" / "s1")
    before = tree(tmp_path / "elsewhere")
    zckpt.gc(tmp_path / "run")
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
    write_steps(tmp_path, 1, 2)
    with stopped_at(lambda wait: slow_write(tmp_path / "s9", wait, 9)) as (_, go_on):
        found = zckpt.gc(tmp_path, dry_run=dry_run)
        assert (found.removed, found.in_use) == ((), (str(tmp_path / "s9"),))
        assert go_on() == str(tmp_path / "s9")
    assert zckpt.validate(tmp_path / "s9").ok


@pytest.mark.linux
def test_a_killed_write_leaves_nothing_after_it(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
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


# What could be repaired


def test_what_could_be_repaired_stays_unless_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 1, 2, 3)
    for name in ("s1", "s2"):
        (tmp_path / name / "manifest.msgpack").unlink()
    before = tree(tmp_path)
    removed = litter(tmp_path / "s2")
    found = zckpt.gc(tmp_path)
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
    write_steps(tmp_path, 1)
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
    write_steps(tmp_path, 1)
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


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 1, 2, 3)
    litter(tmp_path / "s3")
    assert main(["gc", str(tmp_path), "--dry-run"]) == 0
    assert "would remove 3" in capsys.readouterr().out
    assert main(["gc", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["removed"]), found["nbytes"], found["dry_run"]) == (3, 5070, False)
    assert {one["reason"] for one in found["removed"]} == {"leftover"}
    assert kept(tmp_path) == ["s1", "s2", "s3"], "gc removes no checkpoint"
    assert main(["gc", str(tmp_path / "nothing")]) == 2
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert main(["gc", str(tmp_path / "empty")]) == 0
    assert "no checkpoint was found there" in capsys.readouterr().out


def test_checkpoints_in_directories_of_a_run(tmp_path: Path) -> None:
    """Those of nested tags, those of a Trainer, and those of another run, which are nobody's here."""
    for name in ("e1/s4", "checkpoint-5/s5", "other/s6"):
        write_state(tmp_path / name, 1, SHAPES, latest=name.startswith("other"))
    of_trainer, of_other = litter(tmp_path / "checkpoint-5" / "s5"), litter(tmp_path / "other" / "s6")
    nested = litter(tmp_path / "e1" / "s4") | litter(tmp_path / "e1" / "half")
    assert {one.path for one in zckpt.gc(tmp_path).removed} == set(map(str, of_trainer)), "there is no `latest` here"
    (tmp_path / "latest").write_text("e1/s4\n")
    assert {one.path for one in zckpt.gc(tmp_path).removed} == set(map(str, nested))
    assert all(one.exists() for one in of_other)
