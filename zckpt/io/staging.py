"""Staging buffers: what tensors pass through between a file and the memory that they belong to, host's or device's."""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.io.linux import free_lazily
from zckpt.io.memory import PAGE_BYTES, aligned
from zckpt.transfer.devices import CopyQueue, give_back_pinned_memory, has_streams, pinned_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zckpt.io.budget import Budget
    from zckpt.io.memory import Bytes

ARENA_BYTES_PER_THREAD = 16 << 20
"""Of pinned memory: each thread reads into one buffer while another one, that it has read, goes to a device."""


class Stage:
    """One staging buffer, and the copies between it and the memory of devices."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor``: uint8, 1-D, in host memory, aligned for direct I/O."""
        self.tensor = tensor
        self.bytes: Bytes = tensor.numpy()
        self.address = tensor.data_ptr()
        self._queues: dict[torch.device, CopyQueue] = {}
        self._rests = False

    def queue(self, device: torch.device) -> CopyQueue:
        """For the copies between this buffer and a device."""
        if device not in self._queues:
            self._queues[device] = CopyQueue(self.tensor, device)
        return self._queues[device]

    def is_done(self) -> bool:
        """Whether all copies are."""
        return all(queue.is_done() for queue in self._queues.values())

    def wait(self) -> None:
        """Until all copies are done."""
        for queue in list(self._queues.values()):  # its user may add to them meanwhile
            queue.wait()

    def close(self) -> None:
        while self._queues:
            self._queues.popitem()[1].close()

    def wake(self) -> None:
        self._rests = False

    def rest(self) -> None:
        """Its content is not needed any more: the system may take the memory, and does when it runs short. What it
        leaves is as quick to write to as it was."""
        if not self._rests:
            free_lazily(self.address, len(self.bytes))
            self._rests = True


class Staging:
    """Staging buffers that hold a read or a write of ``batch_bytes``, with a page to spare on either side. They are
    made as they are needed, and used again. Safe to use from several threads.

    All use of them is inside of ``work``.
    """

    def __init__(self, batch_bytes: int, buffers: int | None = None) -> None:
        """``buffers``: how many there may be; None: as many as are asked for."""
        self.batch_bytes = batch_bytes
        self.buffers = buffers
        self.nbytes = batch_bytes + 2 * PAGE_BYTES
        self._stages: list[Stage] = []
        self._idle: deque[Stage] = deque()
        """The next one to be used comes first."""
        self._users = self._items = 0
        self._changed = threading.Condition()

    @contextmanager
    def work(self, items: int = sys.maxsize) -> Iterator[None]:
        """A context for so many reads or writes. It ends when all copies are done."""
        with self._changed:
            self._users += 1
            self._items += items
        try:
            yield
        finally:
            try:
                self._wait()
            finally:
                with self._changed:
                    self._users -= 1
                    self._items -= items
                    if not self._users:
                        self._rest()

    def kept(self) -> AbstractContextManager[None]:
        """A context for work that comes in parts: what takes long to make is kept from one to the next."""
        return nullcontext()

    def acquire(self) -> Stage:
        """A buffer for the caller alone, until it is released; the copies that were queued on it are done."""
        with self._changed:
            while not self._idle:
                if made := self._make():
                    self._stages += made
                    self._idle += made
                else:
                    self._changed.wait()
            stage = self._idle.popleft()
        stage.wake()
        stage.wait()
        return stage

    def release(self, stage: Stage) -> None:
        """It is given to the next one when the copies queued on it are done."""
        with self._changed:
            self._put_back(stage)
            self._changed.notify()

    @contextmanager
    def lend(self) -> Iterator[Stage]:
        """A buffer for the duration of a context."""
        stage = self.acquire()
        try:
            yield stage
        finally:
            self.release(stage)

    def _put_back(self, stage: Stage) -> None:
        self._idle.appendleft(stage)  # it may still be in the processor's cache

    def _wait(self) -> None:
        """Until all copies are done; those of others too. An interrupt meanwhile is raised after that: the memory that
        is copied to or from may be freed then."""
        interrupts: list[KeyboardInterrupt] = []
        left = list(self._stages)
        while left:
            try:
                left[-1].wait()
                left.pop()
            except KeyboardInterrupt as error:  # raised below
                interrupts.append(error)
        if interrupts:
            raise interrupts[0]

    def _make(self) -> list[Stage]:
        """More buffers; none where there may be no more."""
        room = torch.from_numpy(np.empty(self.nbytes + PAGE_BYTES, np.uint8))
        return [Stage(aligned(room, self.nbytes, PAGE_BYTES))]

    def _rest(self) -> None:
        """Nobody is at work. They are kept for the life of the process: to write to memory for the first time takes
        several times longer than to write to it again."""
        self._idle = deque(self._stages)  # those too that an error has kept from being released
        for stage in self._stages:
            stage.rest()


