"""Compares loading with the most that this machine can do, which shows why some of the targets cannot be met here.

    python bench/limits.py [--size 3GiB] [--dir DIR] [--runs 5]

zckpt, and loops that do nothing else, move the same bytes out of the page cache into memory that was touched before, in
as many threads as there are processors. The loop ``read and hash`` reads 2 MiB at a time, so that the hash finds them
in the processor's own cache. There are two states of the same size: one of large tensors, and one of tensors that 8
ranks have cut into pieces of 20 KiB.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import zckpt
from common import (
    KIB,
    MIB,
    Contestant,
    Result,
    bring_into_cache,
    cut,
    empty_like,
    fill,
    interleaved,
    make_state,
    parse_options,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from raw_io import touched_memory
from zckpt.format.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

THREADS = len(os.sched_getaffinity(0))
RANKS, PIECE_BYTES = 8, 20 * KIB
READ_BYTES, PORTION_BYTES, BLOCK_BYTES = 8 * MIB, 2 * MIB, MIB
IN_CACHE_BYTES = 256 * KIB
LOOP = "read and hash"


def main() -> None:
    options = parse_options(__doc__)
    result = Result("limits", "Load from the page cache, and the limits of the machine", options)
    small = {
        f"master/layers.{i}.weight": (RANKS * PIECE_BYTES // 4,) for i in range(options.size // RANKS // PIECE_BYTES)
    }
    states = {
        "large tensors": (make_state(options.size, ["master"]), 1, BLOCK_BYTES),
        "pieces of 20 KiB": (fill(small), RANKS, PIECE_BYTES),
    }
    with workspace(options, 2 * options.size) as directory, ThreadPoolExecutor(THREADS) as pool:
        for group, (state, ranks, piece_bytes) in states.items():
            path = directory / str(ranks)
            write_checkpoint(path, cut(state, ranks))
            out = empty_like(state)
            state.clear()
            bring_into_cache(path)
            contestants = loops(pool, path, piece_bytes)
            contestants += [
                Contestant(label, partial(load, path, out, verify=verify))
                for label, verify in (("zckpt, unverified", False), ("zckpt", True))
            ]
            rounds = interleaved(contestants, options.runs)
            result.add(rounds, total_bytes(out), group)
            if ranks == 1:
                value = speedup(rounds, "zckpt", over=LOOP)
                result.at_least("load, cached, large tensors, against the loop that reads and hashes", value, 0.9)
            out.clear()
    result.finish()


def load(path: Path, out: dict[str, torch.Tensor], *, verify: bool) -> None:
    zckpt.open(path).load("master/*", out=out, verify=verify)


def loops(pool: ThreadPoolExecutor, path: Path, piece_bytes: int) -> list[Contestant]:
    """Returns the loops. Each goes over as many bytes as the data files of ``path`` have, ``piece_bytes`` at a time."""
    files = sorted(path.rglob("*.safetensors"))
    share = min(file.stat().st_size for file in files) // MIB * MIB
    assert share, "too little for this comparison"
    fds = [os.open(file, os.O_RDONLY) for file in files]
    memory = memoryview(touched_memory(share * len(files)))
    other = memoryview(touched_memory(share * len(files)))
    places = [(number, start) for number in range(len(files)) for start in range(0, share, READ_BYTES)]

    def each(work: Callable[[int, int, int], None]) -> None:
        """Calls ``work`` with the number of the file, and the first byte and the end there, for all places."""
        next_places = iter(places)  # all threads share it: a thread that is free takes the next place

        def run(_: int) -> None:
            for number, start in next_places:
                work(number, start, min(start + READ_BYTES, share))

        list(pool.map(run, range(THREADS)))

    def pieces(number: int, start: int, stop: int) -> list[memoryview]:
        cuts = [*range(number * share + start, number * share + stop, piece_bytes), number * share + stop]
        return [memory[first:after] for first, after in itertools.pairwise(cuts)]

    def copy(number: int, start: int, stop: int) -> None:
        place = slice(number * share + start, number * share + stop)
        np.copyto(np.frombuffer(memory[place], np.uint8), np.frombuffer(other[place], np.uint8))

    def hash_all(number: int, start: int, stop: int) -> None:
        for piece in pieces(number, start, stop):
            digest(piece)

    def hash_cached(number: int, start: int, stop: int) -> None:
        for _ in range(start, stop, IN_CACHE_BYTES):
            digest(memory[:IN_CACHE_BYTES])

    def read(number: int, start: int, stop: int) -> None:
        os.preadv(fds[number], pieces(number, start, stop), start)

    def read_and_hash(number: int, start: int, stop: int) -> None:
        for first in range(start, stop, PORTION_BYTES):
            views = pieces(number, first, min(first + PORTION_BYTES, stop))
            os.preadv(fds[number], views, first)
            for view in views:
                digest(view)

    actions = {
        "copy from memory to memory": copy,
        "hash what is in memory": hash_all,
        "hash what is in the processor's cache": hash_cached,
        "read": read,
        LOOP: read_and_hash,
    }
    return [Contestant(label, partial(each, action)) for label, action in actions.items()]


if __name__ == "__main__":
    main()
