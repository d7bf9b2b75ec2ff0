"""Measures what the number of data files costs, if each of many ranks has its own or if several ranks share one.

    python bench/many_files.py DIRECTORY [--ranks N] [--parts N] [--kib N] [--threads N] [--runs N]

Threads write the data files of all ranks and make them durable, as ``zckpt.write`` does. zckpt has one data file for
each rank and part. Here, groups of K ranks also share the files of their first rank: each rank writes to a range of
them. Then the program measures how long it takes to open all data files and look at their lengths, in one thread and in
all threads, and to remove them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HEADER_BYTES = 4096
GROUPS = (1, 8, 64)
"""How many ranks share a data file."""


def make_durable(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.pwrite(fd, data, offset)
    os.fsync(fd)
    os.close(fd)


def look(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fstat(fd)
    os.close(fd)


def measure(root: Path, together: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds of each step if ``together`` ranks share a data file."""
    data = os.urandom(options.kib << 10)
    root.mkdir()

    def write_rank(rank: int) -> None:
        own, shared = (root / f"rank-{number:05d}" for number in (rank, rank - rank % together))
        for directory in (own, shared):
            directory.mkdir(exist_ok=True)
        for part in range(options.parts):
            write(shared / f"{part}.safetensors", HEADER_BYTES + rank % together * len(data), data)
        write(own / "digests.bin", 0, bytes(64))
        for directory in {own, shared}:
            make_durable(directory)

    files = [
        root / f"rank-{rank:05d}" / f"{part}.safetensors"
        for rank in range(0, options.ranks, together)
        for part in range(options.parts)
    ]
    with ThreadPoolExecutor(options.threads) as pool:
        steps = {
            "write": lambda: list(pool.map(write_rank, range(options.ranks))),
            "look, one thread": lambda: list(map(look, files)),
            "look, all threads": lambda: list(pool.map(look, files)),
            "remove": lambda: shutil.rmtree(root),
        }
        seconds = {}
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name] = time.perf_counter() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    runs: dict[int, list[dict[str, float]]] = {together: [] for together in GROUPS}
    for _ in range(options.runs):
        for together, of_group in runs.items():
            of_group.append(measure(options.directory / "many_files", together, options))
    for together, of_group in runs.items():
        medians = {name: statistics.median(run[name] for run in of_group) for name in of_group[0]}
        print(f"{together:2} ranks share a file: ", ", ".join(f"{name} {s:.2f} s" for name, s in medians.items()))


if __name__ == "__main__":
    main()
