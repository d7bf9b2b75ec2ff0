"""Measures the memory that a write, a restore and loads need on top of the state itself, at three sizes of state.

    python bench/memory.py [--size 8GiB] [--dir DIR]

``--size`` is the largest of the three sizes. It takes 1.3 times as much memory, and as much room on the disk. Measured
is the growth of two figures: the peak of the process (VmHWM, which is reset before), and the page cache (``Cached`` in
/proc/meminfo, which is sampled every 20 ms, and which other processes change, too). The memory that data is loaded into
exists before. Only ``iter`` allocates memory of its own, for one tensor of 64 MiB at most. A real engine needs twice
the memory of its state. Therefore it is measured only at the two smaller sizes. It has its moments already when it is
restored. At the largest size, ``load(out=)`` stands for it, because it reads into existing memory in the same way.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

import zckpt
from common import GIB, Result, cut, drop_from_cache, make_state, parse_options, workspace, write_checkpoint
from sampler import field_bytes, metered
from training import memory_of_engine, start_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from sampler import Metered

BOUND_MIB = 256 + 64


def write(path: Path, size: int) -> Metered:
    state = make_state(size)
    figures: Metered = {}
    with metered(figures, "write"):
        write_checkpoint(path, cut(state))
    return figures


def load(path: Path, size: int) -> Metered:
    state = make_state(size)
    figures: Metered = {}
    with metered(figures, "load into given memory"):
        zckpt.open(path).load(list(state), out=state)
    return figures


def iterate(path: Path, size: int) -> Metered:
    figures: Metered = {}
    with metered(figures, "iter"):
        for _ in zckpt.open(path).iter():
            pass
    return figures


def main() -> None:
    options = parse_options(__doc__, runs=1, size=8 * GIB)
    result = Result("memory", "Extra host memory", options)
    sizes = [options.size // 8, options.size * 3 // 8, options.size]
    needed = options.size * 13 // 10
    if field_bytes("/proc/meminfo", "MemAvailable") < needed:
        print(f"{needed / GIB:.0f} GiB of memory would be needed for {options.size / GIB:.0f} GiB of state: left out")
        sizes.pop()
    by_size: dict[str, Metered] = {}
    for size in sizes:
        figures_of_size = by_size[f"{size / GIB:.3g} GiB"] = {}
        with workspace(options, size) as directory:
            for action in (write, load, iterate):  # each in a process that has no buffers yet
                drop_from_cache(directory)
                with ProcessPoolExecutor(1, get_context("fork")) as process:
                    figures_of_size |= process.submit(action, directory / "checkpoint", size).result()
        if size <= options.size * 3 // 8:
            with workspace(options, size) as directory:
                (figures_of_engine,) = start_ranks(memory_of_engine, 1, directory, size)
            figures_of_size |= figures_of_engine
    for label, figures_of_size in by_size.items():
        for what, growth in figures_of_size.items():
            peak, cached = growth["peak_mib"], growth["cached_mib"]
            worst = max(peak, cached)
            print(f"  {label:9} {what:24} peak {peak:7.1f} MiB   Cached {cached:7.1f} MiB")
            result.at_most(f"extra memory of {what}, {label} of state", worst, BOUND_MIB, "MiB")
    result.extra["by_size"] = by_size
    result.finish()


if __name__ == "__main__":
    main()
