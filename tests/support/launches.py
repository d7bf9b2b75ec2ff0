"""Training scripts, started as users do: by torchrun, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def launch(script: str, *arguments: object) -> bool:
    """Two ranks of one of ``SCRIPTS``, under ``zckpt run``. Returns whether all of them came to their end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "zckpt", "run", str(SCRIPTS / script), *map(str, arguments)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, check=False).returncode == 0
