"""How a load copies bytes to a device: in which order, in how many copies, and through how much pinned memory. The
device is the simulated accelerator."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support import accelerator
from tests.support.device_copies import (
    BLOCK_BYTES,
    BLOCKS_MAX,
    LARGE,
    LARGE_KEYS,
    MIB,
    ONE_THREAD,
    SMALL,
    forget,
    marked,
    same,
    ticks,
    to_devices,
    write,
    written,
)
from tests.support.states import write_state
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.checkpoint.reading.loader import ReadRequest
from zckpt.geometry import all_of
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_writer import LocalWriter
from zckpt.transfer import devices

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.sim


@pytest.mark.parametrize("direct", [True, False], ids=["past the page cache", "through it"])
def test_the_next_read_begins_while_a_copy_is_under_way(tmp_path: Path, direct: bool) -> None:
    """Before the host fills a buffer again, it waits once for all copies out of it, and not for each copy."""
    tensors = write(tmp_path / "c", LARGE)
    budget = zckpt.Budget(2 * MIB, 1, direct)
    reading = {name: (LocalReader, name) for name in ("read_direct", "read_portions")}
    with marked(**reading), mock.patch.object(LocalReader, "is_cached", return_value=False):
        loaded = zckpt.open(tmp_path / "c", budget=budget).load(device="sim")
        reads, copies, waits = [*ticks("read_direct"), *ticks("read_portions")], to_devices(), accelerator.waits()
    assert same(loaded, tensors)
    assert len(reads) > 5
    assert not any(copy.waited for copy in copies)
    pairs = list(itertools.pairwise(sorted(reads)))
    assert all(len([wait for wait in waits if before < wait.ended < tick]) <= 1 for before, tick in pairs)
    # No read waits for the copy out of the buffer that the read before it has filled, with one rare exception: if two
    # threads queue copies at the same time, the buffer whose copy is the second in the queue may be given back first.
    ran_bytes = [sum(copy.nbytes for copy in copies if copy.ran < tick) for _, tick in pairs]
    too_early = [nbytes > number * BLOCKS_MAX * BLOCK_BYTES for number, nbytes in enumerate(ran_bytes)]
    assert sum(too_early) <= 1


def test_large_tensors_are_copied_in_one_copy_for_each_read(tmp_path: Path) -> None:
    tensors = write(tmp_path / "c", LARGE)
    keys = LARGE_KEYS
    loaded = zckpt.open(tmp_path / "c", budget=ONE_THREAD).load(keys, device="sim:1")
    copies, waits = accelerator.copies(), accelerator.waits()
    assert same(loaded, {key: tensors[key] for key in keys})
    copies = [copy for copy in copies if copy.nbytes > 1]
    assert {(copy.name, copy.device) for copy in copies} == {("host to device", 1)}
    assert sum(copy.nbytes for copy in copies) == sum(loaded[key].nbytes for key in keys)
    assert len(copies) <= sum(loaded[key].nbytes for key in keys) // (14 * BLOCK_BYTES) + 1
    assert len([wait for wait in waits if wait.what in ("stream", "event")]) <= len(copies) + 2


def test_small_tensors_are_copied_together_and_cut_on_the_device(tmp_path: Path) -> None:
    tensors = write(tmp_path / "c", SMALL, ranks=2)
    loaded = zckpt.open(tmp_path / "c").load(device="sim")
    copies, waits = to_devices(), accelerator.waits()
    assert same(loaded, tensors)
    assert len(copies) == 2  # one copy for each file
    assert not any(copy.waited for copy in copies)
    assert sum(copy.nbytes for copy in copies) == sum(tensor.nbytes for tensor in tensors.values())
    assert len([wait for wait in waits if wait.what in ("stream", "event")]) == 1


def test_the_dtype_is_converted_on_the_device(tmp_path: Path) -> None:
    """The device converts the dtype of a few large copies and of many small ones."""
    for shapes in (LARGE, SMALL):
        tensors = write(tmp_path / str(len(shapes)), shapes)
        loaded = zckpt.open(tmp_path / str(len(shapes))).load(device="sim", dtype="bfloat16")
        assert same(loaded, {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()})
        assert not ticks("converted on the host")
        assert sum(copy.nbytes for copy in to_devices()) == sum(tensor.nbytes for tensor in tensors.values())


def test_tensors_in_another_order_are_cut_on_the_device(tmp_path: Path) -> None:
    """A few copies bring the bytes of all runs to the device, and there they go to their places, also converted."""
    full = write_state(tmp_path / "c", 3, {**LARGE, **SMALL}, parts=("master",), layout="divided").full
    for dtype in (torch.float32, torch.bfloat16):
        checkpoint = zckpt.open(tmp_path / "c")
        loaded = checkpoint.load(device="sim", dtype=dtype)
        assert same(loaded, {key: value.to(dtype) for key, value in full.items()})
        assert not ticks("converted on the host")
        assert sum(copy.nbytes for copy in to_devices()) == sum(value.nbytes for value in full.values())
        assert not any(copy.waited for copy in to_devices())
        forget()


def test_targets_on_the_host_and_on_several_devices_in_one_load(tmp_path: Path) -> None:
    """Some targets have another dtype. The load waits for all earlier work on its targets, on any stream."""
    tensors = write(tmp_path / "c", LARGE | SMALL, ranks=3)
    places = ["sim:0", "cpu", "sim:1"]
    dtypes = [torch.float32, torch.float16]
    out = {}
    for number, (key, tensor) in enumerate(tensors.items()):
        out[key] = torch.empty(tensor.shape, dtype=dtypes[number % 2], device=places[number % 3])
        if not out[key].is_cpu:
            with torch.Stream(out[key].device):
                out[key].fill_(number)
    loaded = zckpt.open(tmp_path / "c").load(out=out)
    for device in ("sim:0", "sim:1"):
        torch.accelerator.synchronize(device)  # work for which the load has not waited ends now
    assert same(loaded, {key: tensors[key].to(out[key].dtype) for key in tensors})
    assert all(loaded[key] is out[key] for key in out)


def test_urgent_targets_on_a_device_are_filled_when_the_caller_is_told(tmp_path: Path) -> None:
    """One thread queues the copies of the urgent tensors before all others, so those that have run are theirs."""
    parts = ("master", "exp_avg")
    write_state(tmp_path / "c", 2, {**LARGE, **SMALL}, parts=parts, block_bytes=BLOCK_BYTES)
    checkpoint = zckpt.open(tmp_path / "c", budget=ONE_THREAD)
    expected = checkpoint.load()
    out = {key: torch.zeros(tensor.shape, device="sim") for key, tensor in expected.items()}
    keys = sorted(expected, key=lambda key: key.startswith("exp_avg"))
    requests = [ReadRequest(checkpoint[key], all_of(out[key].shape), out[key]) for key in keys]
    urgent, copied_bytes = len(keys) // 2, list[int]()

    def after_urgent() -> None:
        copied_bytes.append(sum(copy.nbytes for copy in to_devices() if copy.ran))

    forget()
    with mock.patch.object(LocalReader, "is_cached", return_value=True):  # so that one thread does everything
        loader_of(checkpoint).read(requests, urgent=urgent, after_urgent=after_urgent)
    (copied,) = copied_bytes
    assert sum(out[key].nbytes for key in keys[:urgent]) <= copied < sum(tensor.nbytes for tensor in out.values())
    assert same(out, expected)


def test_slices_begin_at_any_element(tmp_path: Path) -> None:
    values = {"a": torch.arange(5000, dtype=torch.int16), "b": torch.arange(9, dtype=torch.int8)}
    write_state(tmp_path / "c", 2, values, parts=["master"])
    checkpoint = zckpt.open(tmp_path / "c")
    for verify in (True, False):
        for index in (slice(0, 5000), slice(1, 4000), slice(4999, 5000)):
            for dtype in (torch.int16, torch.int64):
                loaded = checkpoint.load_slice("master/a", index, device="sim", dtype=dtype, verify=verify)
                assert torch.equal(loaded.cpu(), values["a"][index].to(dtype))


def test_pinned_memory_stays_within_the_budget_and_goes_back(tmp_path: Path) -> None:
    tensors = write(tmp_path / "c", LARGE | SMALL)
    for threads in (1, 3, 16):
        for nbytes in (2 * MIB * threads, 256 * MIB):
            accelerator.reset()
            loaded = zckpt.open(tmp_path / "c", budget=zckpt.Budget(nbytes, threads)).load(device="sim")
            counters = accelerator.counters()
            assert same(loaded, tensors)
            assert 0 < counters["pinned_bytes_max"] <= nbytes
            assert counters["in_flight_bytes_max"] <= counters["pinned_bytes_max"]
            assert counters["pinned_bytes_taken"] == counters["pinned_bytes_max"]  # all of it was pinned at once
            assert counters["pinned_bytes"] == 0


def test_no_more_is_pinned_than_is_needed(tmp_path: Path) -> None:
    write(tmp_path / "c", SMALL)
    zckpt.open(tmp_path / "c").load("master/layer.1", device="sim")
    assert accelerator.counters()["pinned_bytes_max"] == 8 * MIB  # one buffer of the usual size


def test_memory_is_pinned_once_for_many_loads(tmp_path: Path) -> None:
    tensors = write(tmp_path / "c", SMALL)
    budget = zckpt.Budget(8 * MIB, 2)
    loaded = dict(zckpt.open(tmp_path / "c", budget=budget).iter("master/layer.1*", device="sim"))
    assert same(loaded, {key: tensor for key, tensor in tensors.items() if key.startswith("master/layer.1")})
    counters = accelerator.counters()
    assert counters["pinned_bytes_taken"] == counters["pinned_bytes_max"] == 8 * MIB
    assert counters["pinned_bytes"] == 0


def test_streams_and_the_memory_that_belongs_to_them_are_used_again(tmp_path: Path) -> None:
    write(tmp_path / "c", SMALL)
    uses = []
    for _ in range(3):
        accelerator.reset()
        zckpt.open(tmp_path / "c").load(device="sim")
        uses.append(({copy.stream for copy in to_devices()}, accelerator.counters()["device_bytes_max"]))
    assert uses[1:] == uses[:-1]


def test_damage_is_found_and_no_copy_is_left_under_way(tmp_path: Path) -> None:
    write(tmp_path / "c", LARGE)
    checkpoint = zckpt.open(tmp_path / "c", budget=ONE_THREAD)
    with (tmp_path / "c" / checkpoint["master/c"].files[0]).open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(zckpt.DigestError, match="the data is damaged"):
        checkpoint.load(device="sim")
    assert len(to_devices()) > 5
    assert all(copy.ran for copy in accelerator.copies())
    checkpoint.load("master/b", device="sim")
    assert accelerator.counters()["pinned_bytes"] == 0  # the error is gone, and keeps nothing


def test_a_failed_load_keeps_no_pinned_memory(tmp_path: Path) -> None:
    """Neither a failed load nor a failed write keeps pinned memory, even while the caller keeps the error."""
    tensors = write(tmp_path / "c", LARGE)
    checkpoint = zckpt.open(tmp_path / "c")
    with (tmp_path / "c" / checkpoint["master/c"].files[0]).open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(zckpt.DigestError) as damaged:
        checkpoint.load(device="sim")
    assert accelerator.counters()["pinned_bytes"] == 0

    def fail(*args: object) -> None:
        raise OSError("the disk is gone")

    with mock.patch.object(LocalWriter, "write", fail), pytest.raises(OSError, match="the disk is gone") as gone:
        written(tmp_path / "d", {key: tensor.to("sim") for key, tensor in tensors.items()}, ONE_THREAD)
    assert accelerator.counters()["pinned_bytes"] == 0
    assert damaged.value.__traceback__ is not None
    assert gone.value.__traceback__ is not None


def test_a_device_that_fails_leaves_no_copy_of_another_device_under_way(tmp_path: Path) -> None:
    tensors = write(tmp_path / "c", LARGE)
    out = {key: torch.empty_like(tensors[key], device=f"sim:{number % 2}") for number, key in enumerate(LARGE_KEYS)}
    for failing in ("sim:0", "sim:1"):
        wait = devices.CopyQueue.wait

        def failed(queue: devices.CopyQueue, failing: str = failing, wait: Any = wait) -> None:
            if queue.device == torch.device(failing):
                raise RuntimeError("the device failed")
            wait(queue)

        forget()
        with (
            mock.patch.object(devices.CopyQueue, "wait", failed),
            pytest.raises(RuntimeError, match="the device failed"),
        ):
            zckpt.open(tmp_path / "c").load(out=out)
        other = 1 - int(failing[-1])
        ran = [copy.ran for copy in to_devices() if copy.device == other]
        assert ran
        assert all(ran)
        torch.accelerator.synchronize(failing)


def test_too_little_memory_says_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "c", SMALL)
    checkpoint, empty = zckpt.open(tmp_path / "c"), torch.empty

    def full(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory") or torch.device(options.get("device", "cpu")).type == "sim":
            raise torch.OutOfMemoryError("out of memory. Advice\nand the stack")
        return empty(*args, **options)

    with mock.patch.object(torch, "empty", full):
        with pytest.raises(zckpt.DeviceError, match=r"1200 bytes .*sim:0.*\n  free"):
            checkpoint.load("master/layer.5", device="sim")
        with pytest.raises(zckpt.DeviceError, match=r"pin \d+ bytes .*\n  a smaller budget"):
            checkpoint.load(out={"master/layer.5": torch.zeros(6, 50, device="sim")})


def test_an_interrupt_leaves_no_copy_under_way(tmp_path: Path) -> None:
    write(tmp_path / "c", LARGE)
    wait = devices.CopyQueue.wait
    interrupted: list[devices.CopyQueue] = []

    def interrupted_once(queue: devices.CopyQueue) -> None:
        if threading.current_thread() is threading.main_thread() and not interrupted:
            interrupted.append(queue)
            raise KeyboardInterrupt
        wait(queue)

    with mock.patch.object(devices.CopyQueue, "wait", interrupted_once), pytest.raises(KeyboardInterrupt):
        zckpt.open(tmp_path / "c").load(device="sim")
    assert len(to_devices()) > 1
    assert all(copy.ran for copy in accelerator.copies())


def test_a_device_without_streams(tmp_path: Path) -> None:
    """On a device without streams, zckpt waits for every copy, and pins no memory."""
    tensors = write(tmp_path / "c", LARGE | SMALL)
    with (
        mock.patch.object(devices, "_with_streams", set()),
        mock.patch.object(torch, "Stream", side_effect=RuntimeError("there are none")),
    ):
        loaded = zckpt.open(tmp_path / "c").load(device="sim")
        assert same(loaded, tensors)
        converted = zckpt.open(tmp_path / "c").load(device="sim", dtype="bfloat16")
        write_state(tmp_path / "d", 2, {key.partition("/")[2]: tensor for key, tensor in loaded.items()})
    assert same(converted, {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()})
    assert same(zckpt.open(tmp_path / "d").load("master/*"), tensors)
    assert all(copy.waited for copy in accelerator.copies() if "host" in copy.name)
    assert accelerator.counters()["pinned_bytes_max"] == 0
