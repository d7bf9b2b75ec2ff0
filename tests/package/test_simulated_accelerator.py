"""The simulated accelerator shows the defects that it is made to show."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support import accelerator

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

KIB = 1 << 10
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def pinned(nbytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8).pin_memory()


def on(device: str, nbytes: int, value: int) -> torch.Tensor:
    """Returns a tensor on a device whose values are there already, and not only queued."""
    tensor = torch.full((nbytes,), value, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize(device)
    return tensor


def touch(how: str) -> None:
    tensor = torch.zeros(8, device="sim")
    torch.accelerator.synchronize()
    if how == "read":
        ctypes.string_at(tensor.data_ptr(), 1)
    else:
        ctypes.memset(tensor.data_ptr(), 0, 1)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("how", ["read", "write"])
def test_the_host_dies_where_it_touches_device_memory(cluster: Cluster, how: str) -> None:
    (outcome,) = cluster.outcomes(accelerator.run, 1, touch, how, init=False)
    assert outcome.signal == signal.SIGSEGV


def test_other_tests_do_not_see_the_accelerator() -> None:
    with pytest.raises(RuntimeError, match="sim"):
        torch.empty(1, device="sim")


@pytest.mark.sim
def test_torch_takes_the_simulated_devices_for_the_accelerator_of_the_machine() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.empty(3, device="sim").device == torch.device("sim:0")
    torch.accelerator.set_device_index(1)
    assert torch.empty(3, device="sim").device == torch.device("sim:1")
    with pytest.raises(RuntimeError, match="no device 2"):
        torch.empty(3, device="sim:2")


@pytest.mark.sim
@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_tensors_come_back_as_they_were(device: str, dtype: torch.dtype) -> None:
    for shape in ((63, 65), (7, 1), (1, 1), (0, 3)):
        tensor = (torch.randn(shape) * 100).to(dtype)
        there = tensor.to(device)
        assert there.device == torch.device(device)
        assert torch.equal(there.cpu(), tensor)
        assert torch.equal(there.clone().cpu(), tensor)
        assert torch.equal(there.t().cpu(), tensor.t())
        assert torch.equal(there.t().contiguous().view(-1).cpu(), tensor.t().reshape(-1))
        assert torch.equal(tensor.t().to(device)[1:].cpu(), tensor.t()[1:])
        assert torch.equal(there.view(torch.uint8).cpu(), tensor.view(torch.uint8))


@pytest.mark.sim
def test_a_copy_from_pinned_memory_is_late() -> None:
    for waits in (False, True):
        buffer = pinned(KIB, 1)
        target = on("sim", KIB, 0)
        target.copy_(buffer, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().synchronize()
        buffer.fill_(2)
        assert set(target.tolist()) == {1 if waits else 2}


@pytest.mark.sim
def test_a_copy_to_pinned_memory_is_late() -> None:
    buffer = pinned(KIB, 1)
    event = torch.Event("sim")
    buffer.copy_(on("sim", KIB, 1), non_blocking=True)
    event.record()
    assert 1 not in buffer.tolist()  # the old bytes are gone, and the new bytes have not arrived
    event.synchronize()
    assert set(buffer.tolist()) == {1}


@pytest.mark.sim
def test_a_copy_that_cannot_be_late_or_need_not_be_is_done_at_once() -> None:
    for buffer, non_blocking in ((pinned(KIB, 1), False), (torch.ones(KIB, dtype=torch.uint8), True)):
        target = on("sim", KIB, 0)
        target.copy_(buffer, non_blocking=non_blocking)
        buffer.fill_(2)
        assert set(target.tolist()) == {1}
        buffer.copy_(target, non_blocking=non_blocking)
        assert set(buffer.tolist()) == {1}
    assert all(copied.waited for copied in accelerator.copies())


@pytest.mark.sim
def test_an_event_that_is_queried_again_and_again_completes() -> None:
    target, event = on("sim", KIB, 0), torch.Event("sim")
    for _ in range(3):
        target.copy_(pinned(KIB), non_blocking=True)
    event.record()
    queries = 0
    while not event.query():
        queries += 1
    assert queries == 3


@pytest.mark.sim
@pytest.mark.parametrize("waits", [False, True])
def test_one_stream_waits_for_another_only_if_it_is_told_to(waits: bool) -> None:
    source, side = on("sim", KIB, 1), torch.Stream("sim")
    source.fill_(2)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        target = pinned(KIB)
        target.copy_(source, non_blocking=True)
    side.synchronize()
    assert set(target.tolist()) == {2 if waits else 1}


@pytest.mark.sim
def test_each_thread_has_its_own_current_stream_and_device() -> None:
    seen = []

    def look() -> None:
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream().stream_id))

    stream = torch.Stream("sim:1")
    torch.accelerator.set_stream(stream)
    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [(1, stream.stream_id), (0, 0)]


@pytest.mark.sim
@pytest.mark.parametrize("waits", [False, True])
def test_fresh_memory_belongs_to_the_stream_that_it_was_allocated_on(waits: bool) -> None:
    target, side, buffer = torch.empty(KIB, dtype=torch.uint8, device="sim"), torch.Stream("sim"), pinned(KIB, 1)
    if waits:
        torch.accelerator.current_stream().synchronize()
    with side:
        target.copy_(buffer, non_blocking=True)
    side.synchronize()
    assert (set(target.tolist()) == {1}) == waits


@pytest.mark.sim
@pytest.mark.parametrize("recorded", [False, True])
def test_freed_memory_is_used_again_on_its_stream_at_once(recorded: bool) -> None:
    first, side = on("sim", KIB, 1), torch.Stream("sim")
    target, address = pinned(KIB), first.data_ptr()
    with side:
        target.copy_(first, non_blocking=True)
    if recorded:
        first.record_stream(side)
    del first
    second = on("sim", KIB, 2)
    assert (second.data_ptr() == address) != recorded
    side.synchronize()
    assert set(target.tolist()) == {1 if recorded else 2}
    assert not recorded or on("sim", KIB, 2).data_ptr() == address


@pytest.mark.sim
@pytest.mark.parametrize("first", ["sim:0", "sim:1"])
def test_a_copy_between_devices_takes_its_turn_on_both(first: str) -> None:
    source, target = on("sim:0", KIB, 1), on("sim:1", KIB, 2)
    source.fill_(3)
    target.fill_(4)
    target.copy_(source)
    source.fill_(5)
    with torch.Stream("sim:1"):
        assert set(target.tolist()) == {2}
    torch.accelerator.current_stream(first).synchronize()
    assert set(target.tolist()) == {3}


@pytest.mark.sim
def test_a_copy_from_the_host_is_converted_on_the_host_and_another_one_on_the_device() -> None:
    values = torch.randn(1000).pin_memory()
    device = values.to("sim", non_blocking=True)
    half = torch.empty(1000, dtype=torch.bfloat16, device="sim")
    half.copy_(device)
    assert not accelerator.marks()
    assert torch.equal(half.cpu(), values.to(torch.bfloat16))
    half.copy_(values)
    assert [mark.text for mark in accelerator.marks()] == ["converted on the host"]
    assert torch.equal(half.cpu(), values.to(torch.bfloat16))


@pytest.mark.sim
def test_operators_are_queued_too() -> None:
    torch.manual_seed(0)
    values = [torch.randn(100) for _ in range(3)]
    results = []
    for device in ("cpu", "sim"):
        weight, momentum, gradient = (value.to(device, copy=True) for value in values)
        accelerator.reset()
        momentum.mul_(0.9).add_(gradient, alpha=0.1)
        weight.addcdiv_(momentum, gradient.square().sqrt().add_(1e-8), value=-0.1)
        torch._foreach_mul_([weight, momentum], 2.0)
        factor = torch.tensor(3.0)
        weight.mul_(factor)
        factor.fill_(5.0)
        assert not accelerator.waits()
        results.append((weight.cpu(), momentum.cpu()))
    assert all(map(torch.equal, *results))


@pytest.mark.sim
def test_operators_that_return_values_to_the_host_wait_for_the_device() -> None:
    a, b = torch.arange(6, device="sim").view(2, 3), torch.randn(2, 3, device="sim")
    assert torch.equal(a, torch.tensor([[0, 1, 2], [3, 4, 5]], device="sim"))
    assert not torch.equal(a.float(), b)
    accelerator.reset()
    assert a.sum().item() == 15
    assert accelerator.waits()
    assert not accelerator.copies()  # only copies that the program itself asks for are recorded
    assert torch.cat([a, a]).shape == (4, 3)
    assert torch.equal(torch.stack([b, b])[1].cpu(), b.cpu())
    assert "device='sim:0'" in repr(a)


@pytest.mark.sim
def test_a_model_trains_as_on_the_cpu() -> None:
    results = []
    for device in ("cpu", "sim:1"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            loss = (model(torch.ones(2, 8, device=device)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = copy.deepcopy(optimizer.state_dict()["state"])
        results.append([*model.parameters(), *(moments[name] for moments in state.values() for name in moments)])
    assert len(results[0]) == 4 + 4 * 3
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))


@pytest.mark.sim
def test_tensors_are_pickled_with_their_device() -> None:
    tensor, file = torch.randn(5, 7, device="sim:1"), io.BytesIO()
    torch.save(tensor[1:], file)
    for device in ("sim:1", "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=device)
        assert loaded.device == torch.device(device)
        assert torch.equal(loaded.cpu(), tensor[1:].cpu())


@pytest.mark.sim
def test_each_device_has_a_random_number_generator_of_its_own() -> None:
    module = torch.get_device_module("sim")
    torch.manual_seed(7)
    states = [module.get_rng_state(device) for device in ("sim:0", "sim:1")]
    host = torch.get_rng_state()
    first = torch.rand(9, device="sim:0").cpu()
    assert torch.equal(torch.rand(9, device="sim:1").cpu(), first)
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(torch.rand(9, device="sim:0").cpu(), first)
    module.set_rng_state(states[0], "sim:0")
    assert torch.equal(torch.rand(9, device="sim:0").cpu(), first)


@pytest.mark.sim
def test_many_threads_copy_at_once() -> None:
    wrong = []

    def work(device: str) -> None:
        torch.accelerator.set_stream(torch.Stream(device))
        for number in range(50):
            source, back = pinned(KIB, number), pinned(KIB)
            there = torch.empty(KIB, dtype=torch.uint8, device=device)
            there.copy_(source, non_blocking=True)
            there.add_(1)
            back.copy_(there, non_blocking=True)
            torch.accelerator.synchronize(device) if number % 2 else torch.accelerator.current_stream().synchronize()
            if set(back.tolist()) != {number + 1}:
                wrong.append((device, number))

    threads = [threading.Thread(target=work, args=(f"sim:{number % 2}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.sim
def test_pinned_memory_is_rounded_kept_and_given_back() -> None:
    nbytes = 5 * PAGE_BYTES
    buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    assert buffer.is_pinned()
    assert buffer[7:].is_pinned()
    assert not torch.empty(nbytes).is_pinned()
    assert accelerator.counters()["pinned_bytes"] == 8 * PAGE_BYTES
    on("sim", nbytes - 7, 1).copy_(buffer[7:], non_blocking=True)
    assert not accelerator.copies()[-1].waited
    address = buffer.data_ptr()
    del buffer
    assert torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).data_ptr() != address  # a copy still reads there
    torch.accelerator.synchronize()
    assert torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).data_ptr() == address
    counters = accelerator.counters()
    assert (counters["pinned_bytes"], counters["pinned_bytes_max"]) == (16 * PAGE_BYTES, 16 * PAGE_BYTES)
    torch.accelerator.empty_host_cache()
    assert accelerator.counters()["pinned_bytes"] == 0
    assert accelerator.counters()["pinned_bytes_taken"] == 16 * PAGE_BYTES


@pytest.mark.sim
def test_the_order_of_events_is_recorded() -> None:
    target, buffers, event = on("sim:1", KIB, 0), [pinned(KIB), pinned(KIB)], torch.Event("sim:1")
    accelerator.reset()
    stream = torch.Stream("sim:1")
    with stream:
        target.copy_(buffers[0], non_blocking=True)
        event.record()
        read = accelerator.mark("read begins")
        target.copy_(buffers[1], non_blocking=True)
    event.synchronize()
    first, second = accelerator.copies()
    (wait,) = accelerator.waits()
    assert first.queued < read < second.queued < wait.began < first.ran < wait.ended
    assert second.ran == 0  # because no thread has waited for it
    assert {(c.name, c.nbytes, c.device, c.stream, c.pinned, c.waited) for c in (first, second)} == {
        ("host to device", KIB, 1, stream.stream_id, True, False)
    }
    assert (wait.what, wait.device, wait.stream) == ("event", 1, stream.stream_id)
    assert {first.thread, wait.thread, accelerator.marks()[0].thread} == {threading.get_native_id()}
    assert accelerator.counters()["in_flight_bytes_max"] == 2 * KIB
