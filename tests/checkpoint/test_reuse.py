"""A write does not write data again that has not changed since an earlier checkpoint. Each checkpoint is still complete
by itself."""

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
from tests.support import accelerator
from tests.support.independent_reader import Reader
from tests.support.memory_store import in_memory
from tests.support.plain_engine import Engine, engines_are_adapters, everything
from tests.support.progress import RecordedProgress
from tests.support.states import fragment, same_all
from zckpt.checkpoint.open import open_loader
from zckpt.cli import main
from zckpt.engines.history import History
from zckpt.format import names
from zckpt.format.digest import digest
from zckpt.format.names import Tier
from zckpt.transfer import write as transfer

if TYPE_CHECKING:
    from zckpt.plan.inventory import Fragment

pytestmark = pytest.mark.usefixtures("engines_are_adapters")

MIB = 1 << 20
FROZEN = 3 * MIB + 12
"""The number of bytes of the frozen tensor. It needs several reads of 1 MiB."""


class Tuned(Engine):
    """An engine most of whose weights are frozen. The frozen weights are two tensors."""

    def __init__(self, frozen: int = FROZEN, step: int = 5) -> None:
        super().__init__(256 << 10, step=step)
        self._zckpt_history = History()  # Which checkpoint an engine has written last decides what it reuses.
        self.parts = ("master", "exp_avg", "param")
        self.frozen = torch.randn(frozen // 4)
        self.more = torch.arange(1000.0)
        self.tier = Tier.DEVICE

    def fragments(self) -> list[Fragment]:
        unchanged = [("frozen", self.frozen), ("more", self.more)]
        param = [fragment("param", name, value, 0, len(value), self.tier) for name, value in unchanged]
        return [*super().fragments(), *param]

    def train(self) -> None:
        self.weight, self.step = self.weight + 1, self.step + 1

    @property
    def full(self) -> dict[str, torch.Tensor]:
        return {f"{f.part}/{f.name}": f.data for f in self.fragments() if isinstance(f.data, torch.Tensor)}


def data_file(path: str | Path, part: str = "param") -> Path:
    (file,) = Path(path).glob(f"data-*/rank-00000/*{part}.safetensors")
    return file


def shared(path: str | Path) -> set[str]:
    """Returns the parts whose file an earlier save has written. The manifest and the header of each file have to agree
    about this."""
    manifest = open_loader(path).manifest
    parts = {manifest.parts[file.part_id].name: file.origin for file in manifest.files}
    for part, origin in parts.items():
        assert f'"zckpt.save_id":"{origin or manifest.save_id}"'.encode() in data_file(path, part).read_bytes()[:4096]
    return {part for part, origin in parts.items() if origin}


def assert_holds(path: str | Path, full: dict[str, torch.Tensor]) -> None:
    """Checks the tensors with the library, with the validator and with a reader that was written from the specification
    alone."""
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


def test_a_file_that_has_not_changed_is_shared(engine: Tuned, tmp_path: Path) -> None:
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
    origins = {file.origin for file in open_loader(third).manifest.files}
    assert origins == {"", open_loader(first).manifest.save_id}, "of the save that wrote it, however long ago"
    assert data_file(third).stat().st_nlink == 3
    # Each checkpoint is complete by itself, although others were deleted, moved or copied
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


def test_if_everything_has_changed_almost_nothing_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Tuned(30 * MIB)
    first = zckpt.write(engine, tmp_path / "a")
    engine.train()
    engine.frozen = engine.frozen + 1
    digested = [0]

    def counted(data: Any) -> bytes:
        digested[0] += len(data)
        return digest(data)

    monkeypatch.setattr(transfer, "digest", counted)
    second = zckpt.write(engine, tmp_path / "b", budget=zckpt.Budget(2 * MIB, threads=1))
    assert (shared(first), shared(second)) == (set(), set())
    nbytes = sum(open_loader(second).manifest.files.nbytes)
    assert nbytes < digested[0] < nbytes + 8 * MIB


def change_shape(engine: Tuned) -> None:
    engine.frozen = engine.frozen[:-1]


def change_size(engine: Tuned) -> None:
    engine.more = engine.more.view(-1)[: 1000 - 8]


def change_tier(engine: Tuned) -> None:
    engine.tier = Tier.HOST


def change_dtype(engine: Tuned) -> None:
    engine.frozen = engine.frozen.view(torch.int32)


@pytest.mark.parametrize("change", [change_shape, change_size, change_tier, change_dtype])
def test_a_file_with_another_layout_is_written(engine: Tuned, tmp_path: Path, change: Any) -> None:
    zckpt.write(engine, tmp_path / "a")
    engine.train()
    change(engine)
    second = zckpt.write(engine, tmp_path / "b")
    assert shared(second) == set()
    assert same_all(zckpt.open(second).load(), engine.full)


@pytest.mark.filterwarnings("ignore:two engines of this process write to")
def test_the_caller_chooses_the_earlier_checkpoint(engine: Tuned, tmp_path: Path) -> None:
    first = zckpt.write(engine, tmp_path / "one" / "a")
    assert shared(zckpt.write(engine, tmp_path / "one" / "b", reuse=None)) == set()
    other = Tuned()
    assert shared(zckpt.write(other, tmp_path / "two" / "a")) == set(), "there is none yet"
    other = Tuned()
    assert "param" in shared(zckpt.write(other, tmp_path / "three" / "a", reuse=tmp_path / "one"))
    other = Tuned()
    assert "param" in shared(zckpt.write(other, tmp_path / "one" / "c")), "`latest` names one"
    assert open_loader(tmp_path / "one" / "c").manifest.files.shared.keys() == {
        open_loader(tmp_path / "one" / "b").manifest.save_id
    }
    other.frozen = other.frozen + 1
    zckpt.write(other, tmp_path / "one" / "d", reuse=None)
    assert "param" in shared(zckpt.write(engine, tmp_path / "one" / "e")), "its own last one comes first"
    with pytest.raises(zckpt.CheckpointNotFoundError):
        zckpt.write(engine, tmp_path / "d", reuse=tmp_path / "none")
    assert not (tmp_path / "d").exists()
    assert zckpt.validate(first).ok


@pytest.mark.parametrize("damage", ["manifest", "table", "short", "gone", "link"])
def test_a_file_that_cannot_be_read_is_not_shared(engine: Tuned, tmp_path: Path, damage: str) -> None:
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
def test_without_links_the_bytes_are_written(
    engine: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The new file has the bytes of the earlier one, including its header. The manifest says the same as with a
    link."""
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
        assert open_loader(second).manifest.files.shared
        assert zckpt.validate(second).ok
        assert same_all(zckpt.open(second).load(), engine.full)


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_files_are_shared_in_the_background(engine: Tuned, tmp_path: Path, snapshot: Any) -> None:
    engine.refuse_lazy = engine.before_change = lambda *_: None  # type: ignore[attr-defined]
    for step, tag in enumerate("abc"):
        pending = zckpt.write(engine, tmp_path / tag, background=True, snapshot=snapshot)
        full = dict(engine.full)
        assert pending.wait() == str(tmp_path / tag)
        assert shared(tmp_path / tag) == ({"param"} if step else set())
        assert_holds(tmp_path / tag, full)
        engine.train()


@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
def test_weights_on_a_device(tmp_path: Path, background: bool) -> None:
    engine = Tuned()
    engine.frozen, engine.more = (tensor.to(accelerator.DEVICE_TYPE) for tensor in (engine.frozen, engine.more))
    engine.devices = (engine.frozen.device,)  # type: ignore[assignment]
    expected_of: dict[str, set[str]] = {"a": set(), "b": {"param"}, "c": {"master", "exp_avg"}}
    for tag, expected in expected_of.items():
        with engines_are_adapters():  # The test does not run in the process of its fixtures.
            zckpt.write(engine, tmp_path / tag, background=background)
        zckpt.wait()
        assert shared(tmp_path / tag) == expected
        assert_holds(tmp_path / tag, {key: tensor.cpu() for key, tensor in engine.full.items()})
        if tag == "a":
            engine.train()
        else:
            engine.frozen[FROZEN // 8] += 1


def test_a_checkpoint_that_replaces_the_earlier_one(engine: Tuned, tmp_path: Path) -> None:
    for number in range(3):
        zckpt.write(engine, tmp_path / "a", overwrite=True)
        assert shared(tmp_path / "a") == ({"param"} if number else set())
        assert_holds(tmp_path / "a", engine.full)
        assert data_file(tmp_path / "a").stat().st_nlink == 1
        engine.train()


def test_all_files_may_be_shared(tmp_path: Path) -> None:
    engine = Tuned()
    zckpt.write(engine, tmp_path / "a")
    progress = RecordedProgress()
    second = zckpt.write(engine, tmp_path / "b", progress=progress)
    assert shared(second) == {"master", "exp_avg", "param"}
    assert progress.assert_complete("write") > FROZEN
    assert_holds(second, engine.full)


def test_what_info_and_prune_say_about_shared_files(
    engine: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for tag in "abc":
        last = zckpt.write(engine, run / tag)
        engine.train()
    frozen = data_file(last).stat().st_size
    assert main(["info", str(run / "a")]) == 0
    assert "shared      3.0 MiB of them" in capsys.readouterr().out
    planned = zckpt.prune(run, keep_last=1, dry_run=True)
    assert planned.shared_bytes == 2 * frozen, "the one that is kept has it"
    assert 0 < planned.nbytes < frozen
    assert "more bytes stay, because other checkpoints share them" in str(planned)
    done = zckpt.prune(run, keep_last=1)
    assert done == replace(planned, dry_run=False)
    assert zckpt.validate(run).ok
    assert data_file(run / "c").stat().st_nlink == 1
    zckpt.write(engine, run / "d", latest=False)
    (run / "latest").unlink()
    (run / "c" / names.MANIFEST).unlink()  # now gc may remove both, and with them the last link to the file
    (run / "d" / names.MANIFEST).unlink()
    planned = zckpt.gc(run, discard=["c", "d"], dry_run=True)
    removed = zckpt.gc(run, discard=["c", "d"])
    assert removed == replace(planned, dry_run=False)
    assert removed.shared_bytes == frozen
    assert removed.nbytes > frozen


def test_copies_of_checkpoints_that_share_files(engine: Tuned, tmp_path: Path) -> None:
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


def test_damage_is_found_in_all_checkpoints_that_share_the_file_and_ends_a_copy(engine: Tuned, tmp_path: Path) -> None:
    first = zckpt.write(engine, tmp_path / "a")
    alone = zckpt.cp(first, tmp_path / "alone", share=False)
    engine.train()
    second = zckpt.write(engine, tmp_path / "b")
    with data_file(first).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    assert [[finding.rule for finding in zckpt.validate(path).findings] for path in (first, second, alone)] == [
        ["D003"], ["D003"], []
    ]  # fmt: skip
    with pytest.raises(zckpt.DigestError):
        zckpt.cp(second, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("lost", ["manifest", "index", "table", "both"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_repair_changes_no_shared_file(engine: Tuned, tmp_path: Path, lost: str, elsewhere: bool) -> None:
    first, before = zckpt.write(engine, tmp_path / "a"), engine.full
    engine.train()
    second = Path(zckpt.write(engine, tmp_path / "b"))
    old, manifest = everything(Path(first)), open_loader(second).manifest
    if lost in ("manifest", "both"):
        (second / names.MANIFEST).unlink()
    if lost in ("table", "both"):
        data_file(second).with_name("digests.bin").unlink()
    if lost == "index":
        next(second.glob("data-*/index.bin")).write_bytes(b"nothing")
    output = tmp_path / "whole" if elsewhere else None
    if lost == "both":  # nothing proves that the shared file belongs there
        with pytest.raises(zckpt.RepairError, match="no digest table"):
            zckpt.repair(second, output=output, accept_unverified=True)
        return
    report = zckpt.repair(second, output=output)
    assert report.unverified == ()
    assert open_loader(report.path).manifest.files == manifest.files
    assert_holds(report.path, engine.full)
    assert everything(Path(first)) == old
    assert_holds(first, before)
    assert data_file(first).stat().st_nlink == 2
    assert zckpt.repair(report.path).rebuilt == ()


def test_a_file_that_belongs_elsewhere_is_not_taken_for_a_shared_one(engine: Tuned, tmp_path: Path) -> None:
    """The file belongs to another save, and has the same rank, part, tier and layout."""
    first = zckpt.write(engine, tmp_path / "a")
    engine.train()
    engine.frozen = engine.frozen + 1
    second = Path(zckpt.write(engine, tmp_path / "b"))
    shutil.copy(data_file(first), data_file(second))
    assert {finding.rule for finding in zckpt.validate(second).findings} == {"D003"}, "its header has other digests"
    with pytest.raises(zckpt.RepairError):
        zckpt.repair(second, accept_unverified=True)
    (second / names.MANIFEST).unlink()
    with pytest.raises(zckpt.RepairError, match="no digest table"):
        zckpt.repair(second, accept_unverified=True)


def test_nothing_writes_into_an_existing_file(engine: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done to a checkpoint that shares files, the other checkpoint keeps its files, with the same bytes."""
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


def test_a_copy_of_a_file_that_was_read_back_is_read_back_too(tmp_path: Path) -> None:
    engine = Tuned()
    for name in ("1", "2"):
        zckpt.write(engine, tmp_path / name)
        engine.train()
    shutil.copytree(tmp_path / "2", tmp_path / "copy")
    content = bytearray(data_file(tmp_path / "copy").read_bytes())
    content[len(content) // 2] ^= 1
    data_file(tmp_path / "copy").write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged.* not shared"):
        zckpt.write(engine, tmp_path / "3", reuse=tmp_path / "copy")
    assert zckpt.validate(tmp_path / "3").ok


@pytest.mark.parametrize("damage", ["a byte", "the header", "the end"])
@pytest.mark.parametrize("background", [False, True])
def test_a_damaged_file_is_written_anew(tmp_path: Path, damage: str, background: bool) -> None:
    """A further checkpoint would share the damage, although the memory has the right bytes."""
    engine = Tuned()
    zckpt.write(engine, tmp_path / "1")
    file = data_file(tmp_path / "1")
    content = bytearray(file.read_bytes())
    content[{"a byte": len(content) // 2, "the header": 20, "the end": -1}[damage]] ^= 1
    file.write_bytes(content)
    engine.train()

    def write() -> None:
        zckpt.write(engine, tmp_path / "2", background=background)
        zckpt.wait()

    with pytest.warns(UserWarning, match=r"param\.safetensors is damaged.* not shared"):
        write()
    assert zckpt.validate(tmp_path / "2").ok
    assert_holds(tmp_path / "2", engine.full)
    assert not zckpt.validate(tmp_path / "1").ok
    engine.train()
    zckpt.write(engine, tmp_path / "3")
    assert data_file(tmp_path / "3").samefile(data_file(tmp_path / "2")) or shared(tmp_path / "3") == {"param"}
    assert zckpt.validate(tmp_path / "3").ok
