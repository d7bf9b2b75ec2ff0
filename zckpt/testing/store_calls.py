"""Calls of a store for the tests of ``StoreContract``, by one thread or by several at once."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from zckpt.errors import MissingFileError, StorageError
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.transfer.memory import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Store

T = TypeVar("T")
ROUNDS = 50
"""How often each race is run, unless the store says otherwise. A race is short, and chance decides its winner."""
CHANGE_SECONDS = 60
"""For how many seconds a test waits for a change that it should see."""


def content(nbytes: int, seed: int = 0) -> bytes:
    """Returns ``nbytes`` random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def pages(nbytes: int) -> Bytes:
    """Returns zeros in memory that begins at a page."""
    zeros: Bytes = aligned(torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8), nbytes, PAGE_BYTES).numpy()
    return zeros


def staged(data: bytes, start: int, stop: int) -> Bytes:
    """Returns the bytes ``[start, stop)`` of a file in memory that is aligned as ``Writer.write`` expects it."""
    remainder = start % PAGE_BYTES
    stage = pages(remainder + stop - start)[remainder:]
    stage[:] = np.frombuffer(data[start:stop], np.uint8)
    return stage


def read(store: Store, path: str, nbytes: int = 1 << 20) -> bytes:
    with closing(store.reader()) as reader:
        return reader.read(path, 0, nbytes)


def total_bytes(store: Store, path: str) -> int:
    """Returns the size of a file, or of all files in and below a directory."""
    entry, below = store.entry(path), store.entries(path, deep=True) or ()
    return sum(each.nbytes or 0 for each in (entry, *below) if each is not None)


def changed_at(store: Store, path: str) -> float:
    """Returns when a file was changed, or 0 if there is none."""
    entry = store.entry(path)
    return 0.0 if entry is None else entry.changed_at


def replace(store: Store, path: str, data: bytes) -> None:
    store.prepare(path, data).commit()


def together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Makes the calls at the same moment, each in a thread of its own. Returns their results. Raises the error that one
    of them raises. Each thread pauses at random lines of Python, so that a missing lock is noticed."""
    calls = list(calls)
    barrier = threading.Barrier(len(calls))
    tracing = threading.Lock()  # Python refuses to begin to trace in two threads at the same moment.

    def halt(*_: object) -> Callable[..., Any]:
        if random.random() < 0.2:
            time.sleep(1e-6)
        return halt

    def run(call: Callable[[], T]) -> T:
        barrier.wait()
        before = sys.gettrace()
        with tracing:
            sys.settrace(halt)
        try:
            return call()
        finally:
            with tracing:
                sys.settrace(before)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def seen_meanwhile(store: Store, path: str, action: Callable[[int], None], rounds: int) -> set[bytes | None]:
    """Reads ``path`` again and again, while another thread calls ``action`` with 0, 1, 2 and so on, at least ``rounds``
    times and half a second, and until the reads have had different results, or for ``CHANGE_SECONDS``. Returns all
    contents that were read, where None stands for a missing file."""
    seen: set[bytes | None] = set()
    ended = threading.Event()

    def act() -> None:
        begun = time.monotonic()
        try:
            for number in itertools.count():
                action(number)
                elapsed = time.monotonic() - begun
                if number >= rounds and elapsed > (0.5 if len(seen) > 1 else CHANGE_SECONDS):
                    break
        finally:
            ended.set()

    def read_again() -> None:
        while not ended.is_set():
            try:
                seen.add(read(store, path))
            except MissingFileError:
                seen.add(None)
            time.sleep(1e-4)  # Windows cannot rename or remove a file while it is open

    together([act, read_again])
    return seen


def succeeds(action: Callable[[], object]) -> bool:
    """Calls ``action``. Returns whether it has ended without a StorageError."""
    try:
        action()
    except StorageError:
        return False
    return True
