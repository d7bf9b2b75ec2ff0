"""Samples, from a process of its own, the resident memory of some processes and the page cache, every 50 ms.

As a program: ``python sampler.py SECONDS PID ...`` prints lines of time, bytes resident in all of them, and bytes of
``Cached`` in /proc/meminfo, until its input ends. The time is that of ``time.monotonic``.
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
    """Starts when it is made, and returns ``(time, resident bytes, cached bytes)`` when it is stopped."""

    def __init__(self, pids: Sequence[int], interval_seconds: float = INTERVAL_SECONDS) -> None:
        command = [sys.executable, "-S", "-E", __file__, str(interval_seconds), *map(str, pids)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._first = self._process.stdout.readline()

    def stop(self) -> list[tuple[float, int, int]]:
        out, _ = self._process.communicate()
        lines = [self._first, *out.splitlines()]
        return [(float(at), int(rss), int(cached)) for at, rss, cached in map(str.split, lines)]


def field_bytes(path: str, field: str) -> int:
    """A field of /proc/meminfo or /proc/<pid>/status, such as Cached or VmHWM."""
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


Metered = dict[str, dict[str, float]]


@contextmanager
def metered(found: Metered, what: str) -> Iterator[None]:
    """MiB by which peak and page cache grow while this runs."""
    gc.collect()
    sampler = Sampler([os.getpid()], 0.02)
    Path("/proc/self/clear_refs").write_text("5")  # starts VmHWM anew
    before = field_bytes("/proc/self/status", "VmRSS"), field_bytes("/proc/meminfo", "Cached")
    yield
    peak = field_bytes("/proc/self/status", "VmHWM")
    cached = max(sample[2] for sample in sampler.stop())
    found[what] = {"peak_mib": (peak - before[0]) / (1 << 20), "cached_mib": max(0, cached - before[1]) / (1 << 20)}


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
