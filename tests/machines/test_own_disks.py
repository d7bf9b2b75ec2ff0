"""Ranks on several machines write to the same path, which is on each machine's own disk."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.faults import Fault, faulty
from tests.support.machine_ranks import meanwhile, values_on
from tests.support.models import make_engine, train
from tests.support.runs import assert_goes_on_alike, restore_and_go_on, write_and_go_on
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import Cluster
    from tests.support.machines import Machines


def fail_to_write(path: str) -> tuple[str, int | None, float]:
    engine = make_engine(stage=2)
    train(engine, 1)
    began = time.monotonic()
    with pytest.raises(zckpt.RankError) as caught:
        zckpt.write(engine, path)
    return str(caught.value), caught.value.rank, time.monotonic() - began


def test_a_directory_that_not_all_ranks_see_is_refused_on_every_rank(machines: Machines, cluster: Cluster) -> None:
    disk = machines.nodes[0].disk
    for message, rank, seconds in values_on(cluster, machines.nodes, fail_to_write, f"{disk}/run/c"):
        assert "rank 0 has taken a lock that this rank does not see" in message
        assert rank in (1, 2)
        assert seconds < 60, "not only when a rank is given up"
    for node in machines.nodes:
        assert node.shell(f"ls {disk}") == "lost+found\n"


SETUP: dict[str, Any] = {"stage": 2}


def write_on_own_disks(path: str) -> dict[str, Any]:
    return write_and_go_on(path, SETUP, node_local=True)


def test_a_run_goes_on_from_the_disks_of_its_machines(machines: Machines, cluster: Cluster) -> None:
    run = f"{machines.nodes[0].disk}/run"
    through = values_on(cluster, machines.nodes, write_on_own_disks, f"{run}/c")
    assert_goes_on_alike(through, values_on(cluster, machines.nodes, restore_and_go_on, run, SETUP, 0))
    for node in machines.nodes:
        assert node.shell(f"ls {run}/c/data-*").count("rank-") == 1
        assert node.shell(f"cat {run}/latest") == "c\n"
    moved = [*machines.nodes[1:], machines.nodes[0]]
    assert_goes_on_alike(through, values_on(cluster, moved, restore_and_go_on, run, SETUP, 0))


def test_a_machine_with_an_empty_disk_joins_and_one_that_is_gone_is_named(machines: Machines, cluster: Cluster) -> None:
    """The new machine gets what it needs from those that have it, as long as nobody else's files are missing."""
    run = f"{machines.nodes[0].disk}/run"
    written = values_on(cluster, machines.nodes[:2], written_weights, f"{run}/c")
    restored = values_on(cluster, machines.nodes, restored_weights, run)
    assert {*restored} == {*written}
    machines.nodes[1].kill(keep_disk=False)
    machines.nodes[1].start()
    for message in values_on(cluster, machines.nodes[:2], failing_restore, run):
        assert "F001" in message
        assert "with ranks 1" in message


def written_weights(path: str) -> str:
    engine = make_engine(**SETUP)
    train(engine, 2)
    zckpt.write(engine, path, node_local=True)
    return weights_of(engine)


def restored_weights(path: str) -> str:
    engine = make_engine(**SETUP, seed=4)
    zckpt.restore(engine, path)
    return weights_of(engine)


def weights_of(engine: Any) -> str:
    weights = b"".join(parameter.detach().float().numpy().tobytes() for parameter in engine.module.parameters())
    return hashlib.sha256(weights).hexdigest()


def failing_restore(path: str) -> str:
    with pytest.raises(zckpt.FormatError) as caught:
        zckpt.restore(make_engine(stage=2), path)
    return str(caught.value)


def write_until_a_disk_is_full(run: str, marks: str) -> tuple[str, str, int | None]:
    """Writes a checkpoint, and then a second one, in the middle of which the test fills the disk of rank 1: it waits
    for the file ``in-the-middle``, and makes the file ``disturbed``. Returns the error of this rank."""
    engine = make_engine(**SETUP)
    train(engine, 1)
    zckpt.write(engine, f"{run}/old", node_local=True)

    def be_disturbed(operation: Callable[[], Any], file: str) -> Any:
        Path(marks, "in-the-middle").touch()
        wait_until(Path(marks, "disturbed").exists)
        return operation()

    train(engine, 1)
    fault = Fault(be_disturbed, names=("create",)) if engine.global_rank == 1 else None
    with faulty(fault), pytest.raises(zckpt.ZckptError) as caught:
        zckpt.write(engine, f"{run}/new", node_local=True)
    return type(caught.value).__name__, str(caught.value), getattr(caught.value, "rank", None)


def write_again(run: str) -> int:
    engine = make_engine(**SETUP, seed=1)
    zckpt.restore(engine, run)
    train(engine, 1, 1)
    zckpt.write(engine, f"{run}/new", node_local=True)
    return zckpt.open(run).step


def test_a_full_disk_of_one_machine_ends_the_write_on_all(machines: Machines, cluster: Cluster) -> None:
    run, marks, full = f"{machines.nodes[0].disk}/run", machines.directory, machines.nodes[1]

    def fill() -> None:
        full.fill_disk(free_bytes=20_000)
        (marks / "disturbed").touch()

    with meanwhile((marks / "in-the-middle").exists, fill):
        errors = values_on(cluster, machines.nodes, write_until_a_disk_is_full, run, str(marks))
    assert errors[1][0] == "NoSpaceError", errors
    assert all((kind, rank) == ("RankError", 1) for kind, _, rank in (errors[0], errors[2])), errors
    for node in machines.nodes:
        assert node.shell(f"ls {run}") == "latest\nold\n"
        assert node.shell(f"cat {run}/latest") == "old\n"
    full.shell(f"rm {full.disk}/filler")
    assert values_on(cluster, machines.nodes, write_again, run) == [2] * 3


def write_two(run: str) -> list[str]:
    engine, weights = make_engine(**SETUP), []
    for name in ("old", "new"):
        train(engine, 1)
        zckpt.write(engine, f"{run}/{name}", node_local=True)
        weights.append(weights_of(engine))
    return weights


def test_a_machine_comes_back_with_an_old_disk(machines: Machines, cluster: Cluster) -> None:
    """The machine has only the older checkpoint. The error names that one, so the training can go on from there."""
    run, late = f"{machines.nodes[0].disk}/run", machines.nodes[2]
    (old, _), *_ = values_on(cluster, machines.nodes, write_two, run)
    late.shell(f"rm -r {run}/new && echo old > {run}/latest")
    for message in values_on(cluster, machines.nodes, failing_restore, run):
        assert "with ranks 2" in message
        assert "these are whole, newest first: old" in message
    assert values_on(cluster, machines.nodes, restored_weights, f"{run}/old") == [old] * 3
    assert values_on(cluster, machines.nodes, replace_new, run) == [2] * 3
    for node in machines.nodes:
        assert node.shell(f"cat {run}/latest") == "new\n"


def replace_new(run: str) -> int:
    engine = make_engine(**SETUP, seed=1)
    zckpt.restore(engine, f"{run}/old")
    train(engine, 1, 1)
    zckpt.write(engine, f"{run}/new", node_local=True, overwrite=True)
    other = make_engine(**SETUP, seed=5)
    zckpt.restore(other, run)
    assert weights_of(other) == weights_of(engine)
    return zckpt.open(run).step
