"""Nothing outside of a checkpoint is read through links inside it, on any system. In the cache of the Hugging Face Hub,
only the blobs of the repository are read through links."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import zckpt
from tests.support.hub import cached
from tests.support.states import Written, same_all, write_state
from zckpt.checkpoint.listing.runs import directories_of
from zckpt.cli import main
from zckpt.format import names
from zckpt.storage import local_reader
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


needs_steps = pytest.mark.skipif(not local_reader.CAN_OPEN_BY_COMPONENT, reason="opens no file component by component")
on_posix = pytest.mark.skipif(sys.platform == "win32", reason="not every user of Windows may make links")
either_way = pytest.mark.usefixtures("_way")


@pytest.fixture(params=[pytest.param(True, marks=needs_steps), False], ids=["by steps", "after a look"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects one of the two ways to open files without following links. The second is for systems that lack the
    first."""
    monkeypatch.setattr(local_reader, "CAN_OPEN_BY_COMPONENT", request.param)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    state = write_state(tmp_path / "run" / "c", 2, {"w": (5, 3)}, parts=("master",))
    (tmp_path / "run" / "latest").write_bytes(b"c\n")
    return state


def places(written: Written) -> list[str]:
    """Returns the paths that the tests replace by links: every file and directory of the checkpoint, and ``latest``."""
    inside = sorted(path.relative_to(written.path).as_posix() for path in written.path.rglob("*"))
    assert len(inside) == 11, inside
    return ["../latest", *inside]


def read(path: Path) -> dict[str, torch.Tensor]:
    """Reads all tensors and state trees of the checkpoint."""
    checkpoint = zckpt.open(path)
    assert [checkpoint.rank_state(rank) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]
    return checkpoint.load()


def check_refused(written: Written, place: str) -> None:
    with pytest.raises(zckpt.FormatError) as caught:
        read(written.path.parent)
    assert caught.value.rule == "F002", place
    report = zckpt.validate(written.path.parent)
    assert {finding.rule for finding in report.findings} == {"F002"}, place


def link(path: Path, to: Path) -> None:
    try:
        path.symlink_to(to, target_is_directory=to.is_dir())
    except OSError:
        pytest.skip("this user may not make links")


@either_way
def test_no_link_is_followed_even_to_what_is_sound(tmp_path: Path, written: Written) -> None:
    for place in places(written):
        path, outside = written.path / place, tmp_path / "outside"
        path.rename(outside)
        link(path, outside)
        check_refused(written, place)
        path.unlink()
        outside.rename(path)
    assert same_all(zckpt.open(written.path.parent).load(), written.full)


def test_the_way_to_a_checkpoint_may_have_links(tmp_path: Path, written: Written) -> None:
    link(tmp_path / "other", tmp_path / "run")
    assert same_all(zckpt.open(tmp_path / "other").load(), written.full)
    assert directories_of(open_store(tmp_path)) == ["run"], "though they are not listed"


@on_posix
@either_way
def test_a_checkpoint_in_the_cache_of_the_hub_is_read(tmp_path: Path, written: Written) -> None:
    snapshot = cached(written.path.parent, tmp_path / "hub")
    link(tmp_path / "elsewhere", tmp_path / "hub")
    for run in (snapshot, tmp_path / "elsewhere" / snapshot.relative_to(tmp_path / "hub")):
        assert same_all(read(run), written.full)
        assert zckpt.validate(run).ok
    for command in ("info", "ls", "validate"):
        assert main([command, str(snapshot)]) == 0
    zckpt.cp(snapshot, tmp_path / "copy")
    assert same_all(read(tmp_path / "copy"), written.full)
    assert not any(path.is_symlink() for path in (tmp_path / "copy").rglob("*"))


def lead_astray(snapshot: Path, how: str, outside: Path) -> None:
    """Changes a cache of the Hub so that a link in it leads to ``outside``, which has the right bytes."""
    blobs, index = snapshot.parent.parent / "blobs", next(snapshot.glob("c/data-*/index.bin"))
    blob = blobs / index.readlink().name
    shutil.copy(index, outside)
    match how:
        case "a file elsewhere":
            relink(index, outside)
        case "a file elsewhere, through blobs":
            relink(index, blobs / ".." / ".." / ".." / outside.name)
        case "a file in another repository":
            (snapshot.parents[2] / "models--other" / "blobs").mkdir(parents=True)
            relink(index, Path(shutil.copy(outside, snapshot.parents[2] / "models--other" / "blobs")))
        case "a file in a folder of blobs":
            (blobs / "more").mkdir()
            relink(index, Path(shutil.copy(outside, blobs / "more")))
        case "a file in the snapshot":
            relink(index, Path(shutil.copy(outside, snapshot)))
        case "a linked blob":
            relink(blob, outside)
        case "linked blobs":
            blobs.rename(outside.parent / "moved")
            link(blobs, outside.parent / "moved")
        case "a linked folder":
            index.parent.rename(outside.parent / "moved")
            link(index.parent, outside.parent / "moved")
        case "no file":
            blob.unlink()
            blob.mkdir()


