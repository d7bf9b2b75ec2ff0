"""A lost rank is named by all others, although their processes end at once after the error."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.endings import ends, execute

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

pytestmark = pytest.mark.linux

LOST = """
import os, signal, sys, time
import torch.distributed as dist
import zckpt
from zckpt.ranks.collectives import Ranks

dist.init_process_group("gloo")
who, how = int(sys.argv[1]), sys.argv[2]
own = dist.get_rank() == who
ranks = Ranks()
ranks.together(lambda: None, "begin")
if own and how == "ends":
    sys.exit()
if own and how == "dies outside":
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ranks.together(lambda: os.kill(os.getpid(), signal.SIGKILL) if own else None, "go on")
except zckpt.RankError as error:
    print(error.rank, error)
"""


@pytest.mark.parametrize(
    ("who", "how", "said"),
    [
        pytest.param(2, "dies", "rank 2 has died", marks=pytest.mark.matrix),
        pytest.param(2, "dies outside", "rank 2 has died", marks=pytest.mark.matrix),
        (1, "ends", "rank 1 has ended"),
        pytest.param(0, "ends", "rank 0 has died, or the process", marks=pytest.mark.matrix),
    ],
)
def test_ranks_that_end_at_once_name_the_lost_rank(who: int, how: str, said: str) -> None:
    """The process of rank 0 has the store of the job, by which the ranks hear which one is lost."""
    for rank, (status, out, errors) in enumerate(ends(LOST, who, how, ranks=3)):
        if rank == who:
            assert status == (0 if how == "ends" else -signal.SIGKILL), errors
        else:
            assert out.startswith(f"{who} {said}"), (rank, out, errors)


LEFT = """
import torch.distributed as dist
from zckpt.ranks.collectives import CALLS, Ranks
from zckpt.ranks.groups import forget

dist.init_process_group("gloo")
ranks = Ranks()
ranks.together(lambda: None, "begin")
if dist.get_rank() == 1:
    ranks._group.lives.give_up_self("has left this call")
    forget(ranks._job, ranks.members, CALLS)
dist.barrier()
Ranks().together(lambda: None, "go on")
print("went on")
dist.barrier()
"""


def test_the_next_call_goes_on_without_a_group_that_a_rank_has_left(cluster: Cluster) -> None:
    """As if a rank was interrupted in the last step of a call, which the other ranks had ended already."""
    assert [out for out, _ in cluster.run(execute, 3, LEFT, init=False)] == ["went on\n"] * 3
