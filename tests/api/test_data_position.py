"""Runs that are killed in the middle of an epoch go on with the sample that comes next, on every rank."""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import zckpt
from tests.support.launches import launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster

pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

EXAMPLE = Path(__file__).parents[2] / "examples" / "stateful_dataloader.py"
EPOCH = 13
"""Steps of an epoch of the example, on two ranks."""
SAVE_EVERY = 3
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
Log = list[tuple[int, str, tuple[int, ...]]]
"""Of each step of one rank, in order: its number, the loss and the numbers of the samples."""


def read_log(path: Path) -> Log:
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(step), loss, tuple(map(int, numbers))) for step, loss, *numbers in lines]


def run_example(run: str, ends: tuple[int, int, int, float] | None) -> None:
    """``ends``: a rank that gets a signal, which one, and so many seconds after it has logged a step."""
    rank = int(os.environ["RANK"])
    if ends is not None and ends[0] == rank:
        _, number, step, delay = ends
        log = Path(f"{run}-{rank}.log")

        def end() -> None:
            while not log.exists() or (read_log(log) or [(0,)])[-1][0] < step:
                time.sleep(0.001)
            time.sleep(delay)
            os.kill(os.getpid(), number)

        threading.Thread(target=end, daemon=True).start()
    sys.argv = [str(EXAMPLE), run]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def interruptions(steps: tuple[int, ...], seed: int) -> Iterator[tuple[int, int, int, float]]:
    choice = random.Random(seed)
    for number, step in enumerate(steps):
        yield choice.randrange(2), SIGNALS[(number + seed) % 3], step, choice.random() * 0.1


def assert_goes_on_as_if_never_stopped(run: Path, through: Path, interrupted: int) -> None:
    for rank in range(2):
        expected, found = (read_log(Path(f"{one}-{rank}.log")) for one in (through, run))
        by_step = {step: (loss, numbers) for step, loss, numbers in expected}
        assert [step for step, *_ in expected] == list(range(1, len(expected) + 1))
        first_epoch = [numbers for _, _, numbers in expected[: len(expected) // 2]]
        assert len(set(first_epoch)) == len(first_epoch) >= EPOCH
        assert all(by_step[step] == (loss, numbers) for step, loss, numbers in found)
        assert {step for step, *_ in found} == by_step.keys()
        begins = [at for at in range(1, len(found)) if found[at][0] != found[at - 1][0] + 1]
        assert all(found[at][0] % SAVE_EVERY == 1 for at in begins), "behind a checkpoint"
        assert len(begins) <= interrupted


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 6))])
def test_a_run_that_is_killed_at_any_point_sees_each_sample_as_if_it_had_not(
    cluster: Cluster, tmp_path: Path, seed: int
) -> None:
    through, run = tmp_path / "through", tmp_path / "run"
    cluster.run(run_example, 2, str(through), None, init=False)
    for ends in interruptions((4, 7, 11, EPOCH + 2), seed):
        outcomes = cluster.outcomes(run_example, 2, str(run), ends, init=False, grace=2)
        assert outcomes[ends[0]].failed, "it was stopped"
        assert zckpt.validate(run).ok
    cluster.run(run_example, 2, str(run), None, init=False)
    assert_goes_on_as_if_never_stopped(run, through, 4)


@pytest.mark.matrix
@pytest.mark.parametrize("loader", ["own", "accelerate"])
def test_a_trainer_that_is_killed_does_too(tmp_path: Path, loader: str) -> None:
    through, run = tmp_path / "through", tmp_path / "run"
    assert launch("stateful_trainer.py", through, loader, 0)
    for dies_at in (5, 8, 12):
        assert not launch("stateful_trainer.py", run, loader, dies_at)
    assert launch("stateful_trainer.py", run, loader, 0)
    assert_goes_on_as_if_never_stopped(run, through, 3)
