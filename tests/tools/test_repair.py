"""zckpt.repair rebuilds manifests, indexes and digest tables from data files, and says what is lost. It refuses what it
cannot rebuild."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.apart import Apart
from tests.support.faults import BROKEN as REFUSED
from tests.support.faults import Fault, faulty
from tests.support.states import same_all, write_state
from zckpt.checkpoint.open import open_loader
from zckpt.cli import main
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    LockedError,
    RepairError,
    StorageError,
    VersionError,
)
from zckpt.format.names import is_old
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from tests.support.states import Written

BROKEN = Path(__file__).parents[1] / "broken"
WORLD_SIZE = 3


@pytest.fixture
def written(tmp_path: Path) -> Written:
    buffers = {"own": [torch.full((5,), float(rank)) for rank in range(WORLD_SIZE)]}
    more: dict[str, Any] = {"aliases": {"tied": "big"}, "client_state": {"x": 1}}
    return write_state(tmp_path / "c", WORLD_SIZE, layout="random", buffers=buffers, step=9, **more)


def data(written: Written) -> Path:
    return written.path / f"data-{written.save_id}"


def data_file(written: Written, rank: int = 1) -> Path:
    return max((data(written) / f"rank-{rank:05d}").glob("*master.safetensors"), key=lambda file: file.stat().st_size)


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def spoil(file: Path, damage: str) -> None:
    if damage == "gone":
        file.unlink()
    elif damage == "flipped":
        flip(file, file.stat().st_size // 2)
    else:
        os.truncate(file, file.stat().st_size // 2 if damage == "short" else 0)


def assert_same_tensors(written: Written, path: Path | None = None) -> None:
    checkpoint = zckpt.open(path or written.path)
    assert same_all(checkpoint.load(), written.full)
    for rank in range(WORLD_SIZE):
        assert checkpoint.load_pieces(rank, "buffer/own")["buffer/own", 0, 5].tolist() == [rank] * 5
        assert checkpoint.rank_state(rank) == {"rank": rank}
    assert zckpt.validate(path or written.path).ok


def test_a_sound_checkpoint_is_not_changed(written: Written) -> None:
    before = {path: path.read_bytes() for path in written.path.rglob("*") if path.is_file()}
    report = zckpt.repair(written.path)
    assert (report.rebuilt, report.kept, report.lost, report.unverified) == ((), (), (), ())
    assert "nothing to repair" in str(report)
    assert {path: path.read_bytes() for path in written.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("damage", ["gone", "flipped", "short", "empty"])
def test_a_manifest(written: Written, damage: str) -> None:
    manifest = written.path / "manifest.msgpack"
    spoil(manifest, damage)
    spoilt = manifest.read_bytes() if manifest.exists() else None
    report = zckpt.repair(written.path)
    assert report.rebuilt == ("manifest.msgpack",), "the index comes out as it was"
    assert any("step" in what for what in report.lost)
    assert any("client_state" in what for what in report.lost)
    assert report.unverified == ()
    assert_same_tensors(written)
    checkpoint = zckpt.open(written.path)
    assert (checkpoint.step, [*checkpoint.state], dict(checkpoint.aliases)) == (0, ["lineage"], {})
    kept = [path for path in written.path.iterdir() if is_old(path.name)]
    assert [path.read_bytes() for path in kept] == ([] if spoilt is None else [spoilt])
    assert report.kept == tuple(path.name for path in kept)
    assert not (written.path / "write.lock").exists()


@pytest.mark.parametrize("damage", ["gone", "flipped", "short"])
def test_an_index_is_rebuilt(written: Written, damage: str) -> None:
    before, index = open_loader(written.path).manifest, data(written) / "index.bin"
    raw = index.read_bytes()
    spoil(index, damage)
    assert not zckpt.validate(written.path, level="structure").ok
    report = zckpt.repair(written.path)
    assert report.rebuilt == (f"data-{written.save_id}/index.bin",), "and the manifest is what it was"
    assert (report.lost, report.unverified) == ((), ())
    assert index.read_bytes() == raw
    assert open_loader(written.path).manifest == before
    assert_same_tensors(written)


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_digest_table_is_rebuilt(written: Written, damage: str) -> None:
    """The manifest has the digest of the table. It verifies the table that is computed from the data."""
    table = data(written) / "rank-00001" / "digests.bin"
    raw = table.read_bytes()
    spoil(table, damage)
    report = zckpt.repair(written.path)
    assert report.rebuilt == (str(table.relative_to(written.path)),)
    assert (report.lost, report.unverified) == ((), ())
    assert table.read_bytes() == raw
    assert len(report.kept) == (damage == "flipped")
    assert_same_tensors(written)


def test_everything_but_the_data_is_rebuilt(written: Written) -> None:
    for file in [written.path / "manifest.msgpack", *data(written).rglob("*.bin")]:
        file.unlink()
    with pytest.raises(RepairError, match="no sound digest table") as caught:
        zckpt.repair(written.path)
    assert all(f"rank-{rank:05d}" in str(caught.value) for rank in range(WORLD_SIZE))
    assert "--accept-unverified" in str(caught.value)
    assert not (written.path / "manifest.msgpack").exists()
    report = zckpt.repair(written.path, accept_unverified=True)
    assert len(report.rebuilt) == 1 + 1 + WORLD_SIZE
    assert len(report.unverified) == WORLD_SIZE
    assert_same_tensors(written)


@pytest.mark.parametrize("lost", [True, False])
def test_damaged_data_stays_damaged(written: Written, lost: bool) -> None:
    flip(data_file(written), -1)
    (written.path / "manifest.msgpack" if lost else data(written) / "index.bin").unlink()
    with pytest.raises(RepairError, match=r"master\.safetensors: bytes .*damaged"):
        zckpt.repair(written.path)
    report = zckpt.repair(written.path, accept_unverified=True)
    assert len(report.unverified) == 1
    assert [finding.rule for finding in zckpt.validate(written.path).findings] == ["D003"]


def test_missing_ranks_are_listed(written: Written) -> None:
    """Even without a manifest, the tensors and the digest tables show that a rank is missing."""
    manifest = written.path / "manifest.msgpack"
    raw = manifest.read_bytes()
    shutil.rmtree(data(written) / "rank-00002")
    (data(written) / "index.bin").unlink()
    with pytest.raises(RepairError, match="rank 2 of 3 is missing"):
        zckpt.repair(written.path)
    manifest.unlink()
    with pytest.raises(RepairError, match="rank 2 of 3 is missing"):
        zckpt.repair(written.path)
    manifest.write_bytes(raw)
    assert not (data(written) / "index.bin").exists()


@pytest.mark.parametrize("lost", [True, False])
def test_one_missing_file_is_noticed(written: Written, lost: bool) -> None:
    # The file has a further copy of a tensor. No elements are missing without it.
    (data(written) / "rank-00001" / "buffer.safetensors").unlink()
    (written.path / "manifest.msgpack" if lost else data(written) / "index.bin").unlink()
    with pytest.raises(RepairError, match="rank-00001: .*digest table" if lost else "buffer.* is missing"):
        zckpt.repair(written.path)


@pytest.mark.parametrize("damage", ["first digest", "one too many", "one too few"])
def test_a_table_that_does_not_fit_verifies_nothing(written: Written, damage: str) -> None:
    """There is no manifest. If a table has one digest too many, this may be the digest of a missing file."""
    (written.path / "manifest.msgpack").unlink()
    table = data(written) / "rank-00001" / "digests.bin"
    raw = table.read_bytes()
    table.write_bytes({"first digest": bytes(16) + raw[16:], "one too many": raw + raw[:16]}.get(damage, raw[:-16]))
    with pytest.raises(RepairError, match=r"rank-00001: .*digest table") as caught:
        zckpt.repair(written.path)
    assert "rank-00000" not in str(caught.value)
    zckpt.repair(written.path, accept_unverified=True)
    assert_same_tensors(written)


def test_missing_elements_are_refused_even_if_unverified_data_are_accepted(written: Written) -> None:
    data_file(written).unlink()
    (written.path / "manifest.msgpack").unlink()
    with pytest.raises(RepairError, match="I005"):
        zckpt.repair(written.path, accept_unverified=True)
    assert [path.name for path in written.path.iterdir()] == [f"data-{written.save_id}"], "nothing was written"


def test_files_of_two_saves_are_refused(written: Written, tmp_path: Path) -> None:
    other = write_state(tmp_path / "other", WORLD_SIZE, layout="random", seed=0)
    shutil.copy(data_file(other), data_file(written))
    (written.path / "manifest.msgpack").unlink()
    with pytest.raises(RepairError, match=r"S006.*master"):
        zckpt.repair(written.path, accept_unverified=True)
    smaller = write_state(tmp_path / "smaller", 2)
    shutil.copy(data_file(smaller), data_file(written))
    with pytest.raises(RepairError, match="several saves"):
        zckpt.repair(written.path)
    shutil.copytree(tmp_path / "other" / f"data-{other.save_id}", written.path / f"data-{other.save_id}")
    with pytest.raises(RepairError, match="data of 2 saves") as caught:
        zckpt.repair(written.path)
    assert written.save_id in str(caught.value)
    assert other.save_id in str(caught.value)


def test_a_repair_into_another_directory(written: Written, tmp_path: Path) -> None:
    flip(written.path / "manifest.msgpack", 100)
    before = {path: path.read_bytes() for path in written.path.rglob("*") if path.is_file()}
    report = zckpt.repair(written.path, output=tmp_path / "new")
    assert {path: path.read_bytes() for path in written.path.rglob("*") if path.is_file()} == before
    assert_same_tensors(written, tmp_path / "new")
    assert (report.path, report.kept) == (str(tmp_path / "new"), ())
    with pytest.raises(CheckpointExistsError):
        zckpt.repair(written.path, output=tmp_path / "new")
    report = zckpt.repair(tmp_path / "new", output=tmp_path / "third")  # a sound checkpoint is copied
    assert_same_tensors(written, tmp_path / "third")


def lose(operation: Any, file: str) -> None:
    """Acts as a disk that loses what it is given, without an error."""


def change_last_byte(operation: Any, file: str) -> None:
    """Acts as a disk that in the end has other bytes than those it was given."""
    operation()
    flip(Path(file), -1)


def read_too_little(operation: Any, file: str) -> int:
    """Acts as a disk that returns one byte too few for each read, once the copy has begun."""
    begun = any(Path(file).parents[3].glob("new/*/*/*.safetensors"))
    return int(operation()) - begun


@pytest.mark.parametrize(
    "fault",
    [
        Fault(read_too_little, names=("read_into",), path=os.path.join("c", "data-"), lasting=True),
        Fault(lose, names=("write",), path="new", at=2),
        Fault(change_last_byte, names=("sync",), path="new", at=2),
        Fault(lose, names=("write",), path="new", lasting=True),
        Fault(REFUSED, names=("commit",), path=os.path.join("new", "manifest.msgpack")),
    ],
    ids=["a short read", "lost", "misplaced", "all lost", "the manifest"],
)
def test_a_repair_that_writes_other_bytes_leaves_no_checkpoint(written: Written, tmp_path: Path, fault: Fault) -> None:
    with faulty(fault), pytest.raises((StorageError, FormatError)):
        zckpt.repair(written.path, output=tmp_path / "new")
    assert not (tmp_path / "new").exists(), "nothing is left that could be taken for a checkpoint"
    assert zckpt.validate(written.path).ok
    zckpt.repair(written.path, output=tmp_path / "new")
    assert_same_tensors(written, tmp_path / "new")


def test_the_output_is_not_the_checkpoint_itself(written: Written) -> None:
    (written.path / "manifest.msgpack").unlink()
    for output in (written.path, f"{written.path}/../{written.path.name}"):
        with pytest.raises(CheckpointExistsError, match="data of this save are here"):
            zckpt.repair(written.path, output=output)
    assert zckpt.repair(written.path).rebuilt


def test_an_impossible_world_size_is_refused(written: Written) -> None:
    """Without a manifest, the world size comes from the headers alone."""
    (written.path / "manifest.msgpack").unlink()
    for file in data(written).rglob("*.safetensors"):
        raw = file.read_bytes()
        assert raw.count(b'"zckpt.world_size":"3"') == 1
        header = raw[:4096].replace(b'size":"3"', b'size":"' + b"9" * 99 + b'"').rstrip()
        file.write_bytes(header.ljust(4096) + raw[4096:])
    with pytest.raises(RepairError, match="several saves, or"):
        zckpt.repair(written.path, accept_unverified=True)


def test_the_manifest_is_written_last(written: Written) -> None:
    for file in [written.path / "manifest.msgpack", *data(written).rglob("*.bin")]:
        file.unlink()
    with faulty() as operations:
        zckpt.repair(written.path, accept_unverified=True)
    replaced = [file for name, file in operations.done if name == "commit"]
    assert replaced[-1] == str(written.path / "manifest.msgpack")
    assert len(replaced) == 1 + 1 + WORLD_SIZE


def test_other_refusals(written: Written, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        zckpt.repair(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        zckpt.repair(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with WriteLock(open_store(written.path)), pytest.raises(LockedError):
        zckpt.repair(written.path)
    newer = mock.patch("zckpt.format.manifest.VERSION", (2, 0))
    with newer:
        write_state(tmp_path / "c", 1, overwrite=True)
    with pytest.raises(VersionError):
        zckpt.repair(tmp_path / "c")


def test_large_blocks_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_state(tmp_path / "c", 2, {"a": (900_000,), "b": (3,)}, block_bytes=1 << 20)
    (written.path / "manifest.msgpack").unlink()
    assert main(["repair", str(written.path)]) == 0
    assert "lost        step" in capsys.readouterr().out
    assert same_all(zckpt.open(written.path).load(), written.full)
    assert open_loader(written.path).manifest.block_bytes == 1 << 20
    data_file(written).unlink()
    (written.path / "manifest.msgpack").unlink()
    assert main(["repair", str(written.path), "--accept-unverified"]) == 2
    assert "cannot be rebuilt" in capsys.readouterr().err


def test_a_manifest_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    """According to the manifest, the digests of two files are at the same place in the table."""
    path = tmp_path / "c"
    shutil.copytree(BROKEN / "sound", path)
    apart = Apart.of(path)
    apart.seal.discard("bytes")
    apart.body["files"]["first_block"][1] = 0
    apart.write(path)
    next(path.glob("*/index.bin")).unlink()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(RepairError):  # one file seems damaged, because the table has the digest of the other
        zckpt.repair(path)
    with pytest.raises(RepairError, match=r"(?s)D001 .*the manifest away"):
        zckpt.repair(path, accept_unverified=True)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    (path / "manifest.msgpack").unlink()
    assert zckpt.repair(path).rebuilt
    assert zckpt.validate(path).ok
