"""Tensors go to devices and come from them bit for bit, on the simulated accelerator, and on GPUs if there are some.

When zckpt is called, work that fills or reads a tensor may still be under way on any stream. The training goes on as
soon as zckpt returns. ``test_copies_to_devices.py`` and ``test_copies_from_devices.py`` test the order and the number
of copies.
"""

from __future__ import annotations

import itertools
import math
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support import accelerator
from tests.support.models import make_engine, train
from tests.support.reference_engine import tensors_of
from tests.support.slow_writes import slow
from tests.support.states import same, same_all, write_state
from zckpt.engines import adapt
from zckpt.engines.contract import Batch
from zckpt.storage import gpudirect
from zckpt.storage.local_reader import LocalReader
from zckpt.testing import ReferenceEngine
from zckpt.testing.adapter import ReferenceRestoring
from zckpt.transfer import write as io_write
from zckpt.transfer.devices import CopyQueue, ToDevice
from zckpt.transfer.snapshot import Snapshot
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.cluster import Cluster

KIB, MIB = 1 << 10, 1 << 20
SHAPES = {"matrix": (1100, 1300), "vector": (63,), "one": (1,), "scalar": (), "empty": (0, 3)}
SMALL_BUFFERS = zckpt.Budget(nbytes=4 * MIB, threads=2)
"""A budget whose buffers are so small that each of them is used many times."""

