"""How bytes come to a device and from it, on the simulated accelerator: in which order, in how many copies, and in how
much pinned memory.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support import accelerator
from tests.support.states import fragment, write_state
from zckpt.plan import catalog
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_writer import LocalWriter
from zckpt.testing.fragments import Unlocked, rank_write
from zckpt.transfer import devices, staging
from zckpt.transfer import write as io_write
from zckpt.transfer.snapshot import Snapshot
from zckpt.writing.options import WriteOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from zckpt.writing.rank_write import RankWrite


KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = 64 * KIB
ONE_THREAD = zckpt.Budget(2 * MIB, 1)
"""With buffers of 15 blocks."""
LARGE = {"a": (700_001,), "b": (3, 5), "c": (1100, 1000)}
LARGE_KEYS = ["master/a", "master/c"]
SMALL = {f"layer.{number}": (number % 7 + 1, 50) for number in range(400)}
SAVE_ID = "0" * 16

pytestmark = pytest.mark.sim


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], ranks: int = 1) -> dict[str, torch.Tensor]:
    write_state(path, ranks, shapes, parts=["master"], block_bytes=BLOCK_BYTES)
    loaded = zckpt.open(path).load()
    forget()
    return loaded


def forget() -> None:
    """Sets the counters to zero. A test that calls this sees only what happens after the call."""
    for device in ("sim:0", "sim:1"):
        torch.zeros(1, device=device)
        assert devices.has_streams(torch.device(device))
    accelerator.reset()


def same(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return loaded.keys() == expected.keys() and all(torch.equal(loaded[key].cpu(), expected[key]) for key in expected)


def to_devices() -> list[accelerator.Operation]:
    return [copy for copy in accelerator.copies() if copy.name == "host to device"]


def to_host() -> list[accelerator.Operation]:
    """Without the byte by which a device is tried."""
    return [copy for copy in accelerator.copies() if copy.name == "device to host" and copy.nbytes > 1]


@contextmanager
def marked(**functions: tuple[object, str]) -> Iterator[None]:
    """Calls of these functions are marked in the order of events, each under the name it is given here."""
    with ExitStack() as patches:
        for text, (owner, name) in functions.items():
            original = getattr(owner, name)

            def call(*args: Any, text: str = text, original: Any = original) -> Any:
                accelerator.mark(text)
                return original(*args)

            patches.enter_context(mock.patch.object(owner, name, call))
        yield


def ticks(text: str) -> list[int]:
    return [mark.tick for mark in accelerator.marks() if mark.text == text]


# To a device


@pytest.mark.parametrize("direct", [True, False], ids=["past the page cache", "through it"])
def test_the_next_read_begins_while_a_copy_is_under_way(tmp_path: Path, direct: bool) -> None:
    """With one thread too. The host waits for a buffer once before it uses it again, not for each copy."""
    tensors = write(tmp_path / "c", LARGE)
    budget = zckpt.Budget(2 * MIB, 1, direct)
    reading = {name: (LocalReader, name) for name in ("read_direct", "read_into")}
    with marked(**reading), mock.patch.object(LocalReader, "is_cached", return_value=False):
        loaded = zckpt.open(tmp_path / "c", budget=budget).load(device="sim")
        reads, copies, waits = [*ticks("read_direct"), *ticks("read_into")], to_devices(), accelerator.waits()
    assert same(loaded, tensors)
    assert len(reads) > 5
    assert not any(copy.waited for copy in copies)
    for before, tick in itertools.pairwise(sorted(reads)):
        last = [copy for copy in copies if copy.queued < tick][-1]
        assert before < last.queued < tick < last.ran
        assert len([wait for wait in waits if before < wait.ended < tick]) <= 1


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
    assert len(copies) == 2  # one for each file
    assert not any(copy.waited for copy in copies)
    assert sum(copy.nbytes for copy in copies) == sum(tensor.nbytes for tensor in tensors.values())
    assert len([wait for wait in waits if wait.what in ("stream", "event")]) == 1


def test_the_dtype_is_converted_on_the_device(tmp_path: Path) -> None:
    """In few and large copies and in many small ones."""
    for shapes in (LARGE, SMALL):
        tensors = write(tmp_path / str(len(shapes)), shapes)
        loaded = zckpt.open(tmp_path / str(len(shapes))).load(device="sim", dtype="bfloat16")
        assert same(loaded, {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()})
        assert not ticks("converted on the host")
        assert sum(copy.nbytes for copy in to_devices()) == sum(tensor.nbytes for tensor in tensors.values())


def test_targets_on_the_host_and_on_several_devices_in_one_load(tmp_path: Path) -> None:
    """Of other dtypes too. All that they were used for on any stream is done before."""
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
        torch.accelerator.synchronize(device)  # what the load has not waited for comes now
    assert same(loaded, {key: tensors[key].to(out[key].dtype) for key in tensors})
    assert all(loaded[key] is out[key] for key in out)


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
            assert counters["pinned_bytes_taken"] == counters["pinned_bytes_max"]  # all at once
            assert counters["pinned_bytes"] == 0


def test_no_more_is_pinned_than_is_needed(tmp_path: Path) -> None:
    write(tmp_path / "c", SMALL)
    zckpt.open(tmp_path / "c").load("master/layer.1", device="sim")
    assert accelerator.counters()["pinned_bytes_max"] == 8 * MIB  # one buffer of the usual size


def test_memory_is_pinned_once_for_many_loads(tmp_path: Path) -> None:
    tensors = write(tmp_path / "c", SMALL)
    budget = zckpt.Budget(8 * MIB, 2)
    found = dict(zckpt.open(tmp_path / "c", budget=budget).iter("master/layer.1*", device="sim"))
    assert same(found, {key: tensor for key, tensor in tensors.items() if key.startswith("master/layer.1")})
    counters = accelerator.counters()
    assert counters["pinned_bytes_taken"] == counters["pinned_bytes_max"] == 8 * MIB
    assert counters["pinned_bytes"] == 0


def test_streams_and_the_memory_that_belongs_to_them_are_used_again(tmp_path: Path) -> None:
    write(tmp_path / "c", SMALL)
    found = []
    for _ in range(3):
        accelerator.reset()
        zckpt.open(tmp_path / "c").load(device="sim")
        found.append(({copy.stream for copy in to_devices()}, accelerator.counters()["device_bytes_max"]))
    assert found[1:] == found[:-1]


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
    assert accelerator.counters()["pinned_bytes"] == 0  # what the error kept went with it


def test_a_failed_load_keeps_no_pinned_memory(tmp_path: Path) -> None:
    """Nor does a failed write, though the caller keeps the error."""
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
        with pytest.raises(zckpt.DeviceError, match="allocate 1200 bytes on the device sim:0: out of memory\n  free"):
            checkpoint.load("master/layer.5", device="sim")
        with pytest.raises(zckpt.DeviceError, match=r"pin \d+ bytes of host memory: out of memory\n  a smaller budget"):
            checkpoint.load(out={"master/layer.5": torch.zeros(6, 50, device="sim")})


def test_an_interrupt_leaves_no_copy_under_way(tmp_path: Path) -> None:
    write(tmp_path / "c", LARGE)
    wait, interrupted = devices.CopyQueue.wait, []

    def interrupted_once(queue: devices.CopyQueue) -> None:
        if threading.current_thread() is threading.main_thread() and not interrupted:
            interrupted.append(queue)
            raise KeyboardInterrupt
        wait(queue)

    with mock.patch.object(devices.CopyQueue, "wait", interrupted_once), pytest.raises(KeyboardInterrupt):
        zckpt.open(tmp_path / "c").load(device="sim")
    assert len(to_devices()) > 1
    assert all(copy.ran for copy in accelerator.copies())


@pytest.mark.parametrize("direction", ["to_device", "from_device"])
def test_memory_between_copies_belongs_to_their_stream(tmp_path: Path, direction: str) -> None:
    """The streams of the caller go on meanwhile, and what they have freed may still be in use there."""
    tensors, queued = write(tmp_path / "c", SMALL), getattr(devices.CopyQueue, direction)

    def meanwhile(queue: devices.CopyQueue, buffer: torch.Tensor, copies: Any) -> torch.Event:
        done: torch.Event = queued(queue, buffer, copies)
        done.query()  # which has the first copy done, and not the next ones
        torch.accelerator.current_stream("sim").synchronize()
        return done

    with mock.patch.object(devices.CopyQueue, direction, meanwhile):
        if direction == "to_device":
            assert same(zckpt.open(tmp_path / "c").load(device="sim"), tensors)
        else:
            assert written(tmp_path / "d", on_device(SMALL), ONE_THREAD)


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
            other.join(0.5)  # it queues nothing before this thread has queued all
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
    with pool.work(2), pool.lend() as one, pool.lend() as two:
        other = threading.Thread(target=two.from_device, args=(source.device, copies))

        def meanwhile(*args: Any, **options: Any) -> devices.CopyQueue:
            if other.ident is None:
                other.start()
                other.join(0.5)  # it waits for the queue that is being made
            return make(*args, **options)

        with mock.patch.object(staging, "CopyQueue", meanwhile):
            one.from_device(source.device, copies)
            other.join()
    queued = [copy for copy in accelerator.copies() if not copy.waited]
    assert len({copy.stream for copy in queued}) == 1
    assert all(copy.ran for copy in queued)


def test_a_buffer_goes_back_after_an_error() -> None:
    """Another thread may be waiting for it."""
    pool = staging.PinnedPool(staging.Arena.within(ONE_THREAD, BLOCK_BYTES), 1)
    with pool.work(1):
        with pytest.raises(OSError, match="damaged"), pool.lend() as buffer:
            raise OSError("damaged")
        with pool.lend() as again:
            assert again is buffer


def test_a_device_without_streams(tmp_path: Path) -> None:
    """Every copy is waited for, and no memory is pinned."""
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


# From a device


def begun(path: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> RankWrite:
    fragments = [fragment("master", name, tensor, 0, tensor.numel()) for name, tensor in tensors.items()]
    about = catalog.About(0, BLOCK_BYTES, {}, b"\xc0", {})
    write = rank_write(path, SAVE_ID, [fragments], 0, about, WriteOptions(**options))
    write.begin(Unlocked(write.store))
    return write


def written(path: Path, tensors: Mapping[str, torch.Tensor], budget: zckpt.Budget, **options: Any) -> bool:
    """Whether what was written is what the tensors hold."""
    write = begun(path, tensors, budget=budget, **options)
    expected = b"".join(tensor.cpu().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    forget()
    write.write_own(Snapshot())
    (plan,) = write.shards
    return (path / plan.shard.path).read_bytes()[len(plan.header) :] == expected


def on_device(shapes: Mapping[str, tuple[int, ...]], device: str = "sim") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(device) for name, shape in shapes.items()}


def test_what_is_read_from_a_device_is_digested_while_the_next_copy_is_under_way(tmp_path: Path) -> None:
    """With one thread too: it waits for a copy only when it has nothing else to do."""
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
    assert (
        len([wait for wait in waits if wait.what in ("stream", "event")]) == 2
    )  # for the copy, and in the end for all


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


def test_a_write_pins_no_more_than_the_budget_or_the_snapshot_has(tmp_path: Path) -> None:
    """What it pins holds as much of the state as there is room for."""
    tensors = on_device({f"large.{number}": (1_000_000,) for number in range(3)})
    for threads in (1, 4):
        for snapshot_bytes in (0, 5 * MIB, 100 * MIB):
            budget = zckpt.Budget(2 * MIB * threads, threads)
            path = tmp_path / f"{threads}.{snapshot_bytes}"
            assert written(path, tensors, budget, snapshot_bytes=snapshot_bytes)
            counters = accelerator.counters()
            room = max(snapshot_bytes, budget.nbytes)
            arena_bytes = staging.Arena.within(budget, BLOCK_BYTES).nbytes
            assert min(room, 12_000_000) - arena_bytes <= counters["pinned_bytes_max"] <= room
            assert counters["pinned_bytes"] == 0


def test_a_write_of_small_tensors_takes_the_device_memory_of_one_buffer(tmp_path: Path) -> None:
    """However much of the state its snapshot holds in host memory."""
    tensors = on_device({f"{number}": (20_000,) for number in range(60)})
    forget()
    before = accelerator.counters()["device_bytes"][0]
    for snapshot_bytes in (64 * MIB, 0):
        assert written(tmp_path / f"{snapshot_bytes}", tensors, ONE_THREAD, snapshot_bytes=snapshot_bytes)
        counters = accelerator.counters()
        assert ONE_THREAD.nbytes // 4 < counters["device_bytes_max"][0] - before < ONE_THREAD.nbytes
        assert len({copy.stream for copy in to_host() if not copy.waited}) == 1


def test_the_snapshot_is_whole_when_it_is_said_to_be(tmp_path: Path) -> None:
    """Then the device's memory may change, though nothing of it is on the disk yet."""
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
    write.write_own(snapshot)
    assert snapshot.taken.is_set()
    (plan,) = write.shards
    content = (tmp_path / "c" / plan.shard.path).read_bytes()
    assert content[len(plan.header) :] == b"".join(tensor.numpy().tobytes() for tensor in expected)
