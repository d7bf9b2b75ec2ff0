"""Writes the examples of ``spec/format.md`` to another directory: ``python spec/example/make.py DIRECTORY``.

It has written the files in ``run/``, ``second/`` and ``third/`` once. They never change, because they pin version 1.0
of the format. Another version of zstd may compress the index to other bytes, and then the manifest differs too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter, OrderedDict
from pathlib import Path

import torch

from zckpt.format import tree
from zckpt.format.names import Tier
from zckpt.geometry import Grid, Span
from zckpt.plan import catalog, data_files
from zckpt.plan.inventory import BUFFER, MASTER, STATE, FileRange, Fragment
from zckpt.testing.fragments import write_fragments

SAVE_ID = "0123456789abcdef"
WORLD_SIZE = 2
WRITER = {"created": "2026-01-01T00:00:00+00:00"}
W = {MASTER: torch.tensor([1.0, -2.0, 3.5]), "exp_avg": torch.tensor([0.25, 0.5, -0.75])}
B = [torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)]
SPLIT = [(0, 2), (2, 3)]
SEEN = torch.tensor(1234567)
STATE_TREE = {"engine": {"steps": 7}, "client_state": {"betas": (0.5, 0.25), "seen": SEEN}}

SECOND_SAVE_ID = "00000000000000aa"
LONG = torch.arange(1025, dtype=torch.float32)
"""It has one element more than a block of 4096 bytes can contain."""
SWAP_OFFSET = 24
"""The byte of the swap file at which ``LONG`` begins. The writer puts a filler of this many bytes before it."""
ARRAY = torch.tensor([5, -6], dtype=torch.int16)
SECOND_TREE = {"array": ARRAY, "big": 1 << 64, "counts": Counter({"a": 2}), "order": OrderedDict({"z": 1})}

THIRD_SAVE_ID = "00000000000000bb"
MATRIX = torch.arange(8, dtype=torch.float32).view(2, 4)
GRID = Grid((2, 4), ((), (((0, 2),), ((2, 2),))))
"""Each rank has two columns of ``MATRIX``."""


def fragments(rank: int) -> list[Fragment]:
    """Returns what a rank of the first example holds."""
    start, stop = SPLIT[rank]
    of_rank = [
        Fragment(part, "w", "F32", Span(Grid((3,)), start, stop), data=whole[start:stop]) for part, whole in W.items()
    ]
    of_rank.append(Fragment(BUFFER, "b", "BF16", Span(Grid((2,)), 0, 2), copy=rank, data=B[rank]))
    packed = torch.frombuffer(bytearray(tree.pack({"seed": 10 + rank}, "", lambda path, leaf: None)), dtype=torch.uint8)
    of_rank.append(
        Fragment(
            STATE, f"rank/{rank}", "U8", Span(Grid(tuple(packed.shape)), 0, packed.numel()), Tier.HOST, data=packed
        )
    )
    if rank == 0:
        of_rank.append(Fragment(STATE, "tree/0/0", "I64", Span(Grid(()), 0, 1), Tier.HOST, data=SEEN.reshape(1)))
    return of_rank


def second_fragments(swap_file: Path) -> list[Fragment]:
    """Returns what the only rank of the second example holds. It writes the swap file."""
    swap_file.write_bytes(bytes(SWAP_OFFSET) + LONG.numpy().tobytes())
    swapped = FileRange(str(swap_file), SWAP_OFFSET, LONG.numel() * LONG.itemsize)
    return [
        Fragment(MASTER, "m", "F32", Span(Grid((1025,)), 0, 1025), Tier.NVME, data=swapped),
        Fragment(BUFFER, "none", "BF16", Span(Grid((0, 2)), 0, 0), data=torch.empty(0, dtype=torch.bfloat16)),
        Fragment(STATE, "tree/0/0", "I16", Span(Grid((2,)), 0, 2), Tier.HOST, data=ARRAY),
    ]


def third_fragments(rank: int) -> list[Fragment]:
    """Returns what a rank of the third example holds."""
    columns = MATRIX[:, 2 * rank : 2 * rank + 2].flatten()
    return [Fragment(MASTER, "w", "F32", GRID.box(rank), data=columns)]


def main(directory: str) -> None:
    """Writes all examples into ``directory``."""
    target = os.path.join(os.path.abspath(directory), "run", "global_step7")
    state = tree.pack(STATE_TREE, "", lambda path, leaf: (tree.TENSOR, "tree/0/0"))
    about = catalog.SaveMetadata(7, 4096, {"head": "w"}, state, WRITER)
    write_fragments(target, [fragments(rank) for rank in range(WORLD_SIZE)], about, SAVE_ID, latest=True)

    # Without this, the writer puts no filler before fewer than 64 KiB of adjacent bytes of a swap file.
    data_files.SHARED_BYTES_MIN = 4096
    target = os.path.join(os.path.abspath(directory), "second", "global_step8")
    state = tree.pack({"client_state": SECOND_TREE}, "", lambda path, leaf: (tree.NDARRAY, "tree/0/0"))
    about = catalog.SaveMetadata(8, 4096, {}, state, WRITER)
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [second_fragments(Path(scratch, "swap"))]
        write_fragments(target, ranks, about, SECOND_SAVE_ID, latest=True)

    target = os.path.join(os.path.abspath(directory), "third", "global_step9")
    about = catalog.SaveMetadata(9, 4096, {}, tree.pack({}, "", lambda path, leaf: None), WRITER)
    write_fragments(target, [third_fragments(rank) for rank in range(WORLD_SIZE)], about, THIRD_SAVE_ID, latest=True)


if __name__ == "__main__":
    main(sys.argv[1])
