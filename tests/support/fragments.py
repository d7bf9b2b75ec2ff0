"""Fragments of random tensors, as the ranks of a job hold them, and where a plan puts them."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from tests.support.states import cuts
from zckpt.state.inventory import Fragment

if TYPE_CHECKING:
    from zckpt.plan.layout import ShardPlan

SAVE_ID = "0123456789abcdef"
BLOCK_BYTES = 4096


def fragments_of(
    rank: int, world_size: int, seed: int, parts: tuple[str, ...] = ("master", "exp_avg")
) -> list[Fragment]:
    """What one rank holds of some tensors that all ranks of this seed share."""
    choice = random.Random(seed)
    found = []
    for number in range(choice.randrange(1, 6)):
        shape = tuple(choice.randrange(60) for _ in range(choice.randrange(4)))
        dtype = choice.choice(["F32", "BF16", "U8", "F64"])
        for owner, tier, start, stop in cuts(math.prod(shape), world_size, "random", choice):
            if owner == rank:
                found += [Fragment(part, f"layer.{number}", shape, dtype, start, stop, tier) for part in parts]
    return found


def pieces_of(plan: ShardPlan) -> list[tuple[Fragment, int, int, int]]:
    """Each fragment with its first byte among the data, its bytes and its first block."""
    columns = (plan.pieces.start.tolist(), plan.pieces.nbytes.tolist(), plan.pieces.block.tolist())
    return list(zip(plan.fragments, *columns, strict=True))
