"""Sets how long tests wait for a condition, and ranks for each other."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch

from zckpt.ranks import heartbeat as life

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_SECONDS = 300


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until ``condition`` returns true. Fails after ``WAIT_SECONDS``."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{condition} has not returned true for {WAIT_SECONDS} s"
        time.sleep(0.002)


def give_up_after(seconds: int) -> None:
    """Lets a rank wait ``seconds`` for another rank that gives no sign of life.

    A rank that has died is known after less than a second, if the machine is not busy. Every rank calls this.
    """
    os.environ["ZCKPT_RANK_TIMEOUT"] = str(seconds)
    life.PERIOD_SECONDS = 0.2
    torch.distributed.barrier()  # so that no rank is late only because it has started later
