"""How a write copies bytes from a device: in which order, in how many copies, and through how much pinned memory. The
device is the simulated accelerator."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

import zckpt
from tests.support import accelerator
from tests.support.device_copies import (
    BLOCK_BYTES,
    LARGE,
    MIB,
    ONE_THREAD,
    SMALL,
    begun,
    forget,
    marked,
    on_device,
    ticks,
    to_host,
    written,
)
from zckpt.storage.local_writer import LocalWriter
from zckpt.transfer import staging
from zckpt.transfer import write as io_write
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.sim


def test_what_is_read_from_a_device_is_digested_while_the_next_copy_is_under_way(tmp_path: Path) -> None:
    """Even a single thread waits for a copy only when it has nothing else to do."""
    slow = mock.patch.object(staging.StagingBuffer, "is_done", return_value=False)
    with marked(digest=(io_write, "digest"), write=(LocalWriter, "write")), slow:
        assert written(tmp_path / "c", on_device(LARGE), ONE_THREAD)
    copies = to_host()
    assert len(copies) > 5
    assert not any(copy.waited for copy in copies)
    for copy in copies[1:]:
        for text in ("digest", "write"):
            assert [tick for tick in ticks(text) if copy.queued < tick < copy.ran]


def test_small_tensors_come_from_a_device_together(tmp_path: Path) -> None:
    assert written(tmp_path / "c", tensors := on_device(SMALL, "sim:1"), zckpt.Budget())
    copies, waits = to_host(), accelerator.waits()
    (copy,) = [copy for copy in copies if not copy.waited]
    assert copy.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    # One wait is for the copy, and one is for everything at the end.
    assert len([wait for wait in waits if wait.what in ("stream", "event")]) == 2


def test_large_tensors_come_from_a_device_as_they_are(tmp_path: Path) -> None:
    tensors = on_device(LARGE)
    assert written(tmp_path / "c", tensors, zckpt.Budget())
    copies = [copy for copy in accelerator.copies() if not copy.waited]
    assert {copy.name for copy in copies} == {"device to host"}
    assert sum(copy.nbytes for copy in copies) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(copy.nbytes for copy in copies) <= 8 * MIB


def test_fragments_on_the_host_and_on_several_devices_in_one_file(tmp_path: Path) -> None:
    tensors = on_device(LARGE | SMALL)
    for number, name in enumerate(tensors):
        tensors[name] = tensors[name].to(["sim:0", "cpu", "sim:1"][number % 3])
    assert written(tmp_path / "c", tensors, ONE_THREAD)


def test_a_write_pins_no_more_than_the_budget_has(tmp_path: Path) -> None:
    """The buffers of a snapshot that is larger than the pinned memory are not pinned, because that takes long."""
    tensors = on_device({f"large.{number}": (1_000_000,) for number in range(3)})
    for threads in (1, 4):
        for snapshot_bytes in (0, 5 * MIB, 100 * MIB):
            budget = zckpt.Budget(2 * MIB * threads, threads)
            path = tmp_path / f"{threads}.{snapshot_bytes}"
            assert written(path, tensors, budget, snapshot_bytes=snapshot_bytes)
            counters = accelerator.counters()
            assert 0 < counters["pinned_bytes_max"] <= staging.Arena.within(budget, BLOCK_BYTES).nbytes
            assert counters["pinned_bytes"] == 0


def test_the_next_snapshot_takes_the_same_memory(tmp_path: Path) -> None:
    tensors = on_device({f"large.{number}": (1_000_000,) for number in range(9)})
    pool = staging.pool_for([torch.device("sim:0")], ONE_THREAD, BLOCK_BYTES, 64 * MIB)
    buffers = []
    for number in range(2):
        assert written(tmp_path / f"{number}", tensors, ONE_THREAD, snapshot_bytes=64 * MIB)
        buffers.append([buffer.address for buffer in pool._buffers])
    assert buffers[0] == buffers[1]
    assert len(buffers[0]) * pool.batch_bytes > 20 * MIB


def test_a_write_of_small_tensors_takes_the_device_memory_of_one_buffer(tmp_path: Path) -> None:
    """The device memory of a write does not depend on how much of the state the snapshot holds in host memory."""
    tensors = on_device({f"{number}": (20_000,) for number in range(60)})
    forget()
    before = accelerator.counters()["device_bytes"][0]
    for snapshot_bytes in (64 * MIB, 0):
        assert written(tmp_path / f"{snapshot_bytes}", tensors, ONE_THREAD, snapshot_bytes=snapshot_bytes)
        counters = accelerator.counters()
        assert ONE_THREAD.nbytes // 4 < counters["device_bytes_max"][0] - before < ONE_THREAD.nbytes
        assert len({copy.stream for copy in to_host() if not copy.waited}) == 1


def test_the_snapshot_is_whole_when_it_is_said_to_be(tmp_path: Path) -> None:
    """After the event ``taken`` the device's memory may change, although nothing of it is on the disk yet."""
    tensors = on_device({f"{number}": (300_000,) for number in range(20)})
    write = begun(tmp_path / "c", tensors, budget=ONE_THREAD, snapshot_bytes=64 * MIB)
    expected = [tensor.cpu() for tensor in tensors.values()]

    class Watched(threading.Event):
        def set(self) -> None:
            with torch.Stream("sim"):
                for tensor in tensors.values():
                    tensor.zero_()
                torch.accelerator.current_stream().synchronize()
            super().set()

    snapshot = Snapshot()
    snapshot.taken = Watched()
    write.write_data_files(snapshot)
    assert snapshot.taken.is_set()
    (plan,) = write.data_files
    content = (tmp_path / "c" / plan.id.path).read_bytes()
    assert content[len(plan.header) :] == b"".join(tensor.numpy().tobytes() for tensor in expected)
