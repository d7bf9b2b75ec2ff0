"""Object stores: real servers pass the contract of stores, and everything that zckpt does works on them."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import botocore.exceptions
import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.support.buckets import a_day_later, client_of, keys, unfinished, use
from tests.support.forks import in_processes
from tests.support.states import same, same_all, write_state, write_through
from zckpt.cli import main
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    LockedError,
    MissingFileError,
    StorageError,
    UnsupportedError,
)
from zckpt.object_stores import errors as object_errors
from zckpt.object_stores import writer as object_writer
from zckpt.storage.contract import ANYTHING
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.testing import ReferenceEngine, StoreContract
from zckpt.transfer.budget import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.object_servers import ObjectServer
    from zckpt.storage.contract import Store


class TestSeaweedFS(StoreContract):
    rounds = 4

    @pytest.fixture
    def store(self, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
        use(seaweedfs, monkeypatch)
        return open_store(f"s3://{seaweedfs.bucket}{tmp_path}/run/c")


@pytest.mark.cloud
class TestSeaweedFSOften(StoreContract):
    rounds = 500

    @pytest.fixture
    def store(self, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
        use(seaweedfs, monkeypatch)
        return open_store(f"s3://{seaweedfs.bucket}{tmp_path}/run/c")


@pytest.mark.cloud
class TestMoto(StoreContract):
    @pytest.mark.skip("moto carries out two conditional puts at the same time")
    def test_of_many_puts_one_succeeds(self, store: Store) -> None: ...

    @pytest.fixture
    def store(self, moto: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
        use(moto, monkeypatch)
        return open_store(f"s3://{moto.bucket}{tmp_path}/run/c")


@pytest.fixture
def run(seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Yields the path of a run in SeaweedFS. Afterwards it checks that no file was made in the current directory."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    use(seaweedfs, monkeypatch)
    yield f"s3://{seaweedfs.bucket}{tmp_path}/run"
    assert list(here.iterdir()) == []


def trained(steps: int, seed: int = 0) -> ReferenceEngine:
    engine = ReferenceEngine(seed=seed)
    engine.train(steps)
    return engine


def masters(engine: ReferenceEngine) -> dict[str, torch.Tensor]:
    return {f"master/{name}": tensor for name, tensor in engine.tensors["master"].items()}


def loaded(path: str) -> dict[str, torch.Tensor]:
    return {key: tensor.reshape(-1) for key, tensor in zckpt.open(path).load("master/*").items()}


# Calls


def test_a_run_is_written_opened_and_restored_bit_for_bit(run: str) -> None:
    engine = trained(3)
    assert zckpt.write(engine, f"{run}/step3", client_state={"epoch": 1}) == f"{run}/step3"
    for path in (run, f"{run}/", f"{run}/step3"):
        checkpoint = zckpt.open(path)
        assert checkpoint.path.rstrip("/") == f"{run}/step3"
        assert same_all(loaded(path), masters(engine))
    for level in ("structure", "digests", "deep"):
        assert zckpt.validate(run, level=level).ok
    restored = trained(1, seed=1)
    assert zckpt.restore(restored, run, rng=True) == {"epoch": 1}
    for trained_engine in (engine, restored):
        trained_engine.train(2)
    for part, tensors in engine.tensors.items():
        assert same_all(restored.tensors[part], tensors)


def test_a_write_in_the_background(run: str) -> None:
    engine = trained(2)
    before = {key: tensor.clone() for key, tensor in masters(engine).items()}
    pending = zckpt.write(engine, f"{run}/step2", background=True)
    engine.train(1)
    pending.wait()
    assert same_all(loaded(run), before)


def test_overwriting_replaces_a_checkpoint_and_all_of_its_data(run: str, seaweedfs: ObjectServer) -> None:
    path = f"{run}/c"
    zckpt.write(trained(1), path)
    with pytest.raises(CheckpointExistsError, match=path):
        zckpt.write(trained(2), path)
    old = keys(seaweedfs, path)
    zckpt.write(trained(2), path, overwrite=True)
    assert zckpt.open(path).step == 2
    assert zckpt.validate(path).ok
    assert {*keys(seaweedfs, path)} & {*old} == {"manifest.msgpack"}, "the old data are gone"


def test_leftovers_and_older_checkpoints_are_removed(run: str, seaweedfs: ObjectServer) -> None:
    engine = trained(0)
    for step in (1, 2, 3):
        engine.train(1)
        zckpt.write(engine, f"{run}/step{step}")
    store, left = open_store(f"{run}/step3"), "data-0123456789abcdef"
    store.put(f"{left}/rank-00000/master.safetensors", bytes(100))
    done = zckpt.gc(run)
    assert (done.removed, done.in_use) == ((), (f"{run}/step3/{left}",)), "its writer may still be alive"
    with a_day_later():
        dry, done = zckpt.gc(run, dry_run=True), zckpt.gc(run)
        assert dry.removed == done.removed
        assert [(item.path, item.nbytes) for item in done.removed] == [(f"{run}/step3/{left}", 100)]
    dry, done = zckpt.prune(run, keep_last=2, dry_run=True), zckpt.prune(run, keep_last=2)
    assert dry.removed == done.removed != ()
    assert zckpt.open(run).step == 3
    assert {key.split("/")[0] for key in keys(seaweedfs, run)} == {"latest", "step2", "step3"}


def test_a_checkpoint_without_a_manifest_is_repaired_or_discarded(run: str, seaweedfs: ObjectServer) -> None:
    for name in ("a", "b"):
        zckpt.write(trained(1), f"{run}/{name}", latest=False)
        open_store(f"{run}/{name}").remove("manifest.msgpack")
    with pytest.raises(zckpt.UnfinishedWriteError, match=r"zckpt\.repair"):
        zckpt.open(f"{run}/a")
    assert zckpt.gc(run).recoverable == (f"{run}/a", f"{run}/b")
    assert zckpt.repair(f"{run}/a").rebuilt
    assert zckpt.repair(f"{run}/a", output=f"{run}/copy").rebuilt
    for name in ("a", "copy"):
        assert zckpt.validate(f"{run}/{name}").ok
        assert same_all(loaded(f"{run}/{name}"), masters(trained(1)))
    zckpt.gc(run, discard="b")
    assert {key.split("/")[0] for key in keys(seaweedfs, run)} == {"a", "copy"}


def test_copies_from_anywhere_to_anywhere_are_equal(run: str, tmp_path: Path) -> None:
    written = write_state(tmp_path / "local", world_size=3, layout="random")
    for source, destination in (
        (str(tmp_path / "local"), f"{run}/first"),
        (f"{run}/first", f"{run}/second"),
        (f"{run}/second", str(tmp_path / "back")),
    ):
        zckpt.cp(source, destination)
        assert zckpt.validate(destination, level="deep").ok
        assert zckpt.diff(source, destination).equal
        assert same_all(zckpt.open(destination).load(), written.full)
    local, back = ({path.name: path.read_bytes() for path in place.rglob("*.safetensors")}
                   for place in (tmp_path / "local", tmp_path / "back"))  # fmt: skip
    assert local == back
    zckpt.cp(f"{run}/first", f"{run}/part", "master/*")
    assert {*zckpt.open(f"{run}/part").load()} == {key for key in written.full if key.startswith("master/")}


def test_a_model_is_converted_to_a_bucket_and_exported_from_it(run: str, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model, out = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)), tmp_path / "out"
    model.save_pretrained(tmp_path / "model")
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert zckpt.convert(tmp_path / "model", f"{run}/c").path == f"{run}/c"
    assert zckpt.validate(f"{run}/c", level="deep").ok
    assert same_all(zckpt.open(f"{run}/c").state_dict(), tensors)
    zckpt.export(f"{run}/c", out)
    zckpt.export(f"{run}/c", tmp_path / "model.pt", format="pt")
    exported = load_file(out / "model.safetensors")
    assert same_all(exported, {name: tensors[name] for name in exported})
    assert same_all(torch.load(tmp_path / "model.pt", weights_only=True), tensors)


def test_the_command_line(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zckpt.write(trained(1), f"{run}/step1")
    zckpt.write(trained(2), f"{run}/step2")

    def output(*arguments: str, status: int = 0) -> str:
        assert main(arguments) == status, capsys.readouterr()
        return capsys.readouterr().out

    assert "step1" in output("info", run)
    assert json.loads(output("info", run, "--json"))
    assert "master/" in output("ls", run)
    assert output("show", run, next(iter(loaded(run))))
    assert output("state", run)
    assert output("diff", f"{run}/step1", f"{run}/step2", status=1)
    output("validate", run)
    output("gc", run)
    output("report", f"{run}/step2", "--out", str(tmp_path / "report.html"))
    assert f"{run}/step2" in (tmp_path / "report.html").read_text()
    output("cp", f"{run}/step1", f"{run}/copy")
    output("prune", run, "--keep-last", "1")
    output("export", f"{run}/step2", str(tmp_path / "out"))
    assert main(["info", f"{run}/step9"]) == 2
    assert f"{run}/step9" in capsys.readouterr().err


def test_one_writer_at_a_time(run: str, seaweedfs: ObjectServer) -> None:
    with WriteLock(open_store(f"{run}/c")), pytest.raises(LockedError, match=f"{run}/c/write.lock"):
        zckpt.write(trained(1), f"{run}/c")
    assert keys(seaweedfs, run) == []
    zckpt.write(trained(1), f"{run}/c")
    assert not zckpt.gc(run).in_use


def test_each_read_is_one_request(run: str, tmp_path: Path) -> None:
    tensor = torch.arange(2 * MIB, dtype=torch.float32)
    write_state(tmp_path / "c", 1, {"long": tensor}, parts=["master"], block_bytes=MIB)
    zckpt.cp(tmp_path / "c", f"{run}/c")
    checkpoint = zckpt.open(f"{run}/c")
    checkpoint.load()  # also reads the index and the digests
    before = checkpoint.io.reads
    assert same(checkpoint.load()["master/long"], tensor)
    assert checkpoint.io.reads == before + 1


def test_a_checkpoint_at_the_top_of_a_bucket(run: str, seaweedfs: ObjectServer) -> None:
    name = posixpath.basename(posixpath.dirname(posixpath.dirname(run)))
    path = f"s3://{seaweedfs.bucket}/{name}"
    zckpt.write(trained(1), path, latest=False)
    assert same_all(loaded(path), masters(trained(1)))
    store = open_store(path)
    assert store.parent.location == store.parent.parent.location == open_store(f"s3://{seaweedfs.bucket}").location
    with pytest.raises(CheckpointExistsError, match="would hide one"):
        zckpt.write(trained(1), f"{path}/inside")
    store.remove(*keys(seaweedfs, path))


# Files


def test_a_file_of_many_parts_is_written_from_memory_that_changes(run: str, seaweedfs: ObjectServer) -> None:
    store, rest = open_store(run), 12345
    part = bytearray(object_writer.PART_BYTES)
    writer = store.create("data/a", 0, direct=False)
    order = [2, 0, 3, 1, 4]
    for number in order:
        part[:] = bytes([number]) * len(part)
        writer.write(memoryview(part)[: rest if number == 4 else None], number * len(part))
    part[:] = bytes(len(part))
    writer.sync()
    writer.close()
    reader, position = store.reader(), 0
    assert reader.size("data/a") == 4 * len(part) + rest
    for number in range(5):
        nbytes = rest if number == 4 else len(part)
        assert reader.read("data/a", position, nbytes) == bytes([number]) * nbytes
        position += nbytes
    assert unfinished(seaweedfs) == []


def test_a_file_needs_no_more_parts_than_a_server_accepts() -> None:
    writer = open_store("s3://bucket/c").create("a", 10**12, direct=False)
    assert isinstance(writer, object_writer.ObjectWriter)
    assert writer._part_bytes * 10_000 >= 10**12


def test_an_upload_that_is_given_up_leaves_nothing(run: str, seaweedfs: ObjectServer) -> None:
    writer = open_store(run).create("data/a", 0, direct=False)
    writer.write(memoryview(bytes(3 * object_writer.PART_BYTES)), 0)
    writer.close()
    assert keys(seaweedfs, run) == unfinished(seaweedfs) == []


def test_missing_and_empty_files_are_told_apart(run: str) -> None:
    store = open_store(run)
    store.put("empty", b"")
    store.put("four", b"four")
    reader, view = store.reader(), memoryview(bytearray(4))
    for path in ("empty", "four"):
        for offset in (4, 5, 1 << 40):
            assert reader.read(path, offset, 10) == b""
            assert reader.read_into(path, [view], offset) == 0
        assert reader.read(path, 0, 0) == b""
    assert reader.read_into("four", [view[:1], view[:0], view[1:]], 2) == 2
    assert bytes(view[:2]) == b"ur"
    for nbytes in (0, 4):
        with pytest.raises(MissingFileError, match=f"{run}/none"):
            reader.read("none", 0, nbytes)


def test_thousands_of_files_are_looked_at_and_removed(run: str, seaweedfs: ObjectServer) -> None:
    store, paths = open_store(run), [f"data/{number % 7}/{number}" for number in range(1050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(store.put, data=b"12", over=ANYTHING), paths))
    assert store.sizes(paths) == [2] * len(paths)
    assert store.sizes([]) == []
    with pytest.raises(MissingFileError, match="data/none"):
        store.sizes([*paths, "data/none"])
    store.remove(*paths[:-1])
    assert keys(seaweedfs, run) == paths[-1:]
    assert len(paths) > 1000, "one request lists and removes this many"


def test_one_size_is_found_without_a_list_of_everything(run: str) -> None:
    store = open_store(run)
    store.put("data/a", b"12")
    store.put("a", b"1")
    with mock.patch.object(type(store), "entries", autospec=True, side_effect=type(store).entries) as entries:
        assert store.sizes(["data/a"]) == [2]
    assert [call.args[1] for call in entries.call_args_list] == ["data"]
    assert store.sizes(["a", "data/a"]) == [1, 2]


# Errors


def refused(match: str, hint: str, *, path: str = "s3://test-bucket/run", transient: bool = False) -> None:
    """Checks the error of every kind of request."""
    store = open_store(path)
    actions: list[Any] = [
        lambda: store.put("a", b"a"),
        lambda: store.put("a", b"a", ANYTHING),
        lambda: store.put_new("a", b"a"),
        lambda: store.put_new("a", bytes(2 * object_writer.PART_BYTES)),
        store.entries,
        lambda: store.entry(""),
        lambda: store.reader().read("a", 0, 1),
        lambda: zckpt.open(path),
        lambda: zckpt.write(trained(1), f"{path}/c"),
    ]
    for action in actions:
        with pytest.raises(StorageError, match=match) as caught:
            action()
        assert hint in (caught.value.hint or ""), caught.value
        assert caught.value.transient == transient
        assert str(caught.value.file).startswith(path)
        assert "secret" not in str(caught.value)
        assert "\n" not in caught.value.message
    store.remove("a", "b")


def test_wrong_credentials(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-key")
    refused("403", "credentials are missing or wrong", path=run)


def test_no_such_bucket(run: str) -> None:
    refused("NoSuchBucket", "the bucket does not exist", path="s3://no-such-bucket/run")


def test_an_unreachable_server(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    refused("error sending request", "AWS_ENDPOINT_URL", path=run, transient=True)


def test_no_credentials(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with pytest.raises(StorageError, match="no credentials were found") as caught:
        zckpt.open(run)
    assert "AWS_ACCESS_KEY_ID" in (caught.value.hint or "")


def test_credentials_of_a_profile(run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key, secret = (os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[mine]\naws_access_key_id={key}\naws_secret_access_key={secret}\nregion=us-east-1\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    zckpt.write(trained(1), f"{run}/c")
    assert zckpt.gc(run).checkpoints == 1
    assert zckpt.open(run).step == 1
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageError, match="nobody"):
        zckpt.open(run)


@pytest.mark.parametrize("path", ["s3://key:secret@bucket/run", "http://user:secret@127.0.0.1:1/run"])
def test_credentials_in_a_url_are_refused_and_not_repeated(path: str) -> None:
    for call in (zckpt.open, zckpt.gc, partial(zckpt.write, trained(1))):
        with pytest.raises(UnsupportedError, match="may not contain credentials") as caught:
            call(path)
        assert "secret" not in str(caught.value)


def test_credentials_appear_nowhere(
    run: str, seaweedfs: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    zckpt.write(trained(1), f"{run}/c")
    zckpt.report(f"{run}/c", tmp_path / "report.html")
    errors = []
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "another-secret-key")
            for call in (zckpt.open, zckpt.gc, partial(zckpt.write, trained(1))):
                with pytest.raises(StorageError) as caught:
                    call(f"{run}/c/no")
                errors.append(repr(caught.value) + str(caught.value))
            open_store(run).remove("a")
    reader = open_store(f"{run}/c").reader()
    stored = [reader.read(key, 0, 1 << 20) for key in keys(seaweedfs, f"{run}/c")]
    texts = [caplog.text, *errors, (tmp_path / "report.html").read_text(), *(data.decode("latin-1") for data in stored)]
    assert caplog.text
    for text in texts:
        for secret in (seaweedfs.access_key, seaweedfs.secret_key, "another-secret-key", "Signature="):
            assert secret not in text


def test_texts_of_servers_are_told_without_what_they_repeat() -> None:
    error = OSError(
        "Error performing PUT http://host/a?X-Amz-Signature=abc&token=def in 3ms - Server returned non-2xx status "
        "code: 403 Forbidden: <?xml version='1.0'?>\n<Error><Code>SignatureDoesNotMatch</Code>\n<Message>no</Message>"
        "<AWSAccessKeyId>AKIA</AWSAccessKeyId><StringToSign>AWS4</StringToSign></Error>\n\nDebug source: headers"
    )
    assert object_errors.without_secrets(error) == (
        "Error performing PUT http://host/a?... in 3ms - Server returned non-2xx status code: 403 Forbidden: "
        "SignatureDoesNotMatch: no"
    )


def test_a_server_that_ignores_conditions_is_refused(
    rclone: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(rclone, monkeypatch)
    run = f"s3://{rclone.bucket}/run"
    local = write_state(tmp_path / "c").path
    for call in (partial(zckpt.write, trained(1)), partial(zckpt.cp, local)):
        with pytest.raises(UnsupportedError, match="If-Match and If-None-Match") as caught:
            call(f"{run}/c")
        assert "SeaweedFS" in (caught.value.hint or "")
        assert keys(rclone, run) == []


def test_a_forked_process_gets_an_error_instead_of_waiting_for_ever(run: str) -> None:
    zckpt.write(trained(1), f"{run}/c")
    (error,) = in_processes(1, lambda number: zckpt.open(run))
    assert isinstance(error, UnsupportedError)
    assert "spawn" in (error.hint or "")


def open_without_obstore() -> str:
    sys.modules["obstore"] = None  # type: ignore[assignment]
    with pytest.raises(zckpt.ZckptError) as caught:
        zckpt.open("s3://bucket/run")
    return str(caught.value)


def test_the_package_obstore_is_asked_for(cluster: Cluster) -> None:
    (error,) = cluster.run(open_without_obstore, 1, init=False)
    assert "pip install 'zckpt[cloud]'" in error


# Uploads that nobody finishes


def test_gc_gives_up_uploads_that_are_a_day_old(run: str, seaweedfs: ObjectServer) -> None:
    zckpt.write(trained(1), f"{run}/c")
    client, prefix = client_of(seaweedfs), run.partition("://")[2].partition("/")[2]
    key = f"{prefix}/c/data-0123456789abcdef/rank-00000/master.safetensors"
    for other in (key, f"{prefix}/c/mine", f"{prefix}-2/c/data-0123456789abcdef/rank-00000/master.safetensors"):
        upload = client.create_multipart_upload(Bucket=seaweedfs.bucket, Key=other)
        client.upload_part(
            Bucket=seaweedfs.bucket, Key=other, UploadId=upload["UploadId"], PartNumber=1, Body=bytes(5 * MIB)
        )
    assert zckpt.gc(run).removed == ()
    with a_day_later():
        dry = zckpt.gc(run, dry_run=True)
        assert key in unfinished(seaweedfs)
        assert zckpt.gc(run) == zckpt.Cleanup(dry.removed, (), False, checkpoints=1)
    assert [(item.path, item.nbytes, item.reason) for item in dry.removed] == [
        (f"s3://{posixpath.join(seaweedfs.bucket, key)}", 5 * MIB, "leftover")
    ]
    assert len(unfinished(seaweedfs)) == 2, "the others are not zckpt's, or of another run"
    for upload in client.list_multipart_uploads(Bucket=seaweedfs.bucket)["Uploads"]:
        client.abort_multipart_upload(Bucket=seaweedfs.bucket, Key=upload["Key"], UploadId=upload["UploadId"])


def test_gc_warns_if_it_may_not_list_uploads(run: str, seaweedfs: ObjectServer) -> None:
    zckpt.write(trained(1), f"{run}/c")
    error = botocore.exceptions.ClientError({"Error": {"Code": "AccessDenied"}}, "ListMultipartUploads")
    with (
        mock.patch("botocore.paginate.Paginator.paginate", side_effect=error),
        pytest.warns(UserWarning, match=r"unfinished uploads stay.*AccessDenied"),
    ):
        assert zckpt.gc(run).removed == ()


def test_gc_needs_no_boto3(run: str) -> None:
    zckpt.write(trained(1), f"{run}/c")
    with mock.patch.dict(sys.modules, {"boto3": None}):
        assert zckpt.gc(run).removed == ()


def test_nothing_is_there(run: str) -> None:
    for call in (zckpt.open, zckpt.gc, zckpt.validate):
        with pytest.raises(CheckpointNotFoundError, match=run):
            call(run)
    write_through_path: Any = f"{run}/c"
    write_through(write_through_path, torch.zeros(3))
    with pytest.raises(CheckpointNotFoundError, match="newest first: c"):
        zckpt.open(f"{run}/d")