@dataclass(frozen=True, slots=True)
class Arena:
    """``nbytes`` of pinned memory, a power of two, which torch's allocator would take anyway; cut into buffers."""

    nbytes: int
    batch_bytes: int

    @classmethod
    def within(cls, budget: Budget, block_bytes: int) -> Arena:
        """The arena from which all buffers of a load come, or of a write in the foreground. It has two for each thread,
        or as many as fit; a buffer holds a block at least."""
        nbytes = _power_of_two_below(min(budget.nbytes, ARENA_BYTES_PER_THREAD * budget.threads))
        batch_bytes = max((nbytes // (2 * budget.threads) - 3 * PAGE_BYTES) // block_bytes, 1) * block_bytes
        one = cls(nbytes, batch_bytes)
        return one if one.buffers else one.for_buffers(1)

    @property
    def buffers(self) -> int:
        """How many it is cut into. It need not begin with a page."""
        return (self.nbytes - PAGE_BYTES) // (self.batch_bytes + 2 * PAGE_BYTES)

    def for_buffers(self, count: int) -> Arena:
        """One with so many buffers at least, of the same size."""
        nbytes = count * (self.batch_bytes + 2 * PAGE_BYTES) + PAGE_BYTES
        return replace(self, nbytes=2 * _power_of_two_below(nbytes - 1))


class PinnedStaging(Staging):
    """Up to ``buffers`` of them, from arenas of pinned memory. At the end the system gets the memory back."""

    def __init__(self, arena: Arena, buffers: int) -> None:
        super().__init__(arena.batch_bytes, buffers)
        self._arena, self._buffers_max = arena, buffers

    def kept(self) -> AbstractContextManager[None]:
        return self.work()

    def _put_back(self, stage: Stage) -> None:
        self._idle.append(stage)  # its copies have just been queued

    def _make(self) -> list[Stage]:
        missing = min(self._buffers_max, self._items) - len(self._stages)
        if missing <= 0:
            return []
        arena = self._arena if missing >= self._arena.buffers else self._arena.for_buffers(missing)
        memory = aligned(pinned_memory(arena.nbytes), arena.buffers * self.nbytes, PAGE_BYTES)
        return [Stage(memory.narrow(0, number * self.nbytes, self.nbytes)) for number in range(arena.buffers)]

    def _rest(self) -> None:
        self._idle.clear()
        while self._stages:
            self._stages.pop().close()
        give_back_pinned_memory()


@lru_cache(maxsize=4)
def host_staging(batch_bytes: int) -> Staging:
    """Buffers in memory that is not pinned, shared by all who ask for the same size."""
    return Staging(batch_bytes)


def staging_for(devices: Iterable[torch.device], budget: Budget, block_bytes: int, nbytes: int = 0) -> Staging:
    """For reads and writes of whole blocks to and from these devices, and the host's memory too. If it is pinned, it
    takes no more than ``nbytes`` or what the budget has, whichever is more."""
    if not any(map(has_streams, devices)):
        return host_staging(budget.batch_bytes(block_bytes))
    arena = Arena.within(budget, block_bytes)
    return PinnedStaging(arena, arena.buffers * max(nbytes // arena.nbytes, 1))


def _power_of_two_below(nbytes: int) -> int:
    """The largest one that is not above."""
    return 1 << (nbytes.bit_length() - 1)
