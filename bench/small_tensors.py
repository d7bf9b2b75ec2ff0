"""Compares 20,000 small tensors with 20 large tensors of as many bytes, both cut over 8 ranks as ZeRO-3 cuts them.

    python bench/small_tensors.py [--size 3GiB] [--dir DIR] [--runs 5]

Every rank is a process that writes its own pieces, as in training. A further process commits. Loading is done by a
single process, which reads all 160,000 pieces back into the memory that they come from.
"""

from __future__ import annotations

import gc
import multiprocessing
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

import zckpt
from common import (
    Contestant,
    Ranks,
    Result,
    bring_into_cache,
    cut,
    drop_from_cache,
    fill,
    interleaved,
    loading,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
    write_rank,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.pool import Pool
    from pathlib import Path

RANKS = 8
COUNTS = {"20,000 tensors": 20_000, "20 tensors": 20}
SMALL, LARGE = COUNTS
RANKS_OF: dict[str, Ranks] = {}
"""The fragments that each rank holds, by label. It is global so that the forked processes inherit it."""


def take_fragments(rank: int) -> None:
    """Moves the fragments of a rank to memory of its own process, into one flat buffer, as ZeRO-3 has them. Before the
    system writes from a page by direct I/O, it would copy the page if the page were shared since the fork."""
    for ranks in RANKS_OF.values():
        tensors = [fragment.data for fragment in ranks[rank] if isinstance(fragment.data, torch.Tensor)]
        parts = torch.cat(tensors).split([tensor.numel() for tensor in tensors])
        ranks[rank] = [replace(fragment, data=part) for fragment, part in zip(ranks[rank], parts, strict=True)]


def write(path: Path, label: str, pools: Sequence[Pool]) -> None:
    def write_all(*place: str) -> list[tuple[bytes, bytes]]:
        written = [pool.apply_async(write_data_files, (label, *place, rank)) for rank, pool in enumerate(pools)]
        return [result.get() for result in written]

    write_checkpoint(path, RANKS_OF[label], write_all)


def write_data_files(label: str, path: str, save_id: str, rank: int) -> tuple[bytes, bytes]:
    return write_rank(path, save_id, RANKS_OF[label], rank)


def load(path: Path, out: dict[str, torch.Tensor]) -> None:
    zckpt.open(path).load("master/*", out=out)


def main() -> None:
    options = parse_options(__doc__)
    states = {
        label: fill({f"master/layers.{i}.weight": (options.size // count // 4,) for i in range(count)})
        for label, count in COUNTS.items()
    }
    nbytes = total_bytes(states[LARGE])
    result = Result("small_tensors", f"Many small tensors at {RANKS} ranks", options)
    with workspace(options, 2 * options.size) as directory:
        paths = {label: directory / label for label in COUNTS}
        RANKS_OF.update({label: cut(state, RANKS) for label, state in states.items()})
        gc.collect()
        gc.freeze()
        context = multiprocessing.get_context("fork")
        with ExitStack() as stack:
            pools = [stack.enter_context(context.Pool(1, take_fragments, (rank,))) for rank in range(RANKS)]
            pids = [process.pid for process in multiprocessing.active_children() if process.pid]
            writes = [
                Contestant(label, partial(write, path, label, pools), partial(remove, path), pids=pids)
                for label, path in paths.items()
            ]
            rounds = interleaved(writes, options.runs)
        result.add(rounds, nbytes, "write")
        result.at_least("20,000 tensors against 20, write", speedup(rounds, SMALL, over=LARGE), 0.6)
        for group, prepare in (("load cold", drop_from_cache), ("load cached", bring_into_cache)):
            contestants = [
                loading(label, path, prepare, partial(load, out=states[label])) for label, path in paths.items()
            ]
            rounds = interleaved(contestants, options.runs)
            result.add(rounds, nbytes, group)
            result.at_least(f"20,000 tensors against 20, {group}", speedup(rounds, SMALL, over=LARGE), 0.6)
    result.finish()


if __name__ == "__main__":
    main()
