"""What a process takes of memory, as Linux tells it, and files that are taken out of the page cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zckpt.system import linux


def peak_growth(action: Any) -> int:
    """Bytes by which the resident memory at its highest exceeds that before ``action``."""
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
                os.fsync(file.fileno())  # what is not on the disk yet would stay
                linux.uncache(file.fileno())
