"""Starts training scripts as users do, by torchrun, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]


def launch(script: str, *arguments: object) -> bool:
    """Runs a script of ``SCRIPTS`` on two ranks under ``zckpt run``. Returns whether both ranks came to their end."""
    return _launch(str(SCRIPTS / script), *arguments)


def launch_module(*arguments: object) -> bool:
    """Does what ``launch`` does, for a module."""
    return _launch("-m", *arguments)


def _launch(*arguments: object) -> bool:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "zckpt", "run", *map(str, arguments)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == 0
