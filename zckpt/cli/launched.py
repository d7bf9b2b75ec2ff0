"""Lets the ranks of a launcher, such as torchrun, share the work of a command, on one machine or on several."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def launched() -> Iterator[int]:
    """Yields the rank of this process, which is 0 without a launcher. Under a launcher, the process group exists until
    the block ends. Only rank 0 may print."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
