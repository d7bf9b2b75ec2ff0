"""A store that is no file system passes the contract of stores, and everything that zckpt does works on it."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from tests.support.memory_store import Disk, File, in_memory
from tests.support.states import same_all, write_state
from zckpt.checkpoint.cleaning.work import OLD_SECONDS
from zckpt.checkpoint.listing.runs import directories_of
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.testing import ReferenceEngine, StoreContract
from zckpt.transfer.budget import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zckpt.storage.contract import Store

RUN = "memory://bucket/runs/one"


@pytest.fixture(name="disk", autouse=True)
def _disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Yields the files of the memory store. Afterwards it checks that no file was made in the current directory."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with in_memory() as disk:
        yield disk
    assert list(here.iterdir()) == []


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store("memory://some/run")


class TestMemoryStoreAtTheTop(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store("memory://run")


def trained(steps: int, seed: int = 0) -> ReferenceEngine:
    engine = ReferenceEngine(seed=seed)
    engine.train(steps)
    return engine


def test_a_run_is_written_opened_and_restored_bit_for_bit(disk: Disk) -> None:
    engine = trained(3)
    assert zckpt.write(engine, f"{RUN}/step3", client_state={"epoch": 1}) == f"{RUN}/step3"
    assert isinstance(disk["bucket/runs/one/step3/manifest.msgpack"], File)
    for path in (RUN, f"{RUN}/", f"{RUN}/step3"):
        checkpoint = zckpt.open(path)
        assert checkpoint.path.rstrip("/") == f"{RUN}/step3"
        loaded = checkpoint.load("master/*")
        masters = {f"master/{name}": tensor for name, tensor in engine.tensors["master"].items()}
        assert same_all({key: tensor.reshape(-1) for key, tensor in loaded.items()}, masters)
        assert checkpoint.io.data_bytes == sum(tensor.nbytes for tensor in masters.values())
    for level in ("structure", "digests", "deep"):
        assert zckpt.validate(RUN, level=level).ok
    restored = trained(1, seed=1)
    assert zckpt.restore(restored, RUN, rng=True) == {"epoch": 1}
    for trained_engine in (engine, restored):
        trained_engine.train(2)
    for part, tensors in engine.tensors.items():
        assert same_all(restored.tensors[part], tensors)


def test_a_write_in_the_background() -> None:
    engine = trained(2)
    before = {name: tensor.clone() for name, tensor in engine.tensors["master"].items()}
    pending = zckpt.write(engine, f"{RUN}/step2", background=True)
    engine.train(1)
    pending.wait()
    for key, tensor in zckpt.open(RUN).load("master/*").items():
        assert torch.equal(tensor.reshape(-1), before[key.partition("/")[2]])


def test_overwriting_replaces_a_checkpoint_and_all_of_its_data(disk: Disk) -> None:
    path = f"{RUN}/c"
    zckpt.write(trained(1), path)
    with pytest.raises(zckpt.CheckpointExistsError, match="memory://bucket/runs/one/c"):
        zckpt.write(trained(2), path)
    old = set(disk)
    zckpt.write(trained(2), path, overwrite=True)
    assert zckpt.open(path).step == 2
    assert zckpt.validate(path).ok
    assert not [file for file in disk if file in old and "/data-" in file], "the old data are gone"


def test_leftovers_and_older_checkpoints_are_removed(disk: Disk) -> None:
    engine = trained(0)
    for step in (1, 2, 3):
        engine.train(1)
        zckpt.write(engine, f"{RUN}/step{step}")
    store = open_store(f"{RUN}/step3")
    store.put("data-0123456789abcdef/rank-00000/master.safetensors", bytes(100))
    left = next(path for path in disk if "data-0123456789abcdef" in path)
    disk[left] = disk[left]._replace(changed_at=time.time() - OLD_SECONDS - 1)
    store.put("data-fedcba9876543210/rank-00000/master.safetensors", bytes(100))
    for clean in (zckpt.gc, partial(zckpt.prune, keep_last=2)):
        dry = clean(RUN, dry_run=True)
        done = clean(RUN)
        assert done.removed == dry.removed != ()
        if clean is zckpt.gc:
            assert [item.path.partition("step")[2] for item in done.removed] == ["3/data-0123456789abcdef"]
            assert done.in_use == dry.in_use == (f"{RUN}/step3/data-fedcba9876543210",), "it is not a day old"
    assert zckpt.open(RUN).step == 3
    assert directories_of(open_store(RUN)) == ["step2", "step3"]
    assert not [item for item in disk if "step1" in item]


def test_a_checkpoint_without_a_manifest_is_repaired_or_discarded() -> None:
    engine = trained(1)
    for name in ("a", "b"):
        zckpt.write(engine, f"{RUN}/{name}", latest=False)
        open_store(f"{RUN}/{name}").remove("manifest.msgpack")
    with pytest.raises(zckpt.UnfinishedWriteError, match=r"zckpt\.repair"):
        zckpt.open(f"{RUN}/a")
    assert zckpt.gc(RUN).recoverable == (f"{RUN}/a", f"{RUN}/b")
    assert zckpt.repair(f"{RUN}/a").rebuilt
    assert zckpt.repair(f"{RUN}/a", output=f"{RUN}/copy").rebuilt
    for name in ("a", "copy"):
        assert zckpt.validate(f"{RUN}/{name}").ok
    zckpt.gc(RUN, discard="b")
    assert directories_of(open_store(RUN)) == ["a", "copy"]


def test_errors_name_what_is_there(disk: Disk) -> None:
    zckpt.write(trained(1), f"{RUN}/step1")
    with pytest.raises(zckpt.CheckpointNotFoundError, match=r"memory://bucket/runs/one .*newest first: step1"):
        zckpt.open(f"{RUN}/step9")
    open_store(RUN).remove("latest")
    with pytest.raises(zckpt.CheckpointNotFoundError, match="newest first: step1") as caught:
        zckpt.open(RUN)
    assert caught.value.file == RUN
    open_store(f"{RUN}/step1").remove("manifest.msgpack")
    zckpt.write(trained(2), f"{RUN}/step2")
    file = next(name for name in disk if "step2" in name and name.endswith("master.safetensors"))
    disk[file] = File(b"short", 0.0)
    with pytest.raises(zckpt.FormatError, match="F003"):
        zckpt.open(RUN).load()
    with pytest.raises(zckpt.CheckpointExistsError, match=f"{RUN}/step2 is a checkpoint"):
        zckpt.write(trained(2), f"{RUN}/step2/inside")


def test_one_writer_at_a_time() -> None:
    with WriteLock(open_store(f"{RUN}/c")), pytest.raises(zckpt.LockedError, match=f"{RUN}/c/write.lock"):
        zckpt.write(trained(1), f"{RUN}/c")
    assert open_store(RUN).entry("") is None, "the directories that the lock has made are gone with it"
    zckpt.write(trained(1), f"{RUN}/c")
    assert not zckpt.gc(RUN).in_use


@pytest.mark.parametrize("call", ["write", "open", "restore", "validate", "gc", "repair"])
def test_an_unknown_scheme_is_refused_before_anything_is_made(call: str) -> None:
    arguments = ["ftp://host/run"] if call in ("open", "validate", "gc", "repair") else [trained(1), "ftp://host/run"]
    with pytest.raises(zckpt.UnsupportedError, match=r"scheme 'ftp'.*ftp://host/run") as caught:
        getattr(zckpt, call)(*arguments)
    assert "memory://" in (caught.value.hint or "")


def test_each_read_is_one_request(tmp_path: Path) -> None:
    """A request to a store on a network takes long, however few bytes it asks for."""
    tensor = torch.arange(2 * MIB, dtype=torch.float32)
    write_state(tmp_path / "c", 1, {"long": tensor}, parts=["master"], block_bytes=MIB)
    zckpt.cp(tmp_path / "c", f"{RUN}/c")
    checkpoint = zckpt.open(f"{RUN}/c")
    checkpoint.load()  # also reads the index and the digests
    for verify in (False, True):
        before = checkpoint.io.reads
        assert torch.equal(checkpoint.load(verify=verify)["master/long"], tensor)
        assert checkpoint.io.reads == before + 1
