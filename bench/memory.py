"""The memory that a write, a restore and loads need beside the state itself, at three sizes of state.

    python bench/memory.py [--size 8GiB] [--dir DIR]

``--size`` is the largest of the three; it takes 1.3 times as much memory and once as much disk. Measured are the growth
of the process's peak (VmHWM, started anew before) and of the page cache (``Cached`` in /proc/meminfo, every 20 ms,
which other processes change too). The memory that data is loaded into exists before, but for ``iter``, where one tensor
of 64 MiB at most comes on top. A real engine, which needs twice its state, is restored at the two smaller sizes only,
when it has its moments already: reading into its memory is what ``load(out=)`` does.
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
    found: Metered = {}
    with metered(found, "write"):
        write_checkpoint(path, cut(state))
    return found


def load(path: Path, size: int) -> Metered:
    state = make_state(size)
    found: Metered = {}
    with metered(found, "load into given memory"):
        zckpt.open(path).load(list(state), out=state)
    return found


def iterate(path: Path, size: int) -> Metered:
    found: Metered = {}
    with metered(found, "iter"):
        for _ in zckpt.open(path).iter():
            pass
    return found


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
        found = by_size[f"{size / GIB:.3g} GiB"] = {}
        with workspace(options, size) as directory:
            for what in (write, load, iterate):  # each in a process that has no buffers yet
                drop_from_cache(directory)
                with ProcessPoolExecutor(1, get_context("fork")) as process:
                    found |= process.submit(what, directory / "checkpoint", size).result()
        if size <= options.size * 3 // 8:
            with workspace(options, size) as directory:
                (engine,) = start_ranks(memory_of_engine, 1, directory, size)
            found |= engine
    for label, found in by_size.items():
        for what, one in found.items():
            worst = max(one["peak_mib"], one["cached_mib"])
            print(f"  {label:9} {what:24} peak {one['peak_mib']:7.1f} MiB   Cached {one['cached_mib']:7.1f} MiB")
            result.at_most(f"extra memory of {what}, {label} of state", worst, BOUND_MIB, "MiB")
    result.extra["by_size"] = by_size
    result.finish()


if __name__ == "__main__":
    main()
