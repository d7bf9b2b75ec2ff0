"""Queues of copies to and from a device, and their staging buffers, while several threads or streams are at work. The
device is the simulated accelerator."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support import accelerator
from tests.support.device_copies import (
    BLOCK_BYTES,
    ONE_THREAD,
    SMALL,
    on_device,
    same,
    to_devices,
    to_host,
    write,
    written,
)
from zckpt.transfer import devices, staging

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType


pytestmark = pytest.mark.sim


@pytest.mark.parametrize("direction", ["to_device", "from_device"])
def test_memory_between_copies_belongs_to_their_stream(tmp_path: Path, direction: str) -> None:
    """The streams of the caller go on meanwhile. Memory that they have freed may still be in use there."""
    tensors, queued = write(tmp_path / "c", SMALL), getattr(devices.CopyQueue, direction)

    def meanwhile(queue: devices.CopyQueue, buffer: torch.Tensor, copies: Any) -> torch.Event:
        done: torch.Event = queued(queue, buffer, copies)
        done.query()  # lets the accelerator carry out the first copy, and not the next ones
        torch.accelerator.current_stream("sim").synchronize()
        return done

    with mock.patch.object(devices.CopyQueue, direction, meanwhile):
        if direction == "to_device":
            assert same(zckpt.open(tmp_path / "c").load(device="sim"), tensors)
        else:
            assert written(tmp_path / "d", on_device(SMALL), ONE_THREAD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_call_torch_a_few_times_for_many_small_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """After each call, a thread waits for its turn in Python. ``numel`` and ``is_contiguous`` let no other thread
    run."""
    tensors = {f"{number}": torch.full((5, 10), number, dtype=dtype, device="sim") for number in range(1000)}
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if event == "c_call" and (isinstance(owner, torch.Tensor) or "torch" in str(getattr(owner, "__name__", ""))):
            calls[function.__name__] += 1

    threading.setprofile(count)
    try:
        zckpt.write_state_dict(tensors, tmp_path / "c")
        in_write = Counter(calls)
        loaded = zckpt.open(tmp_path / "c").load(device="sim")
    finally:
        threading.setprofile(None)
    assert same(loaded, {key: tensors[key.partition("/")[2]].cpu() for key in loaded})
    assert len(loaded) == 1000
    assert 0 < in_write["flatten_dense_tensors"] <= 2
    assert 0 < calls["unflatten_dense_tensors"] <= 2
    viewed = 0 if dtype is torch.float32 else 1000  # as integers, so that every bit of a NaN is kept
    others = sum(calls[name] for name in calls.keys() - {"numel", "is_contiguous"})
    assert viewed <= others < viewed + 200, calls


@pytest.mark.parametrize("to_device", [True, False])
def test_a_device_without_memory_for_a_buffer_gets_small_tensors_one_by_one(tmp_path: Path, to_device: bool) -> None:
    tensors = write(tmp_path / "c", SMALL)
    full = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory"))
    if to_device:
        out = {key: torch.empty(tensor.shape, device="sim") for key, tensor in tensors.items()}
        halves = {key: torch.empty(tensor.shape, device="sim", dtype=torch.half) for key, tensor in tensors.items()}
        with mock.patch.object(devices, "device_memory", mock.Mock(side_effect=zckpt.DeviceError("out of memory"))):
            loaded = zckpt.open(tmp_path / "c").load(out=out)
            assert same(zckpt.open(tmp_path / "c").load(out=halves), {key: tensors[key].half() for key in tensors})
        assert same(loaded, tensors)
        assert len(to_devices()) >= 2 * len(SMALL)
    else:
        on_sim = on_device(SMALL)
        with mock.patch.object(torch._C._nn, "flatten_dense_tensors", full):
            assert written(tmp_path / "d", on_sim, ONE_THREAD)
        assert full.called
        assert len([copy for copy in to_host() if not copy.waited]) == len(SMALL)


def test_a_queue_serves_tensors_of_inference_mode_and_others() -> None:
    buffer = torch.arange(8, dtype=torch.uint8).pin_memory()
    queue = devices.CopyQueue(torch.device("sim:0"), 8, pinned=True)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            targets = [torch.zeros(2, 2, dtype=torch.uint8, device="sim") for _ in range(2)]
            devices.synchronize([targets[0].device])
            queue.to_device(buffer, [devices.ToDevice(4 * at, torch.uint8, targets[at]) for at in range(2)])
        queue.wait()
        assert [target.tolist() for target in targets] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("to_device", [True, False])
def test_copies_of_two_threads_do_not_mix(to_device: bool) -> None:
    """The copies of both threads go through the same memory on the device. The second thread begins while the first one
    is queueing its copies."""
    buffers = [torch.full((4,), value, dtype=torch.uint8).pin_memory() for value in (1, 2)]
    tensors = [torch.full((4,), value, dtype=torch.uint8, device="sim") for value in (3, 4)]
    torch.accelerator.synchronize()
    queue = devices.CopyQueue(tensors[0].device, 4, pinned=True)

    def copy(number: int) -> None:
        halves = [(0, tensors[number][:2]), (2, tensors[number][2:])]
        if to_device:
            queue.to_device(buffers[number], [devices.ToDevice(at, torch.uint8, half) for at, half in halves])
        else:
            queue.from_device(buffers[number], [devices.FromDevice(at, half) for at, half in halves])

    owner, name = (torch, "_foreach_copy_") if to_device else (devices, "_joined")
    original, other = getattr(owner, name), threading.Thread(target=copy, args=(1,))

    def meanwhile(*args: Any) -> Any:
        if other.ident is None:
            other.start()
            other.join(0.5)  # it queues nothing before this thread has queued all copies
        return original(*args)

    with mock.patch.object(owner, name, meanwhile):
        copy(0)
        other.join()
    queue.wait()
    expected = [1, 2] if to_device else [3, 4]
    assert [buffer.tolist() for buffer in buffers] == [[value] * 4 for value in expected]
    assert [tensor.tolist() for tensor in tensors] == [[value] * 4 for value in expected]


def test_threads_that_begin_at_once_share_one_queue() -> None:
    source = torch.ones(1, dtype=torch.uint8, device="sim")
    devices.synchronize([source.device])
    copies, make = [devices.FromDevice(0, source)], devices.CopyQueue
    pool = staging.pool_for([source.device], ONE_THREAD, BLOCK_BYTES)
    with pool.work(2), pool.lend() as first, pool.lend() as second:
        other = threading.Thread(target=second.from_device, args=(source.device, copies))

        def meanwhile(*args: Any, **options: Any) -> devices.CopyQueue:
            if other.ident is None:
                other.start()
                other.join(0.5)  # it waits for the queue that this thread is making
            return make(*args, **options)

        with mock.patch.object(staging, "CopyQueue", meanwhile):
            first.from_device(source.device, copies)
            other.join()
    queued = [copy for copy in accelerator.copies() if not copy.waited]
    assert len({copy.stream for copy in queued}) == 1
    assert all(copy.ran for copy in queued)


def test_a_buffer_goes_back_after_an_error() -> None:
    """Otherwise another thread might wait for this buffer forever."""
    pool = staging.PinnedPool(staging.Arena.within(ONE_THREAD, BLOCK_BYTES), 1)
    with pool.work(1):
        with pytest.raises(OSError, match="damaged"), pool.lend() as buffer:
            raise OSError("damaged")
        with pool.lend() as again:
            assert again is buffer


def test_a_buffer_is_done_when_the_copies_of_all_devices_are() -> None:
    buffers = staging.pool_for([torch.device("sim:0")], ONE_THREAD, BLOCK_BYTES)
    with buffers.work(1), buffers.lend() as buffer:
        sources = [torch.ones(1, dtype=torch.uint8, device=device) for device in ("sim:0", "sim:1")]
        devices.synchronize(devices.devices_of(sources))
        for start, source in enumerate(sources):
            buffer.from_device(source.device, [devices.FromDevice(start, source)])
        torch.accelerator.synchronize("sim:0")
        assert not buffer.is_done()
        buffer.wait()
        assert buffer.is_done()
        assert buffer.bytes[:2].tolist() == [1, 1]
