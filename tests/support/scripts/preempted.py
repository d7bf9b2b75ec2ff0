"""Trains until a signal ends it: preempted.py WORKERS DIRECTORY.

WORKERS is the number of worker processes of the data loader. DIRECTORY gets the checkpoint, ``pid-<rank>`` once steps
are taken, and ``status-<rank>`` with the exit status and the step at the end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch

import zckpt
from tests.support.models import make_engine, train

workers, run = int(sys.argv[1]), Path(sys.argv[2])
rank = int(os.environ["RANK"])
deepspeed.init_distributed("gloo")
engine = make_engine(stage=3)
zckpt.on_preemption(engine, run / "checkpoints" / "last")
samples: Any = range(3000)
loader = torch.utils.data.DataLoader(samples, num_workers=workers)
try:
    for number, _ in enumerate(loader):
        train(engine, 1, number)
        if number == 1:
            (run / f"pid-{rank}.new").write_text(str(os.getpid()))
            (run / f"pid-{rank}.new").rename(run / f"pid-{rank}")
        time.sleep(0.02)
except SystemExit as end:
    (run / f"status-{rank}").write_text(f"{end.code} {engine.global_steps}")
    raise
