"""zckpt.gc removes what dead writers have left, and nothing else."""

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
from tests.support.litter import SHAPES, directory_names, litter, tree, write_steps
from tests.support.slow_writes import slow_write
from tests.support.states import write_state, write_through
from zckpt.cli import main
from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write_files_to_keep(path: Path) -> set[Path]:
    """Writes files that are not leftovers, although the names of some are similar. Returns their paths."""
    files = {path / name for name in ("notes.txt", "data-notes", "manifest.msgpack.bak", "data-0123456789abcdeg")}
    for file in files:
        file.write_text("mine")
    return files


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    write_files_to_keep(tmp_path)
    write_files_to_keep(tmp_path / "s1")
    before = tree(tmp_path)
    removed = litter(tmp_path / "s1") | litter(tmp_path / "unfinished")
    (tmp_path / "latest.01234567.tmp").write_text("old")
    os.utime(tmp_path / "latest.01234567.tmp", (0, 0))
    removed.add(tmp_path / "latest.01234567.tmp")
    (tmp_path / "latest.00000000.tmp").write_text("a commit that is under way")
    with_litter = tree(tmp_path)

    cleanup = zckpt.gc(tmp_path, dry_run=True)
    assert tree(tmp_path) == with_litter
    assert {removal.path for removal in cleanup.removed} == set(map(str, removed))
    assert {removal.reason for removal in cleanup.removed} == {"leftover"}
    assert cleanup.nbytes == 2 * 5070 + 3
    assert zckpt.gc(tmp_path) == zckpt.Cleanup(cleanup.removed, (), dry_run=False, checkpoints=3)
    assert tree(tmp_path) == before | {"latest.00000000.tmp"}
    assert zckpt.gc(tmp_path).removed == ()
    assert all(zckpt.validate(tmp_path / name).ok for name in ("s1", "s2"))


def test_no_lock_is_taken_if_there_is_nothing_to_remove(tmp_path: Path) -> None:
    """A lock would stop a write that begins at that moment."""
    write_steps(tmp_path, 1, 2)
    litter(tmp_path / "s2")
    with faulty() as operations:
        zckpt.gc(tmp_path)
    locked = {os.path.dirname(file) for name, file in operations.done if name == "put"}
    assert locked == {str(tmp_path / "s2")}


@pytest.mark.linux
def test_the_files_by_which_processes_take_a_lock_stay(tmp_path: Path) -> None:
    """Two clean-ups and a write may take a lock at the same time. If one removed the file of another, that would
    fail. The file of a process that has died goes at once."""
    write_steps(tmp_path, 1)
    unknown, alive, dead = (tmp_path / "s1" / f"write.lock.{number:08x}.tmp" for number in range(3))
    lock = json.loads(WriteLock(open_store(tmp_path / "s1")).data)
    unknown.write_bytes(b"now")
    alive.write_text(json.dumps(lock | {"pid": 1, "started": None}))
    dead.write_text(json.dumps(lock | {"pid": 4_000_000}))
    assert [removed.path for removed in zckpt.gc(tmp_path).removed] == [str(dead)]
    with faulty() as operations:
        assert zckpt.gc(tmp_path).removed == ()
    assert all(name != "put" for name, _ in operations.done)
    for path in (unknown, alive):
        os.utime(path, (0, 0))
    assert [removed.path for removed in zckpt.gc(tmp_path).removed] == [str(unknown), str(alive)]


