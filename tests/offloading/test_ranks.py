"""Tests of zckpt.offload and zckpt.reload on several ranks, with DeepSpeed's engines, and on a device."""

from __future__ import annotations

import os
import resource
import signal
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.accelerator import DEVICE_TYPE
from tests.support.memory import memory
from tests.support.models import batch, make_engine, train
from tests.support.offload import CPU
from tests.support.reference_engine import tensors_of
from tests.support.runs import everything
from tests.support.scratch import flip_a_bit
from zckpt.engines import adapt
from zckpt.engines.away import away
from zckpt.offloading import files
from zckpt.testing import ReferenceEngine
from zckpt.transfer import write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.offload
SHAPES = {"wide": (700, 701), "odd": (63, 65), "one": (1,), "empty": (0, 3), "frozen": (63, 63)}


def damage(engine: Any, part: str, name: str | None = None) -> None:
    """Flips a bit in each offloaded storage of the part, or only in the one with this name."""
    for storage in away(engine).moved:  # type: ignore[union-attr]
        if storage.parts == (part,) and name in (None, storage.name):
            flip_a_bit(storage, storage.nbytes // 2)


def one_rank_changes_its_state(directory: str) -> None:
    engine, expected = ReferenceEngine(SHAPES), ReferenceEngine(SHAPES)
    for each in (engine, expected):
        each.train(2)
    run_writes = write.run_writes

    def write_and_change(*arguments: Any, **options: Any) -> bytes:
        table = run_writes(*arguments, **options)
        for each in (engine, expected) if engine.rank else ():
            each.tensors["exp_avg"]["wide"][7] = 7
        return table

    with mock.patch.object(files, "run_writes", write_and_change):
        zckpt.offload(engine, directory, background=True).wait()
    tiers = {(entry.rank, entry.tier) for entry in zckpt.where(engine).entries if entry.part == "exp_avg"}
    assert tiers == {(0, "offloaded"), (1, "pageable")}
    zckpt.reload(engine)
    assert away(engine) is None
    torch.testing.assert_close(tensors_of(engine), tensors_of(expected), rtol=0, atol=0)


def test_a_change_on_one_rank_during_an_offload_in_the_background_is_not_lost(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(one_rank_changes_its_state, 2, str(tmp_path))


def one_rank_fails(directory: str) -> None:
    engine = ReferenceEngine(SHAPES)
    engine.train(2)
    before = tensors_of(engine)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for background in (False, True):
        if engine.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        error = zckpt.NoSpaceError if engine.rank == 1 else zckpt.RankError
        with pytest.raises(error):
            zckpt.offload(engine, directory, background=background).wait()
        zckpt.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert away(engine) is None
    torch.testing.assert_close(tensors_of(engine), before, rtol=0, atol=0)
    zckpt.write(engine, f"{directory}/ck")
    zckpt.offload(engine, directory)
    if engine.rank == 1:
        damage(engine, "exp_avg")
    with pytest.raises(zckpt.DigestError if engine.rank == 1 else zckpt.RankError, match="exp_avg/"):
        zckpt.reload(engine)
    for call in (engine.step, lambda: zckpt.write(engine, f"{directory}/other")):
        with pytest.raises(zckpt.OffloadedError, match="exp_avg/"):
            call()
    zckpt.restore(engine, f"{directory}/ck")
    torch.testing.assert_close(tensors_of(engine), before, rtol=0, atol=0)
    nowhere: Any = None if engine.rank else directory
    with pytest.raises(TypeError if engine.rank else zckpt.RankError, match="not NoneType"):
        zckpt.offload(engine, nowhere)
    with pytest.raises(zckpt.RankError, match="different parts arguments"):
        zckpt.offload(engine, directory, parts=["master"] if engine.rank else ["param"])
    if engine.rank == 0:  # the other rank has no elements of this tensor
        engine.tensors["exp_avg"]["extra"] = torch.ones(1000)
        engine.shapes["extra"], engine.ranges["extra"] = (1000,), (0, 1000)
    zckpt.offload(engine, directory, parts=["exp_avg"])
    with pytest.raises(zckpt.OffloadedError):
        engine.step()
    zckpt.reload(engine)
    assert away(engine) is None


def test_a_failure_on_one_rank_is_an_error_on_all(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(one_rank_fails, 2, str(tmp_path))


def deepspeed_engine(directory: str, setup: dict[str, Any]) -> None:
    engine = make_engine(**setup)
    train(engine, 2)
    zckpt.write(engine, f"{directory}/plain")
    before = everything(engine)
    zckpt.offload(engine, f"{directory}/scratch")
    zckpt.write(engine, f"{directory}/out")  # the weights that ZeRO-3 gathers after a write are offloaded
    plain, out = (zckpt.open(f"{directory}/{which}").load() for which in ("plain", "out"))
    assert plain.keys() == out.keys()
    assert all(torch.equal(plain[key], out[key]) for key in plain)
    inputs, stock = batch(engine, 2), f"{directory}/stock"
    for call, name in (
        (lambda: engine(**inputs), "forward"),
        (lambda: engine.module(**inputs), "a call of the module"),
        (engine.module.half, "a conversion of the module"),
        (lambda: engine.module.to("cpu"), "a conversion of the module"),
        (engine.module.state_dict, "state_dict"),
        (engine.module_state_dict, "state_dict"),
        (engine.state_dict, "state_dict"),
        (engine._zero3_consolidated_16bit_state_dict, "state_dict"),
        (lambda: engine.backward(torch.zeros((), requires_grad=True)), "backward"),
        (engine.step, "step"),
        (lambda: engine.module.load_state_dict({}), "load_state_dict"),
        (engine.optimizer.step, "step"),
        (engine.optimizer.state_dict, "state_dict"),
        (lambda: engine.optimizer.load_state_dict({}), "load_state_dict"),
        (engine.zero_grad, "zero_grad"),
        (lambda: engine.save_checkpoint(stock), "save_checkpoint"),
        (lambda: engine.load_checkpoint(stock), "load_checkpoint"),
        (lambda: engine.save_16bit_model(stock), "save_16bit_model"),
        (engine.offload_states, "offload_states"),
        (engine.reload_states, "reload_states"),
    ):
        if name != "zero_grad" or "gradient" in away(engine).parts:  # type: ignore[union-attr]
            with pytest.raises(zckpt.OffloadedError, match=f"{name} uses .*zckpt.offload"):
                call()
    assert not os.path.exists(stock)
    zckpt.reload(engine, ["param"])
    if "gradient" in away(engine).parts:  # type: ignore[union-attr]
        loss = engine(**inputs)
        with pytest.raises(zckpt.OffloadedError, match=r"backward uses .*gradient"):
            loss.backward()  # instead of engine.backward(loss)
    zckpt.reload(engine)
    engine.save_checkpoint = ours = lambda directory: type(engine).save_checkpoint(engine, directory)
    zckpt.offload(engine, f"{directory}/scratch", parts=["optim_states"])
    with pytest.raises(zckpt.OffloadedError, match="save_checkpoint uses"):
        engine.save_checkpoint(stock)
    zckpt.offload(engine, f"{directory}/scratch")
    damage(engine, "exp_avg")
    with pytest.raises(zckpt.DigestError, match=r"key exp_avg/.*weight"):
        zckpt.reload(engine)
    with pytest.raises(zckpt.OffloadedError, match="exp_avg/"):
        engine(**inputs)
    zckpt.restore(engine, f"{directory}/out", rng=True)
    assert away(engine) is None
    assert engine.save_checkpoint is ours
    assert everything(engine) == before
    expected = train(engine, 2, 2)
    zckpt.restore(engine, f"{directory}/plain", rng=True)
    assert train(engine, 2, 2) == expected


def deepspeed_engines(directory: str) -> None:
    deepspeed_engine(f"{directory}/3", {"stage": 3, "model": "odd", "groups": True})
    deepspeed_engine(f"{directory}/1", {"stage": 1, "frozen": True})
    deepspeed_engine(f"{directory}/2", {"stage": 2, "offload_optimizer": CPU})


def test_engines_of_deepspeed_are_guarded_written_and_restored(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(deepspeed_engines, 2, str(tmp_path))


def buckets_of_deepspeed(directory: str) -> None:
    numel = 50 << 20
    for stage in (3, 1):
        engine = make_engine(stage=stage, reduce_bucket_size=numel, config={"gradient_accumulation_steps": 2})
        train(engine, 3)  # so the engine is between two micro steps
        zckpt.offload(engine, directory)
        zckpt.reload(engine)
        (bucket,) = engine.optimizer.ipg_buckets.values()
        buffer = bucket.buffer if stage == 3 else bucket.buffer[0]
        shape, dtype, before = buffer.shape, buffer.dtype, memory("VmRSS")
        out = zckpt.offload(engine, directory, parts=["gradient"])
        assert out.nbytes > numel * dtype.itemsize
        entries = [entry for entry in zckpt.where(engine).entries if entry.rank == engine.global_rank]
        offloaded = {entry.path: entry.nbytes for entry in entries if entry.tier == "offloaded"}
        assert sum(offloaded.values()) == out.nbytes
        assert offloaded[None] == numel * dtype.itemsize
        saved = {storage.saved for storage in away(engine).moved if storage.saved is not None}  # type: ignore[union-attr]
        assert sum(os.stat(saved_range.file.path).st_size for saved_range in saved) < 1 << 20
        zckpt.reload(engine)
        assert memory("VmRSS") - before < 16 << 20
        assert (buffer.shape, buffer.dtype, buffer.untyped_storage().nbytes()) == (shape, dtype, numel * dtype.itemsize)
        buffer[-1] = 1
        bucket.elements = 1  # as if the bucket had a gradient
        assert not any(holding.workspace for holding in adapt(engine).memory())
        bucket.elements = 0


def test_empty_buckets_are_not_written_and_come_back_untouched(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(buckets_of_deepspeed, 2, str(tmp_path))


def lost_buffers(directory: str) -> None:
    engine = make_engine(stage=2, offload_optimizer={**CPU, "pin_memory": True})
    train(engine, 2)
    zckpt.write(engine, f"{directory}/ck")
    before = everything(engine)
    zckpt.offload(engine, f"{directory}/scratch")
    damage(engine, "param", "param_buffer_of_bit16_for_cpu_offload_groups")
    with pytest.raises(zckpt.DigestError, match="key param/param_buffer_of_bit16"):
        zckpt.reload(engine)
    with pytest.raises(zckpt.OffloadedError, match="param/param_buffer_of_bit16"):
        engine.step()
    zckpt.restore(engine, f"{directory}/ck", rng=True)  # the checkpoint has no such tensor
    assert away(engine) is None
    assert everything(engine) == before


def test_a_lost_buffer_that_no_checkpoint_has_is_made_again(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(lost_buffers, 1, str(tmp_path))


def muon(directory: str) -> None:
    for stage in (1, 2, 3):
        engine = make_engine(stage=stage, optimizer="muon", model="odd", reduce_scatter=False)
        train(engine, 1)
        loss = engine(**batch(engine, 1))
        zckpt.offload(engine, directory, parts=["optim_states"])
        with pytest.raises(zckpt.OffloadedError, match="backward uses momentum_buffer"):
            engine.backward(loss)
        zckpt.reload(engine, ["momentum_buffer"])
        engine.backward(loss)
        with pytest.raises(zckpt.OffloadedError, match="step uses exp_avg"):
            engine.step()
        zckpt.reload(engine)
        with torch.no_grad():
            engine.step()


def test_backward_passes_of_muon_use_its_momentum(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(muon, 1, str(tmp_path))


def pinned_by_deepspeed(directory: str) -> None:
    os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    engine = make_engine(stage=2, offload_optimizer={**CPU, "pin_memory": True})
    train(engine, 1)
    before = zckpt.where(engine)
    zckpt.offload(engine, directory)
    out = zckpt.where(engine)
    assert out.total("pinned") == before.total("pinned") > 0
    assert out.total("offloaded") > 0
    zckpt.reload(engine)
    assert zckpt.where(engine).entries == before.entries


def test_memory_that_deepspeed_itself_has_locked_is_not_offloaded(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(pinned_by_deepspeed, 1, str(tmp_path))


@pytest.mark.sim
@pytest.mark.parametrize("auto", [False, True])
def test_on_a_device(tmp_path: Path, auto: bool) -> None:
    engine, plain = (ReferenceEngine(SHAPES, device=DEVICE_TYPE) for _ in range(2))
    pinned = torch.arange(10_000, dtype=torch.float32).pin_memory()  # as DeepSpeed pins it; it cannot be resized
    engine.tensors["exp_avg"]["pinned"], engine.shapes["pinned"], engine.ranges["pinned"] = (
        pinned,
        (10_000,),
        (0, 10_000),
    )
    for _ in range(3):
        plain.train(1)
        engine.backward()
        engine.step()
        out = zckpt.offload(engine, tmp_path, auto=auto)
        assert out.nbytes > pinned.nbytes
        if not auto:
            zckpt.reload(engine)
    zckpt.reload(engine)
    assert pinned.is_pinned()
    assert torch.equal(pinned, torch.arange(10_000, dtype=torch.float32))
    del engine.tensors["exp_avg"]["pinned"]
    torch.testing.assert_close(tensors_of(engine), tensors_of(plain), rtol=0, atol=0)
