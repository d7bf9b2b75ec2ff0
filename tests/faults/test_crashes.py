"""A rank is killed in the middle of a write, wherever it may be: no checkpoint is lost, none is half there."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.crashes import OLD, check_after, check_next, write_and_die
from tests.support.plain_engine import Engine, engines_are_adapters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster, Outcome

EVERY = int(os.environ.get("ZCKPT_TEST_EVERY", "30"))
"""Of the operations, one is tried; ``make test-crash`` tries all."""
KILLS = int(os.environ.get("ZCKPT_TEST_KILLS", "2"))
"""At a random time."""


@pytest.fixture
def run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory) / "run"


def crash(cluster: Cluster, run: Path, name: str, who: int, **how: Any) -> tuple[list[Outcome], bool]:
    """An older checkpoint, a write to ``name`` that dies, and the next one. Returns whether the dead one committed."""
    with engines_are_adapters():
        zckpt.write(Engine(seed=OLD, step=OLD), run / "old", overwrite=True)
    outcomes = cluster.outcomes(write_and_die, 2, str(run / name), who, **how, timeout=60, grace=20)
    committed = check_after(run, name, "old")
    check_next(run, name)
    if name != "old":
        (run / name / "manifest.msgpack").unlink()
    return outcomes, committed


@pytest.mark.parametrize("name", ["old", "new"])
@pytest.mark.parametrize("who", [0, 1])
def test_killed_at_any_operation(cluster: Cluster, run: Path, who: int, name: str) -> None:
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
        else:  # it had all that it needs before the other died
            assert committed
        seen.add(committed)
        at += EVERY
    assert EVERY > 1 or seen == ({False, True} if who == 0 else {False})


@pytest.mark.parametrize("background", [False, True])
def test_killed_at_any_time(cluster: Cluster, run: Path, background: bool) -> None:
    choice, killed, committed = random.Random(background), 0, 0
    while killed < KILLS:
        who, seconds = choice.randrange(3), choice.uniform(0, 0.1)
        outcomes, done = crash(cluster, run, choice.choice(["old", "new"]), who, seconds=seconds, background=background)
        killed += any(outcome.signal == signal.SIGKILL for outcome in outcomes)  # else it had returned before
        committed += done
    assert KILLS < 100 or 0 < committed < KILLS


@pytest.mark.matrix
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("at", [0, 5, 12, 20, 30])
def test_killed_with_a_real_engine(cluster: Cluster, run: Path, who: int, at: int) -> None:
    crash(cluster, run, "old", who, at=at, real=True)
    crash(cluster, run, "new", who, at=at, real=True, background=True)