def test_one_checkpoint_alone(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    before = tree(tmp_path)
    removed = litter(tmp_path / "s1")
    paths = litter(tmp_path / "s2")
    assert {removal.path for removal in zckpt.gc(tmp_path / "s1").removed} == set(map(str, removed))
    shutil.rmtree(tmp_path / "s2")
    assert paths
    assert tree(tmp_path) == before


def test_nothing_is_removed_beside_a_damaged_manifest(tmp_path: Path) -> None:
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
    cleanup = zckpt.gc(tmp_path / "run")
    assert (cleanup.removed, cleanup.foreign) == ((), (str(linked),))
    assert tree(tmp_path / "elsewhere") == before
    assert linked.is_symlink(), "zckpt makes no links there"


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
        cleanup = zckpt.gc(tmp_path, dry_run=dry_run)
        assert (cleanup.removed, cleanup.in_use) == ((), (str(tmp_path / "s9"),))
        assert go_on() == str(tmp_path / "s9")
    assert zckpt.validate(tmp_path / "s9").ok


@pytest.mark.linux
def test_what_a_killed_write_has_left_can_be_removed(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    before = tree(tmp_path)
    with stopped_at(lambda wait: slow_write(tmp_path / "s9", wait, 9)):
        pass  # the write is killed here
    assert tree(tmp_path) > before
    cleanup = zckpt.gc(tmp_path)
    assert (cleanup.in_use, cleanup.removed, cleanup.recoverable) == ((), (), (str(tmp_path / "s9"),)), (
        "it had all data"
    )
    with stopped_at(lambda wait: slow_write(tmp_path / "s9", wait, 9)):
        pass  # the first write was never committed, and does not stop this one
    cleanup = zckpt.gc(tmp_path, discard="s9")
    assert (cleanup.in_use, cleanup.recoverable) == ((), ())
    assert cleanup.nbytes > 1_200_000
    assert tree(tmp_path) == before


@pytest.mark.linux
@pytest.mark.parametrize("lost", ["index.bin", "rank-00001/digests.bin"])
def test_what_a_killed_repair_has_left_is_removed(tmp_path: Path, lost: str) -> None:
    write_steps(tmp_path, 1)
    whole = tree(tmp_path)
    (file,) = tmp_path.glob(f"s1/data-*/{lost}")
    file.write_bytes(b"damaged")

    def repair(wait: Callable[[], None]) -> None:
        with faulty(Fault(lambda *_: wait(), names=("commit",), path=lost)):
            zckpt.repair(tmp_path / "s1")

    with stopped_at(repair):
        with_temporary = tree(tmp_path)
        cleanup = zckpt.gc(tmp_path)
        assert (cleanup.removed, cleanup.in_use) == ((), (str(tmp_path / "s1"),))
    # The repair is killed here. The damaged file stays under its other name.
    (temporary,) = tmp_path.glob(f"s1/data-*/{lost}.*.tmp")
    cleanup = zckpt.gc(tmp_path)
    assert [removed.path for removed in cleanup.removed] == [str(temporary)]
    assert tree(tmp_path) == with_temporary - {str(temporary.relative_to(tmp_path)), "s1/write.lock"}
    zckpt.repair(tmp_path / "s1")
    assert zckpt.validate(tmp_path / "s1").ok
    assert whole < tree(tmp_path)


# Checkpoints that could be repaired


def test_checkpoints_that_could_be_repaired_stay_unless_they_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(tmp_path, 1, 2, 3)
    for name in ("s1", "s2"):
        (tmp_path / name / "manifest.msgpack").unlink()
    before = tree(tmp_path)
    removed = litter(tmp_path / "s2")
    cleanup = zckpt.gc(tmp_path)
    assert {removal.path for removal in cleanup.removed} == set(map(str, removed))
    assert cleanup.recoverable == (str(tmp_path / "s1"), str(tmp_path / "s2"))
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
    assert directory_names(tmp_path) == ["s1", "s3"]


@pytest.mark.parametrize("lost", ["rank", "table", "header", "file", "length"])
def test_checkpoints_that_could_not_be_repaired_are_removed(tmp_path: Path, lost: str) -> None:
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
    assert directory_names(tmp_path) == []


def test_a_write_replaces_a_checkpoint_that_could_be_repaired_only_if_asked(tmp_path: Path) -> None:
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
    output = json.loads(capsys.readouterr().out)
    assert (len(output["removed"]), output["nbytes"], output["dry_run"]) == (3, 5070, False)
    assert {removal["reason"] for removal in output["removed"]} == {"leftover"}
    assert directory_names(tmp_path) == ["s1", "s2", "s3"], "gc removes no checkpoint"
    assert main(["gc", str(tmp_path / "nothing")]) == 2
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert main(["gc", str(tmp_path / "empty")]) == 0
    assert "no checkpoint was found there" in capsys.readouterr().out


def test_checkpoints_in_directories_of_a_run(tmp_path: Path) -> None:
    """The checkpoints are those of nested tags, those of a Trainer, and those of another run, which gc must not
    touch."""
    for name in ("e1/s4", "checkpoint-5/s5", "other/s6"):
        write_state(tmp_path / name, 1, SHAPES, latest=name.startswith("other"))
    of_trainer, of_other = litter(tmp_path / "checkpoint-5" / "s5"), litter(tmp_path / "other" / "s6")
    nested = litter(tmp_path / "e1" / "s4") | litter(tmp_path / "e1" / "half")
    assert {removal.path for removal in zckpt.gc(tmp_path).removed} == set(map(str, of_trainer)), (
        "there is no `latest` here"
    )
    (tmp_path / "latest").write_text("e1/s4\n")
    assert {removal.path for removal in zckpt.gc(tmp_path).removed} == set(map(str, nested))
    assert all(path.exists() for path in of_other)
