"""Writes the example of spec/format.md anew: ``python spec/example/make.py DIRECTORY``.

The files in ``run/`` were made by it once and stay as they are: they pin version 1.0. Another zstd may
compress the index to other bytes; everything else comes out the same.
"""

from __future__ import annotations

import os
import sys

import torch

from zckpt.format import tree
from zckpt.plan import catalog
from zckpt.state.inventory import BUFFER, MASTER, STATE, Fragment
from zckpt.testing.fragments import write_fragments

SAVE_ID = "0123456789abcdef"
WORLD_SIZE = 2
W = {MASTER: torch.tensor([1.0, -2.0, 3.5]), "exp_avg": torch.tensor([0.25, 0.5, -0.75])}
B = [torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)]
SPLIT = [(0, 2), (2, 3)]
SEEN = torch.tensor(1234567)
STATE_TREE = {"engine": {"steps": 7}, "client_state": {"betas": (0.5, 0.25), "seen": SEEN}}


def fragments(rank: int) -> list[Fragment]:
    start, stop = SPLIT[rank]
    found = [Fragment(part, "w", (3,), "F32", start, stop, data=whole[start:stop]) for part, whole in W.items()]
    found.append(Fragment(BUFFER, "b", (2,), "BF16", 0, 2, copy=rank, data=B[rank]))
    packed = torch.frombuffer(bytearray(tree.pack({"seed": 10 + rank}, "", lambda path, leaf: None)), dtype=torch.uint8)
    found.append(Fragment(STATE, f"rank/{rank}", tuple(packed.shape), "U8", 0, packed.numel(), "host", data=packed))
    if rank == 0:
        found.append(Fragment(STATE, "tree/0/0", (), "I64", 0, 1, "host", data=SEEN.reshape(1)))
    return found


def main(directory: str) -> None:
    target = os.path.join(os.path.abspath(directory), "global_step7")
    state = tree.pack(STATE_TREE, "", lambda path, leaf: (tree.TENSOR, "tree/0/0"))
    about = catalog.About(7, 4096, {"head": "w"}, state, {"created": "2026-01-01T00:00:00+00:00"})
    write_fragments(target, [fragments(rank) for rank in range(WORLD_SIZE)], about, SAVE_ID, latest=True)


if __name__ == "__main__":
    main(sys.argv[1])
