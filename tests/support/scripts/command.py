"""One rank of a launched command of zckpt. With DIES, the rank 1 dies at its first such operation on a store.

torchrun --nproc-per-node 2 command.py COMMAND ...
"""

from __future__ import annotations

import os
import sys

from tests.support.faults import Fault, faulty, kill
from zckpt.cli import main
from zckpt.ranks import heartbeat

if __name__ == "__main__":
    heartbeat.PERIOD_SECONDS = 0.2
    dies = os.environ.get("DIES") if os.environ["RANK"] == "1" else None
    with faulty(Fault(kill, names=tuple(dies.split(","))) if dies else None):
        sys.exit(main())
