"""Writes that take long, or wait, so that a test can look at what there is meanwhile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from tests.support.states import write_through
from zckpt.transfer import write as io_write
from zckpt.writing.rank_write import RankWrite

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path


def slow(seconds: float) -> AbstractContextManager[Any]:
    """Each copy out of the state and each write takes this long: training goes on while they last."""

    def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            time.sleep(seconds)
            return function(*args)

        return call

    return mock.patch.multiple("zckpt.transfer.write", _take=slowed(io_write._take), _put=slowed(io_write._put))


def value(number: float) -> torch.Tensor:
    """By numpy, as all here: torch's own threads do not survive a fork."""
    return torch.from_numpy(np.full(300_000, number, np.float32))


def slow_write(path: Path, wait: Callable[[], None], number: int, **options: Any) -> object:
    """A write that waits once its files are there, before its commit."""
    commit_write = RankWrite.commit

    def commit(*arguments: Any, **keywords: Any) -> bytes:
        wait()
        return commit_write(*arguments, **keywords)

    with mock.patch.object(RankWrite, "commit", commit):
        return write_through(path, value(number), **options)
