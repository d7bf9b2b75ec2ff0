"""Measures what the number of data files costs: many ranks write a checkpoint with ``ranks_per_file=1``, 8 and 64.

    python bench/many_files.py DIRECTORY [--ranks N] [--kib N] [--runs N]

The ranks are threads of this process (``tests.support.thread_ranks``), and all else is the code of real ranks. Each of
them has KIB of the masters and as much of two moments, and a tree of its own. The program prints the medians of: the
seconds of the whole write, of its planning, of the data files and of the commit, the processor time of all ranks with
the making of the engines, the number of files, and the seconds that it takes to remove them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from unittest import mock

import torch

import zckpt
from tests.support.thread_ranks import ONE_THREAD, ThreadRanks
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.testing import ReferenceEngine

RANKS_PER_FILE = (1, 8, 64)


def measure(root: Path, ranks_per_file: int, options: argparse.Namespace) -> dict[str, float]:
    root.mkdir()
    ready, done = threading.Barrier(options.ranks), threading.Barrier(options.ranks)
    times: dict[str, list[float]] = {"begin": [], "files begin": [], "files end": [], "end": []}
    write_data_files = RankWrite.write_data_files

    def noted(write: RankWrite, *arguments: object) -> bytes:
        times["files begin"].append(time.perf_counter())
        try:
            return write_data_files(write, *arguments)  # type: ignore[arg-type]
        finally:
            times["files end"].append(time.perf_counter())

    def write_rank(rank: int) -> None:
        # The values of the weights do not matter, and every rank would draw those of all ranks.
        engine = ReferenceEngine({"weight": (options.ranks, options.kib << 8)}, frozen=())
        engine.tensors["buffer"].clear()
        ready.wait()
        times["begin"].append(time.perf_counter())
        zckpt.write(engine, root / "run" / "c", budget=ONE_THREAD, ranks_per_file=ranks_per_file)
        times["end"].append(time.perf_counter())
        done.wait()

    with (
        mock.patch.object(RankWrite, "write_data_files", noted),
        mock.patch("torch.randn", lambda numel, generator: torch.zeros(numel)),
    ):
        processor = time.process_time()
        for outcome in ThreadRanks(options.ranks).run(write_rank):
            if outcome.error is not None:
                raise outcome.error
        processor = time.process_time() - processor
    begin, files_begin, files_end, end = (
        min(times["begin"]),
        min(times["files begin"]),
        *map(max, (times["files end"], times["end"])),
    )
    files = sum(len(files) for _, _, files in os.walk(root))
    start = time.perf_counter()
    shutil.rmtree(root)
    return {
        "write": end - begin,
        "plan": files_begin - begin,
        "data files": files_end - files_begin,
        "commit": end - files_end,
        "processor": processor,
        "files": files,
        "remove": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[int, list[dict[str, float]]] = {number: [] for number in RANKS_PER_FILE}
    for _ in range(options.runs):
        for number, of_number in runs.items():
            of_number.append(measure(options.directory / "many_files", number, options))
            print(number, {name: round(value, 3) for name, value in of_number[-1].items()}, flush=True)
    for number, of_number in runs.items():
        medians = {name: statistics.median(run[name] for run in of_number) for name in of_number[0]}
        print(f"{number:2} ranks to a file: ", ", ".join(f"{name} {value:.2f}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
