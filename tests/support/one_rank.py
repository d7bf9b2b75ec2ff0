"""Makes this process the only rank of a run, for tests on a GPU. A process that has used a GPU cannot be forked."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def one_rank(port: int, begin: Callable[[], object]) -> Iterator[None]:
    """``port``: where the rank listens. ``begin``: makes the process group."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank.items():
            patch.setenv(name, value)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that products repeat bit for bit
        begin()
        yield
        dist.destroy_process_group()
