"""Each kind of damage to a checkpoint raises the right error, which says where the fault is. Nothing hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import torch

import zckpt
from tests.support.apart import edit_field
from tests.support.states import Written, fragment, same_all, write_state
from zckpt.checkpoint.open import open_loader
from zckpt.cli import main
from zckpt.errors import (
    CheckpointNotFoundError,
    DigestError,
    FeatureError,
    FormatError,
    MissingFileError,
    SizeError,
    UnfinishedWriteError,
    VersionError,
    ZckptError,
)
from zckpt.format import names
from zckpt.format.digest import digest
from zckpt.format.names import Tier
from zckpt.plan import catalog
from zckpt.testing.fragments import write_fragments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SHAPES = {"a": (60, 50), "b": (6,)}  # ranks 0 and 1 have equal shares of both
BUFFERS = {"mean": [torch.zeros(2), torch.ones(2)]}


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(600)  # long, because a busy machine may be slow
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_state(
        tmp_path_factory.mktemp("original") / "c",
        2,
        SHAPES,
        parts=("master", "exp_avg"),
        buffers=BUFFERS,
        client_state={"seen": torch.arange(3)},
    )


class Place:
    """A copy of the checkpoint that a test may damage, and short names for its files."""

    def __init__(self, original: Written, path: Path) -> None:
        shutil.copytree(original.path, path)
        self.path = path
        self.data = path / names.data_dir(original.save_id)
        self.manifest = path / names.MANIFEST
        self.index = self.data / "index.bin"
        self.table = self.data / "rank-00001" / "digests.bin"
        self.master = [self.data / f"rank-0000{rank}" / "master.safetensors" for rank in (0, 1)]
        self.state = self.data / "rank-00001" / "host.state.safetensors"

    def edit_manifest(self, path: str, change: Any) -> None:
        _, version, _, packed = msgpack.unpackb(self.manifest.read_bytes())
        body = msgpack.unpackb(packed)
        edit_field(body, path, change)
        packed = msgpack.packb(body)
        self.manifest.write_bytes(msgpack.packb(["zckpt", version, digest(packed), packed]))

    def edit_table(self, change: Callable[[bytes], bytes]) -> None:
        self.table.write_bytes(change(self.table.read_bytes()))
        self.edit_manifest("digests.1", digest(self.table.read_bytes()))

    def edit_header(self, file: Path, old: str, new: str) -> None:
        """Replaces a text in the header of a file of rank 1. The header keeps its length, and its digest is made to
        fit."""
        raw = file.read_bytes()
        assert raw[:4096].count(old.encode()) == 1
        header = raw[:4096].replace(old.encode(), new.encode())
        header = header.rstrip(b" ").ljust(4096)
        file.write_bytes(header + raw[4096:])
        manifest = open_loader(self.path).manifest
        paths = [self.path / manifest.path(record) for record in manifest.files]
        block = manifest.files[paths.index(file)].first_block
        self.edit_table(lambda table: table[: 16 * block] + digest(header) + table[16 * block + 16 :])


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def cut(file: Path, nbytes: int = 1) -> None:
    os.truncate(file, file.stat().st_size - nbytes)


def grow(file: Path, nbytes: int = 1) -> None:
    with file.open("ab") as end:
        end.write(b"\0" * nbytes)


def replace_one(place: Place, name: str, how: str) -> None:
    replace(place.master[1] if name == "master" else getattr(place, name), how)


def make_with_a_pipe(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "latest")


def replace(file: Path, how: str) -> None:
    moved = file.with_name("moved")
    file.rename(moved)
    if how == "link":
        file.symlink_to(moved.name)
    elif how == "dangling":
        file.symlink_to("nowhere")
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "socket":
        here = os.getcwd()
        os.chdir(file.parent)  # the path of a socket must be short
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(file.name)
        finally:
            os.chdir(here)
    else:
        file.mkdir()


def swap(file_a: Path, file_b: Path) -> None:
    first, second = file_a.read_bytes(), file_b.read_bytes()
    file_a.write_bytes(second)
    file_b.write_bytes(first)


def mix_saves(place: Place) -> None:
    other = write_state(place.path.with_name("other"), 2, SHAPES, parts=("master", "exp_avg"), seed=1)
    shutil.copy(other.path / names.data_file_path(other.save_id, 1, "master", Tier.DEVICE), place.master[1])


@dataclass(frozen=True)
class Case:
    """A way to damage a checkpoint, the error that a reader raises, and the rules that a validator finds broken."""

    spoil: Callable[[Place], object]
    error: type[FormatError] | None
    rule: str | None
    file: str = ""
    key: str | None = None
    span: tuple[int, int] | None = None
    found: set[str] | None = None
    """The rules that a validator finds broken. None means that it finds ``rule`` alone."""


def unseen(spoil: Callable[[Place], object], *findings: str) -> Case:
    """Returns a case that only a validator notices, because a load does not need the damaged bytes."""
    return Case(spoil, None, None, found=set(findings))


MASTER_1 = "rank-00001/master.safetensors"
CASES = {
    # Wrong versions
    "newer version": Case(lambda p: edit_version(p, [2, 0]), VersionError, "M002", "manifest.msgpack"),
    "feature": Case(lambda p: p.edit_manifest("requires", ["telepathy"]), FeatureError, "M006", "manifest.msgpack"),
    # Flipped bits and broken manifests
    "manifest flip": Case(lambda p: flip(p.manifest, 99), DigestError, "M003", "manifest.msgpack"),
    "manifest cut": Case(lambda p: cut(p.manifest), FormatError, "M001", "manifest.msgpack"),
    "manifest empty": Case(lambda p: p.manifest.write_bytes(b""), FormatError, "M001", "manifest.msgpack"),
    "index flip": Case(lambda p: flip(p.index, 0), DigestError, "I002", "index.bin"),
    "table flip": Case(lambda p: flip(p.table, 5), DigestError, "D002", "rank-00001/digests.bin"),
    "data flip": Case(lambda p: flip(p.master[1], 8192), DigestError, "D003", MASTER_1, "master/a", (8192, 10096)),
    "last bit": Case(lambda p: flip(p.master[1], -1), DigestError, "D003", MASTER_1, "master/b", (10096, 10108)),
    "header flip": unseen(lambda p: flip(p.master[1], 4000), "D003"),
    "other name": unseen(lambda p: flip(p.master[1], p.master[1].read_bytes().index(b'"b@') + 1), "D003"),
    # Missing files and wrong lengths
    "data missing": Case(lambda p: p.master[1].unlink(), MissingFileError, "F001", MASTER_1),
    "data short": Case(lambda p: cut(p.master[1]), SizeError, "F003", MASTER_1),
    "data long": Case(lambda p: grow(p.master[1]), SizeError, "F003", MASTER_1),
    "data empty": Case(lambda p: cut(p.master[1], 10108), SizeError, "F003", MASTER_1),
    "index missing": Case(lambda p: p.index.unlink(), MissingFileError, "F001", "index.bin"),
    "index short": Case(lambda p: os.truncate(p.index, 9), DigestError, "I002", "index.bin", found={"I001", "I002"}),
    "index long": unseen(lambda p: grow(p.index), "I001"),
    "table missing": Case(lambda p: p.table.unlink(), MissingFileError, "F001", "rank-00001/digests.bin"),
    "table short": Case(lambda p: cut(p.table, 16), DigestError, "D002", "rank-00001/digests.bin"),
    "table long": Case(lambda p: grow(p.table), SizeError, "D001", "rank-00001/digests.bin"),
    "rank missing": Case(lambda p: shutil.rmtree(p.master[1].parent), MissingFileError, "F001", "rank-00001"),
    # Files that belong elsewhere
    "ranks swapped": Case(lambda p: swap(*p.master), DigestError, "D003", "master.safetensors"),
    "another save": Case(mix_saves, DigestError, "D003", MASTER_1, "master/a"),
    "another part": Case(
        lambda p: shutil.copy(p.master[1].with_name("exp_avg.safetensors"), p.master[1]),
        *(DigestError, "D003", MASTER_1, "master/a"),
    ),
    # Files that are not regular files
    **{
        f"{name} as {how}": Case(
            partial(replace_one, name=name, how=how),
            *(FormatError, "F002", {"table": "digests.bin", "master": MASTER_1}.get(name, name)),
        )
        for name in ("manifest", "index", "table", "master")
        for how in ("link", "dangling", "pipe", "socket", "directory")
    },
    "data directory as link": Case(lambda p: replace(p.data, "link"), FormatError, "F002", "data-"),
    "rank directory as link": Case(lambda p: replace(p.table.parent, "link"), FormatError, "F002", "rank-00001"),
    "rank directory as pipe": Case(lambda p: replace(p.table.parent, "pipe"), FormatError, "F002", "rank-00001"),
    # Wrong contents whose digests fit
    "table and more": unseen(lambda p: p.edit_table(lambda t: t + b"\0" * 16), "D001"),
    "table and less": unseen(lambda p: p.edit_table(lambda t: t[:-16]), "D001"),
    "blocks elsewhere": Case(
        lambda p: p.edit_manifest("files.first_block.0", 1),
        DigestError,
        "D003",
        "rank-00000/master",
        found={"D001", "D003"},
    ),
    "other dtype": unseen(lambda p: p.edit_manifest("parts.0.dtypes.0", "I32"), "S007"),
    "other shape": unseen(lambda p: p.edit_manifest("shapes.0", [50, 60]), "S007"),
    "header of another rank": unseen(lambda p: p.edit_header(p.master[1], 'rank":"1"', 'rank":"0"'), "S006"),
    "header of another dtype": unseen(
        lambda p: p.edit_header(p.master[1], '"b@3:6":{"dtype":"F32"', '"b@3:6":{"dtype":"I32"'), "S007"
    ),
    "header with a duplicate": unseen(lambda p: p.edit_header(p.master[1], '"b@3:6"', '"a@1500:3000"'), "S002"),
    "filler": unseen(lambda p: add_filler(p, b"\0" * 16)),
    "filler that is not zero": unseen(lambda p: add_filler(p, b"\0" * 15 + b"\1"), "S008"),
}


def edit_version(place: Place, version: list[int]) -> None:
    place.edit_manifest("version", version)
    raw = msgpack.unpackb(place.manifest.read_bytes())
    place.manifest.write_bytes(msgpack.packb([raw[0], version, *raw[2:]]))


def add_filler(place: Place, content: bytes) -> None:
    """Adds a filler to the last file of rank 1. The digests of this file are the last ones of the rank's digest
    table."""
    raw = place.state.read_bytes()
    header = json.loads(raw[8:4096])
    stop = len(raw) - 4096
    header["@pad"] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [stop, stop + len(content)]}
    head = raw[:8] + json.dumps(header).encode().ljust(4088)
    place.state.write_bytes(head + raw[4096:] + content)
    manifest = open_loader(place.path).manifest
    number = len(manifest.files) - 1
    block = manifest.files[number].first_block
    assert manifest.path(manifest.files[number]).endswith("rank-00001/host.state.safetensors")
    place.edit_manifest(f"files.bytes.{number}", len(raw) + len(content))
    place.edit_table(lambda t: t[: 16 * block] + digest(head) + t[16 * block + 16 :] + digest(content))


@pytest.fixture
def place(original: Written, tmp_path: Path) -> Place:
    return Place(original, tmp_path / "c")


@pytest.mark.parametrize("name", CASES)
def test_a_reader_raises_the_right_error(original: Written, place: Place, name: str) -> None:
    case = CASES[name]
    case.spoil(place)

    def read() -> dict[str, torch.Tensor]:
        checkpoint = zckpt.open(place.path)
        return checkpoint.load(["master/*", "exp_avg/*"])

    if case.error is None:
        loaded = read()
        if "other" not in name:
            assert same_all(loaded, {key: original.full[key] for key in loaded})
        return
    with pytest.raises(case.error) as caught:
        read()
    error = caught.value
    assert isinstance(error, ZckptError)
    assert type(error) is case.error
    assert error.rule == case.rule
    assert case.file in (error.file or "")
    assert f"rule {case.rule}" in str(error)
    assert f"file {error.file}" in str(error)
    if case.key is not None:
        assert error.key == case.key
        assert f"key {case.key}" in str(error)
    if case.span is not None:
        assert (error.start, error.stop) == case.span
        assert f"bytes [{case.span[0]}, {case.span[1]})" in str(error)


@pytest.mark.parametrize("name", CASES)
def test_a_validator_reports_the_broken_rules(place: Place, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    case.spoil(place)
    report = zckpt.validate(place.path)
    expected = {case.rule} if case.found is None else case.found
    assert {finding.rule for finding in report.findings} == expected, str(report)
    assert report.ok is (not expected)
    assert all(case.file in (finding.file or "") for finding in report.findings)
    assert main(["validate", str(place.path)]) == (1 if expected else 0)
    out = capsys.readouterr().out
    assert all(str(rule) in out for rule in expected)
    assert (": valid (" in out.splitlines()[-1]) == (not expected)


def test_unknown_features_are_named(place: Place) -> None:
    place.edit_manifest("requires", ["telepathy", "zstd"])
    with pytest.raises(FeatureError, match="telepathy, zstd"):
        zckpt.open(place.path)


def test_the_level_structure_does_not_read_tensors(place: Place) -> None:
    flip(place.master[1], 8192)
    report = zckpt.validate(place.path, level="structure")
    assert report.ok
    assert report.bytes_read < zckpt.validate(place.path).bytes_read
    assert [finding.rule for finding in zckpt.validate(place.path).findings] == ["D003"]
    flip(place.master[1], 4000)
    assert not zckpt.validate(place.path, level="structure").ok


def test_a_validator_finds_every_fault(place: Place) -> None:
    flip(place.master[0], -1)
    flip(place.master[1], 8192)
    flip(place.master[1], -1)
    flip(place.state, -1)
    findings = [(finding.rule, finding.key, finding.file) for finding in zckpt.validate(place.path).findings]
    assert [rule for rule, _, _ in findings[:4]] == ["D003"] * 4
    assert len({file for _, _, file in findings}) >= 3


def write_trees(path: str, root: bytes, rank_tree: torch.Tensor) -> None:
    state = fragment("state", "rank/0", rank_tree, 0, rank_tree.numel())
    write_fragments(path, [[state]], catalog.SaveMetadata(0, 1 << 20, {}, root, {}))


@pytest.mark.parametrize(
    "rank_tree", [torch.zeros(3).bfloat16(), torch.zeros((1, 1), dtype=torch.uint8)], ids=["dtype", "shape"]
)
def test_trees_that_are_not_stored_as_bytes_are_reported(tmp_path: Path, rank_tree: torch.Tensor) -> None:
    write_trees(str(tmp_path / "c"), b"\xc0", rank_tree)
    assert [finding.rule for finding in zckpt.validate(tmp_path / "c").findings] == ["T001"]


@pytest.mark.parametrize(
    ("rule", "root", "rank_tree"),
    [
        ("T001", b"\xc1", b"\xc0"),
        ("T001", b"\xc0", b"\xc1"),
        ("T001", b"\xc0", b""),
        ("T002", b"\x91" * 70 + b"\0", b"\xc0"),
        ("T003", msgpack.packb(msgpack.ExtType(1, b"nothing")), b"\xc0"),
        ("T003", b"\xc0", msgpack.packb([msgpack.ExtType(2, b"nothing")])),
    ],
)
def test_broken_trees_are_reported(tmp_path: Path, rule: str, root: bytes, rank_tree: bytes) -> None:
    path = str(tmp_path / "c")
    write_trees(path, root, torch.tensor(list(rank_tree), dtype=torch.uint8))
    assert [finding.rule for finding in zckpt.validate(path).findings] == [rule]
    checkpoint = zckpt.open(path)
    with pytest.raises(FormatError) as caught:
        assert checkpoint.state is checkpoint.rank_state(0) is None
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, CheckpointNotFoundError, "does not exist"),
        (lambda path: path.write_bytes(b"PK"), CheckpointNotFoundError, "is a file"),
        (lambda path: path.mkdir(), CheckpointNotFoundError, "no manifest"),
        (lambda path: path.symlink_to("nowhere"), CheckpointNotFoundError, "does not exist"),
        (lambda path: (path / f"data-{'0' * 16}").mkdir(parents=True), UnfinishedWriteError, "never committed"),
        (
            lambda path: (path.mkdir(), (path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()),
            *(CheckpointNotFoundError, "DeepSpeed's own format"),
        ),
        (lambda path: (path.mkdir(), (path / "latest").write_text("gone\n")), CheckpointNotFoundError, "gone"),
        (lambda path: (path.mkdir(), (path / "latest").symlink_to("nowhere")), FormatError, "F002"),
        (make_with_a_pipe, FormatError, "F002"),
    ],
    ids=["missing", "file", "empty", "dangling", "unfinished", "deepspeed", "latest", "latest-link", "latest-pipe"],
)
def test_a_path_without_a_checkpoint(
    tmp_path: Path, make: Any, error: type[ZckptError], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "there"
    make(path)
    with pytest.raises(error, match=message) as caught:
        zckpt.open(path)
    assert type(caught.value) is error
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError | ValueError)
    assert main(["validate", str(path)]) == (1 if error is FormatError else 2)
    assert message in "".join(capsys.readouterr())


def test_an_unknown_key_is_a_key_error(place: Place) -> None:
    with pytest.raises(KeyError, match="nearest are: master/a") as caught:
        zckpt.open(place.path).load("master/aa")
    assert isinstance(caught.value, ZckptError)
    assert caught.value.key == "master/aa"


def test_a_damaged_tensor_does_not_keep_others_from_loading(original: Written, place: Place) -> None:
    flip(place.master[1], 8192)
    checkpoint = zckpt.open(place.path)
    keys = [key for key in checkpoint if key != "master/a"]
    assert same_all(checkpoint.load(keys), {key: original.full[key] for key in keys})
    with pytest.raises(DigestError):
        checkpoint.load("master/a")
    damaged = checkpoint.load("master/a", verify=False)["master/a"]
    assert int((damaged != original.full["master/a"]).sum()) == 1
    for rows, sound in ((slice(0, 30), True), (slice(51, 60), False)):  # only the blocks of these rows are checked
        if sound:
            assert checkpoint.load_slice("master/a", rows).equal(original.full["master/a"][rows])
        else:
            with pytest.raises(DigestError):
                checkpoint.load_slice("master/a", rows)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_is_cut_off_while_the_checkpoint_is_open(place: Place, verify: bool) -> None:
    checkpoint = zckpt.open(place.path)
    checkpoint.load()
    os.truncate(place.master[1], 9000)
    with pytest.raises(SizeError) as caught:
        checkpoint.load("master/a", verify=verify)
    assert caught.value.rule == "F003"
    assert (caught.value.key, caught.value.start) == ("master/a", 4096)


def run_cli(*arguments: str) -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, "-m", "zckpt", *arguments], capture_output=True, check=False, text=True, timeout=600
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_the_command_line(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(place.path)]) == 0
    assert ": valid (" in capsys.readouterr().out
    flip(place.master[1], 8192)
    status, output = run_cli("validate", str(place.path))
    assert status == 1
    assert "D003" in output
    assert MASTER_1 in output
    assert "bytes [8192, 10096)" in output
    assert main(["validate", "--level", "structure", str(place.path)]) == 0
    for wrong in ([], ["validate"], ["destroy", str(place.path)], ["validate", "--fast", str(place.path)]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err
