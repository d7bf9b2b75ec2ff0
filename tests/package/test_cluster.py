"""The ranks that other tests run on, every way in which a rank can fail, and the table of skipped tests."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.cluster import Cluster, ClusterError


def rank_sum(start: int) -> tuple[str, float]:
    total = torch.tensor([float(start + int(os.environ["RANK"]))])
    torch.distributed.all_reduce(total)
    return os.environ["RANK"], total.item()


def train_zero3() -> tuple[list[float], int]:
    from tests.support.models import make_engine, train

    engine = make_engine(stage=3)
    return train(engine, 2), len(engine.optimizer.fp32_partitioned_groups_flat)


def raise_on_rank_1() -> None:
    print("a word before the end")
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 had enough")
    time.sleep(600)


def die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


def make_shared_memory() -> tuple[str, list[Path]]:
    import deepspeed

    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # DeepSpeed's launcher sets it
    deepspeed.init_distributed("gloo")
    port = os.environ["MASTER_PORT"]
    return port, list(Path("/dev/shm").glob(f"*_{port}_*"))


def take_the_port() -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))


def test_ranks_talk_and_return_in_rank_order(cluster: Cluster) -> None:
    assert cluster.run(rank_sum, 3, start=10) == [("0", 33.0), ("1", 33.0), ("2", 33.0)]
    assert cluster.run(f"{__name__}:rank_sum", 1, 5) == [("0", 5.0)]


def test_training_repeats_itself(cluster: Cluster) -> None:
    first, second = cluster.run(train_zero3, 2), cluster.run(train_zero3, 2)
    assert first == second
    (losses, _), (other_losses, _) = first
    assert losses != other_losses, "each rank has its own data"


def test_an_exception_is_reported_and_ends_the_other_ranks(cluster: Cluster) -> None:
    with pytest.raises(ClusterError) as caught:
        cluster.run(raise_on_rank_1, 2, grace=0.5, init=False)
    message = str(caught.value)
    assert "rank 1: Traceback" in message
    assert "in raise_on_rank_1\n    raise ValueError" in message
    assert "rank 0: still running 0.5 s after rank 1 had failed" in message
    assert "a word before the end" in message


def test_a_killed_rank_is_reported(cluster: Cluster) -> None:
    survivor, dead = cluster.outcomes(die_on_rank_1, 2, init=False)
    assert not survivor.failed
    assert (dead.signal, dead.error) == (signal.SIGKILL, "died of SIGKILL")


def test_a_hang_ends_and_shows_its_stack(cluster: Cluster) -> None:
    (outcome,) = cluster.outcomes(hang, 1, timeout=2, init=False)
    assert outcome.error == "still running after 2 s"
    assert "in hang" in outcome.output


def test_nothing_is_left_in_shared_memory(cluster: Cluster) -> None:
    for port, buffers in cluster.run(make_shared_memory, 2, init=False):
        assert buffers
        assert not list(Path("/dev/shm").glob(f"*_{port}_*"))


def test_no_other_program_gets_the_port_of_the_ranks(cluster: Cluster) -> None:
    """This also holds before rank 0 listens at the port."""
    cluster.run(take_the_port, 1, init=False)


STARTS_A_THREAD = """
import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.matrix
def test_a_thread_of_the_server_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked ranks would wait for ever for a lock that this thread holds."""
    (tmp_path / "sitecustomize.py").write_text(STARTS_A_THREAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"threads .+: forking"):
        Cluster().run(rank_sum, 1, 1)


def test_a_table_says_what_was_skipped_and_why() -> None:
    from tests import conftest  # the ranks, which import this module, do without it, because it takes long

    skipped = [("test_a.py", "Skipped: no GPU"), ("test_a.py", "Skipped: no disk"), ("test_b.py", "Skipped: no disk")]
    reports = [SimpleNamespace(nodeid=f"{file}::test", longrepr=("conftest.py", 1, why)) for file, why in skipped]
    lines: list[str] = []
    reporter: Any = SimpleNamespace(
        stats={"skipped": reports}, write_sep=lambda mark, title: lines.append(title), write_line=lines.append
    )
    conftest.pytest_terminal_summary(reporter)
    assert lines == ["3 tests were skipped", "    2  test_a.py, test_b.py: no disk", "    1  test_a.py: no GPU"]
