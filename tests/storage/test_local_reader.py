"""The ends of readers and of other objects that keep files open: by an interrupt, or with the process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.states import write_state
from zckpt.storage.local_reader import IDLE_FILES_MAX, LocalReader

ROOT = Path(__file__).parents[2]
AT_THE_END = """
import os
import sys

import __main__
import torch

import zckpt
from zckpt.offloading.scratch import ScratchFile

os.main = __main__  # As where dill is imported, something keeps the script's names until other modules are cleared.
checkpoint = zckpt.open(sys.argv[1])
first = next(tensors := checkpoint.iter())
file = ScratchFile(sys.argv[2])
"""


@pytest.mark.linux
def test_objects_that_outlive_the_modules_end_without_a_word(tmp_path: Path) -> None:
    path = write_state(tmp_path / "c", 1, {"w": (2,), "v": (3,)}).path
    command = [sys.executable, "-c", AT_THE_END, str(path), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr.decode()) == (0, "")


@pytest.mark.linux
def test_an_interrupted_close_loses_no_file(tmp_path: Path) -> None:
    names = [f"{number}" for number in range(IDLE_FILES_MAX)]
    for name in names:
        (tmp_path / name).write_bytes(b"content")
    choice = random.Random(0)
    before = set(os.listdir("/proc/self/fd"))
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        while interrupted < 100:
            reader = LocalReader(str(tmp_path))
            for name in names:
                reader.read(name, 0, 7)
            try:
                signal.setitimer(signal.ITIMER_REAL, choice.uniform(1e-6, 3e-4))
                reader.close()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            reader.close()
            assert set(os.listdir("/proc/self/fd")) == before
    finally:
        signal.signal(signal.SIGALRM, handler)
