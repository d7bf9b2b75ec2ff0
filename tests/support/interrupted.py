"""Runs of the examples that are ended by signals, and what their logs say about the samples and the losses."""

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

from zckpt.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCH = 13
"""Steps of an epoch of each example, on two ranks."""
SAVE_EVERY = 3
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
Log = list[tuple[int, str, tuple[int, ...]]]
"""Of each step of one rank, in order: its number, the loss and the numbers of the samples."""
Ends = tuple[int, int, int, float]
"""A rank that gets a signal, which one, and so many seconds after it has logged a step."""


def read_log(path: Path) -> Log:
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(step), loss, tuple(map(int, numbers))) for step, loss, *numbers in lines]


def run_example(example: str, run: str, ends: Ends | None, attach: bool = False) -> None:
    """One rank of an example, by Python itself or, with ``attach``, by `zckpt run`."""
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
    script = str(EXAMPLES / example)
    if attach:
        if status := main(["run", script, run]):
            sys.exit(status)
    else:
        sys.argv = [script, run]
        runpy.run_path(script, run_name="__main__")


def interruptions(steps: tuple[int, ...], seed: int) -> Iterator[Ends]:
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
