"""Blocks of checkpoints in object stores are kept on a local disk, and read from the store once."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from filelock import FileLock

import zckpt
from tests.support.buckets import use
from tests.support.faulty_proxy import FaultyProxy
from tests.support.states import same_all, write_state
from zckpt.storage import cache as cache_module
from zckpt.storage.cache import BlockCache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.object_servers import ObjectServer
    from tests.support.states import Written

BLOCK_BYTES = 100_000


class Stored(NamedTuple):
    """A checkpoint in an object store that is reached through a proxy."""

    url: str
    written: Written
    proxy: FaultyProxy

    def data_bytes(self) -> int:
        """Returns how many bytes of data files the store has sent since the last call of this method."""
        requests = self.proxy.requests(method="GET")
        self.proxy.clear()
        return sum(request.response_body_bytes for request in requests if "/data-" in request.path)


@pytest.fixture
def stored(seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stored]:
    monkeypatch.setattr(cache_module, "CACHE_BLOCK_BYTES", BLOCK_BYTES)
    written = write_state(tmp_path / "local", 2, {"w": (300, 1000), "b": (7,)})
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        use(seaweedfs, monkeypatch, proxy.endpoint)
        url = f"s3://{seaweedfs.bucket}{tmp_path}/c"
        zckpt.cp(written.path, url)
        proxy.clear()
        yield Stored(url, written, proxy)


def blocks(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.blocks/*"))


def test_a_second_process_reads_nothing_from_the_store(stored: Stored, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = zckpt.open(stored.url, cache=cache).load(["master/*"])
    files = sum(file.stat().st_size for file in stored.written.path.rglob("master.safetensors"))
    assert files <= stored.data_bytes() < files + 50_000
    again = zckpt.open(stored.url, cache=cache)
    assert same_all(again.load(["master/*"]), first)
    assert stored.data_bytes() == 0
    assert same_all(zckpt.open(stored.written.path).load(["master/*"]), first)
    again.load(["exp_avg/*"])
    assert files <= stored.data_bytes() < files + 50_000


@pytest.mark.parametrize("how", ["cut", "changed", "removed"])
def test_a_damaged_block_is_read_again(stored: Stored, tmp_path: Path, how: str) -> None:
    cache = tmp_path / "cache"
    tensors = zckpt.open(stored.url, cache=cache).load()
    stored.data_bytes()
    block = max(blocks(cache), key=lambda path: path.stat().st_size)
    raw = bytearray(block.read_bytes())
    raw[1000] ^= 1
    if how == "removed":
        block.unlink()
    else:
        block.write_bytes(raw if how == "changed" else raw[:5])
    assert same_all(zckpt.open(stored.url, cache=cache).load(), tensors)
    assert 0 < stored.data_bytes() <= BLOCK_BYTES


def test_blocks_that_came_damaged_are_forgotten(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests of zckpt find bytes that were damaged on their way. The next read gets them from the store."""
    cache, put = tmp_path / "cache", BlockCache.put

    def damaged(self: BlockCache, block: Path, data: Any) -> None:
        data[-1] ^= 1
        put(self, block, data)

    monkeypatch.setattr(BlockCache, "put", damaged)
    with pytest.raises(zckpt.FormatError):
        zckpt.open(stored.url, cache=cache).load()
    monkeypatch.setattr(BlockCache, "put", put)
    zckpt.open(stored.url, cache=cache).load()


def test_a_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    def usage(path: Path) -> Usage:
        return Usage(1_000_000 - sum(block.stat().st_size for block in blocks(path)))

    monkeypatch.setattr("shutil.disk_usage", usage)
    cache, data = BlockCache(tmp_path), np.zeros(10_000, np.uint8)
    files = cache.files("s3://bucket/run/c/data-1/rank-00000/master.safetensors")
    for number in range(100):
        cache.put(files / f"{number}", data)
        os.utime(files / f"{number}", (number, number))
        assert cache.get(files / "0") is not None, "what is used is not removed"
    kept = {int(block.name) for block in blocks(tmp_path)}
    assert 30 < len(kept) <= 50
    assert kept - {0} == {*range(100 - len(kept) + 1, 100)}


def test_a_full_disk_costs_only_time(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    first = zckpt.open(stored.url, cache=tmp_path / "cache").load()
    assert same_all(first, zckpt.open(stored.written.path).load())
    assert blocks(tmp_path / "cache") == []
    (tmp_path / "file").touch()
    with pytest.raises(zckpt.StorageError, match="make the cache"):
        zckpt.open(stored.url, cache=tmp_path / "file" / "cache")


def test_a_cache_can_be_removed_at_any_time(stored: Stored, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    checkpoint = zckpt.open(stored.url, cache=cache)
    first = checkpoint.load(["master/*"])
    shutil.rmtree(cache)
    assert same_all(checkpoint.load(["master/*"]), first)
    assert blocks(cache) != []
    shutil.rmtree(cache)
    cache.touch()  # Now nothing can be kept there.
    assert same_all(checkpoint.load(["master/*"]), first)


def test_a_process_that_stands_still_does_not_stop_others(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "LOCK_SECONDS", 0.01)
    cache = tmp_path / "cache"
    cache.mkdir()
    with ExitStack() as held:
        for number in range(cache_module.LOCKS):
            held.enter_context(FileLock(cache / f"{number}.lock"))
        tensors = zckpt.open(stored.url, cache=cache).load()
    assert same_all(tensors, zckpt.open(stored.written.path).load())


@pytest.mark.linux
def test_what_is_no_block_is_not_read(stored: Stored, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    tensors = zckpt.open(stored.url, cache=cache).load()
    for block in blocks(cache):
        block.unlink()
        os.mkfifo(block)
    assert same_all(zckpt.open(stored.url, cache=cache).load(), tensors)
    with pytest.raises(zckpt.UnsupportedError, match="on a local disk"):
        zckpt.open(stored.url, cache="s3://bucket/cache")
    with pytest.raises(ValueError, match="the nearest is the cache"):
        zckpt.open([stored.written.path, stored.url], cache=cache)


def load(url: str, cache: str, barrier: Any) -> None:
    cache_module.CACHE_BLOCK_BYTES = BLOCK_BYTES
    barrier.wait(60)
    zckpt.open(url, cache=cache).load()


def test_processes_that_read_at_the_same_time_read_each_block_once(stored: Stored, tmp_path: Path) -> None:
    context = get_context("spawn")
    barrier = context.Barrier(3)
    arguments = stored.url, str(tmp_path / "cache"), barrier
    processes = [context.Process(target=load, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    files = sum(file.stat().st_size for file in stored.written.path.rglob("data-*/**/*") if file.is_file())
    assert stored.data_bytes() <= files + 10_000
