"""A rank is killed at any point of a write: no checkpoint is lost, and none is there in part."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.crashes import OLD, check_after, check_next, write_and_die, write_frozen
from tests.support.plain_engine import Engine, engines_are_adapters, everything

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster, Outcome

EVERY = int(os.environ.get("ZCKPT_TEST_EVERY", "30"))
"""The distance between the operations at which a rank is killed. ``make test-crash`` tries all operations."""
KILLS = int(os.environ.get("ZCKPT_TEST_KILLS", "2"))
"""The number of kills at random times."""


@pytest.fixture
def run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory) / "run"


def crash(cluster: Cluster, run: Path, name: str, who: int, **how: Any) -> tuple[list[Outcome], bool]:
    """Writes an older checkpoint, lets a write to ``name`` die, checks the run, and writes again.

    Returns the outcomes of the ranks, and whether the killed write has committed its checkpoint.
    """
    with engines_are_adapters():
        zckpt.write(Engine(seed=OLD, step=OLD), run / "old", overwrite=True)
    outcomes = cluster.outcomes(write_and_die, 2, str(run / name), who, **how)
    committed = check_after(run, name, "old")
    check_next(run, name)
    if name != "old":
        (run / name / "manifest.msgpack").unlink()
    return outcomes, committed


@pytest.mark.parametrize("name", ["old", "new"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_killed_at_any_operation_leaves_only_whole_checkpoints(
    cluster: Cluster, run: Path, who: int, name: str
) -> None:
    at, seen = (3 * who + (name == "new")) % EVERY, set()
    while True:
        outcomes, committed = crash(cluster, run, name, who, at=at)
        if outcomes[who].signal is None:
            assert at >= outcomes[who].value[0]
            assert committed
            break
        other = outcomes[1 - who]
        assert other.value is not None, other.error
        _, message, rank = other.value
        if message:
            assert rank == who
            assert f"rank {who}" in message
        else:  # it had received all that it needs before the other rank died
            assert committed
        seen.add(committed)
        at += EVERY
    assert EVERY > 1 or seen == ({False, True} if who == 0 else {False})


@pytest.mark.parametrize("name", [pytest.param("old", marks=pytest.mark.matrix), "new"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_killed_while_files_are_shared_leaves_the_older_files_as_they_are(
    cluster: Cluster, run: Path, who: int, name: str
) -> None:
    """The next write removes the links to the older files that the killed write has left."""
    at, shared = (40 - 10 * who) % EVERY, 0
    while True:
        cluster.run(write_frozen, 2, str(run / "old"))
        before = everything(run / "old")
        outcomes = cluster.outcomes(write_and_die, 2, str(run / name), who, at=at, frozen=True, background=bool(who))
        links = [file.stat().st_nlink for file in run.rglob("param.safetensors")]
        shared += any(number > 1 for number in links)
        committed = check_after(run, name, "old")
        if name != "old" or not committed:
            assert before.items() <= everything(run / "old").items()
        check_next(run, name)
        assert [file.stat().st_nlink for file in run.rglob("param.safetensors")] == [1] * 2 * (name != "old")
        shutil.rmtree(run)
        if outcomes[who].signal is None:
            break
        at += EVERY
    assert shared or name == "old"


@pytest.mark.parametrize("background", [False, True])
def test_ranks_killed_at_any_time_leave_only_whole_checkpoints(cluster: Cluster, run: Path, background: bool) -> None:
    choice, longest, killed, committed = random.Random(background), 0.1, 0, 0
    while killed < KILLS:
        who, seconds = choice.randrange(3), choice.uniform(0, longest)
        name = choice.choice(["old", "new"])
        # A rank that dies before it begins is waited for, so the other rank is soon killed, too.
        outcomes, is_committed = crash(cluster, run, name, who, seconds=seconds, background=background, grace=2)
        # If no rank died of the signal, the write had returned before.
        is_killed = any(outcome.signal == signal.SIGKILL for outcome in outcomes)
        killed += is_killed
        committed += is_killed and is_committed
        longest *= 0.8 if is_committed else 1.25  # so that ranks die before and after commits, however fast this is
    assert KILLS < 100 or 0 < committed < KILLS


@pytest.mark.matrix
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("at", [0, 5, 12, 20, 30])
def test_a_rank_killed_with_a_real_engine_leaves_only_whole_checkpoints(
    cluster: Cluster, run: Path, who: int, at: int
) -> None:
    crash(cluster, run, "old", who, at=at, real=True)
    crash(cluster, run, "new", who, at=at, real=True, background=True)
