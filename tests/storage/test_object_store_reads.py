"""Reads from an object store take few round trips, and few bytes more than they need. A proxy counts both."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import obstore
import pytest
import torch

import zckpt
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.live_export import make_engine, train
from tests.support.states import write_state
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.format import names
from zckpt.storage.contract import ANYTHING
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.faulty_proxy import Request
    from tests.support.object_servers import ObjectServer

MIB = 1 << 20
LATENCY_SECONDS = 0.3
"""The time that the proxy adds to each request, so that requests that are made at the same time overlap."""


@pytest.fixture
def proxy(seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        for name, value in seaweedfs.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def run(seaweedfs: ObjectServer, tmp_path: Path) -> str:
    """Returns the URL of a run that does not exist yet."""
    return f"s3://{seaweedfs.bucket}{tmp_path}/run"


def store_state(tmp_path: Path, url: str, tensors: Mapping[str, tuple[int, ...]], world_size: int = 2) -> None:
    """Writes a checkpoint of one part to the object store."""
    write_state(tmp_path / "c", world_size, tensors, parts=["master"], block_bytes=MIB)
    zckpt.cp(tmp_path / "c", url)


def slow(proxy: FaultyProxy) -> None:
    """Forgets the requests so far, and makes each request from now on take longer."""
    proxy.clear()
    proxy.inject(Fault(stall_seconds=LATENCY_SECONDS), times=None)


def round_trips(requests: Sequence[Request]) -> int:
    """Returns the largest number of requests of which each began after the end of the one before."""
    depth: list[int] = []
    for request in requests:
        before = [d for r, d in zip(requests, depth, strict=False) if r.ended_seconds <= request.started_seconds]
        depth.append(1 + max(before, default=0))
    return max(depth)


def test_a_tensor_takes_three_round_trips(proxy: FaultyProxy, run: str, tmp_path: Path) -> None:
    store_state(tmp_path, f"{run}/step3", {"a": (3000, 1000), "b": (1000,)}, world_size=1)
    slow(proxy)
    checkpoint = zckpt.open(f"{run}/step3")
    tensor = checkpoint.load("master/a")["master/a"]
    requests = proxy.requests()
    kinds = sorted(f"{request.method} {request.path.rpartition('/')[2]}" for request in requests[2:])
    assert [request.path.rpartition("/")[2] for request in requests[:2]] == [names.MANIFEST, "index.bin"]
    assert kinds == ["GET digests.bin", "GET master.safetensors", "HEAD master.safetensors"]
    assert round_trips(requests) == 3

    metadata_bytes = sum(r.response_body_bytes for r in requests if not r.path.endswith(".safetensors"))
    assert metadata_bytes == checkpoint.io.metadata_bytes
    assert sum(request.response_body_bytes for request in requests) <= 1.05 * tensor.nbytes + metadata_bytes
    assert torch.equal(tensor, zckpt.open(tmp_path / "c").load("master/a")["master/a"])


def test_the_lengths_and_tables_of_many_files_are_asked_for_at_once(
    proxy: FaultyProxy, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_state(tmp_path, f"{run}/step3", {"a": (3000, 1000)}, world_size=6)
    checkpoint = zckpt.open(f"{run}/step3")
    list(checkpoint["master/a"].pieces)  # reads the index
    slow(proxy)
    checkpoint.load("master/a")
    assert len(proxy.requests(method="HEAD")) == 6
    assert round_trips(proxy.requests()) == 1

    # If the tensors take more memory than the budget, nothing is read before the lengths are known.
    monkeypatch.setenv("ZCKPT_BUDGET_BYTES", str(8 * MIB))
    checkpoint = zckpt.open(f"{run}/step3")
    list(checkpoint["master/a"].pieces)
    slow(proxy)
    checkpoint.load("master/a")
    heads, others = proxy.requests(method="HEAD"), proxy.requests(method="GET")
    assert max(request.ended_seconds for request in heads) <= min(request.started_seconds for request in others)
    assert (len(heads), round_trips(heads)) == (6, 1)


def test_a_load_has_as_many_requests_in_flight_as_the_store_serves_best(
    proxy: FaultyProxy, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_state(tmp_path, f"{run}/step3", {f"t{number}": (1 << 20,) for number in range(16)}, world_size=1)

    def most_in_flight() -> int:
        slow(proxy)
        # Elements that are converted are read in smaller requests, so there are more of them.
        zckpt.open(f"{run}/step3").load(verify=False, dtype="float64")
        requests = proxy.requests(method="GET", path="master.safetensors")
        return max(
            sum(other.started_seconds <= request.started_seconds < other.ended_seconds for other in requests)
            for request in requests
        )

    assert most_in_flight() > 8
    monkeypatch.setenv("ZCKPT_BUDGET_BYTES", str(64 * MIB))
    assert most_in_flight() == 4


def test_tensors_with_small_gaps_between_them_are_read_by_one_request(
    proxy: FaultyProxy, run: str, tmp_path: Path
) -> None:
    shapes = {f"t{number}": (5000,) for number in range(9)} | {"u": (1 << 20,), "v": (5000,)}
    store_state(tmp_path, f"{run}/step3", shapes, world_size=1)
    keys = [f"master/{name}" for name in ("t0", "t2", "t4", "t6", "t8", "v")]

    checkpoint, store = zckpt.open(f"{run}/step3"), open_store(f"{run}/step3")
    (between,) = checkpoint["master/t3"].pieces
    content = bytearray(loader_of(checkpoint).reader.read(between.file, 0, 16 * MIB))
    content[between.offset] ^= 1  # The digests of what lies between are not compared.
    store.put(between.file, bytes(content), ANYTHING)
    proxy.clear()
    tensors = checkpoint.load(keys)
    assert len(proxy.requests(method="GET", path=between.file)) == 2, "4 MiB before the last one are left out"
    expected = zckpt.open(tmp_path / "c").load(keys)
    assert all(torch.equal(tensors[key], expected[key]) for key in keys)
    with pytest.raises(zckpt.FormatError, match=r"D003.*master/t3"):
        checkpoint.load([*keys, "master/t3"])


def test_a_run_is_opened_by_few_requests(proxy: FaultyProxy, run: str, tmp_path: Path) -> None:
    store_state(tmp_path, f"{run}/step3", {"a": (10,)})
    open_store(run).put(names.LATEST, names.encode_latest("step3"))
    slow(proxy)
    assert zckpt.open(run).path == f"{run}/step3"
    kinds = [f"{request.method} {request.path.rpartition('/')[2]}" for request in proxy.requests()]
    assert kinds == ["GET manifest.msgpack", "GET test-bucket", "GET latest", "GET manifest.msgpack"]


def test_what_is_wrong_with_a_file_is_found_while_its_data_are_read(
    proxy: FaultyProxy, run: str, tmp_path: Path
) -> None:
    store_state(tmp_path, f"{run}/step3", {"a": (1000,), "b": (1000,)})
    store = open_store(f"{run}/step3")
    checkpoint = zckpt.open(f"{run}/step3")
    (first, _), table = checkpoint["master/a"].files, names.digests_path(loader_of(checkpoint).manifest.save_id, 1)

    def refused(path: str, content: bytes, rule: str) -> None:
        before = loader_of(checkpoint).reader.read(path, 0, MIB)
        store.put(path, content, ANYTHING)
        with pytest.raises(zckpt.FormatError) as caught:
            zckpt.open(f"{run}/step3").load(["master/b", "master/a"])
        assert caught.value.rule == rule
        assert str(caught.value.file).endswith(path)
        store.put(path, before, ANYTHING)

    content, digests = (loader_of(checkpoint).reader.read(path, 0, MIB) for path in (first, table))
    refused(first, content + b"!", "F003")
    refused(first, content[:-1], "F003")
    refused(first, content[:-1] + b"!", "D003")
    refused(first, bytes(len(content) + 1), "F003")
    refused(table, digests[:-1] + b"!", "D002")
    refused(table, digests + b"!", "D001")
    refused(table, digests + bytes(100 * 16), "D002")


def restore(environment: dict[str, str], url: str, stage: int) -> bool:
    """Restores an engine after its checkpoint was written. Returns whether its weights are those of the writer."""
    os.environ.update(environment)
    config = {"bf16": {"enabled": stage > 0}}
    engine = make_engine("gpt2", stage, **config)
    train(engine, 1)
    zckpt.write(engine, url)
    other = make_engine("gpt2", stage, **config)
    zckpt.restore(other, url)
    return all(map(torch.equal, engine.module.parameters(), other.module.parameters()))


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_restore_without_a_cache_and_read_each_byte_once(
    cluster: Cluster, seaweedfs: ObjectServer, tmp_path: Path, stage: int
) -> None:
    """At stage 0, every rank holds the whole state. Each of them reads a share of it."""
    url = f"s3://{seaweedfs.bucket}{tmp_path}/c"
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        assert cluster.run(restore, 2, seaweedfs.environment(proxy.endpoint), url, stage) == [True, True]
        answers = proxy.requests(method="GET", path=".safetensors")
    received = sum(request.response_body_bytes for request in answers)
    entries = [entry for chunk in obstore.list(seaweedfs.store(), f"{tmp_path}/c".strip("/")) for entry in chunk]
    written = sum(entry["size"] for entry in entries if entry["path"].endswith(".safetensors"))
    assert 0.8 * written < received < 1.1 * written
