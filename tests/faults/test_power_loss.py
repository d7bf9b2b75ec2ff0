"""Loss of power at any time of a write: the old checkpoint or the new one is there, whole.

Once the write has returned, the new checkpoint is there. The disk may have kept any part of the changes that were not
synced.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.power import Disk, Killed, fingerprint, make, recorded
from tests.support.states import write_state, write_through
from tests.support.thread_ranks import ONE_THREAD, ThreadRanks
from zckpt.checkpoint.writing import rank_write
from zckpt.format.names import LOCK
from zckpt.plan import data_files
from zckpt.system import linux
from zckpt.testing import ReferenceEngine
from zckpt.transfer.write import run_writes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tests.support.power import Op
    from zckpt.plan.writes import WritePlan
    from zckpt.storage.contract import Store

SHAPES = {"w": (37, 5), "b": (3,)}
VARIANTS = int(os.environ.get("ZCKPT_TEST_VARIANTS", "120"))
"""The number of losses of power in each write. ``make test-crash`` simulates more of them."""


@pytest.fixture
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def write(path: Path, step: int, overwrite: bool = False) -> None:
    write_state(path, 2, SHAPES, parts=("master", "exp_avg"), step=step, seed=step, overwrite=overwrite,
                engine_state={}, client_state={})  # fmt: skip


def found_step(path: Path) -> int:
    """Returns the step of the checkpoint at ``path``, which must be whole, or 0 if there is none."""
    try:
        checkpoint = zckpt.open(path)
    except zckpt.CheckpointNotFoundError as error:
        if error.rule is None:
            return 0
        raise  # `latest` names a checkpoint that is not there
    report = zckpt.validate(path)
    assert report.ok, str(report)
    return checkpoint.step


def lose_power(
    root: Path, before: Disk, ops: list[Op], names: list[str], allowed: Collection[tuple[int, ...]], seed: int
) -> int:
    """Loses power after each operation, in many ways, and checks the steps of the checkpoints then.

    ``names`` are the paths of the checkpoints. ``allowed`` has the steps that they may have. At the end, they must have
    the greatest of its elements. Everything that is left over must be recognised as zckpt's. Returns the number of
    different trees.
    """
    choice = random.Random(seed)
    seen: dict[bytes, tuple[int, ...]] = {}
    target = root / "after"
    for number in range(len(ops) + 1):
        share = -(-VARIANTS // (len(ops) + 1)) if number < len(ops) else max(VARIANTS // 10, 50)
        for _ in range(share):
            tree = before.after_loss(choice)
            key = fingerprint(tree)
            if key not in seen:
                make(tree, target)
                seen[key] = tuple(found_step(target / name) for name in names)
                for path in (target / name for name in names):
                    assert not path.exists() or zckpt.gc(path, dry_run=True).foreign == ()
            steps = seen[key]
            assert steps in allowed, (number, ops[number : number + 1], steps)
            assert number < len(ops) or steps == max(allowed), "the write had returned"
        if number < len(ops):
            before.play(ops[number])
    return len(seen)


@pytest.mark.parametrize("seed", range(2))
def test_an_overwritten_checkpoint_is_whole_after_a_loss_of_power(disk: Path, seed: int) -> None:
    run = disk / "run"
    write(run / "c", 5)
    before = Disk(run)
    with recorded() as recorder:
        write(run / "c", 6, overwrite=True)
    assert lose_power(disk, before, recorder.ops, [".", "c"], {(5, 5), (6, 6)}, seed) > 20


@pytest.mark.parametrize("seed", range(2))
def test_a_new_checkpoint_and_an_older_one_are_whole_after_a_loss_of_power(disk: Path, seed: int) -> None:
    run = disk / "run"
    write(run / "old", 5)
    before = Disk(run)
    with recorded() as recorder:
        write(run / "new", 6)
    allowed = {(5, 5, 0), (5, 5, 6), (6, 5, 6)}
    assert lose_power(disk, before, recorder.ops, [".", "old", "new"], allowed, seed) > 20


def test_the_first_checkpoint_of_a_run_is_whole_after_a_loss_of_power(disk: Path) -> None:
    (disk / "disk").mkdir()
    before = Disk(disk / "disk")
    with recorded() as recorder:
        write(disk / "disk" / "more" / "run" / "c", 6)
    allowed = {(0, 0), (0, 6), (6, 6)}
    assert lose_power(disk, before, recorder.ops, ["more/run", "more/run/c"], allowed, 0) > 20


def write_together(path: Path, step: int, overwrite: bool = False) -> None:
    """Writes a checkpoint of two ranks that write to the same files."""

    def write_rank(rank: int) -> None:
        engine = ReferenceEngine({"w": (37, 5), "b": (3,)}, frozen=())
        engine.train(step)
        zckpt.write(engine, path, overwrite=overwrite, budget=ONE_THREAD, ranks_per_file=2, reuse=None)

    def write_late(store: Store, plan: WritePlan, *arguments: Any) -> bytes:
        """Lets the second rank write when the first one has synced the files, which are the same."""
        if any(file.is_range and not file.header for file in plan.files):
            time.sleep(0.3)
        return run_writes(store, plan, *arguments)

    with mock.patch.object(rank_write, "run_writes", write_late):
        outcomes = ThreadRanks(2).run(write_rank)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    assert not [*path.glob("data-*/rank-00001/master.safetensors")]


def test_files_of_several_ranks_are_whole_after_a_loss_of_power(disk: Path) -> None:
    run = disk / "run"
    write_together(run / "c", 5)
    before = Disk(run)
    with recorded() as recorder:
        write_together(run / "c", 6, overwrite=True)
    assert lose_power(disk, before, recorder.ops, [".", "c"], {(5, 5), (6, 6)}, 0) > 20


@pytest.mark.parametrize("seed", range(2))
def test_a_write_with_a_lock_leaves_a_whole_checkpoint_after_a_loss_of_power(disk: Path, seed: int) -> None:
    run = disk / "run"
    write_through(run / "c", torch.ones(99), step=5)
    before = Disk(run)
    with recorded() as recorder:
        write_through(run / "c", torch.zeros(99), step=6, overwrite=True)
    assert {"link", "rename"} <= {op.call for op in recorder.ops if LOCK in op.path}
    assert lose_power(disk, before, recorder.ops, [".", "c"], {(5, 5), (6, 6)}, seed) > 20


def test_pages_shared_with_swap_files_are_whole_after_a_loss_of_power(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"w": (10_007,), "b": (3,)}
    run, swap = disk / "run", disk / "swap"
    swap.mkdir()
    write(run / "c", 5)
    before = Disk(run)
    monkeypatch.setattr(data_files, "SHARED_BYTES_MIN", 4096)
    with recorded() as recorder:
        write_state(run / "c", 2, shapes, layout="random", step=6, swap=swap, overwrite=True)
    assert any(op.call == "clone" for op in recorder.ops)
    assert lose_power(disk, before, recorder.ops, [".", "c"], {(5, 5), (6, 6)}, 0) > 20


@pytest.mark.parametrize("call", ["clone", "link"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_shared_with_an_older_checkpoint_are_whole_after_a_loss_of_power(
    disk: Path, call: str, overwrite: bool
) -> None:
    run, value = disk / "run", torch.arange(20_000.0)
    write_through(run / "old", value, step=5)
    before = Disk(run)
    links = mock.patch.object(linux, "share_blocks", return_value=False) if call == "link" else nullcontext()
    with recorded() as recorder, links:
        write_through(run / ("old" if overwrite else "new"), value, step=6, overwrite=overwrite)
    assert [op.call for op in recorder.ops if op.path.endswith(".safetensors") and op.call in ("clone", "link")] == [
        call
    ]
    names = [".", "old", *([] if overwrite else ["new"])]
    allowed: Collection[tuple[int, ...]] = {(5, 5), (6, 6)} if overwrite else {(5, 5, 0), (5, 5, 6), (6, 5, 6)}
    assert lose_power(disk, before, recorder.ops, names, allowed, 0) > 20


def test_directories_of_a_killed_writer_are_not_taken_for_durable(disk: Path) -> None:
    """Their names are there already, but were never synced."""
    number = 0
    while True:
        root = disk / str(number)
        root.mkdir()
        before = Disk(root)
        target = root / "more" / "run" / "c"
        with recorded(die_at=number) as recorder:
            try:
                write(target, 5)
                killed = False
            except Killed:
                killed = True
        with recorded() as again:
            write(target, 6, overwrite=True)
        for op in (*recorder.ops, *again.ops):
            before.play(op)
        for seed in range(4):
            make(before.after_loss(random.Random(seed)), disk / "after")
            assert found_step(disk / "after" / "more" / "run") == 6, f"killed before call {number}"
        if not killed:
            break
        assert sorted(path.name[:5] for path in target.iterdir()) == ["data-", "manif"]
        number += 1
    assert number > 20
