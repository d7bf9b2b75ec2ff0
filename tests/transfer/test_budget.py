"""The budget bounds the buffers, the environment sets its defaults, pinned memory is cut into buffers without waste,
and an interrupt ends all tasks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.states import same_all, write_state
from zckpt.plan.reads import STRAIGHT_BYTES_MAX
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.system.threads import Worker
from zckpt.transfer.budget import Budget
from zckpt.transfer.staging import Arena
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
SHAPES = {"large": (1500, 1009), "larger": (2_200_001,), "one": (1,), "none": (0, 3)}


def test_the_budget_bounds_every_buffer() -> None:
    for nbytes in (8 * MIB, 32 * MIB, 256 * MIB):
        budget = zckpt.Budget(nbytes=nbytes, threads=4)
        assert 4 * (budget.batch_bytes(MIB) + 2 * PAGE_BYTES) <= nbytes
    with pytest.raises(ValueError, match="2 MiB"):
        zckpt.Budget(nbytes=MIB)
    with pytest.raises(ValueError, match="threads"):
        zckpt.Budget(threads=0)


def test_a_store_has_as_many_requests_in_flight_as_the_budget_allows() -> None:
    remote, local = (mock.Mock(requests_in_flight=requests) for requests in (16, 0))
    for nbytes, threads in ((8 * MIB, 1), (64 * MIB, 4), (256 * MIB, 16), (1024 * MIB, 16)):
        budget = Budget(nbytes)
        assert budget.serving(local) is budget
        serving = budget.serving(local, remote)
        assert serving.threads == threads
        # A request takes a buffer and as much memory of the store's, or, if it is straight, only the latter.
        assert threads * 2 * (serving.batch_bytes(MIB) + 2 * PAGE_BYTES) <= nbytes
        assert threads == 1 or threads * STRAIGHT_BYTES_MAX <= nbytes


@pytest.mark.parametrize("block_bytes", [4 << 10, 64 << 10, MIB])
@pytest.mark.parametrize("nbytes_per_thread", [2 * MIB, 5 * MIB, 64 * MIB])
def test_pinned_memory_is_cut_into_buffers_without_waste(nbytes_per_thread: int, block_bytes: int) -> None:
    for threads in range(1, 65):
        budget = zckpt.Budget(nbytes_per_thread * threads, threads)
        arena = Arena.within(budget, block_bytes)
        assert arena.nbytes <= budget.nbytes
        assert arena.nbytes.bit_count() == 1  # torch's allocator rounds up to a power of 2
        assert arena.batch_bytes % block_bytes == 0
        room, buffer_bytes = arena.nbytes - PAGE_BYTES, arena.batch_bytes + 2 * PAGE_BYTES
        assert arena.buffers * buffer_bytes <= room < (arena.buffers + 1) * buffer_bytes
        assert arena.buffers >= min(2 * threads, room // (block_bytes + 2 * PAGE_BYTES))
        assert nbytes_per_thread < 16 * MIB or arena.buffers * buffer_bytes > 0.87 * arena.nbytes


def test_small_budgets_write_and_read_the_same(tmp_path: Path) -> None:
    state = write_state(tmp_path / "c", 2, SHAPES)
    loaded = zckpt.open(tmp_path / "c", budget=zckpt.Budget(nbytes=2 * MIB, threads=1)).load()
    assert same_all(loaded, state.full)


def test_the_environment_sets_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zckpt.Budget.from_environment() == zckpt.Budget()
    monkeypatch.setenv("ZCKPT_BUDGET_BYTES", str(64 * MIB))
    monkeypatch.setenv("ZCKPT_THREADS", "2")
    monkeypatch.setenv("ZCKPT_DIRECT", "0")
    assert zckpt.Budget.from_environment() == zckpt.Budget(64 * MIB, 2, False)
    for variable, value in (("ZCKPT_THREADS", "many"), ("ZCKPT_DIRECT", "yes"), ("ZCKPT_BUDGET_BYTES", "256M")):
        with monkeypatch.context() as context:
            context.setenv(variable, value)
            with pytest.raises(ValueError, match=variable):
                zckpt.Budget.from_environment()


def test_the_environment_turns_digests_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path / "c", 1, SHAPES, parts=("master",))
    (file,) = (tmp_path / "c").rglob("master.safetensors")
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 100)
        opened.write(b"\xff\x00\xff\x00")
    with pytest.raises(zckpt.DigestError):
        zckpt.open(tmp_path / "c").load()
    monkeypatch.setenv("ZCKPT_VERIFY", "0")
    zckpt.open(tmp_path / "c").load()
    with pytest.raises(zckpt.DigestError):
        zckpt.open(tmp_path / "c").load(verify=True)


def test_a_budget_or_progress_of_another_type_is_refused_by_every_call(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    engine, before = zckpt.TrainState(model, torch.optim.AdamW(model.parameters())), model.weight.detach().clone()
    path = zckpt.write(engine, tmp_path / "c")
    number: Any = 1 << 28
    for call in (
        lambda: zckpt.open(path, budget=number),
        lambda: zckpt.restore(engine, path, budget=number),
        lambda: zckpt.export(path, tmp_path / "e", budget=number),
        lambda: zckpt.export(zckpt.open(path), tmp_path / "e", budget=number),
        lambda: zckpt.validate(path, budget=number),
        lambda: zckpt.diff(path, path, budget=number),
        lambda: zckpt.repair(path, budget=number),
        lambda: zckpt.offload(engine, tmp_path / "o", budget=number),
    ):
        with pytest.raises(TypeError, match=r"budget must be .* zckpt\.Budget\(nbytes="):
            call()
    zckpt.offload(engine, tmp_path / "o")
    with pytest.raises(TypeError, match="budget must"):
        zckpt.reload(engine, budget=number)
    zckpt.reload(engine)
    wrong: list[Any] = [True, zckpt.ProgressBar]
    for progress in wrong:
        with pytest.raises(TypeError, match=r"progress must .*zckpt\.ProgressBar\(\)"):
            zckpt.restore(engine, path, progress=progress)
        with pytest.raises(TypeError, match=r"progress must .*zckpt\.ProgressBar\(\)"):
            zckpt.open(path).load(progress=progress)
    assert torch.equal(model.weight, before)


def test_an_interrupt_is_raised_even_if_the_first_task_cannot_be_made() -> None:
    """The first wait for a thread is interrupted. Only then a thread asks for its first task, and this fails."""
    interrupted = threading.Event()
    wait = Worker.wait

    def interrupted_once(worker: Worker, timeout: float | None = None) -> bool:
        if not interrupted.is_set():
            raise KeyboardInterrupt
        return wait(worker, timeout)

    def no_task() -> Callable[[], None]:
        assert interrupted.wait(60)
        raise OSError("no task")

    with mock.patch.object(Worker, "wait", interrupted_once), pytest.raises(KeyboardInterrupt):
        run_tasks((no_task() for _ in range(1)), 4, interrupted.set)
