"""Runs scripts on ranks that end as the scripts of users do, by the end of the interpreter. (The ranks of ``cluster``
are ended without it.)"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

from tests.support.cluster import ROOT, held_port

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 300
"""A script that hangs is killed after so many seconds."""


@contextmanager
def started(script: str, *arguments: object, ranks: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a script on some ranks. Its arguments are in ``sys.argv``. ``torch.distributed`` can be initialized from
    the environment. Kills the ranks that are left at the end."""
    with held_port() as port, ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-c", script, *map(str, arguments)],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def ends(script: str, *arguments: object, ranks: int = 1) -> list[tuple[int, str, str]]:
    """Runs a script on some ranks. Returns the exit status of each rank, and what it has printed on stdout and
    stderr. A negative status is the number of a signal."""
    with started(script, *arguments, ranks=ranks) as processes:
        return [ended(process) for process in processes]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits for the end of a rank, and returns what ``ends`` returns for it."""
    out, errors = process.communicate(timeout=SECONDS)
    return process.returncode, out, errors


def execute(script: str, *arguments: object) -> tuple[str, str]:
    """Runs a script on a rank of ``cluster``, for a script whose end does not matter: no Python is started, which would
    import torch again. Returns what it has printed on stdout and stderr."""
    out, errors = StringIO(), StringIO()
    sys.argv = ["-c", *map(str, arguments)]
    with redirect_stdout(out), redirect_stderr(errors):
        exec(script, {"__name__": "__main__"})
    return out.getvalue(), errors.getvalue()
