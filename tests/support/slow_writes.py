"""Writes that take long, or that wait, so that a test can look at the checkpoint meanwhile."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from tests.support.states import write_through
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.transfer import write as io_write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


def slow(seconds: float) -> AbstractContextManager[Any]:
    """Makes each copy out of the state and each write take ``seconds`` longer, so that training goes on meanwhile."""

    def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            time.sleep(seconds)
            return function(*args)

        return call

    return mock.patch.multiple("zckpt.transfer.write", _take=slowed(io_write._take), _put=slowed(io_write._put))


@contextmanager
def held(where: str = "") -> Iterator[Callable[[], None]]:
    """Lets no write of this rank to a path with ``where`` in it end before the function that this yields is called. The
    files are written meanwhile, but the ranks do not commit before this function is called on each of them."""
    write_data_files, go_on = RankWrite.write_data_files, threading.Event()

    def write_and_wait(write: RankWrite, *arguments: Any) -> bytes:
        digest = write_data_files(write, *arguments)
        if where in str(write.store.location):
            go_on.wait()
        return digest

    with mock.patch.object(RankWrite, "write_data_files", write_and_wait):
        try:
            yield go_on.set
        finally:
            go_on.set()


def value(number: float) -> torch.Tensor:
    """Returns a tensor filled with ``number``. It is made by numpy, because torch's threads do not survive a fork."""
    return torch.from_numpy(np.full(300_000, number, np.float32))


def slow_write(path: Path, wait: Callable[[], None], number: int, **options: Any) -> object:
    """Writes a checkpoint, but calls ``wait`` once its files are there, before its commit."""
    commit_write = RankWrite.prepare_commit

    def commit(*arguments: Any, **keywords: Any) -> None:
        wait()
        commit_write(*arguments, **keywords)

    with mock.patch.object(RankWrite, "prepare_commit", commit):
        return write_through(path, value(number), **options)
