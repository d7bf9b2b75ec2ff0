"""zckpt.where says in which memory and files the state of an engine is. The tests compare this with the tensors and
files of the engine, and with what torch and the system say."""

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
from zckpt.system.linux import trim_heap
from zckpt.testing import ReferenceEngine
from zckpt.tools.where import TIERS

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from tests.support.cluster import Cluster

MIB = 1 << 20
PARTS = {"master", "exp_avg", "exp_avg_sq", "param", "gradient"}
SMALL_BUCKETS: dict[str, Any] = {"reduce_bucket_size": 20000}
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
    """Returns the bytes of one rank by part and tier."""
    sums: dict[str, dict[str, int]] = {}
    for entry in placement.entries:
        if entry.rank == rank:
            tiers = sums.setdefault(entry.part, {})
            tiers[entry.tier] = tiers.get(entry.tier, 0) + entry.nbytes
    return sums


def numel_on_rank(engine: DeepSpeedEngine) -> int:
    """Returns how many elements of the masters, and of each moment, one rank has. This includes the padding of ZeRO."""
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
    assert [rank_memory.rank for rank_memory in placement.ranks] == list(range(ranks))
    assert {entry.rank for entry in placement.entries} == set(range(ranks))
    assert {entry.tier for entry in placement.entries} == {"pageable"}
    assert all(entry.path is None for entry in placement.entries)
    assert placement.total("pageable") == sum(entry.nbytes for entry in placement.entries)
    numel = numel_on_rank(engine)
    for sums_of_rank in (summed(placement, rank) for rank in range(ranks)):
        large = {part: sum(tiers.values()) for part, tiers in sums_of_rank.items() if part in PARTS}
        assert {part: large[part] for part in ("master", "exp_avg", "exp_avg_sq")} == dict.fromkeys(
            ("master", "exp_avg", "exp_avg_sq"), 4 * numel
        )
        assert large["gradient"] >= 2 * numel
        if setup["stage"] == 0:  # with fp32, the weights are the masters
            assert large.get("param") == (None if setup.get("dtype") == "fp32" else 2 * numel)
    assert {entry.dtype for entry in placement.entries if entry.part == "master"} == {"float32"}
    assert {entry.dtype for entry in placement.entries if entry.part == "param"} <= {"bfloat16"}


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
    assert {entry.path: entry.nbytes for entry in placement.entries if entry.tier == "nvme"} == on_disk
    assert placement.total("nvme") == sum(on_disk.values())
    assert placement.total("device") == placement.total("offloaded") == 0
    for rank, rank_memory in enumerate(placement.ranks):
        sums_of_rank = summed(placement, rank)
        assert {part for part, tiers in sums_of_rank.items() if "nvme" in tiers} == PARTS
        assert sums_of_rank["master"]["nvme"] >= 2 * 524288 * 4
        directories = {os.path.dirname(entry.path) for entry in placement.entries if entry.path and entry.rank == rank}
        assert rank_memory.free_bytes.keys() == directories
        disk = os.statvfs(swap)
        assert all(abs(free - disk.f_bavail * disk.f_frsize) < 1 << 30 for free in rank_memory.free_bytes.values())
        lines = [line for line in str(placement).splitlines() if f"/rank{rank}" in line]
        assert lines
        assert all(line.startswith(f"rank {rank}: ") for line in lines)
    assert {entry.dtype for entry in placement.entries if entry.path and "optimizer" in entry.path} == {"float32"}


@pytest.mark.nvme
def test_swap_files_of_deepspeed_count_with_the_space_that_they_take(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(look_at_swap_files, 2, str(tmp_path))


def look_at_moved_states(stage: int, pinned: bool) -> None:
    """Runs on the simulated accelerator, because host memory can be pinned for it. The engine itself is on the CPU."""
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


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.matrix), 3])
def test_states_that_deepspeed_has_moved_are_found(cluster: Cluster, stage: int, pinned: bool) -> None:
    cluster.run(accelerator.run, 1, look_at_moved_states, stage, pinned)


def look_at_offloaded_states(setup: dict[str, Any], directory: str) -> None:
    engine = make_engine(**setup, **SMALL_BUCKETS)
    train(engine, 1)
    rank, own_directory = torch.distributed.get_rank(), f"{directory}/{torch.distributed.get_rank()}"
    before = zckpt.where(engine)
    zckpt.offload(engine, own_directory, parts=["master", "exp_avg"])
    placement = zckpt.where(engine)
    tier = ("offloaded", own_directory)
    entries_of_rank = [entry for entry in placement.entries if entry.rank == rank]
    assert {entry.part for entry in entries_of_rank if (entry.tier, entry.path) == tier} == {"master", "exp_avg"}
    assert {entry.part for entry in entries_of_rank if entry.tier == "pageable"} >= {"exp_avg_sq"}
    assert {entry.path for entry in entries_of_rank} == {None, own_directory}
    sums = [sum(entry.nbytes for entry in state.entries) for state in (before, placement)]
    assert sums[0] == sums[1] == placement.total("pageable") + placement.total("offloaded")
    assert placement.ranks[rank].free_bytes.keys() == {own_directory}
    lines = str(placement).splitlines()
    assert any(line.startswith(f"rank {rank}: ") and f" in {own_directory}, " in line for line in lines)
    zckpt.offload(engine, own_directory)
    everything = zckpt.where(engine)
    assert {entry.part for entry in everything.entries if entry.tier == "pageable"} <= {"buffer", "step"}
    zckpt.reload(engine)
    assert zckpt.where(engine).entries == before.entries


