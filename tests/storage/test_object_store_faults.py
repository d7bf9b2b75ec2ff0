"""Object stores that fail: requests that are lost, cut off or refused, writers that race, stand still or are killed."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.buckets import a_day_later, keys, unfinished, use
from tests.support.faulty_proxy import (
    CLOSE,
    INTERNAL_ERROR,
    LOSE_ANSWER,
    PASS,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    Fault,
    FaultyProxy,
)
from tests.support.memory import peak_growth
from tests.support.patience import give_up_after
from tests.support.states import EngineOfAnAdapter, same_all, write_through
from tests.support.waiting import wait_until
from zckpt.checkpoint.writing import rank_write
from zckpt.errors import LockedError, StorageError, ZckptError
from zckpt.object_stores import client as object_client
from zckpt.object_stores import store as object_store
from zckpt.object_stores import writer as object_writer
from zckpt.ranks.collectives import Ranks
from zckpt.storage import lock as lock_module
from zckpt.storage.contract import ANYTHING, _PutLater
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.transfer.budget import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.object_servers import ObjectServer

FAULTS = {
    "drop before": CLOSE,
    "lose the answer": LOSE_ANSWER,
    "500": INTERNAL_ERROR,
    "503": SLOW_DOWN,
    "429": TOO_MANY_REQUESTS,
    "stall": Fault(stall_seconds=3),
    "truncated body": Fault(truncate_bytes=50),
}
TIMEOUT_SECONDS = 2
"""How long a request may take in the tests in which one stalls."""
ENGINE = EngineOfAnAdapter()
PART_BYTES = 5 * MIB
"""The smallest part that servers accept."""
LONG = PART_BYTES // 4 + 1000
"""So many elements are uploaded in two parts."""


@pytest.fixture
def proxy(seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Yields a proxy through which zckpt reaches SeaweedFS."""
    monkeypatch.setattr(object_writer, "PART_BYTES", PART_BYTES)
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        use(seaweedfs, monkeypatch, proxy.endpoint, 30)
        yield proxy


