"""Runs of small checkpoints, and files that dead writers leave in them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.support.states import write_state

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"w": (40, 50)}


def write_steps(run: Path, *steps: int) -> None:
    """Writes a checkpoint of two ranks for each step, each committed a second after the one before."""
    for number, step in enumerate(steps):
        write_state(run / f"s{step}", 2, SHAPES, step=step, seed=step)
        os.utime(run / f"s{step}" / "manifest.msgpack", (1e9 + number,) * 2)


def tree(path: Path) -> set[str]:
    return {str(entry.relative_to(path)) for entry in path.rglob("*")}


def directory_names(run: Path) -> list[str]:
    """Returns the names of the directories in a run, in order."""
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def litter(checkpoint: Path) -> set[Path]:
    """Makes the files that a dead writer may leave, and returns the paths that a clean-up has to remove."""
    data = checkpoint / "data-0123456789abcdef" / "rank-00000"
    data.mkdir(parents=True)
    (data / "master.safetensors").write_bytes(bytes(5000))
    temporary = checkpoint / "manifest.msgpack.01234567.tmp"
    temporary.write_bytes(bytes(70))
    of_lock = checkpoint / "write.lock.89abcdef.tmp"
    of_lock.write_bytes(b"")
    os.utime(of_lock, (0, 0))
    return {data.parent, temporary, of_lock}
