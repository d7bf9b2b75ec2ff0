"""Exports, reports and folders of DeepSpeed are written to an object store as they are written to a file system."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import obstore
import pytest
import torch

import zckpt
from tests.support.buckets import keys, unfinished, use
from tests.support.faulty_proxy import LOSE_ANSWER, Fault, FaultyProxy
from tests.support.hugging_face import content, make_hugging_face, write_both, write_model
from tests.support.states import write_state
from zckpt.errors import CheckpointExistsError, StorageError
from zckpt.object_stores import writer as object_writer
from zckpt.object_stores.writer import ObjectWriter
from zckpt.storage.schemes import open_store
from zckpt.testing import ReferenceEngine
from zckpt.tools.exporting.hugging_face import FILES
from zckpt.tools.exporting.place import Place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.object_servers import ObjectServer

SIZE = "60KB"
FORBIDDEN = Fault(status=403)
"""An answer after which the client does not try again."""


@pytest.fixture
def proxy(seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Yields a proxy through which zckpt reaches SeaweedFS."""
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        use(seaweedfs, monkeypatch, proxy.endpoint)
        yield proxy


@pytest.fixture
def bucket(seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Returns a path in SeaweedFS, which zckpt reaches directly unless the test uses ``proxy``."""
    if "AWS_ENDPOINT_URL" not in os.environ:
        use(seaweedfs, monkeypatch)
    return f"s3://{seaweedfs.bucket}{tmp_path}"


def stored(server: ObjectServer, path: str) -> dict[str, bytes]:
    """Returns the content of all files below an ``s3://`` path."""
    prefix = path.partition("://")[2].partition("/")[2]
    return {key: bytes(obstore.get(server.store(), f"{prefix}/{key}").bytes()) for key in keys(server, path)}


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Returns a model with merged experts, and writes a checkpoint of it and its configuration."""
    model = make_hugging_face("mixtral")
    write_model(tmp_path / "zckpt", model)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved", max_shard_size=SIZE)
    return model


@pytest.mark.usefixtures("model")
def test_a_model(seaweedfs: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The converted weights of a file are written last, so the bytes behind them wait in a temporary file."""
    monkeypatch.setattr(object_writer.EARLY, "nbytes_max", 1000)
    zckpt.cp(tmp_path / "zckpt", f"{bucket}/zckpt")
    options: dict[str, Any] = {"config": tmp_path / "saved", "dtype": "bf16", "max_shard_size": SIZE}
    exported = zckpt.export(f"{bucket}/zckpt", f"{bucket}/model", **options)
    assert stored(seaweedfs, exported.path) == content(tmp_path / "saved")
    assert exported.path == f"{bucket}/model"
    with pytest.raises(CheckpointExistsError, match="only on a file system"):
        zckpt.export(f"{bucket}/zckpt", f"{bucket}/model", overwrite=True, **options)
    assert stored(seaweedfs, exported.path) == content(tmp_path / "saved")
    assert unfinished(seaweedfs) == []


def export_live(environment: dict[str, str], checkpoint: str, directory: str, bucket: str) -> str:
    os.environ.update(environment)
    engine = ReferenceEngine()
    zckpt.export(engine, f"{directory}/live.pt", format="pt")
    zckpt.export(engine, f"{bucket}/live.pt", format="pt")
    options: dict[str, Any] = {"config": f"{directory}/saved", "dtype": "bf16", "max_shard_size": SIZE}
    return zckpt.export(checkpoint, f"{bucket}/model", **options).path


@pytest.mark.usefixtures("model")
def test_ranks_share_the_files(cluster: Cluster, seaweedfs: ObjectServer, bucket: str, tmp_path: Path) -> None:
    arguments = seaweedfs.environment(), str(tmp_path / "zckpt"), str(tmp_path), bucket
    assert cluster.run(export_live, 3, *arguments) == [f"{bucket}/model"] * 3
    assert stored(seaweedfs, f"{bucket}/model") == content(tmp_path / "saved")
    assert stored(seaweedfs, bucket)["live.pt"] == (tmp_path / "live.pt").read_bytes()


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("name", ["model-00002-of-", "config.json", "model.safetensors.index.json"])
def test_a_failure_leaves_nothing(
    proxy: FaultyProxy, seaweedfs: ObjectServer, bucket: str, tmp_path: Path, name: str
) -> None:
    proxy.inject(FORBIDDEN, method="PUT", path=name, times=None)
    with pytest.raises(StorageError, match=name):
        zckpt.export(tmp_path / "zckpt", f"{bucket}/model", config=tmp_path / "saved", max_shard_size=SIZE)
    assert stored(seaweedfs, bucket) == {}
    assert unfinished(seaweedfs) == []


@pytest.mark.usefixtures("model")
def test_an_export_does_not_touch_what_another_one_has_written(
    seaweedfs: ObjectServer, bucket: str, tmp_path: Path
) -> None:
    late = Place.choose(f"{bucket}/model", "export", overwrite=False, patterns=FILES)
    options: dict[str, Any] = {"config": tmp_path / "saved", "max_shard_size": SIZE}
    exported = zckpt.export(tmp_path / "zckpt", f"{bucket}/model", **options)
    before = stored(seaweedfs, bucket)
    with pytest.raises(CheckpointExistsError, match="there are files already"):
        late.begin(exported.files)
    late.remove()
    assert stored(seaweedfs, bucket) == before
    first = Place.choose(f"{bucket}/other", "export", overwrite=False, patterns=FILES)
    second = Place.choose(f"{bucket}/other", "export", overwrite=False, patterns=FILES)
    first.begin(exported.files)
    with pytest.raises(CheckpointExistsError, match="there are files already"):
        second.begin(exported.files)
    first.remove()
    assert stored(seaweedfs, bucket) == before


@pytest.mark.usefixtures("model")
def test_files_end_as_soon_as_they_are_written_and_those_that_say_so_come_last(
    proxy: FaultyProxy, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[ObjectWriter] = set()
    most, upload, close = [0], ObjectWriter._upload, ObjectWriter.close

    def counted(writer: ObjectWriter) -> None:
        opened.add(writer)
        most[0] = max(most[0], len(opened))
        upload(writer)

    def closed(writer: ObjectWriter) -> None:
        opened.discard(writer)
        close(writer)

    monkeypatch.setattr(ObjectWriter, "_upload", counted)
    monkeypatch.setattr(ObjectWriter, "close", closed)
    options: dict[str, Any] = {"max_shard_size": "8KB", "budget": zckpt.Budget(8 << 20, 2)}
    exported = zckpt.export(tmp_path / "zckpt", f"{bucket}/plain", **options)
    assert len(exported.files) > 2 * most[0]
    proxy.clear()
    zckpt.export(tmp_path / "zckpt", f"{bucket}/model", config=tmp_path / "saved", max_shard_size=SIZE)
    names = [request.path.rpartition("/")[2] for request in proxy.requests(method="PUT")]
    files = [name for name in names if name != "write.lock"]
    assert files[-2:] == ["model.safetensors.index.json", "config.json"]


def test_a_file_is_replaced_only_by_one_of_its_kind(seaweedfs: ObjectServer, bucket: str, tmp_path: Path) -> None:
    for number in range(2):
        write_state(tmp_path / f"{number}", 2, {"w": (30, 4 + number)})
    paths = [tmp_path / "0", tmp_path / "1"]
    zckpt.export(paths[0], f"{bucket}/model.pt", format="pt")
    zckpt.report(paths, f"{bucket}/page.html")
    first = stored(seaweedfs, bucket)
    with pytest.raises(CheckpointExistsError, match="something is there already"):
        zckpt.export(paths[1], f"{bucket}/model.pt", format="pt")
    with pytest.raises(CheckpointExistsError, match="of another kind"):
        zckpt.export(paths[1], f"{bucket}/page.html", format="pt", overwrite=True)
    with pytest.raises(CheckpointExistsError, match="there is a directory"):
        zckpt.export(paths[1], bucket, format="pt", overwrite=True)
    with pytest.raises(ValueError, match="path of a file"):
        zckpt.report(paths, f"s3://{seaweedfs.bucket}")
    assert stored(seaweedfs, bucket) == first
    zckpt.export(paths[1], f"{bucket}/model.pt", format="pt", overwrite=True)
    zckpt.export(paths[1], tmp_path / "model.pt", format="pt")
    assert stored(seaweedfs, bucket) == {**first, "model.pt": (tmp_path / "model.pt").read_bytes()}
    assert first["page.html"].startswith(b"<!doctype html>")


def test_a_folder_of_deepspeed(
    cluster: Cluster, proxy: FaultyProxy, seaweedfs: ObjectServer, bucket: str, tmp_path: Path
) -> None:
    cluster.run(write_both, 2, str(tmp_path), "gpt2", 2)
    zckpt.convert(tmp_path / "zckpt", tmp_path / "out", to="deepspeed")
    expected = {
        f"{file.relative_to(tmp_path / 'out')}": file.read_bytes()
        for file in (tmp_path / "out").rglob("*")
        if file.is_file()
    }
    proxy.inject(FORBIDDEN, method="PUT", path="latest", times=None)
    with pytest.raises(StorageError, match="latest"):
        zckpt.convert(tmp_path / "zckpt", f"{bucket}/out", to="deepspeed")
    assert stored(seaweedfs, f"{bucket}/out") == {}
    proxy.clear()
    proxy.inject(LOSE_ANSWER, method="PUT", path="latest", times=None)
    assert zckpt.convert(tmp_path / "zckpt", f"{bucket}/out", to="deepspeed").path == f"{bucket}/out/global_step1"
    assert stored(seaweedfs, f"{bucket}/out") == expected
    proxy.clear()
    zckpt.cp(tmp_path / "zckpt", f"{bucket}/run/global_step1")
    open_store(f"{bucket}/run").put("latest", b"global_step1\n")
    zckpt.convert(f"{bucket}/run", tmp_path / "from a URL", to="deepspeed")
    written = (tmp_path / "from a URL").rglob("*.pt")
    assert {file.name: file.read_bytes() for file in written} == {
        file.name: file.read_bytes() for file in (tmp_path / "out").rglob("*.pt")
    }
    proxy.inject(FORBIDDEN, method="GET", path="latest", times=None)
    with pytest.raises(StorageError):
        zckpt.convert(tmp_path / "zckpt", f"{bucket}/run", to="deepspeed", tag="other")
    proxy.clear()
    with pytest.raises(CheckpointExistsError, match="a run of zckpt"):
        zckpt.convert(tmp_path / "zckpt", f"{bucket}/run", to="deepspeed", tag="other")