@pytest.fixture
def run(seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Returns the path of a run in SeaweedFS, which zckpt reaches directly unless the test uses ``proxy``."""
    if "AWS_ENDPOINT_URL" not in os.environ:
        use(seaweedfs, monkeypatch)
    return f"s3://{seaweedfs.bucket}{tmp_path}/run"


def write(path: str, number: float, elements: int = 1000, **options: Any) -> Any:
    """Writes a checkpoint of one tensor, all of whose elements are ``number``."""
    destination: Any = path
    return write_through(destination, torch.full((elements,), number), engine=ENGINE, **options)


def held(path: str) -> list[float]:
    """Returns the distinct values of the checkpoint. There is only one if no two writes are mixed."""
    return np.unique(zckpt.open(path).load()["master/w"].numpy()).tolist()


def check_that_only_whole_checkpoints_are_left(server: ObjectServer, run: str, number: float) -> None:
    """Cleans up, and checks that there are the files of the checkpoint ``c`` with this value, and nothing else."""
    with a_day_later():
        zckpt.gc(run)
    assert held(f"{run}/c") == [number]
    assert zckpt.validate(f"{run}/c", level="deep").ok
    kinds = Counter(key.split("/")[1].split("-")[0] for key in keys(server, run) if key != "latest")
    files = {"data": 4, "manifest.msgpack": 1}
    assert kinds == files
    assert unfinished(server) == []


# Faults at each request


def cases(requests: int) -> list[tuple[int, str]]:
    """Returns which request fails, and how. ``ZCKPT_TEST_EVERY`` asks for all faults at each request instead of one at
    every third."""
    if os.environ.get("ZCKPT_TEST_EVERY"):
        return list(itertools.product(range(requests), FAULTS))
    return list(zip(range(0, requests, 3), itertools.cycle(FAULTS), strict=False))


def at_request(proxy: FaultyProxy, number: int, fault: Fault, times: int | None = 1) -> None:
    proxy.clear()
    if number:
        proxy.inject(PASS, times=number)
    proxy.inject(fault, times=times)


def outcome(action: Callable[[], object]) -> ZckptError | None:
    """Returns the error that ``action`` raises, which has to be a clear one."""
    try:
        action()
    except ZckptError as error:
        raised = error
    else:
        return None
    assert raised.file or raised.hint
    assert "secret" not in str(raised)
    return raised


def requests_of(proxy: FaultyProxy, action: Callable[[], object]) -> int:
    proxy.clear()
    action()
    return len(proxy.requests())


def test_a_fault_at_each_request_of_a_write(
    run: str, proxy: FaultyProxy, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failed request is sent again, so every write succeeds. Only the requests that begin and end an upload are not
    sent again if their answer is cut off. Then the write raises an error that says that trying again can help."""
    use(seaweedfs, monkeypatch, proxy.endpoint, TIMEOUT_SECONDS)
    path = f"{run}/c"
    write(path, 0, LONG)
    count = requests_of(proxy, partial(write, path, 0.5, LONG, overwrite=True))
    assert count > 20
    for number, (request, name) in enumerate(cases(count), 1):
        at_request(proxy, request, FAULTS[name])
        error = outcome(partial(write, path, number, LONG, overwrite=True))
        proxy.clear()
        if error is not None:
            assert name == "truncated body"
            assert isinstance(error, StorageError)
            assert error.transient
            write(path, number, LONG, overwrite=True)
        assert held(path) == [number]
    check_that_only_whole_checkpoints_are_left(seaweedfs, run, number)


@pytest.mark.parametrize("name", ["drop before", "lose the answer", "503"])
def test_a_server_that_is_gone_from_some_request_of_a_write_on(
    run: str, proxy: FaultyProxy, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The older checkpoint stays, or the new one is there. Nothing else is left but what ``zckpt.gc`` removes."""
    monkeypatch.setattr(object_client, "RETRIES", 0)
    path, number = f"{run}/c", 0.0
    write(path, 0, LONG)
    count = requests_of(proxy, partial(write, path, 0, LONG, overwrite=True))
    step = 1 if os.environ.get("ZCKPT_TEST_EVERY") else 6
    for request in range(0, count, step):
        at_request(proxy, request, FAULTS[name], times=None)
        error = outcome(partial(write, path, request + 1, LONG, overwrite=True))
        proxy.clear()
        (now,) = held(path)
        assert now in (number, request + 1)
        assert error is None or isinstance(error, StorageError) or now == number, "a write that failed says so"
        assert error is not None or now == request + 1
        number = now
        if request % (4 * step) == 0:
            check_that_only_whole_checkpoints_are_left(seaweedfs, run, number)
    check_that_only_whole_checkpoints_are_left(seaweedfs, run, number)


def test_a_fault_at_each_request_of_a_load(run: str, proxy: FaultyProxy) -> None:
    path = f"{run}/c"
    tensor = torch.arange(LONG, dtype=torch.float32)
    destination: Any = path
    write_through(destination, tensor)
    count = requests_of(proxy, lambda: zckpt.open(run).load())
    assert count >= 5
    names = FAULTS if os.environ.get("ZCKPT_TEST_EVERY") else ("truncated body", "503")
    for request, name, times in itertools.product(range(count), names, (1, None)):
        at_request(proxy, request, FAULTS[name], times)
        loaded: list[Any] = []
        error = outcome(lambda loaded=loaded: loaded.append(zckpt.open(run).load()))  # type: ignore[misc]
        if error is None:
            assert same_all(loaded[0], {"master/w": tensor}), (request, name)
        else:
            assert times is None, (request, name, str(error)[:3000])
            assert isinstance(error, StorageError)
            assert error.transient
    proxy.clear()


def test_a_read_goes_on_where_it_was_cut(run: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_client, "RETRIES", 0)
    data = np.random.default_rng(0).integers(0, 256, 3 * MIB, dtype=np.uint8)
    store, view = open_store(run), np.zeros(3 * MIB, np.uint8)
    store.put("a", data.tobytes())
    proxy.clear()
    proxy.inject(Fault(truncate_bytes=MIB + 1000), method="GET", times=2)
    assert store.reader().read_into("a", [view[:MIB], view[MIB:]], 0) == len(data)
    assert np.array_equal(view, data)
    asked = [request.range for request in proxy.requests(method="GET")]
    starts = [int(str(text).removeprefix("bytes=").partition("-")[0]) for text in asked]
    assert [start // MIB for start in starts] == [0, 1, 2]


def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed(
    run: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_client, "RETRIES", 0)
    store = open_store(run)
    for other in (bytes(2 * MIB), bytes(1000)):
        store.put("a", b"\1" * 2 * MIB, over=ANYTHING)
        proxy.clear()
        proxy.inject(Fault(truncate_bytes=MIB + 1000), method="GET")
        reader = store.reader()
        pieces = reader._pieces("a", 0, 2 * MIB)  # type: ignore[attr-defined]
        first = bytes(next(pieces))
        store.put("a", other, over=ANYTHING)
        assert {*first} == {1}
        with pytest.raises(StorageError, match="was replaced") as caught:
            list(pieces)
        assert caught.value.transient


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("name", ["lose the answer", "stall", "drop before", "500"])
def test_a_commit_whose_answer_is_lost_is_a_success(
    run: str, proxy: FaultyProxy, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, name: str, retries: int
) -> None:
    use(seaweedfs, monkeypatch, proxy.endpoint, TIMEOUT_SECONDS)
    monkeypatch.setattr(object_client, "RETRIES", retries)
    for number, options in ((1.0, {}), (2.0, {"overwrite": True})):
        proxy.clear()
        proxy.inject(FAULTS[name], method="PUT", path="manifest.msgpack")
        write(f"{run}/c", number, **options)
        assert held(f"{run}/c") == [number]
        statuses = [request.upstream_status for request in proxy.requests(method="PUT", path="manifest.msgpack")]
        assert len(statuses) == 2
        assert (statuses[0] == 200) == (name == "lose the answer")


def test_an_upload_that_the_server_has_forgotten_after_its_end_is_a_success(run: str, proxy: FaultyProxy) -> None:
    proxy.inject(LOSE_ANSWER, method="POST", query="uploadId")
    proxy.inject(Fault(status=404, code="NoSuchUpload"), method="POST", query="uploadId")
    write(f"{run}/c", 1, LONG)
    assert held(f"{run}/c") == [1]


@pytest.mark.parametrize("fault", [INTERNAL_ERROR, Fault(status=403), Fault(status=507), CLOSE])
def test_an_upload_whose_parts_fail_leaves_nothing(
    run: str, proxy: FaultyProxy, seaweedfs: ObjectServer, fault: Fault
) -> None:
    proxy.inject(fault, method="PUT", query="partNumber", times=None)
    with pytest.raises(StorageError) as caught:
        write(f"{run}/c", 1, LONG)
    assert caught.value.transient == (fault.status not in (403, 507))
    assert isinstance(caught.value, zckpt.NoSpaceError) == (fault.status == 507)
    assert str(caught.value.file).startswith(f"{run}/c/data-")
    assert keys(seaweedfs, run) == unfinished(seaweedfs) == []


def test_a_bucket_in_another_region(run: str, proxy: FaultyProxy) -> None:
    proxy.inject(Fault(status=301), times=None)
    with pytest.raises(StorageError) as caught:
        write(f"{run}/c", 1)
    assert "AWS_REGION" in (caught.value.hint or "")
    assert not caught.value.transient


def test_what_cannot_be_removed_stays_and_costs_little_time(
    run: str, proxy: FaultyProxy, seaweedfs: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    """If a server cannot be reached, it is not asked for each of thousands of files. If it cannot remove many files at
    once, it is."""
    caplog.set_level(logging.DEBUG)
    store, paths = open_store(run), [f"{number}" for number in range(30)]
    for path in paths:
        store.put(path, b"", over=ANYTHING)
    proxy.clear()
    proxy.inject(CLOSE, times=None)
    store.remove(*paths)
    assert len(proxy.requests()) < 10
    assert "error sending request" in caplog.text
    assert len(keys(seaweedfs, run)) == 30
    proxy.clear()
    proxy.inject(Fault(status=400), query="delete")
    store.remove(*paths)
    assert keys(seaweedfs, run) == []


# Writers that race


def race(worker: int, run: str, rounds: int, barrier: Any, results: Any) -> None:
    """Writes one checkpoint after another at the same moment as the other process. In every second round each writer
    takes the other one for dead, so that only the conditions of the puts protect the checkpoint."""
    object_client.PAUSE_SECONDS = 0.01
    outcomes: list[str] = []
    for number in range(rounds):
        seconds = (-1.0, 0.1) if number % 2 else (120.0, 5.0)
        lock_module.DEAD_SECONDS, rank_write.LATE_SECONDS = seconds
        barrier.wait(600)
        try:
            write(f"{run}/{number}", worker, 10, latest=False)
            outcomes.append("won")
        except ZckptError as error:
            outcomes.append(f"{type(error).__name__}: {error.message}")
    results.put((worker, outcomes))


def run_race(run: str, rounds: int) -> None:
    """Two processes write to the same paths."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=race, args=(n, run, rounds, barrier, results)) for n in range(2)]
    for process in processes:
        process.start()
    outcomes = dict(results.get(timeout=120 + 10 * rounds) for _ in processes)
    for process in processes:
        process.join()
    for number, pair in enumerate(zip(outcomes[0], outcomes[1], strict=True)):
        blind, wins = number % 2, pair.count("won")
        # A writer that has committed, but was taken for dead meanwhile, reports that it has lost its lock.
        assert wins == 1 or (blind and wins == 0), (number, pair)
        assert held(f"{run}/{number}") in ([[pair.index("won")]] if wins else [[0], [1]]), (number, pair)
        lost = {outcome.partition(":")[0] for outcome in pair} - {"won"}
        known = {"LockedError", "CheckpointExistsError"} | ({"StorageError", "RankError"} if blind else set())
        assert lost <= known, (number, pair)


def test_of_two_processes_that_write_one_path_one_wins(run: str) -> None:
    run_race(run, 36)


@pytest.mark.cloud
def test_of_two_processes_that_write_one_path_one_wins_each_of_ten_thousand_times(run: str) -> None:
    run_race(run, int(os.environ.get("ZCKPT_TEST_RACES", "10000")))


# Writers that are taken for dead


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("other", ["commits", "commits later", "dies"])
@pytest.mark.parametrize("old", [None, 1.0])
def test_a_writer_that_stands_still_around_its_commit(
    run: str, seaweedfs: ObjectServer, when: str, other: str, old: float | None
) -> None:
    """A writer stands still just before or just after the put that commits, and is taken for dead. Another writer
    commits, or comes to its own commit when the first has gone on, or dies before it. One of the two wins."""
    path, put = f"{run}/c", _PutLater.commit
    if old is not None:
        write(path, old, latest=False)
    main, reached, go_on = threading.get_ident(), threading.Event(), threading.Event()

    def commit(prepared: _PutLater, *over: Any) -> None:
        if threading.get_ident() == main:
            if other == "commits later" and not go_on.is_set():
                go_on.set()
                first.exception(20)
            elif other == "dies":
                raise StorageError("the process has died", file=path)
            put(prepared, *over)
            return
        if when == "after":
            put(prepared, *over)
        reached.set()
        assert go_on.wait(20)
        if when == "before":
            put(prepared, *over)

    with mock.patch.object(_PutLater, "commit", commit), ThreadPoolExecutor(1) as pool:
        first = pool.submit(write, path, 2, overwrite=True, latest=False)
        assert reached.wait(20)
        with mock.patch.object(lock_module, "DEAD_SECONDS", -1.0):
            second = outcome(lambda: write(path, 3, overwrite=True, latest=False))
        go_on.set()
        error = first.exception(20)
    assert isinstance(error, LockedError), error
    assert "taken over" in str(error)
    if other == "commits" or (other == "commits later" and when == "after"):
        assert second is None
        expected = 3.0
    else:
        assert isinstance(second, (StorageError, LockedError))
        expected = 2.0
    check_that_only_whole_checkpoints_are_left(seaweedfs, run, expected)


def test_the_data_of_a_writer_that_is_taken_for_dead_stay_for_a_day(run: str, seaweedfs: ObjectServer) -> None:
    """Before that, ``zckpt.gc`` would remove what the writer may still commit."""
    path, put = f"{run}/c", _PutLater.commit
    reached, go_on = threading.Event(), threading.Event()

    def commit(prepared: _PutLater, *over: Any) -> None:
        reached.set()
        assert go_on.wait(20)
        put(prepared, *over)

    write(path, 1, latest=False)
    with mock.patch.object(_PutLater, "commit", commit), ThreadPoolExecutor(1) as pool:
        first = pool.submit(write, path, 2, overwrite=True, latest=False)
        assert reached.wait(20)
        with mock.patch.object(lock_module, "DEAD_SECONDS", -1.0):
            cleanup = zckpt.gc(run)
        assert cleanup.removed == ()
        assert [place.startswith(f"{path}/data-") for place in cleanup.in_use] == [True]
        go_on.set()
        assert isinstance(first.exception(20), LockedError)
    check_that_only_whole_checkpoints_are_left(seaweedfs, run, 2)


# Processes that are killed


def write_in_small_parts(path: str) -> None:
    object_writer.PART_BYTES = PART_BYTES
    write(path, 2, 8 * LONG, overwrite=True)


def test_a_process_that_is_killed_while_it_uploads(run: str, proxy: FaultyProxy, seaweedfs: ObjectServer) -> None:
    path = f"{run}/c"
    write(path, 1)
    proxy.clear()
    proxy.inject(PASS, method="PUT", query="partNumber", times=2)
    proxy.inject(Fault(stall_seconds=600), method="PUT", query="partNumber", times=None)
    process = multiprocessing.get_context("spawn").Process(target=write_in_small_parts, args=(path,))
    process.start()
    wait_until(lambda: len(started(proxy)) > 2 or not process.is_alive())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    proxy.clear()
    assert held(path) == [1]
    assert {key.split("-")[0] for key in keys(seaweedfs, path)} == {"manifest.msgpack", "data", "write.lock"}
    assert len(unfinished(seaweedfs)) == 1
    assert [item.path for item in zckpt.gc(run).removed] == []
    with a_day_later():
        (removed,) = zckpt.gc(run).removed
    assert removed.path.startswith(f"{path}/data-")
    assert removed.nbytes >= PART_BYTES
    check_that_only_whole_checkpoints_are_left(seaweedfs, run, 1)


def started(proxy: FaultyProxy) -> list[Any]:
    """Returns the requests for parts that the proxy has got, without waiting for their answers."""
    return [request for request in list(proxy._requests) if "partNumber" in request.query]


def test_a_lock_that_is_being_removed_when_its_writer_dies_is_free(
    run: str, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "REMOVAL_SECONDS", 0.2)
    path, call = f"{run}/c", object_store.ObjectStore.call
    write(path, 1)

    def dies(store: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "delete":
            raise StorageError("the process has died")
        return call(store, name, *arguments, **keywords)

    for next_call in (partial(write, path, 1, overwrite=True), partial(zckpt.gc, run)):
        lock = WriteLock(open_store(path))
        lock.acquire()
        with mock.patch.object(object_store.ObjectStore, "call", dies):
            lock.release()
        assert "write.lock" in keys(seaweedfs, path)
        next_call()
        check_that_only_whole_checkpoints_are_left(seaweedfs, run, 1)


# Memory


def ask_a_server_that_is_down() -> str:
    """Rank 1 asks again and again for longer than the other ranks wait for a rank that gives no sign of life."""
    give_up_after(1)
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    ranks = Ranks()

    def ask() -> None:
        if ranks.rank == 1:
            open_store("s3://bucket/run").reader().read("manifest.msgpack", 0, 10)

    retries = mock.patch.object(object_client, "RETRY_SECONDS", 3)
    with mock.patch.dict(os.environ, nowhere), retries, pytest.raises(ZckptError) as caught:
        ranks.decide(ask, list, "read")
    return str(caught.value)


def test_a_rank_that_asks_again_and_again_is_not_taken_for_one_that_hangs(cluster: Cluster) -> None:
    waiting, asking = cluster.run(ask_a_server_that_is_down, 2)
    assert "cannot read" in asking
    assert f"rank 1 failed to read: StorageError: {asking}".partition(" in ")[0] in waiting


@pytest.mark.linux
def test_memory_is_bounded_by_the_budget(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = zckpt.Budget(32 * MIB, threads=2)
    write(f"{run}/warm", 1, 16 * LONG, budget=budget)
    destination: Any = f"{run}/c"
    tensor = torch.arange(32 * MIB, dtype=torch.float32)
    in_flight = (object_writer.PARTS_IN_FLIGHT + 2) * object_writer.PART_BYTES
    refused = AssertionError("these bytes need not wait: those in front of them can be written first")
    monkeypatch.setattr(object_writer._Early, "keep", mock.Mock(side_effect=refused))
    growth = peak_growth(lambda: write_through(destination, tensor, engine=ENGINE, budget=budget))
    assert growth < budget.nbytes + in_flight + 32 * MIB
    out = {"master/w": torch.zeros(tensor.shape)}
    checkpoint = zckpt.open(destination, budget=budget)
    growth = peak_growth(lambda: checkpoint.load(out=out))
    assert torch.equal(out["master/w"], tensor)
    assert growth < budget.nbytes + 48 * MIB
