"""Ranks on several machines write to the same path, which is on each machine's own disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import zckpt
from tests.support.machine_ranks import values_on
from tests.support.models import make_engine, train

if TYPE_CHECKING:
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
