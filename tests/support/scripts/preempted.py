"""Trains until a signal ends it. The argument is a directory: for the checkpoint, for ``pid-<rank>`` once steps are
taken, and for ``status-<rank>`` with the status and the step at the end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import deepspeed

import zckpt
from tests.support.models import make_engine, train

run = Path(sys.argv[1])
rank = int(os.environ["RANK"])
deepspeed.init_distributed("gloo")
engine = make_engine(stage=3)
zckpt.on_preemption(engine, run / "checkpoints" / "last")
try:
    for number in range(3000):
        train(engine, 1, number)
        if number == 1:
            (run / f"pid-{rank}.new").write_text(str(os.getpid()))
            (run / f"pid-{rank}.new").rename(run / f"pid-{rank}")
        time.sleep(0.02)
except SystemExit as end:
    (run / f"status-{rank}").write_text(f"{end.code} {engine.global_steps}")
    raise
