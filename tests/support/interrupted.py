"""Runs of the examples that are ended by signals, and their logs of the samples and the losses."""

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
    from collections.abc import Iterator, Sequence

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCH = 13
"""The number of steps in an epoch of each example, on two ranks."""
SAVE_EVERY = 3
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
Log = list[tuple[int, str, tuple[int, ...]]]
"""The number, the loss and the numbers of the samples of each step of one rank, in order."""
Ends = tuple[int, int, int, float]
"""A rank that gets a signal, the number of the signal, a step, and the delay in seconds after the rank logged it."""


def read_log(path: Path) -> Log:
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(step), loss, tuple(map(int, numbers))) for step, loss, *numbers in lines]


def run_example(example: str, run: str, ends: Ends | None, zckpt_run: Sequence[str] | None = None) -> None:
    """Runs one rank of an example, by Python itself, or by `zckpt run` with the options ``zckpt_run``.

    A rank that is to get a signal waits for it if the example ends first, as it may on a busy machine.
    """
    rank = int(os.environ["RANK"])
    if ends is not None and ends[0] == rank:
        _, number, step, delay = ends
        log = Path(f"{run}-{rank}.log")

        def end() -> None:
            while not (steps := read_log(log)) or steps[-1][0] < step:
                time.sleep(0.001)
            time.sleep(delay)
            os.kill(os.getpid(), number)
            # Python ignores a KeyboardInterrupt that is raised in a callback, for instance of weakref or of logging.
            while number == signal.SIGINT:
                time.sleep(1)
                os.kill(os.getpid(), number)

        threading.Thread(target=end, daemon=True).start()
    script = str(EXAMPLES / example)
    if zckpt_run is not None:
        if status := main(["run", *zckpt_run, script, run]):
            sys.exit(status)
    else:
        sys.argv = [script, run]
        runpy.run_path(script, run_name="__main__")
    while ends is not None and ends[0] == rank:
        time.sleep(1)


def interruptions(steps: tuple[int, ...], seed: int) -> Iterator[Ends]:
    choice = random.Random(seed)
    for number, step in enumerate(steps):
        yield choice.randrange(2), SIGNALS[(number + seed) % 3], step, choice.random() * 0.1


def assert_goes_on_as_if_never_stopped(run: Path, through: Path, interrupted: int) -> None:
    """Checks the logs of a run that was interrupted up to ``interrupted`` times, against one that went through."""
    for rank in range(2):
        expected, trained = (read_log(Path(f"{directory}-{rank}.log")) for directory in (through, run))
        by_step = {step: (loss, numbers) for step, loss, numbers in expected}
        assert [step for step, *_ in expected] == list(range(1, len(expected) + 1))
        first_epoch = [numbers for _, _, numbers in expected[: len(expected) // 2]]
        assert len(set(first_epoch)) == len(first_epoch) >= EPOCH
        assert all(by_step[step] == (loss, numbers) for step, loss, numbers in trained)
        assert {step for step, *_ in trained} == by_step.keys()
        resumed_at = [at for at in range(1, len(trained)) if trained[at][0] != trained[at - 1][0] + 1]
        assert all(trained[at][0] % SAVE_EVERY == 1 for at in resumed_at), "a run resumes after a checkpoint"
        assert len(resumed_at) <= interrupted
