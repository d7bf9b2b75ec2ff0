"""Ranks on several machines write to one file system that all of them mount, while links and machines fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.faults import Fault, faulty
from tests.support.machine_ranks import assert_told, cut_until_told, meanwhile, outcomes_on, values_on
from tests.support.models import make_engine, train
from tests.support.patience import give_up_after
from tests.support.runs import assert_goes_on_alike, restore_and_go_on, write_and_go_on
from tests.support.waiting import wait_until
from zckpt.storage.lock import DEAD_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import Cluster
    from tests.support.machines import Machine, Machines

GIVE_UP_SECONDS = 8
TOLD_SECONDS = 30
"""The longest time after which a rank has to know that another one is gone. It has a margin for busy machines."""


@pytest.mark.parametrize("stage", [1, 2])
def test_a_restored_run_goes_on_bit_for_bit(machines: Machines, files: Machine, cluster: Cluster, stage: int) -> None:
    path, setup = f"{files.common}/run/c", {"stage": stage}
    through = values_on(cluster, machines.nodes, write_and_go_on, path, setup)
    resumed = values_on(cluster, machines.nodes, restore_and_go_on, path, setup, 0)
    assert_goes_on_alike(through, resumed)
    assert zckpt.validate(files.exported / "run").ok


def replace_and_restore(run: str) -> list[tuple[int, int]]:
    """Replaces a checkpoint again and again. Returns what was restored, and the step of what was opened, each time."""
    engine, seen = make_engine(stage=2), []
    for number in range(4):
        train(engine, 1, number)
        state = {"number": number, "text": "x" * 500 * (number % 3)}  # so that the manifest's size changes
        zckpt.write(engine, f"{run}/c", client_state=state, overwrite=True)
        seen.append((zckpt.restore(engine, run)["number"], zckpt.open(run).step))
        torch.distributed.barrier()
    return seen


def test_every_machine_sees_at_once_what_has_replaced_a_checkpoint(
    machines: Machines, files: Machine, cluster: Cluster
) -> None:
    seen = values_on(cluster, machines.nodes, replace_and_restore, f"{files.common}/run")
    assert seen == [[(number, number + 1) for number in range(4)]] * 3


def write_and_be_disturbed(run: str, marks: str, who: int) -> tuple[str, str, int | None, float] | None:
    """Writes a checkpoint, and then a second one, in the middle of which the test does something to a machine: it waits
    for the file ``in-the-middle``, and makes the file ``disturbed``. Rank ``who`` goes on after that.

    Returns the error of this rank, and after how many seconds it has come, or None if there is no error.
    """
    engine = make_engine(stage=2)
    give_up_after(GIVE_UP_SECONDS)
    train(engine, 1)
    zckpt.write(engine, f"{run}/old")
    rank = engine.global_rank

    def be_disturbed(operation: Callable[[], Any], file: str) -> Any:
        Path(marks, "in-the-middle").touch()
        wait_until(Path(marks, "disturbed").exists)
        return operation()

    train(engine, 1)
    try:
        with faulty(Fault(be_disturbed, names=("write",)) if rank == who else None):
            zckpt.write(engine, f"{run}/new")
    except zckpt.ZckptError as error:
        seconds = time.time() - Path(marks, "disturbed").stat().st_mtime
        Path(marks, f"told-{rank}").touch()
        return type(error).__name__, str(error), getattr(error, "rank", None), seconds
    return None


def write_again(run: str) -> None:
    engine = make_engine(stage=2, seed=1)
    zckpt.restore(engine, run)
    train(engine, 1, 1)
    zckpt.write(engine, f"{run}/new")


def assert_old_is_whole(run: Path) -> None:
    assert zckpt.open(run).step == 1
    assert zckpt.validate(run).ok


def assert_both_are_whole(run: Path) -> None:
    """Checks that both checkpoints of a run are whole, and that nothing else is there."""
    assert zckpt.open(run).step == 2
    assert all(zckpt.validate(run / name).ok for name in ("old", "new"))
    assert sorted(os.listdir(run)) == ["latest", "new", "old"]
    assert len(os.listdir(run / "new")) == 2


@pytest.mark.parametrize("who", [0, 2])
def test_ranks_are_told_of_a_cut_link(machines: Machines, files: Machine, cluster: Cluster, who: int) -> None:
    node, marks, run = machines.nodes[who], machines.directory, f"{files.common}/run"

    with cut_until_told(node, marks, {0, 1, 2} - {who}):
        outcomes = outcomes_on(cluster, machines.nodes, write_and_be_disturbed, run, str(marks), who)
    assert_told(outcomes, who, TOLD_SECONDS)
    assert outcomes[who].value[0] in ("RankError", "StorageError"), outcomes[who]
    assert_old_is_whole(files.exported / "run")
    values_on(cluster, machines.nodes, write_again, run)
    assert_both_are_whole(files.exported / "run")


@pytest.mark.parametrize(("who", "then"), [(2, "write"), (0, "write"), (0, "gc")])
def test_ranks_are_told_of_a_killed_machine(
    machines: Machines, files: Machine, cluster: Cluster, who: int, then: str
) -> None:
    """Rank 0 has the lock and removes what a write has made. So this stays if the machine of rank 0 is killed."""
    node, marks, run = machines.nodes[who], machines.directory, f"{files.common}/run"
    new = files.exported / "run" / "new"

    def kill() -> None:
        node.kill()
        (marks / "disturbed").touch()

    with meanwhile((marks / "in-the-middle").exists, kill):
        outcomes = outcomes_on(cluster, machines.nodes, write_and_be_disturbed, run, str(marks), who)
    assert_told(outcomes, who, TOLD_SECONDS)
    assert outcomes[who].signal == signal.SIGKILL
    assert_old_is_whole(files.exported / "run")
    assert new.exists() == (who == 0)
    node.start()
    if who == 0:
        gc = [sys.executable, "-m", "zckpt", "gc", run]
        node.run(gc)
        assert (new / "write.lock").exists(), "the writer may be alive, because it was another boot's"
        os.utime(new / "write.lock", (0, time.time() - DEAD_SECONDS))
        node.remount_common()  # otherwise the machine would see the new time some seconds later
        if then == "gc":
            node.run(gc)
            assert not new.exists()
    values_on(cluster, machines.nodes, write_again, run)
    assert_both_are_whole(files.exported / "run")


def test_a_write_waits_for_a_file_server_that_cannot_be_reached_for_a_while(
    machines: Machines, files: Machine, cluster: Cluster
) -> None:
    marks, run = machines.directory, f"{files.common}/run"

    def cut_for_a_while() -> None:
        files.cut()
        (marks / "disturbed").touch()
        time.sleep(GIVE_UP_SECONDS / 2)
        files.mend()

    with meanwhile((marks / "in-the-middle").exists, cut_for_a_while):
        assert values_on(cluster, machines.nodes, write_and_be_disturbed, run, str(marks), 2) == [None] * 3
    assert_both_are_whole(files.exported / "run")
