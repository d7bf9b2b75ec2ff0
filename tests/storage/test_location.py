"""Locations: a path of a file system changes only as the system's own functions change it, and a URL never changes."""

from __future__ import annotations

import ntpath
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.states import write_state, write_through
from zckpt.cli import main
from zckpt.errors import UnsupportedError
from zckpt.offloading.scratch import scratch_directory
from zckpt.storage import schemes
from zckpt.storage.local_store import LocalStore
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "s3://bucket//a/../b/", "gs://b", "memory://", "my-store+v2.0://x y"]
)
def test_what_is_behind_a_scheme_is_never_changed(url: str) -> None:
    location = Location.of(url)
    assert (location.scheme, f"{location.scheme}://{location.path}") == (url.partition(":")[0], url)
    assert str(location) == str(location.child("")) == url
    assert str(location.absolute()) == url.rstrip("/") or location.path == ""
    assert location.absolute() == location.resolved()
    below = location.child("epoch1/step2")
    assert str(below) == (url if url.endswith("/") else f"{url}/") + "epoch1/step2"
    assert (below.name, below.parent.name) == ("step2", "epoch1")
    assert below.path_from(location) == "epoch1/step2"
    assert below.parent.parent.absolute() == location.absolute()


def test_a_url_that_pathlib_has_changed_is_refused() -> None:
    for read in (zckpt.open, zckpt.validate, zckpt.gc, zckpt.repair):
        with pytest.raises(zckpt.UnsupportedError, match=r"s3:/bucket/run.*URL.*\n.*as a string"):
            read(Path("s3://bucket/run"))
    assert Location.of(Path("at:12/c")).path == os.path.join("at:12", "c")


@pytest.mark.parametrize("url", ["s3:/bucket/run", "https:/host/run"])
def test_a_url_that_lacks_a_slash_is_refused(url: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s)lacks a slash.*give '{url.replace(':/', '://')}'"):
        Location.of(url)
    assert Location.of(f"./{url}").scheme == ""


@pytest.mark.skipif(os.sep == "\\", reason="there, these are paths")
@pytest.mark.parametrize("path", ["C:\\served", "c:/served/run", "\\\\host\\share", "D:\\"])
def test_a_path_of_windows_is_refused_elsewhere_and_makes_no_directory(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_state(tmp_path / "c", 1, {"w": (2,)}).path
    calls: list[Callable[[], object]] = [
        lambda: write_through(Path(path), torch.ones(2)),
        lambda: zckpt.cp(source, path),
        lambda: zckpt.export(source, path),
        lambda: zckpt.export(source, Path(path), format="pt"),
        lambda: zckpt.convert(source, path, to="deepspeed"),
        lambda: zckpt.report(source, path),
        lambda: zckpt.repair(source, output=path),
        lambda: zckpt.open(path),
        lambda: zckpt.gc(path),
        lambda: scratch_directory(path),
    ]
    for call in calls:
        with pytest.raises(zckpt.UnsupportedError, match="path of Windows"):
            call()
    assert main(["cp", str(source), path]) == 2
    assert repr(f"./{path}") in capsys.readouterr().err
    assert sorted(os.listdir()) == ["c", "latest"]
    zckpt.cp(source, f"./{path}x")
    assert zckpt.open(f"./{path}x").step == 5


def test_the_topmost_location_is_its_own_parent() -> None:
    assert Location.of("s3://bucket").parent == Location.of("s3://")
    assert Location.of("s3://").parent == Location.of("s3://")
    root = Location.of(os.path.abspath(os.sep))
    assert root.parent == root


@pytest.mark.parametrize(
    "path", ["run", "run/c", "../run/c", "/run/c", ".", "./C:/run", "a:b", "a\\b", "./x:\\y", "./s3:/bucket", "é\n"]
)
def test_a_path_of_a_file_system_is_what_the_system_makes_of_it(path: str) -> None:
    location = Location.of(path)
    assert (location.scheme, str(location)) == ("", path)
    assert Location.of(Path("run") / "c") == Location.of(os.path.join("run", "c"))
    assert str(location.child("a/b")) == os.path.join(path, "a/b")
    assert str(location.absolute()) == os.path.abspath(path)
    assert str(location.resolved()) == os.path.realpath(path)
    assert str(location.parent) == (os.path.dirname(path) or ".")
    assert location.name == os.path.basename(path)
    assert location.child("a/b").path_from(location) == "a/b"


def test_a_slash_at_the_end_names_the_same_directory() -> None:
    assert Location.of("run/c/").parent == Location.of("run")
    assert Location.of("run/c/").name == "c"
    assert Location.of("run/c/").absolute() == Location.of("run/c").absolute()


def test_what_lies_elsewhere_has_no_path_from_there() -> None:
    assert Location.of("/a/b").path_from(Location.of("/a/c")) == "../b"
    assert Location.of("s3://a/b").path_from(Location.of("/a")) == "s3://a/b"
    assert Location.of("/a/b").path_from(Location.of("s3://a")) == "/a/b"


def test_paths_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = SimpleNamespace(path=ntpath, sep="\\", altsep="/", curdir=".", fspath=os.fspath)
    monkeypatch.setattr("zckpt.storage.location.os", windows)
    run = Location.of("C:\\runs\\")
    assert str(run.child("a/b")) == "C:\\runs\\a/b"
    assert run.child("a").child("b").path_from(run) == "a/b"
    assert Location.of("c:/RUNS/a").path_from(run) == "a"
    assert Location.of("D:\\a").path_from(run) == "D:\\a"
    assert (run.parent, run.name) == (Location.of("C:\\"), "runs")
    assert str(Location.of("s3://bucket/run").child("a").parent) == "s3://bucket/run"


@pytest.mark.parametrize(("given", "error"), [(b"run", TypeError), (None, TypeError), ("", ValueError)])
def test_what_is_no_path_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"(?i)path"):
        Location.of(given)


def test_a_package_adds_a_store_by_an_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "other-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[zckpt.stores]\nmine = zckpt.storage.local_store:LocalStore\n")
    with pytest.raises(UnsupportedError, match="scheme 'mine'"):
        open_store("mine://a")
    monkeypatch.setattr(schemes, "SCHEMES", {**schemes.SCHEMES})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(open_store("MINE://a"), LocalStore)