@pytest.mark.offload
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
    masters["weight"] = masters["weight"].cpu().pin_memory()  # the masters are moved, half of them into pinned memory
    masters["bias"] = masters["bias"].cpu()
    gc.collect()
    placement = zckpt.where(engine)
    sums_of_rank = summed(placement, torch.distributed.get_rank())
    half = engine.ranges["weight"][1] - engine.ranges["weight"][0]
    assert sums_of_rank["master"] == {"pinned": 4 * half, "pageable": 4 * 500}
    assert all(tiers.keys() == {"device"} for part, tiers in sums_of_rank.items() if part != "master")
    rank_memory = placement.ranks[torch.distributed.get_rank()]
    state = sum(tiers.get("device", 0) for tiers in sums_of_rank.values())
    assert rank_memory.allocated_bytes is not None
    # torch rounds the bytes of each tensor up, and the engine has a few numbers of its own.
    assert state <= rank_memory.allocated_bytes - before < state + 16384
    assert rank_memory.reserved_bytes is not None
    return placement


@pytest.mark.usefixtures("devices")
def test_devices_and_pinned_memory(cluster: Cluster) -> None:
    first, second = cluster.run(accelerator.run, 2, look_at_devices)
    assert first == second
    table = str(first)
    assert [tier for tier in TIERS if f" {tier} " in table] == ["device", "pinned", "pageable"]
    assert "device allocated" in table


def test_the_system_counts_the_same_memory() -> None:
    engine = ReferenceEngine({"weight": (12 * MIB,)}, frozen=())
    engine.train(1)
    gc.collect()  # otherwise, what other tests have left may be freed between the measurements
    trim_heap()  # the C library may keep memory that is freed, even a tensor of 48 MiB
    before, held = zckpt.where(engine), memory("VmRSS")
    (rank_memory,) = before.ranks
    assert rank_memory.resident_bytes is not None
    assert abs(rank_memory.resident_bytes - held) < MIB
    assert rank_memory.available_bytes is not None
    assert rank_memory.allocated_bytes is rank_memory.reserved_bytes is None
    moments = {"exp_avg", "exp_avg_sq"}
    freed = sum(entry.nbytes for entry in before.entries if entry.part in moments)
    assert freed == 2 * 48 * MIB
    for part in moments:
        del engine.tensors[part]
    trim_heap()
    after = zckpt.where(engine)
    assert after.ranks[0].resident_bytes is not None
    assert abs(rank_memory.resident_bytes - after.ranks[0].resident_bytes - freed) < MIB
    assert before.total("pageable") - after.total("pageable") == freed


@pytest.mark.offload
def test_the_system_counts_memory_that_offload_has_freed_as_free(tmp_path: Path) -> None:
    engine = ReferenceEngine({"weight": (4 * MIB,)}, frozen=())
    engine.train(1)
    with zckpt.offloaded(engine, tmp_path):  # the first offload takes memory for code and buffers, and keeps it
        pass
    before = zckpt.where(engine)
    moved = zckpt.offload(engine, tmp_path)
    after = zckpt.where(engine)
    assert after.total("offloaded") == moved.nbytes == before.total("pageable") - after.total("pageable")
    resident = [placement.ranks[0].resident_bytes or 0 for placement in (before, after)]
    assert resident[0] - resident[1] > 0.9 * moved.nbytes, "the smallest part has more than a tenth"
    zckpt.reload(engine)
    assert zckpt.where(engine).entries == before.entries


def pin_by_deepspeed() -> None:
    os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    engine = make_engine(stage=2, offload_optimizer={**CPU, "pin_memory": True}, **SMALL_BUCKETS)
    master = engine.optimizer.single_partition_of_fp32_groups[0]
    assert get_accelerator().is_pinned(master)
    assert not master.is_pinned()  # because torch did not pin it
    placement = zckpt.where(engine)
    tiers = {entry.part: entry.tier for entry in placement.entries}
    assert tiers["master"] == "pinned"
    assert {entry.tier for entry in placement.entries} == {"pinned", "pageable"}


def test_memory_that_deepspeed_has_locked_is_pinned(cluster: Cluster) -> None:
    cluster.run(pin_by_deepspeed, 1)


def test_a_storage_counts_once_and_with_all_its_bytes() -> None:
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
    with pytest.raises(ValueError, match=r"no tier 'gpu'.*device, pinned"):
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
    memories = [zckpt.RankMemory(rank, 5 << 30, 7 << 30, None, None, {"/scratch": 9 << 30}) for rank in range(10)]
    table = str(zckpt.Placement(tuple(entries), tuple(memories)))
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


def test_an_error_on_one_rank_is_an_error_on_all(cluster: Cluster) -> None:
    cluster.run(fail_on_one_rank, 2)
