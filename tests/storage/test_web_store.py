"""Checkpoints are read from a web server, and never written to one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("obstore")

import zckpt
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.states import same_all, write_state
from tests.support.web_server import web_server
from zckpt.errors import CheckpointNotFoundError, MissingFileError, StorageError, UnsupportedError
from zckpt.object_stores import client as object_client
from zckpt.storage.schemes import open_store
from zckpt.testing import ReferenceEngine
from zckpt.transfer.budget import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.states import Written


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return write_state(tmp_path / "run" / "step5", world_size=2)


@pytest.fixture
def url(tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(object_client, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(object_client, "RETRIES", 2)
    object_client._client.cache_clear()
    with web_server(tmp_path) as url:
        yield url


def test_a_checkpoint_is_read(url: str, written: Written, tmp_path: Path) -> None:
    for path in (f"{url}/run/step5", f"{url}/run/step5/", f"{url}/run"):
        checkpoint = zckpt.open(path)
        assert checkpoint.path.rstrip("/") == f"{url}/run/step5"
        assert same_all(checkpoint.load(), written.full)
        assert zckpt.validate(path, level="deep").ok
    zckpt.cp(f"{url}/run", tmp_path / "copy")
    assert same_all(zckpt.open(tmp_path / "copy").load(), written.full)
    assert zckpt.diff(f"{url}/run", tmp_path / "copy").equal


def test_what_is_not_there(url: str) -> None:
    for path in (f"{url}/run/step6", f"{url}/none"):
        with pytest.raises(CheckpointNotFoundError, match=path):
            zckpt.open(path)
    reader = open_store(f"{url}/run").reader()
    with pytest.raises(MissingFileError):
        reader.read("none", 0, 1)
    assert reader.read("latest", 0, 100) == b"step5\n"
    assert reader.read("latest", 6, 100) == b""


def test_a_server_that_cannot_be_reached(url: str) -> None:
    with pytest.raises(StorageError) as caught:
        zckpt.open("http://127.0.0.1:1/run")
    assert "check the address" in (caught.value.hint or "")
    assert "AWS" not in str(caught.value)


def test_nothing_is_written(url: str, written: Written, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    store = open_store(f"{url}/run/step6")
    calls: list[Callable[[], Any]] = [
        partial(zckpt.write, ReferenceEngine(), f"{url}/run/step6"),
        partial(zckpt.cp, f"{url}/run", f"{url}/copy"),
        partial(store.put, "a", b""),
        partial(store.put_new, "a", b""),
        partial(store.remove_if, "a", b""),
        store.prepare("a", b"").commit,
        store.now,
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="can only be read") as caught:
            call()
        assert "s3://" in (caught.value.hint or "")
    open_store(f"{url}/run/step5").remove("manifest.msgpack")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_server_without_ranges_is_refused(written: Written, tmp_path: Path) -> None:
    with (
        web_server(tmp_path, ranges=False) as url,
        pytest.raises(UnsupportedError, match="sends whole files") as caught,
    ):
        zckpt.open(f"{url}/run/step5")
    assert "Range" in (caught.value.hint or "")


def test_a_read_that_was_cut_goes_on_though_the_server_has_no_etags(url: str, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * MIB, dtype=np.uint8)
    (tmp_path / "a").write_bytes(data.tobytes())
    view = np.zeros(len(data), np.uint8)
    with FaultyProxy(url) as proxy:
        proxy.inject(Fault(truncate_bytes=MIB + 1000), times=2)
        reader = open_store(proxy.endpoint).reader()
        assert reader.read_into("a", [view], 0) == len(data)
        assert np.array_equal(view, data)
        proxy.clear()
        proxy.inject(Fault(truncate_bytes=1000), times=None)
        with pytest.raises(StorageError) as caught:
            reader.read_into("a", [view], 0)
        assert caught.value.transient
