"""Fragments of random tensors, as the ranks of a job hold them, and their places in a plan."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch

from tests.support.states import cuts
from zckpt.geometry import Grid, Span
from zckpt.plan.inventory import Fragment

if TYPE_CHECKING:
    from zckpt.plan.data_files import DataFilePlan

SAVE_ID = "0123456789abcdef"
BLOCK_BYTES = 4096


def fragments_of(
    rank: int, world_size: int, seed: int, parts: tuple[str, ...] = ("master", "exp_avg")
) -> list[Fragment]:
    """Returns the fragments that one rank holds of some tensors, which are the same for all ranks with this seed."""
    choice = random.Random(seed)
    fragments = []
    for number in range(choice.randrange(1, 6)):
        shape = tuple(choice.randrange(60) for _ in range(choice.randrange(4)))
        dtype = choice.choice(["F32", "BF16", "U8", "F64"])
        for owner, tier, start, stop in cuts(math.prod(shape), world_size, "random", choice):
            if owner == rank:
                fragments += [
                    Fragment(part, f"layer.{number}", dtype, Span(Grid(shape), start, stop), tier) for part in parts
                ]
    return fragments


def data_of(fragment: Fragment) -> torch.Tensor:
    """Returns the tensor of a fragment. Fails if the fragment has no data, or if its data is in a swap file."""
    assert isinstance(fragment.data, torch.Tensor)
    return fragment.data


def pieces_of(plan: DataFilePlan) -> list[tuple[Fragment, int, int, int]]:
    """Returns each fragment with its first byte in the data, its number of bytes, and its first block."""
    columns = (plan.pieces.start.tolist(), plan.pieces.nbytes.tolist(), plan.pieces.block.tolist())
    return list(zip(plan.fragments, *columns, strict=True))