def relink(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(os.path.relpath(to, path.parent) if ".." not in to.parts else to)


ASTRAY = [
    "a file elsewhere",
    "a file elsewhere, through blobs",
    "a file in another repository",
    "a file in a folder of blobs",
    "a file in the snapshot",
    "a linked blob",
    "linked blobs",
    "a linked folder",
    "no file",
]


@on_posix
@either_way
@pytest.mark.parametrize("how", ASTRAY)
def test_links_in_the_cache_of_the_hub_lead_only_to_its_blobs(tmp_path: Path, written: Written, how: str) -> None:
    snapshot = cached(written.path.parent, tmp_path / "hub")
    lead_astray(snapshot, how, tmp_path / "outside")
    with pytest.raises(zckpt.FormatError) as caught:
        read(snapshot)
    assert caught.value.rule == "F002"
    assert {finding.rule for finding in zckpt.validate(snapshot / "c").findings} == {"F002"}


@on_posix
def test_an_error_about_a_link_says_how_to_copy_what_it_leads_to(tmp_path: Path, written: Written) -> None:
    for place in places(written):
        if (written.path / place).is_file():
            target = tmp_path / place.replace("/", "_")
            (written.path / place).rename(target)
            link(written.path / place, target)
    for path in (written.path, written.path.parent):
        with pytest.raises(zckpt.FormatError) as caught:
            zckpt.open(path)
        assert "give one of the checkpoints" not in str(caught.value), "each of them fails alike"
        assert "`cp -rL`" in str(caught.value)
    subprocess.run(["cp", "-rL", written.path.parent, tmp_path / "copy"], check=True)
    assert same_all(read(tmp_path / "copy"), written.full)


def make_pipe(path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no pipes with names")
    os.mkfifo(path)


@either_way
@pytest.mark.parametrize("make", [Path.mkdir, make_pipe])
def test_what_is_no_file_is_refused_at_once(written: Written, make: Callable[[Path], None]) -> None:
    for place in places(written):
        path = written.path / place
        if path.is_file():
            path.rename(written.path / "moved")
            make(path)
            check_refused(written, place)
            path.rmdir() if path.is_dir() else path.unlink()
            (written.path / "moved").rename(path)


@needs_steps
@pytest.mark.parametrize("number", [errno.EMLINK, getattr(errno, "EFTYPE", errno.ELOOP), errno.EOPNOTSUPP])
def test_every_error_number_for_a_link_is_understood(written: Written, number: int) -> None:
    real, place = os.open, "index.bin"

    def opened(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if path == place:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args, **kwargs)

    with mock.patch("os.open", opened), pytest.raises(zckpt.FormatError) as caught:
        zckpt.open(written.path).load()
    assert caught.value.rule == "F002"


def test_a_junction_of_windows_is_a_link(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """A junction is a directory with a tag that says that it leads elsewhere. Directories with other tags are no
    links."""
    real = os.lstat

    def lstat(path: str) -> Any:
        if not path.endswith("rank-00001"):
            return real(path)
        return SimpleNamespace(st_mode=stat.S_IFDIR | 0o755, st_reparse_tag=tag)

    monkeypatch.setattr(local_reader, "CAN_OPEN_BY_COMPONENT", False)
    with mock.patch("os.lstat", lstat):
        tag = 0x80000013  # the tag of a file whose content is stored once for several files
        assert same_all(zckpt.open(written.path).load(), written.full)
        tag = 0xA0000003
        check_refused(written, "rank-00001")


@pytest.mark.parametrize("name", ["..\\..\\outside", "C:outside", "C:\\outside", "c:stream"])
def test_latest_leads_nowhere_else_on_windows(written: Written, name: str) -> None:
    """On Windows these names are paths. On other systems they are the names of files."""
    (written.path.parent / names.LATEST).write_bytes(f"{name}\n".encode())
    with mock.patch.object(sys, "platform", "win32"), pytest.raises(zckpt.FormatError) as caught:
        zckpt.open(written.path.parent)
    assert caught.value.rule == "L001"
    if sys.platform != "win32":
        with pytest.raises(zckpt.CheckpointNotFoundError):
            zckpt.open(written.path.parent)


@either_way
def test_a_name_that_no_file_can_have_is_missing(written: Written) -> None:
    reader = open_store(written.path).reader()
    for number, winerror in ((errno.ENAMETOOLONG, None), (errno.EILSEQ, None), (errno.EINVAL, 123)):
        error = OSError(number, os.strerror(number))
        error.winerror = winerror  # type: ignore[attr-defined]
        with mock.patch("os.open", side_effect=error), mock.patch("os.lstat", side_effect=error):
            with pytest.raises(zckpt.MissingFileError):
                reader.size("x")
            assert open_store(written.path).entry("x") is None
