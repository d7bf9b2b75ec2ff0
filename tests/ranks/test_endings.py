"""A process whose work is done ends with the exit status 0, whatever its threads and those of gloo are doing.

Python before 3.14 ends a thread that asks for the interpreter while it ends. Inside of C++ code, this aborts the
process. The launcher then takes the whole job for a failed one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.cluster import ROOT
from tests.support.endings import ends

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux

ALL_THREADS = """
import atexit, os, sys, threading

counts = []

def look():
    counts.append(len(os.listdir("/proc/self/task")))
    print(*counts, *(thread.name for thread in threading.enumerate() if "zckpt" in thread.name))

atexit.register(look)  # Handlers that are registered first are called last.
import torch.distributed as dist
import zckpt
from zckpt.testing import ReferenceEngine
dist.init_process_group("gloo")
engine = ReferenceEngine()
counts.append(len(os.listdir("/proc/self/task")))
zckpt.on_preemption(engine)
zckpt.offload(engine, sys.argv[1] + "/scratch", background=True)
zckpt.reload(engine, parts=["master"])
zckpt.reload(engine)
zckpt.write(engine, sys.argv[1] + "/run/step0", background=True)
"""


@pytest.mark.offload
def test_no_thread_is_left_when_the_interpreter_ends(tmp_path: Path) -> None:
    for status, out, errors in ends(ALL_THREADS, tmp_path, ranks=2):
        assert (status, errors) == (0, "")
        before, after, *of_zckpt = out.split()
        assert after == before
        assert of_zckpt == []


CANNOT_CONNECT = """
import os, sys, time
import torch.distributed as dist
import zckpt
from zckpt.testing import ReferenceEngine

class SlowToDelete:
    def __del__(self):
        time.sleep(6)

dist.init_process_group("gloo")
engine = ReferenceEngine()
if dist.get_rank() == 0:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
try:
    zckpt.write(engine, sys.argv[1])
except zckpt.RankError as error:
    print(error)
if dist.get_rank() == 0:
    time.sleep(3)  # The store of the job ends with this process, while the interpreter of rank 1 is ending.
else:
    sys.modules["slow"] = SlowToDelete()
"""


def test_ranks_that_cannot_connect_end_as_others_do(tmp_path: Path) -> None:
    for status, out, errors in ends(CANNOT_CONNECT, tmp_path / "c", ranks=2):
        assert "cannot connect to the other ranks" in out
        assert (status, errors) == (0, "")


@pytest.mark.matrix
@pytest.mark.parametrize("hold", ["", "pt_gloo", "zckpt"])
def test_many_jobs_end(tmp_path: Path, hold: str) -> None:
    command = [sys.executable, "bench/endings.py", "--jobs", "40", "--only", "zckpt", "--results", str(tmp_path)]
    subprocess.run([*command, "--hold", hold], cwd=ROOT, check=True)
    endings = json.loads((tmp_path / "endings.json").read_text())["endings"]
    assert len(endings) == 4
    assert all(statuses == {"status 0 and status 0": 10} for statuses in endings.values()), endings