on_each = pytest.mark.parametrize(
    "kind", [pytest.param("sim", marks=pytest.mark.sim), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def devices_of(kind: str) -> list[str]:
    """Returns the names of the first two devices of this kind, or of one if there is only one."""
    return [f"{kind}:{number}" for number in range(min(torch.accelerator.device_count(), 2))]


def random_tensors(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(device) for name, shape in SHAPES.items()}


def set_late(target: torch.Tensor, values: torch.Tensor) -> None:
    """Lets a stream that nobody else uses set ``target`` to ``values`` after a while. One of these tensors is on a
    device. The other is on a device too, or in pinned memory."""
    device = values.device if target.is_cpu else target.device
    stream = torch.Stream(device)
    with stream:
        if device.type == "cuda":
            torch.cuda._sleep(50_000_000)  # clock cycles
        target.copy_(values, non_blocking=True)


def junk_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, 7, device="cpu").pin_memory()


def seen(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors as streams see them that wait for no other stream. Checks that they do not change
    afterwards."""
    copies = {}
    for key, tensor in tensors.items():
        copies[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.Stream(tensor.device) if not tensor.is_cpu else nullcontext() as stream:
            copies[key].copy_(tensor, non_blocking=True)
        if stream is not None:
            stream.synchronize()
    for number in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(number)
    assert same_all({key: tensor.cpu() for key, tensor in tensors.items()}, copies)
    return copies


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def assert_loaded(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert same_all(seen(loaded), {f"master/{name}": tensor.cpu() for name, tensor in expected.items()})


# Checkpoints


@on_each
@pytest.mark.parametrize(
    ("budget", "block_bytes"),
    [(None, MIB), (SMALL_BUFFERS, 64 * KIB), (SMALL_BUFFERS, 2 * MIB)],
    ids=["usual", "small buffers", "one buffer"],
)
def test_device_tensors_come_back_as_they_were(
    kind: str, budget: zckpt.Budget | None, block_bytes: int, tmp_path: Path
) -> None:
    for device in devices_of(kind):
        tensors = random_tensors(device)
        path = tmp_path / device
        write_state(path, 3, tensors, parts=["master"], block_bytes=block_bytes)
        checkpoint = zckpt.open(path, budget=budget)
        for to_device in (*devices_of(kind), "cpu"):
            for loaded in (checkpoint.load(device=to_device), dict(checkpoint.iter(device=to_device))):
                assert {str(tensor.device) for tensor in loaded.values()} == {to_device}
                assert_loaded(loaded, tensors)
            rows = checkpoint.load_slice("master/matrix", (slice(7, 1050), slice(100, 1290)), device=to_device)
            assert same(seen({"": rows})[""], tensors["matrix"].cpu()[7:1050, 100:1290].contiguous())


@on_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_conversion_on_the_way(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random_tensors("cpu")
    write_state(tmp_path / "c", 2, tensors, parts=["master"])
    for budget, inference in ((None, False), (None, True), (SMALL_BUFFERS, False)):
        with torch.inference_mode(inference):
            loaded = zckpt.open(tmp_path / "c", budget=budget).load("master/*", device=kind, dtype=dtype)
        assert_loaded(loaded, {name: tensor.to(dtype) for name, tensor in tensors.items()})


@on_each
def test_small_tensors_keep_every_bit(kind: str, tmp_path: Path) -> None:
    """Tensors of all dtypes, with any bits, such as those of NaNs, are put together and cut apart on the devices."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for device, shape in itertools.product(devices_of(kind), [(3, 5), (7,), (), (0, 3), (1, 1), (2, 3, 4)]):
        for name, dtype in TORCH_DTYPES.items():
            values = torch.randint(256, (2, math.prod(shape) * dtype.itemsize), dtype=torch.uint8)
            for number in range(2):
                tensors[f"{name}.{len(tensors)}"] = values[number].clone().view(dtype).view(shape).to(device)
    with torch.inference_mode():
        tensors["inference"] = torch.randn(5, device=kind)
    tensors["parameter"] = torch.nn.Parameter(torch.randn(5, 3, device=kind, dtype=torch.bfloat16))
    tensors["view"] = torch.randn(9, 5, device=kind)[3:]
    zckpt.write_state_dict(tensors, tmp_path / "c")
    checkpoint = zckpt.open(tmp_path / "c")
    out = {key: torch.zeros_like(tensors[key.partition("/")[2]]) for key in checkpoint}
    parameter = next(key for key in out if key.endswith("/parameter"))
    out[parameter] = torch.nn.Parameter(out[parameter])
    for loaded in (checkpoint.load(device=kind), checkpoint.load(out=out)):
        assert len(loaded) == len(tensors)
        for key, tensor in loaded.items():
            assert torch.equal(bits(tensor), bits(tensors[key.partition("/")[2]])), key


@on_each
def test_all_devices_and_the_host_at_once(kind: str, tmp_path: Path) -> None:
    """When the load is called, a stream of its own is still writing to the memory of each tensor on a device."""
    tensors = random_tensors("cpu")
    places = dict(zip(["master", "exp_avg", "exp_avg_sq"], ["cpu", *devices_of(kind)], strict=False))
    write_state(tmp_path / "c", 2, tensors, parts=[*places])
    out = {}
    for part, device in places.items():
        for name, tensor in tensors.items():
            key = f"{part}/{name}"
            out[key] = torch.empty_like(tensor, device=device)
            if device != "cpu":
                set_late(out[key], junk_like(tensor))
    loaded = zckpt.open(tmp_path / "c").load(out=out)
    assert all(tensor is out[key] for key, tensor in loaded.items())
    assert same_all(seen(loaded), {key: tensors[key.partition("/")[2]] for key in out})


@on_each
def test_the_caller_may_use_another_stream(kind: str, tmp_path: Path) -> None:
    tensors = random_tensors("cpu")
    write_state(tmp_path / "c", 2, tensors, parts=["master"])
    for device in devices_of(kind):
        with torch.Stream(device):
            loaded = zckpt.open(tmp_path / "c", budget=SMALL_BUFFERS).load(device=device)
            written = {name: tensor.clone() for name, tensor in loaded.items()}
            write_state(
                tmp_path / device, 2, {key.partition("/")[2]: t for key, t in written.items()}, parts=["master"]
            )
        assert_loaded(loaded, tensors)
        assert_loaded(zckpt.open(tmp_path / device).load(), tensors)


@on_each
def test_loading_waits_for_what_the_memory_was_used_for(kind: str, tmp_path: Path) -> None:
    """The allocator hands out memory to which queued work may still write. The loaded values must win."""
    tensors = random_tensors("cpu")
    write_state(tmp_path / "c", 2, tensors, parts=["master"])
    checkpoint = zckpt.open(tmp_path / "c")
    for _ in range(3):
        scratch = torch.empty(SHAPES["matrix"], device=kind)
        if kind == "cuda":
            torch.cuda._sleep(50_000_000)  # clock cycles
        scratch.copy_(junk_like(scratch), non_blocking=True)
        del scratch
        loaded = checkpoint.load("master/matrix", device=kind)
        assert_loaded(loaded, {"matrix": tensors["matrix"]})


@pytest.mark.sim
def test_a_queue_knows_whether_its_copies_are_done() -> None:
    staged, target = (
        torch.arange(100, dtype=torch.uint8).pin_memory(),
        torch.zeros(100, dtype=torch.uint8, device="sim"),
    )
    torch.accelerator.synchronize()
    queue = CopyQueue(target.device, len(staged), pinned=True)
    done = queue.to_device(staged, [ToDevice(0, torch.uint8, target)])
    assert done is not None
    assert not done.query()
    queue.wait()
    assert done.query()
    assert torch.equal(target.cpu(), staged)


@pytest.mark.gpu
def test_gpudirect_storage(tmp_path: Path) -> None:
    """Without digests, bytes go from the disk straight to the device, even if a piece begins in the middle of a
    page."""
    if not gpudirect.serves(torch.device("cuda")):
        pytest.skip("no kvikio, or no driver for GPUDirect Storage")
    numels = {"a": 3_000_001, "b": 7, "c": 5_000_003}
    tensors = {name: torch.randn(numel, device="cuda") for name, numel in numels.items()}
    write_state(tmp_path / "checkpoint", 2, tensors, block_bytes=1 << 20)
    # The checkpoint was written past the page cache, so all of it is read from the disk.
    checkpoint = zckpt.open(tmp_path / "checkpoint")
    direct: list[int] = []
    read = LocalReader.read_to_device

    def counted(reader: LocalReader, path: str, target: torch.Tensor, offset: int) -> int:
        direct.append(read(reader, path, target, offset))
        return direct[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalReader, "read_to_device", counted)
        loaded = checkpoint.load(device="cuda", verify=False)
    assert sum(direct) == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert torch.equal(loaded[f"master/{name}"], tensor)


# Engines

ENGINE_SHAPES = {**SHAPES, "frozen": (63, 63)}
WRITES: dict[str, dict[str, Any]] = {
    "foreground": {},
    "small buffers": {"budget": SMALL_BUFFERS},
    "copy": {"background": True},
    "little memory": {"background": True, "snapshot_bytes": 0, "budget": SMALL_BUFFERS},
    "lazy": {"background": True, "snapshot": "lazy", "budget": SMALL_BUFFERS},
}


def trained(device: str) -> ReferenceEngine:
    """Returns an engine that has trained on its device's default stream. It has a buffer on another device, if there is
    one. The last values of its tensors are still under way, each on a stream of its own."""
    engine = ReferenceEngine(ENGINE_SHAPES, device=device)
    engine.train(2)
    other = devices_of(engine.device.type)[-1 - engine.device.index]
    engine.tensors["buffer"]["elsewhere"] = torch.zeros(100, device=other)
    for device_used in {device, other}:
        torch.accelerator.synchronize(device_used)
    for part, tensors in engine.tensors.items():
        for name, tensor in tensors.items():
            if part != "param" or name == "frozen":  # derived weights keep their values
                set_late(tensor, (torch.rand(tensor.shape) * 100).to(tensor.dtype).pin_memory())
    return engine


def values(engine: ReferenceEngine) -> dict[str, torch.Tensor]:
    """Waits for all work, and returns the state without the weights that are derived from masters."""
    for device in devices_of(engine.device.type):
        torch.accelerator.synchronize(device)
    return {key: tensor for key, tensor in tensors_of(engine).items() if key == "param/frozen" or "param" not in key}


def expected_values(device: str) -> dict[str, torch.Tensor]:
    """Returns the values of an engine that ``trained`` has made. All such engines have the same values."""
    torch.manual_seed(0)
    return values(trained(device))


@on_each
@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_of_the_state_at_the_call(kind: str, how: str, tmp_path: Path) -> None:
    """At the call, the state may still be under way to the devices. Training goes on as soon as the write returns."""
    for device, other in zip(devices_of(kind), reversed(devices_of(kind)), strict=True):
        expected = expected_values(device)
        torch.manual_seed(0)
        engine = trained(device)
        tokens, view = torch.zeros(1000, device=other), torch.zeros(100, 200, device=other).t()
        client_state = {"tokens": torch.rand(1000), "view": torch.rand(200, 100)}
        torch.accelerator.synchronize(other)
        set_late(tokens, client_state["tokens"].pin_memory())
        set_late(view, client_state["view"].pin_memory())
        with slow(0.01):
            state = {"tokens": tokens, "view": view}
            written = zckpt.write(engine, tmp_path / device, client_state=state, **WRITES[how])
            tokens.zero_()
            view.zero_()
            torch.accelerator.synchronize(other)
            engine.train(2)
            torch.accelerator.synchronize(device)
            if isinstance(written, zckpt.PendingWrite):
                written.wait()
        assert zckpt.validate(tmp_path / device).ok
        checkpoint = zckpt.open(tmp_path / device)
        loaded = {key: tensor.reshape(expected[key].shape) for key, tensor in checkpoint.load().items()}
        beta_powers, *_ = (expected.pop(key) for key in ("beta_powers", "steps", "learning_rate"))
        assert same_all(loaded, expected)
        assert same(checkpoint.state["engine"]["optimizer"]["beta_powers"], beta_powers)
        assert same_all(checkpoint.state["client_state"], client_state)
        assert not same(values(engine)["master/matrix"], expected["master/matrix"])


@on_each
def test_client_state_on_a_device_that_the_engine_does_not_use(kind: str, tmp_path: Path) -> None:
    tokens, view = torch.zeros(1000, device=kind), torch.zeros(100, 200, device=kind).t()
    expected = {"tokens": torch.rand(1000), "view": torch.rand(200, 100)}
    torch.accelerator.synchronize(kind)
    set_late(tokens, expected["tokens"].pin_memory())
    set_late(view, expected["view"].pin_memory())
    zckpt.write(ReferenceEngine(), tmp_path / "c", client_state={"tokens": tokens, "view": view})
    assert same_all(zckpt.open(tmp_path / "c").state["client_state"], expected)


def offload(engine: ReferenceEngine, junk: bool = False) -> None:
    """Moves the state to host memory as DeepSpeed's ``offload_states(non_blocking=True)`` does, with the values still
    on their way. With ``junk``, they are not the values of the engine."""
    for tensors in engine.tensors.values():
        for name, tensor in tensors.items():
            tensors[name] = torch.zeros_like(tensor, device="cpu").pin_memory()
            set_late(tensors[name], torch.full_like(tensor, 7) if junk else tensor)
    engine.beta_powers = engine.beta_powers.cpu()  # nothing is left on the device


@on_each
def test_state_on_its_way_to_host_memory_is_written(kind: str, tmp_path: Path) -> None:
    engine = ReferenceEngine(ENGINE_SHAPES, device=devices_of(kind)[-1])
    engine.train(1)
    expected = values(engine)
    offload(engine)
    zckpt.write(engine, tmp_path / "c")
    checkpoint = zckpt.open(tmp_path / "c")
    assert {piece.tier for info in checkpoint.values() for piece in info.pieces} == {"host"}
    for key, tensor in checkpoint.load().items():
        assert same(tensor.reshape(expected[key].shape), expected[key])


def write_deepspeed_state_on_its_way(path: str) -> None:
    """Writes a real engine on the CPU that was told that it is on a device."""
    engine = make_engine(stage=2)
    train(engine, 1)
    (master,) = engine.optimizer.single_partition_of_fp32_groups
    values, buffer = master.detach().to("sim:1"), torch.zeros(7, device="sim:0")
    expected = values.cpu()
    engine.module.register_buffer("elsewhere", buffer)
    with mock.patch.object(engine, "device", torch.device("sim:1")):
        assert adapt(engine).devices == {torch.device("sim:0"), torch.device("sim:1")}
        master.data = torch.zeros_like(master).pin_memory()
        set_late(master.data, values)
        zckpt.write(engine, path)
    loaded = zckpt.open(path).load("master/*")
    assert torch.equal(torch.cat([tensor.view(-1) for tensor in loaded.values()]), expected)


@pytest.mark.usefixtures("devices")
def test_deepspeed_state_on_its_way_to_host_memory_is_written(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(accelerator.run, 1, write_deepspeed_state_on_its_way, str(tmp_path / "c"))


@on_each
@pytest.mark.parametrize("offloaded", [False, True])
def test_an_engine_holds_what_was_restored(kind: str, offloaded: bool, tmp_path: Path) -> None:
    """Any stream sees the restored values, even if earlier work was still writing to the engine's memory at the
    call."""
    for device in devices_of(kind):
        engine = ReferenceEngine(ENGINE_SHAPES, device=device)
        engine.train(2)
        zckpt.write(engine, tmp_path / device)
        expected = tensors_of(engine)
        other = ReferenceEngine(ENGINE_SHAPES, device=device, seed=1)
        other.train(1)
        torch.accelerator.synchronize(device)
        if offloaded:
            offload(other, junk=True)
        else:
            for tensor in (
                other.beta_powers,
                *(value for tensors_of_part in other.tensors.values() for value in tensors_of_part.values()),
            ):
                set_late(tensor, junk_like(tensor))
        zckpt.restore(other, tmp_path / device, rng=True, budget=SMALL_BUFFERS)
        tensors = {
            f"{part}/{name}": value
            for part, tensors_of_part in other.tensors.items()
            for name, value in tensors_of_part.items()
        }
        restored = seen({**tensors, "beta_powers": other.beta_powers})
        assert same_all(restored, {key: expected[key] for key in restored})
        if not offloaded:
            engine.train(2)
            gone_on = tensors_of(engine)
            with torch.Stream(device):
                other.train(2)
                assert same_all(tensors_of(other), gone_on)


@on_each
@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_training_waits_until_all_that_it_may_change_has_been_read(kind: str, snapshot: str, tmp_path: Path) -> None:
    """Reading is delayed until the training waits for it, or has gone on without waiting."""
    take, reading = io_write._take, threading.Event()

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            reading.set()
            return super().wait(timeout)

    class Watched(Snapshot):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, "taken" if snapshot == "lazy" else "copied", Waited())

    def take_late(job: Any, stage: Any) -> Any:
        if snapshot == "copy" or job.plan.id.part == "master":
            reading.wait(60)
        return take(job, stage)

    engine = ReferenceEngine(device=kind)
    engine.train(1)
    expected = values(engine)
    with (
        mock.patch("zckpt.checkpoint.background.Snapshot", Watched),
        mock.patch("zckpt.transfer.write._take", take_late),
    ):
        pending = zckpt.write(engine, tmp_path / "c", background=True, snapshot=snapshot)  # type: ignore[call-overload]
        engine.train(1)
        torch.accelerator.synchronize()
        reading.set()
        pending.wait()
    for key, tensor in zckpt.open(tmp_path / "c").load().items():
        assert same(tensor.reshape(expected[key].shape), expected[key])


@on_each
def test_a_buffer_is_used_again_only_when_it_has_been_written(kind: str, tmp_path: Path) -> None:
    """The write of the first full buffer takes longer than the writes of many later ones."""
    put, full, others = io_write._put, itertools.count(), threading.Semaphore(0)

    def put_late(job: Any, stage: Any) -> None:
        if job.op.nbytes == MIB and next(full) == 0:
            for _ in range(12):
                others.acquire()
        put(job, stage)
        others.release()

    engine = ReferenceEngine(SHAPES, device=kind)
    with mock.patch("zckpt.transfer.write._put", put_late):
        zckpt.write(engine, tmp_path / "c", budget=SMALL_BUFFERS)
    expected = values(engine)
    for key, tensor in zckpt.open(tmp_path / "c").load().items():
        assert same(tensor.reshape(expected[key].shape), expected[key])


@pytest.mark.sim
def test_a_restore_in_many_batches_pins_memory_once(tmp_path: Path) -> None:
    engine, fill = ReferenceEngine(device="sim"), ReferenceRestoring.fill
    path = zckpt.write(engine, tmp_path / "c")
    accelerator.reset()
    with mock.patch.object(
        ReferenceRestoring, "fill", lambda *given: (Batch((f,)) for batch in fill(*given) for f in batch.urgent)
    ):
        zckpt.restore(engine, path)
    counters = accelerator.counters()
    assert 0 < counters["pinned_bytes_taken"] == counters["pinned_bytes_max"]


@on_each
def test_a_run_goes_on_alike_on_another_device(kind: str, tmp_path: Path) -> None:
    """The run moves from the CPU to a device and back."""
    engine = ReferenceEngine(ENGINE_SHAPES)
    engine.train(2)
    zckpt.write(engine, tmp_path / "cpu")
    there = ReferenceEngine(ENGINE_SHAPES, device=devices_of(kind)[-1], seed=1)
    zckpt.restore(there, tmp_path / "cpu", rng=True)
    zckpt.write(there, tmp_path / "there")
    back = ReferenceEngine(ENGINE_SHAPES, seed=2)
    zckpt.restore(back, tmp_path / "there", rng=True)
    back.train(2)
    engine.train(2)
    assert same_all(tensors_of(back), tensors_of(engine))


@on_each
def test_a_device_that_gives_no_bytes_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cpu:
            return tensor
        raise NotImplementedError("no copies")

    on_device, on_host = ReferenceEngine(device=kind), ReferenceEngine()
    tensor = torch.zeros(3, device=kind)
    for engine, client_state in ((on_device, {}), (on_host, {"tensor": tensor})):
        with (
            mock.patch.object(torch.Tensor, "cpu", cpu),
            pytest.raises(zckpt.DeviceError, match=f"device {kind}:0: no copies"),
        ):
            zckpt.write(engine, tmp_path / "c", client_state=client_state)
        assert list(tmp_path.iterdir()) == []
