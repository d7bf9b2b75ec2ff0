"""What has not changed since an earlier checkpoint is not written again, and each checkpoint stays whole by itself."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.independent_reader import Reader
from tests.support.memory_store import in_memory
from tests.support.plain_engine import Engine, everything
from tests.support.states import fragment, same_all
from zckpt.cli import main
from zckpt.format import names
from zckpt.transfer import write as transfer

if TYPE_CHECKING:
    from zckpt.state.inventory import Fragment

pytestmark = pytest.mark.usefixtures("engines_are_adapters")

MIB = 1 << 20
FROZEN = 3 * MIB + 12
"""Bytes, in several reads of 1 MiB."""


class Tuned(Engine):
    """Most of its weights are frozen, in two tensors."""

    def __init__(self, frozen: int = FROZEN, step: int = 5) -> None:
        super().__init__(256 << 10, step=step)
        self.parts = ("master", "exp_avg", "param")
        self.frozen = torch.randn(frozen // 4)
        self.more = torch.arange(1000.0)
        self.tier = "device"

    def fragments(self) -> list[Fragment]:
        own = [("frozen", self.frozen), ("more", self.more)]
        param = [fragment("param", name, value, 0, len(value), self.tier) for name, value in own]
        return [*super().fragments(), *param]

    def train(self) -> None:
        self.weight, self.step = self.weight + 1, self.step + 1

    @property
    def full(self) -> dict[str, torch.Tensor]:
        return {f"{one.part}/{one.name}": one.data for one in self.fragments() if isinstance(one.data, torch.Tensor)}


def data_file(path: str | Path, part: str = "param") -> Path:
    (found,) = Path(path).glob(f"data-*/rank-00000/*{part}.safetensors")
    return found


def shared(path: str | Path) -> set[str]:
    """The parts whose file an earlier save has written, as manifest and headers say."""
    manifest = zckpt.open(path).manifest
    parts = {manifest.parts[file.part].name: file.origin for file in manifest.files}
    for part, origin in parts.items():
        assert f'"zckpt.save_id":"{origin or manifest.save_id}"'.encode() in data_file(path, part).read_bytes()[:4096]
    return {part for part, origin in parts.items() if origin}


def assert_holds(path: str | Path, full: dict[str, torch.Tensor]) -> None:
    """By the library, by the validator and by a reader that was written from the specification."""
    report = zckpt.validate(path)
    assert report.ok, str(report)
    assert same_all(zckpt.open(path).load(), full)
    reader = Reader(Path(path))
    assert all(reader.load(key) == tensor.numpy().tobytes() for key, tensor in full.items())


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCKPT_BUDGET_BYTES", str(8 * MIB))


@pytest.fixture
def engine() -> Tuned:
    return Tuned()


def test_what_has_not_changed_is_shared(engine: Tuned, tmp_path: Path) -> None:
    first, before = zckpt.write(engine, tmp_path / "run" / "a"), engine.full
    engine.train()
    second = zckpt.write(engine, tmp_path / "run" / "b")
    assert (shared(first), shared(second)) == (set(), {"param"})
    assert os.path.samefile(data_file(first), data_file(second))
    assert not os.path.samefile(data_file(first, "master"), data_file(second, "master"))
    assert_holds(first, before)
    assert_holds(second, engine.full)
    engine.train()
    third = zckpt.write(engine, tmp_path / "run" / "c")
    origins = {file.origin for file in zckpt.open(third).manifest.files}
    assert origins == {"", zckpt.open(first).manifest.save_id}, "of the save that wrote it, however long ago"
    assert data_file(third).stat().st_nlink == 3
    # Each is whole by itself: deleted, moved, copied
    shutil.rmtree(first)
    Path(second).rename(tmp_path / "moved")
    shutil.copytree(third, tmp_path / "copied")
    shutil.rmtree(third)
    for path in (tmp_path / "moved", tmp_path / "copied"):
        assert zckpt.validate(path).ok
    assert_holds(tmp_path / "copied", engine.full)


@pytest.mark.parametrize("at", [0, FROZEN // 8, -1, "more"])
def test_a_frozen_tensor_that_has_changed_after_all_is_written(engine: Tuned, tmp_path: Path, at: Any) -> None:
    first, before = zckpt.write(engine, tmp_path / "a"), {key: value.clone() for key, value in engine.full.items()}
    tensor, index = (engine.more, 7) if at == "more" else (engine.frozen, at)
    tensor[index] += 1
    second = zckpt.write(engine, tmp_path / "b")
    assert shared(second) == {"master", "exp_avg"}, "which nobody has trained"
    assert_holds(first, before)
    assert_holds(second, engine.full)


def test_where_all_has_changed_next_to_nothing_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Tuned(30 * MIB)
    first = zckpt.write(engine, tmp_path / "a")
    engine.train()
    engine.frozen = engine.frozen + 1
    digested, real = [0], transfer.digest

    def counted(data: Any) -> bytes:
        digested[0] += len(data)
        return real(data)

    monkeypatch.setattr(transfer, "digest", counted)
    second = zckpt.write(engine, tmp_path / "b", budget=zckpt.Budget(2 * MIB, threads=1))
    assert (shared(first), shared(second)) == (set(), set())
    nbytes = sum(zckpt.open(second).manifest.files.nbytes)
    assert nbytes < digested[0] < nbytes + 8 * MIB


def change_shape(engine: Tuned) -> None:
    engine.frozen = engine.frozen[:-1]


def change_size(engine: Tuned) -> None:
    engine.more = engine.more.view(-1)[: 1000 - 8]


def change_tier(engine: Tuned) -> None:
    engine.tier = "host"


def change_dtype(engine: Tuned) -> None:
    engine.frozen = engine.frozen.view(torch.int32)


@pytest.mark.parametrize("change", [change_shape, change_size, change_tier, change_dtype])
def test_another_layout_is_written(engine: Tuned, tmp_path: Path, change: Any) -> None:
    zckpt.write(engine, tmp_path / "a")
    engine.train()
    change(engine)
    second = zckpt.write(engine, tmp_path / "b")
    assert shared(second) == set()
    assert same_all(zckpt.open(second).load(), engine.full)


def test_the_caller_chooses_the_earlier_checkpoint(engine: Tuned, tmp_path: Path) -> None:
    first = zckpt.write(engine, tmp_path / "one" / "a")
    assert shared(zckpt.write(engine, tmp_path / "one" / "b", reuse=None)) == set()
    other = Tuned()
    assert shared(zckpt.write(other, tmp_path / "two" / "a")) == set(), "there is none yet"
    other = Tuned()
    assert "param" in shared(zckpt.write(other, tmp_path / "three" / "a", reuse=tmp_path / "one"))
    other = Tuned()
    assert "param" in shared(zckpt.write(other, tmp_path / "one" / "c")), "`latest` names one"
    assert zckpt.open(tmp_path / "one" / "c").manifest.files.shared.keys() == {
        zckpt.open(tmp_path / "one" / "b").manifest.save_id
    }
    with pytest.raises(zckpt.CheckpointNotFoundError):
        zckpt.write(engine, tmp_path / "d", reuse=tmp_path / "none")
    assert not (tmp_path / "d").exists()
    assert zckpt.validate(first).ok


@pytest.mark.parametrize("damage", ["manifest", "table", "short", "gone", "link"])
def test_what_cannot_be_read_is_not_taken_over(engine: Tuned, tmp_path: Path, damage: str) -> None:
    first = zckpt.write(engine, tmp_path / "a")
    frozen = data_file(first)
    if damage == "manifest":
        (tmp_path / "a" / names.MANIFEST).write_bytes(b"nothing")
    elif damage == "table":
        frozen.with_name("digests.bin").write_bytes(bytes(160))
    elif damage == "short":
        os.truncate(frozen, frozen.stat().st_size - 1)
    else:
        frozen.rename(tmp_path / "moved")
        if damage == "link":
            frozen.symlink_to(tmp_path / "moved")
    engine.train()
    with pytest.raises(zckpt.FormatError):
        zckpt.write(engine, tmp_path / "b", reuse=first)
    second = zckpt.write(engine, tmp_path / "b")
    assert shared(second) == set()
    assert_holds(second, engine.full)


def no_links(*_: object) -> None:
    raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))


@pytest.mark.parametrize("why", ["too many links", "another file system"])
def test_where_there_are_no_links_the_bytes_are_written(
    engine: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The file is the same, header and all, and the manifest as well."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        first = zckpt.write(engine, (Path(elsewhere) if why == "another file system" else tmp_path) / "a")
        engine.train()
        if why == "too many links":
            monkeypatch.setattr("zckpt.storage.local_store.os.link", no_links)
        elif os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is on the same file system")
        second = zckpt.write(engine, tmp_path / "b")
        assert shared(second) == {"param"}
        assert data_file(second).stat().st_nlink == 1
        assert data_file(second).read_bytes() == data_file(first).read_bytes()
    assert_holds(second, engine.full)


def test_a_store_of_another_kind(engine: Tuned) -> None:
    with in_memory():
        zckpt.write(engine, "memory://run/a")
        engine.train()
        second = zckpt.write(engine, "memory://run/b")
        assert zckpt.open(second).manifest.files.shared
        assert zckpt.validate(second).ok
        assert same_all(zckpt.open(second).load(), engine.full)


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_in_the_background(engine: Tuned, tmp_path: Path, snapshot: Any) -> None:
    engine.refuse_lazy = engine.before_change = lambda *_: None  # type: ignore[attr-defined]
    for step, tag in enumerate("abc"):
        pending = zckpt.write(engine, tmp_path / tag, background=True, snapshot=snapshot)
        full = dict(engine.full)
        assert pending.wait() == str(tmp_path / tag)
        assert shared(tmp_path / tag) == ({"param"} if step else set())
        assert_holds(tmp_path / tag, full)
        engine.train()


def test_one_that_replaces_the_earlier_one(engine: Tuned, tmp_path: Path) -> None:
    for number in range(3):
        zckpt.write(engine, tmp_path / "a", overwrite=True)
        assert shared(tmp_path / "a") == ({"param"} if number else set())
        assert_holds(tmp_path / "a", engine.full)
        assert data_file(tmp_path / "a").stat().st_nlink == 1
        engine.train()


def test_nothing_is_left_to_write(tmp_path: Path) -> None:
    engine = Tuned()
    zckpt.write(engine, tmp_path / "a")
    second = zckpt.write(engine, tmp_path / "b")
    assert shared(second) == {"master", "exp_avg", "param"}
    assert_holds(second, engine.full)


def test_what_info_and_prune_say_of_it(engine: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for tag in "abc":
        last = zckpt.write(engine, run / tag)
        engine.train()
    frozen = data_file(last).stat().st_size
    assert main(["info", str(run / "a")]) == 0
    assert "shared      3.0 MiB of them" in capsys.readouterr().out
    told = zckpt.prune(run, keep_last=1, dry_run=True)
    assert told.shared_bytes == 2 * frozen, "the one that is kept has it"
    assert 0 < told.nbytes < frozen
    assert "more bytes stay, because other checkpoints share them" in str(told)
    done = zckpt.prune(run, keep_last=1)
    assert done == replace(told, dry_run=False)
    assert zckpt.validate(run).ok
    assert data_file(run / "c").stat().st_nlink == 1
    zckpt.write(engine, run / "d", latest=False)
    (run / "latest").unlink()
    (run / "c" / names.MANIFEST).unlink()  # what is left of both is garbage, the last link included
    (run / "d" / names.MANIFEST).unlink()
    found = zckpt.gc(run, discard=["c", "d"])
    assert found.shared_bytes == frozen
    assert found.nbytes > frozen


def test_copies(engine: Tuned, tmp_path: Path) -> None:
    zckpt.write(engine, tmp_path / "run" / "a")
    engine.train()
    source = zckpt.write(engine, tmp_path / "run" / "b")
    manifest = (tmp_path / "run" / "b" / names.MANIFEST).read_bytes()
    assert main(["cp", source, str(tmp_path / "same")]) == 0
    assert main(["cp", source, str(tmp_path / "alone"), "--no-share"]) == 0
    zckpt.cp(source, tmp_path / "some", ["param/*"])
    for name in ("same", "alone"):
        assert (tmp_path / name / names.MANIFEST).read_bytes() == manifest
        assert_holds(tmp_path / name, engine.full)
        for part in ("master", "param"):
            assert os.path.samefile(data_file(source, part), data_file(tmp_path / name, part)) == (name == "same")
            assert data_file(tmp_path / "alone", part).stat().st_nlink == 1
    assert shared(tmp_path / "some") == set()
    assert zckpt.validate(tmp_path / "some").ok


def test_damage_hits_all_that_share_and_a_copy_ends_at_it(engine: Tuned, tmp_path: Path) -> None:
    first = zckpt.write(engine, tmp_path / "a")
    alone = zckpt.cp(first, tmp_path / "alone", share=False)
    engine.train()
    second = zckpt.write(engine, tmp_path / "b")
    with data_file(first).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    assert [[one.rule for one in zckpt.validate(path).findings] for path in (first, second, alone)] == [
        ["D003"], ["D003"], []
    ]  # fmt: skip
    with pytest.raises(zckpt.DigestError):
        zckpt.cp(second, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("lost", ["manifest", "index", "table", "both"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_repair_changes_no_file_that_is_shared(engine: Tuned, tmp_path: Path, lost: str, elsewhere: bool) -> None:
    first, before = zckpt.write(engine, tmp_path / "a"), engine.full
    engine.train()
    second = Path(zckpt.write(engine, tmp_path / "b"))
    old, manifest = everything(Path(first)), zckpt.open(second).manifest
    if lost in ("manifest", "both"):
        (second / names.MANIFEST).unlink()
    if lost in ("table", "both"):
        data_file(second).with_name("digests.bin").unlink()
    if lost == "index":
        next(second.glob("data-*/index.bin")).write_bytes(b"nothing")
    output = tmp_path / "whole" if elsewhere else None
    if lost == "both":  # nothing says that it belongs there
        with pytest.raises(zckpt.RepairError, match="no digest table lists it"):
            zckpt.repair(second, output=output, accept_unverified=True)
        return
    report = zckpt.repair(second, output=output)
    assert report.unverified == ()
    assert zckpt.open(report.path).manifest.files == manifest.files
    assert_holds(report.path, engine.full)
    assert everything(Path(first)) == old
    assert_holds(first, before)
    assert data_file(first).stat().st_nlink == 2
    assert zckpt.repair(report.path).rebuilt == ()


def test_a_file_that_belongs_elsewhere_is_no_shared_one(engine: Tuned, tmp_path: Path) -> None:
    """Of another save, of the same rank, part, tier and layout."""
    first = zckpt.write(engine, tmp_path / "a")
    engine.train()
    engine.frozen = engine.frozen + 1
    second = Path(zckpt.write(engine, tmp_path / "b"))
    shutil.copy(data_file(first), data_file(second))
    assert "S006" in {one.rule for one in zckpt.validate(second).findings}
    with pytest.raises(zckpt.RepairError):
        zckpt.repair(second, accept_unverified=True)
    (second / names.MANIFEST).unlink()
    with pytest.raises(zckpt.RepairError, match="no digest table lists it"):
        zckpt.repair(second, accept_unverified=True)


def test_nobody_writes_into_a_file_that_is_there(
    engine: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is done to a checkpoint that shares files, the other one has the same bytes in the same files."""
    first = Path(zckpt.write(engine, tmp_path / "run" / "a"))
    inodes = {file: file.stat().st_ino for file in first.rglob("*") if file.is_file()}
    old = everything(first)
    engine.train()
    second = zckpt.write(engine, tmp_path / "run" / "b")
    zckpt.write(engine, second, overwrite=True)
    zckpt.cp(second, tmp_path / "run" / "c")
    zckpt.cp(first, second, overwrite=True)
    next(Path(second).glob("data-*/index.bin")).write_bytes(b"")
    zckpt.repair(second)
    zckpt.gc(tmp_path / "run")
    zckpt.export(second, tmp_path / "out")
    shutil.rmtree(second)
    assert everything(first) == old
    assert {file: file.stat().st_ino for file in first.rglob("*") if file.is_file()} == inodes
