"""Compares 20,000 small tensors with 20 large tensors of as many bytes, both cut over 8 ranks as ZeRO-3 cuts them.

    python bench/small_tensors.py [--size 3GiB] [--dir DIR] [--runs 5]

Every rank is a process that writes its own pieces, as in training. A further process commits. Loading is done by a
single process, which reads all 160,000 pieces back into the memory that they were written from.
"""

from __future__ import annotations

import gc
import multiprocessing
from functools import partial
from typing import TYPE_CHECKING

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
    from multiprocessing.pool import Pool
    from pathlib import Path

    import torch

RANKS = 8
COUNTS = {"20,000 tensors": 20_000, "20 tensors": 20}
SMALL, LARGE = COUNTS
RANKS_OF: dict[str, Ranks] = {}
"""The fragments that each rank holds, by label. It is global so that the forked processes inherit it."""


def write(path: Path, label: str, pool: Pool) -> None:
    write_checkpoint(
        path, RANKS_OF[label], lambda *place: pool.starmap(write_data_files, [(label, *place, r) for r in range(RANKS)])
    )


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
        with multiprocessing.get_context("fork").Pool(RANKS) as pool:
            pids = [process.pid for process in multiprocessing.active_children() if process.pid]
            writes = [
                Contestant(label, partial(write, path, label, pool), partial(remove, path), pids=pids)
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
