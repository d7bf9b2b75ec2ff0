"""Where the state of an engine is: by its tensors and files, beside what torch and the system say."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

import zckpt
from tests.support import accelerator
from tests.support.memory import memory
from tests.support.models import batch, make_engine, train
from tests.support.offload import CPU, NVME, PARAM_DISK, WIDE
from zckpt.api.where import TIERS
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from tests.support.cluster import Cluster

MIB = 1 << 20
PARTS = {"master", "exp_avg", "exp_avg_sq", "param", "gradient"}
SMALL_BUCKETS = {"reduce_bucket_size": 20000}
STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2-cpu": {"stage": 2, "offload_optimizer": CPU},
    "3": {"stage": 3},
    "3-cpu+cpu": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}
EVERY_TIME = {"0-fp32", "2-cpu", "3"}


def summed(placement: zckpt.Placement, rank: int) -> dict[str, dict[str, int]]:
    """Bytes of one rank, by part and tier."""
    found: dict[str, dict[str, int]] = {}
    for one in placement.entries:
        if one.rank == rank:
            tiers = found.setdefault(one.part, {})
            tiers[one.tier] = tiers.get(one.tier, 0) + one.nbytes
    return found


def numel_on_rank(engine: DeepSpeedEngine) -> int:
    """The elements that each rank has of the masters and of each moment: as ZeRO cuts them, padding and all."""
    stage = engine.zero_optimization_stage()
    numels = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters()]
    if stage == 3:
        return sum(-(-numel // engine.world_size) for numel in numels)
    assert sum(numels) % (2 * engine.world_size) == 0
    return sum(numels) // (1 if stage == 0 else engine.world_size)


def look(setup: dict[str, Any]) -> None:
    engine = make_engine(**setup, **SMALL_BUCKETS)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert not {"exp_avg", "exp_avg_sq"} & summed(zckpt.where(engine), rank).keys() or setup["stage"] == 0
    train(engine, 1)
    engine.backward(engine(**batch(engine, 0)))
    placement = zckpt.where(engine)
    assert [one.rank for one in placement.ranks] == list(range(ranks))
    assert {one.rank for one in placement.entries} == set(range(ranks))
    assert {one.tier for one in placement.entries} == {"pageable"}
    assert all(one.path is None for one in placement.entries)
    assert placement.total("pageable") == sum(one.nbytes for one in placement.entries)
    numel = numel_on_rank(engine)
    for own in (summed(placement, rank) for rank in range(ranks)):
        large = {part: sum(tiers.values()) for part, tiers in own.items() if part in PARTS}
        assert {part: large[part] for part in ("master", "exp_avg", "exp_avg_sq")} == dict.fromkeys(
            ("master", "exp_avg", "exp_avg_sq"), 4 * numel
        )
        assert large["gradient"] >= 2 * numel
        if setup["stage"] == 0:  # in fp32, where the weights and the masters are one
            assert large.get("param") == (None if setup.get("dtype") == "fp32" else 2 * numel)
    assert {one.dtype for one in placement.entries if one.part == "master"} == {"float32"}
    assert {one.dtype for one in placement.entries if one.part == "param"} <= {"bfloat16"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in EVERY_TIME else pytest.mark.matrix) for c in STAGES])
def test_every_part_is_found_where_it_is(cluster: Cluster, case: str) -> None:
    cluster.run(look, 2, STAGES[case])


def disk_usage(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_blocks * 512 for path in directory.rglob("*.swp")}


def look_at_swap_files(swap: str) -> None:
    engine = make_engine(**WIDE, offload_optimizer=NVME, offload_param=PARAM_DISK, swap=swap)
    train(engine, 1)
    placement = zckpt.where(engine)
    torch.distributed.barrier()
    on_disk = disk_usage(Path(swap))
    assert {one.path: one.nbytes for one in placement.entries if one.tier == "nvme"} == on_disk
    assert placement.total("nvme") == sum(on_disk.values())
    assert placement.total("device") == placement.total("offloaded") == 0
    for rank, told in enumerate(placement.ranks):
        own = summed(placement, rank)
        assert {part for part, tiers in own.items() if "nvme" in tiers} == PARTS
        assert own["master"]["nvme"] >= 2 * 524288 * 4
        directories = {os.path.dirname(one.path) for one in placement.entries if one.path and one.rank == rank}
        assert told.free_bytes.keys() == directories
        disk = os.statvfs(swap)
        assert all(abs(free - disk.f_bavail * disk.f_frsize) < 1 << 30 for free in told.free_bytes.values())
        lines = [line for line in str(placement).splitlines() if f"/rank{rank}" in line]
        assert lines
        assert all(line.startswith(f"rank {rank}: ") for line in lines)
    assert {one.dtype for one in placement.entries if one.path and "optimizer" in one.path} == {"float32"}


@pytest.mark.nvme
def test_swap_files_of_deepspeed_are_found_with_what_they_take_on_the_disk(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(look_at_swap_files, 2, str(tmp_path))


def look_at_moved_states(stage: int, pinned: bool) -> None:
    """On the simulated accelerator, which host memory can be pinned for. The engine itself is on the CPU."""
    get_accelerator().__class__.pin_memory = lambda self, tensor, *_, **__: tensor.pin_memory()
    get_accelerator().__class__._torch_empty_pinned = lambda self, tensor, shape: tensor.new_empty(shape).pin_memory()
    engine = make_engine(stage=stage, **SMALL_BUCKETS)
    train(engine, 1)
    before = summed(zckpt.where(engine), torch.distributed.get_rank())
    assert all(tiers.keys() == {"pageable"} for tiers in before.values())
    engine.offload_states(pin_memory=pinned)
    moved = summed(zckpt.where(engine), torch.distributed.get_rank())
    tier = "pinned" if pinned else "pageable"
    assert moved["master"][tier] == before["master"]["pageable"]
    assert moved["param"][tier] == before["param"]["pageable"]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.matrix), 3])
def test_states_that_deepspeed_has_moved_are_where_they_are_now(cluster: Cluster, stage: int, pinned: bool) -> None:
    cluster.run(accelerator.run, 1, look_at_moved_states, stage, pinned)


def look_at_offloaded_states(setup: dict[str, Any], directory: str) -> None:
    engine = make_engine(**setup, **SMALL_BUCKETS)
    train(engine, 1)
    rank, own_directory = torch.distributed.get_rank(), f"{directory}/{torch.distributed.get_rank()}"
    before = zckpt.where(engine)
    zckpt.offload(engine, own_directory, parts=["master", "exp_avg"])
    placement = zckpt.where(engine)
    tier = ("offloaded", own_directory)
    own = [one for one in placement.entries if one.rank == rank]
    assert {one.part for one in own if (one.tier, one.path) == tier} == {"master", "exp_avg"}
    assert {one.part for one in own if one.tier == "pageable"} >= {"exp_avg_sq"}
    assert {one.path for one in own} == {None, own_directory}
    sums = [sum(one.nbytes for one in found.entries) for found in (before, placement)]
    assert sums[0] == sums[1] == placement.total("pageable") + placement.total("offloaded")
    assert placement.ranks[rank].free_bytes.keys() == {own_directory}
    lines = str(placement).splitlines()
    assert any(line.startswith(f"rank {rank}: ") and f" in {own_directory}, " in line for line in lines)
    zckpt.offload(engine, own_directory)
    everything = zckpt.where(engine)
    assert {one.part for one in everything.entries if one.tier == "pageable"} <= {"buffer", "step"}
    zckpt.reload(engine)
    assert zckpt.where(engine).entries == before.entries


@pytest.mark.parametrize(
    "case", [pytest.param("0", marks=pytest.mark.matrix), pytest.param("2-cpu", marks=pytest.mark.matrix), "3"]
)
def test_offloaded_states_are_on_disk_with_all_of_their_bytes(cluster: Cluster, tmp_path: Path, case: str) -> None:
    cluster.run(look_at_offloaded_states, 2, STAGES[case], str(tmp_path))


def look_at_devices() -> zckpt.Placement:
    device = f"sim:{torch.distributed.get_rank()}"
    before = torch.accelerator.memory_allocated(device)
    engine = ReferenceEngine({"weight": (700, 1000), "bias": (1000,)}, frozen=(), device=device)
    engine.train(1)
    engine.backward()
    masters = engine.tensors["master"]
    masters["weight"] = masters["weight"].cpu().pin_memory()  # moved away, half of it into pinned memory
    masters["bias"] = masters["bias"].cpu()
    gc.collect()
    placement = zckpt.where(engine)
    own = summed(placement, torch.distributed.get_rank())
    half = engine.spans["weight"][1] - engine.spans["weight"][0]
    assert own["master"] == {"pinned": 4 * half, "pageable": 4 * 500}
    assert all(tiers.keys() == {"device"} for part, tiers in own.items() if part != "master")
    told = placement.ranks[torch.distributed.get_rank()]
    state = sum(tiers.get("device", 0) for tiers in own.values())
    assert told.allocated_bytes is not None
    # torch rounds each tensor up, and there are the engine's own few numbers.
    assert state <= told.allocated_bytes - before < state + 16384
    assert told.reserved_bytes is not None
    return placement


def test_devices_and_pinned_memory(cluster: Cluster) -> None:
    one, other = cluster.run(accelerator.run, 2, look_at_devices)
    assert one == other
    table = str(one)
    assert [tier for tier in TIERS if f" {tier} " in table] == ["device", "pinned", "pageable"]
    assert "device allocated" in table


def test_memory_as_the_system_counts_it() -> None:
    engine = ReferenceEngine({"weight": (12 * MIB,)}, frozen=())  # more than malloc would keep
    engine.train(1)
    before, held = zckpt.where(engine), memory("VmRSS")
    (told,) = before.ranks
    assert told.resident_bytes is not None
    assert abs(told.resident_bytes - held) < MIB
    assert told.available_bytes is not None
    assert told.allocated_bytes is told.reserved_bytes is None
    moments = {"exp_avg", "exp_avg_sq"}
    freed = sum(one.nbytes for one in before.entries if one.part in moments)
    assert freed == 2 * 48 * MIB
    for part in moments:
        del engine.tensors[part]
    after = zckpt.where(engine)
    assert after.ranks[0].resident_bytes is not None
    assert abs(told.resident_bytes - after.ranks[0].resident_bytes - freed) < MIB
    assert before.total("pageable") - after.total("pageable") == freed


def test_memory_that_offload_has_freed_is_free_as_the_system_counts_it(tmp_path: Path) -> None:
    engine = ReferenceEngine({"weight": (4 * MIB,)}, frozen=())
    engine.train(1)
    with zckpt.offloaded(engine, tmp_path):  # which takes some memory for good, for code and buffers
        pass
    before = zckpt.where(engine)
    moved = zckpt.offload(engine, tmp_path)
    after = zckpt.where(engine)
    assert after.total("offloaded") == moved.nbytes == before.total("pageable") - after.total("pageable")
    resident = [one.ranks[0].resident_bytes or 0 for one in (before, after)]
    assert resident[0] - resident[1] > 0.98 * moved.nbytes
    zckpt.reload(engine)
    assert zckpt.where(engine).entries == before.entries


def pin_by_deepspeed() -> None:
    os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    engine = make_engine(stage=2, offload_optimizer={**CPU, "pin_memory": True}, **SMALL_BUCKETS)
    master = engine.optimizer.single_partition_of_fp32_groups[0]
    assert get_accelerator().is_pinned(master)
    assert not master.is_pinned()  # that is, by torch
    placement = zckpt.where(engine)
    tiers = {one.part: one.tier for one in placement.entries}
    assert tiers["master"] == "pinned"
    assert {one.tier for one in placement.entries} == {"pinned", "pageable"}


def test_memory_that_deepspeed_has_locked_is_pinned(cluster: Cluster) -> None:
    cluster.run(pin_by_deepspeed, 1)


def test_a_storage_counts_once_and_whole() -> None:
    engine = ReferenceEngine({"weight": (100,), "bias": (50,)}, frozen=())
    flat = torch.zeros(256)
    engine.tensors = {
        "master": {"weight": flat[:100], "bias": flat[100:150]},
        "exp_avg": {"weight": flat[150:], "bias": torch.zeros(3, dtype=torch.int32)},
    }
    placement = zckpt.where(engine)
    assert placement.entries == (
        zckpt.PlacementEntry(0, "master", "float32", "pageable", 1024, None),
        zckpt.PlacementEntry(0, "exp_avg", "int32", "pageable", 12, None),
    )
    assert placement.total("pageable") == 1036
    with pytest.raises(ValueError, match="there is no tier 'gpu'; the tiers are device, pinned"):
        placement.total("gpu")


def test_the_table_of_many_ranks() -> None:
    entries = [
        zckpt.PlacementEntry(rank, part, "float32", tier, (rank + 1) * scale, path)
        for rank in range(10)
        for part, tier, scale, path in (
            ("gradient", "device", 100, None),
            ("exp_avg", "nvme", 1 << 20, f"/nvme/rank{rank}/exp_avg.swp"),
            ("exp_avg", "nvme", 1 << 20, f"/nvme/rank{rank}/more.swp"),
            ("param", "offloaded", 1 << 30, "/scratch"),
            ("master", "device", 1000, None),
        )
    ]
    told = [zckpt.RankMemory(rank, 5 << 30, 7 << 30, None, None, {"/scratch": 9 << 30}) for rank in range(10)]
    table = str(zckpt.Placement(tuple(entries), tuple(told)))
    first, second, directories = table.split("\n\n")
    assert [line.split() for line in second.splitlines()] == [
        ["part", "dtype", "tier", "rank", "8", "rank", "9", "all", "ranks"],
        ["master", "float32", "device", "8.8", "KiB", "9.8", "KiB", "53.7", "KiB"],
        ["exp_avg", "float32", "nvme", "18.0", "MiB", "20.0", "MiB", "110.0", "MiB"],
        ["param", "float32", "offloaded", "9.0", "GiB", "10.0", "GiB", "55.0", "GiB"],
        ["gradient", "float32", "device", "900", "B", "1.0", "KiB", "5.4", "KiB"],
        ["all", "parts", "device", "9.7", "KiB", "10.7", "KiB", "59.1", "KiB"],
        ["all", "parts", "nvme", "18.0", "MiB", "20.0", "MiB", "110.0", "MiB"],
        ["all", "parts", "offloaded", "9.0", "GiB", "10.0", "GiB", "55.0", "GiB"],
        ["resident", "memory", "5.0", "GiB", "5.0", "GiB"],
        ["available", "memory", "7.0", "GiB", "7.0", "GiB"],
    ]
    assert "all ranks" not in first
    assert len(first.splitlines()) == len(second.splitlines())
    lines = directories.splitlines()
    assert len(lines) == 20
    assert lines[:2] == ["rank 0: 2.0 MiB in /nvme/rank0", "rank 0: 1.0 GiB in /scratch, 9.0 GiB free"]


def fail_on_one_rank() -> None:
    engine: Any = ReferenceEngine() if torch.distributed.get_rank() else {}
    with pytest.raises(zckpt.ZckptError, match=r"not a training engine") as raised:
        zckpt.where(engine)
    assert isinstance(raised.value, zckpt.RankError) == bool(torch.distributed.get_rank())


def test_an_error_on_one_rank_is_one_on_all(cluster: Cluster) -> None:
    cluster.run(fail_on_one_rank, 2)
