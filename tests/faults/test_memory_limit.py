"""A machine that has no memory left is simulated by a control group with room for an engine and little more.

The page cache counts, too. A program that needs a copy of the state is killed there, as the last tests show.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import zckpt
from tests.support.fragments import data_of
from tests.support.memory import uncache
from tests.support.memory_cgroup import NAME, NoGroupError, memory_group
from zckpt.engines import adapt
from zckpt.format.digest import digest
from zckpt.testing import ReferenceEngine
from zckpt.transfer.memory import host_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cluster import Cluster, Outcome
    from tests.support.memory_cgroup import MemoryGroup

pytestmark = pytest.mark.linux

MIB = 1 << 20
SMALL = (480 * MIB, 64 * MIB)
"""The bytes of state, and the bytes of memory that are left for zckpt."""
LARGE = (1536 * MIB, 128 * MIB)
WIDTH = 2048
BYTES_PER_LAYER = WIDTH * WIDTH * 12
"""The bytes of fp32 weights and both moments."""
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with memory_group() as control_group:
            yield control_group
    except NoGroupError as error:
        pytest.skip(str(error))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yields a directory on a disk, and removes it afterwards, because pytest would keep the files in ``tmp_path``."""
    if subprocess.check_output(["stat", "--file-system", "--format=%T", tmp_path], text=True).strip() == "tmpfs":
        pytest.skip("the directory for temporary files is in memory")
    with tempfile.TemporaryDirectory(dir=tmp_path) as directory:
        yield Path(directory)


def reference_engine(nbytes: int) -> ReferenceEngine:
    """Returns an engine that has small tensors, too, and moments as if it had trained."""
    shapes: dict[str, tuple[int, ...]] = {f"large{i}": (WIDTH, WIDTH) for i in range(nbytes // BYTES_PER_LAYER)}
    shapes |= {f"small{i}": (40, 101) for i in range(100)}
    engine = ReferenceEngine(shapes, frozen=("large0", "small0"))
    for part in ("exp_avg", "exp_avg_sq"):
        for tensor in engine.tensors[part].values():
            tensor.uniform_()  # the tensor takes no memory before
    return engine


def deepspeed_engine(nbytes: int, stage: int) -> Any:
    import deepspeed

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(nbytes // BYTES_PER_LAYER)))
    torch.set_default_dtype(torch.float32)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    return engine


ENGINES: dict[str, Callable[[int], Any]] = {
    "reference": reference_engine,
    "ZeRO-2": lambda nbytes: deepspeed_engine(nbytes, 2),
    "ZeRO-3": lambda nbytes: deepspeed_engine(nbytes, 3),
}


def tensors_of(engine: Any) -> dict[str, torch.Tensor]:
    return {fragment.key: data_of(fragment) for fragment in adapt(engine).inventory(None).fragments}


def fingerprints(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Returns a digest of each tensor, without copying the tensors, because they may be large."""
    return {key: digest(host_bytes(tensor)) for key, tensor in tensors.items()}


def write_and_read_again(
    group: MemoryGroup, directory: Path, kind: str, nbytes: int, headroom_bytes: int, direct: bool
) -> None:
    group.enter()
    engine = ENGINES[kind](nbytes)
    before = fingerprints(tensors_of(engine))
    budget = None if direct else zckpt.Budget(direct=False)
    for background in (False, True):
        path = directory / f"background-{background}"
        group.close(headroom_bytes)
        zckpt.write(engine, path, background=background, budget=budget)
        zckpt.wait()
        for tensor in tensors_of(engine).values():
            tensor.fill_(0)
        uncache(directory)
        group.close(headroom_bytes)
        zckpt.restore(engine, path, budget=budget)
        assert fingerprints(tensors_of(engine)) == before
    group.close(headroom_bytes)
    used = group.used_bytes()
    moved = zckpt.offload(engine, directory, parts=("master", "optim_states"), budget=budget)
    assert used - group.used_bytes() > 0.99 * moved.nbytes - headroom_bytes
    zckpt.reload(engine, budget=budget)
    assert fingerprints(tensors_of(engine)) == before
    uncache(directory)
    destination_bytes = sum(tensor.nbytes for tensor in tensors_of(engine).values())
    group.close(destination_bytes + headroom_bytes)
    loaded = zckpt.open(path, budget=budget).load()
    assert fingerprints(loaded) == before


def copy_in_memory(group: MemoryGroup, directory: Path, nbytes: int, headroom_bytes: int) -> None:
    group.enter()
    tensors = tensors_of(reference_engine(nbytes))
    group.close(headroom_bytes)
    for tensor in [tensor.clone() for tensor in tensors.values()]:
        assert tensor.is_contiguous()


def load_by_torch(group: MemoryGroup, directory: Path, nbytes: int, headroom_bytes: int) -> None:
    group.enter()
    tensors = tensors_of(reference_engine(nbytes))
    group.close(headroom_bytes)
    torch.save(tensors, directory / "saved.pt")  # this fills the page cache, which the kernel can take back
    (directory / "is saved").touch()
    for key, tensor in torch.load(directory / "saved.pt").items():
        tensors[key].copy_(tensor)


def load_by_deepspeed(group: MemoryGroup, directory: Path, nbytes: int, headroom_bytes: int) -> None:
    group.enter()
    engine = deepspeed_engine(nbytes, 3)
    engine.save_checkpoint(str(directory), tag="saved")
    (directory / "is saved").touch()
    group.close(headroom_bytes)
    engine.load_checkpoint(str(directory), tag="saved")


def run(cluster: Cluster, function: Callable[..., Any], group: MemoryGroup, *args: Any, init: bool) -> Outcome:
    outcome: Outcome = cluster.outcomes(function, 1, group, *args, init=init)[0]
    return outcome


@pytest.mark.offload
@pytest.mark.parametrize(
    ("kind", "size", "direct"),
    [
        ("reference", SMALL, True),
        ("ZeRO-3", SMALL, True),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in itertools.product(ENGINES, [LARGE], [True, False])),
    ],
    ids=str,
)
def test_no_copy_of_the_state_is_needed(
    cluster: Cluster, group: MemoryGroup, disk: Path, kind: str, size: tuple[int, int], direct: bool
) -> None:
    """The state is written, also in the background, restored, moved to a disk and back, and loaded into fresh memory.

    The fresh memory counts as used. No file is in the page cache when it is read.
    """
    outcome = run(cluster, write_and_read_again, group, disk, kind, *size, direct, init=kind != "reference")
    assert not outcome.failed, f"{outcome.error}\n{outcome.output}"
    assert group.kills() == 0


@pytest.mark.parametrize(
    "function",
    [
        copy_in_memory,
        pytest.param(load_by_torch, marks=pytest.mark.matrix),
        pytest.param(load_by_deepspeed, marks=pytest.mark.matrix),
    ],
)
def test_a_process_that_needs_a_copy_is_killed(
    cluster: Cluster, group: MemoryGroup, disk: Path, function: Callable[..., Any]
) -> None:
    """This shows that the other tests can fail."""
    outcome = run(cluster, function, group, disk, *SMALL, init=function is load_by_deepspeed)
    assert outcome.signal == signal.SIGKILL, outcome
    assert group.kills() == 1
    assert function is copy_in_memory or (disk / "is saved").exists()


def test_the_group_of_a_killed_run_is_removed(group: MemoryGroup) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    leftover = group.path.with_name(NAME.format(pid=ended.pid, number=0))
    leftover.mkdir()
    with memory_group() as other:
        assert not leftover.exists()
        assert group.path.exists()
    assert not other.path.exists()
