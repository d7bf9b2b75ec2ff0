"""Samples the resident memory of some processes, and the page cache, from a process of its own, every 50 ms.

As a program, ``python sampler.py SECONDS PID ...`` prints a line every SECONDS until its input ends. A line has the
time of ``time.monotonic``, the bytes that are resident in all of the processes together, and the bytes of ``Cached`` in
/proc/meminfo.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INTERVAL_SECONDS = 0.05


class Sampler:
    """A process that samples memory from the construction of the object until ``stop`` is called."""

    def __init__(self, pids: Sequence[int], interval_seconds: float = INTERVAL_SECONDS) -> None:
        command = [sys.executable, "-S", "-E", __file__, str(interval_seconds), *map(str, pids)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._first = self._process.stdout.readline()

    def stop(self) -> list[tuple[float, int, int]]:
        """Returns the samples: the time in seconds, the resident bytes and the bytes of the page cache."""
        out, _ = self._process.communicate()
        lines = [self._first, *out.splitlines()]
        return [(float(at), int(rss), int(cached)) for at, rss, cached in map(str.split, lines)]


def field_bytes(path: str, field: str) -> int:
    """Returns the value of a field of /proc/meminfo or /proc/<pid>/status, such as Cached or VmHWM, in bytes."""
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


Metered = dict[str, dict[str, float]]
"""The MiB by which peak and page cache have grown, by the name of what was done."""


@contextmanager
def metered(figures: Metered, what: str) -> Iterator[None]:
    """Puts the MiB by which peak and page cache grow within the ``with`` block into ``figures[what]``. Memory that was
    freed before counts if it is used again, even if the C library has kept it."""
    from zckpt.system.linux import trim_heap  # here, because the program of this file cannot import zckpt

    gc.collect()
    trim_heap()
    sampler = Sampler([os.getpid()], 0.02)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = field_bytes("/proc/self/status", "VmRSS"), field_bytes("/proc/meminfo", "Cached")
    yield
    peak = field_bytes("/proc/self/status", "VmHWM")
    cached = max(sample[2] for sample in sampler.stop())
    figures[what] = {"peak_mib": (peak - before[0]) / (1 << 20), "cached_mib": max(0, cached - before[1]) / (1 << 20)}


def main() -> None:
    import select

    interval = float(sys.argv[1])
    while True:
        resident = sum(field_bytes(f"/proc/{pid}/status", "VmRSS") for pid in sys.argv[2:])
        print(time.monotonic(), resident, field_bytes("/proc/meminfo", "Cached"), flush=True)
        if select.select([sys.stdin], [], [], interval)[0]:
            return


if __name__ == "__main__":
    main()
