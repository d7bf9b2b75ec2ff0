"""The memory of a process, as Linux counts it, and the removal of files from the page cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zckpt.system import linux


def peak_growth(action: Any) -> int:
    """Returns the bytes by which the peak of the resident memory during ``action`` exceeds that before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    action()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def uncache(directory: Path) -> None:
    """Takes all files below a directory out of the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages that are not on the disk yet would stay in the cache
                linux.uncache(file.fileno())
