"""Runs one rank of a command of zckpt that torchrun has launched.

    torchrun --nproc-per-node 2 command.py COMMAND ...

The variable DIES may have names of operations on a store. Rank 1 dies at its first operation with such a name.
"""

from __future__ import annotations

import faulthandler
import os
import sys

from tests.support.faults import Fault, faulty, kill
from zckpt.cli import main
from zckpt.ranks import heartbeat

if __name__ == "__main__":
    faulthandler.dump_traceback_later(300)  # the output of a rank that hangs then says where
    heartbeat.PERIOD_SECONDS = 0.2
    dies = os.environ.get("DIES") if os.environ["RANK"] == "1" else None
    with faulty(Fault(kill, names=tuple(dies.split(","))) if dies else None):
        sys.exit(main())
