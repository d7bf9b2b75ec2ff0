"""Sets how long ranks wait for each other."""

from __future__ import annotations

import os

import torch

from zckpt.ranks import heartbeat as life


def give_up_after(seconds: int) -> None:
    """Lets a rank wait ``seconds`` for another rank that gives no sign of life.

    A rank that has died is known after less than a second, if the machine is not busy. Every rank calls this.
    """
    os.environ["ZCKPT_RANK_TIMEOUT"] = str(seconds)
    life.PERIOD_SECONDS = 0.2
    torch.distributed.barrier()  # so that no rank is late only because it has started later
