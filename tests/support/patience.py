"""How long ranks wait for each other."""

from __future__ import annotations

import os

import torch

from zckpt.ranks import heartbeat as life


def give_up_after(seconds: int) -> None:
    """A rank without a sign of life; and one that has died is known after less than a second."""
    os.environ["ZCKPT_RANK_TIMEOUT"] = str(seconds)
    life.PERIOD_SECONDS = 0.2
    torch.distributed.barrier()  # none comes later than that because it has begun later
