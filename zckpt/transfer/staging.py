"""Staging buffers: memory through which tensors pass between a file and host or device memory."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.storage.buffers import PAGE_BYTES
from zckpt.system.linux import free_lazily
from zckpt.transfer.devices import CopyQueue, give_back_pinned_memory, has_streams, pinned_memory
from zckpt.transfer.memory import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zckpt.storage.buffers import Bytes
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.devices import FromDevice, ToDevice

ARENA_BYTES_PER_THREAD = 16 << 20
"""Pinned memory for one thread: it reads into one buffer while the buffer that it filled before is copied to a
device."""


class StagingBuffer:
    """One staging buffer, and the copies between it and the memory of devices. One thread uses it at a time."""

    def __init__(self, tensor: torch.Tensor, queue: Callable[[torch.device], CopyQueue]) -> None:
        """``tensor``: uint8, 1-D, in host memory, aligned for direct I/O. ``queue``: returns the queue of a device."""
        self.tensor = tensor
        self.bytes: Bytes = tensor.numpy()
        self.address = tensor.data_ptr()
        self._queue = queue
        self._queued: list[torch.Event] = []
        """One for each batch of copies that may be under way."""
        self._system_may_take = False

    def to_device(self, device: torch.device, copies: Sequence[ToDevice]) -> None:
        """Queues copies to a device."""
        self._add(self._queue(device).to_device(self.tensor, copies))

    def from_device(self, device: torch.device, copies: Sequence[FromDevice]) -> None:
        """Queues copies from a device."""
        self._add(self._queue(device).from_device(self.tensor, copies))

    def _add(self, done: torch.Event | None) -> None:
        if done is not None:
            self._queued.append(done)

    def is_done(self) -> bool:
        """Whether all queued copies are done."""
        return all(done.query() for done in self._queued)

    def wait(self) -> None:
        """Waits for all queued copies."""
        for done in self._queued:
            done.synchronize()
        self._queued.clear()

    def mark_used(self) -> None:
        self._system_may_take = False

    def let_system_take(self) -> None:
        """The content is not needed any more: the system may take the memory, and does when it runs short. What it
        leaves is as quick to write to as it was."""
        if not self._system_may_take:
            free_lazily(self.address, len(self.bytes))
            self._system_may_take = True

    def close(self) -> None:
        """Lets go of the memory, also if somebody still holds this object. All copies are done."""
        del self.tensor, self.bytes


class StagingPool:
    """Staging buffers that hold a read or a write of ``batch_bytes``, with a page to spare on either side. They are
    made as they are needed, and used again. Safe to use from several threads.

    All use of them is inside of ``work``.
    """

    pinned = False

    def __init__(self, batch_bytes: int, buffers: int = 0) -> None:
        """``buffers``: the most buffers that there may be; 0 for no limit."""
        self.batch_bytes = batch_bytes
        self.buffers = buffers
        self.nbytes = batch_bytes + 2 * PAGE_BYTES
        self._buffers: list[StagingBuffer] = []
        self._idle: deque[StagingBuffer] = deque()
        """The next one to be used comes first."""
        self._queues: dict[torch.device, CopyQueue] = {}
        self._users = self._items = 0
        self._changed = threading.Condition()

    @contextmanager
    def work(self, items: int = sys.maxsize) -> Iterator[None]:
        """A context in which up to ``items`` reads or writes use buffers. On leaving, it waits for all copies."""
        with self._changed:
            self._users += 1
            self._items += items
        try:
            yield
        except BaseException as error:
            if self.pinned:
                # Its frames hold buffers, which could not go back to the system as long as the caller keeps the error.
                traceback.clear_frames(error.__traceback__)
            raise
        finally:
            try:
                self._wait()
            finally:
                with self._changed:
                    self._users -= 1
                    self._items -= items
                    if not self._users:
                        self._end()

    def kept(self) -> AbstractContextManager[None]:
        """A context that keeps the buffers between several uses of ``work``."""
        return nullcontext()

    def acquire(self) -> StagingBuffer:
        """Waits for a free buffer and gives it to the caller until ``release``. No copy is under way on it."""
        with self._changed:
            while not self._idle:
                if made := self._make():
                    self._buffers += made
                    self._idle += made
                else:
                    self._changed.wait()
            buffer = self._idle.popleft()
        buffer.mark_used()
        buffer.wait()
        return buffer

    def release(self, buffer: StagingBuffer) -> None:
        """Gives the buffer back. Its copies may still be under way; ``acquire`` waits for them."""
        with self._changed:
            self._put_back(buffer)
            self._changed.notify()

    @contextmanager
    def lend(self) -> Iterator[StagingBuffer]:
        """Acquires a buffer, and releases it when the context ends."""
        buffer = self.acquire()
        try:
            yield buffer
        finally:
            self.release(buffer)

    def _queue(self, device: torch.device) -> CopyQueue:
        """Returns the queue of copies between the buffers and ``device``."""
        with self._changed:
            if device not in self._queues:
                self._queues[device] = CopyQueue(device, self.nbytes, pinned=self.pinned)
            return self._queues[device]

    def _put_back(self, buffer: StagingBuffer) -> None:
        self._idle.appendleft(buffer)  # it may still be in the processor's cache

    def _wait(self) -> None:
        """Waits for all copies, also those of other users. The first error, such as an interrupt, is raised only
        afterwards, because the memory may then be freed."""
        errors: list[BaseException] = []
        left = list(self._queues.values())
        while left:
            try:
                left[-1].wait()
                left.pop()
            except KeyboardInterrupt as error:  # raised below
                errors.append(error)
            except BaseException as error:  # raised below
                errors.append(error)
                left.pop()
        if errors:
            raise errors.pop(0)

    def _make(self) -> list[StagingBuffer]:
        """Makes more buffers; returns none at the limit."""
        room = torch.from_numpy(np.empty(self.nbytes + PAGE_BYTES, np.uint8))
        return [StagingBuffer(aligned(room, self.nbytes, PAGE_BYTES), self._queue)]

    def _end(self) -> None:
        """Called when the last user has left. The buffers stay allocated: writing to fresh memory takes several times
        longer."""
        self._idle = deque(self._buffers)  # those too that an error has kept from being released
        for buffer in self._buffers:
            buffer.let_system_take()


@dataclass(frozen=True, slots=True)
class Arena:
    """``nbytes`` of pinned memory, a power of two, which torch's allocator would take anyway; cut into buffers."""

    nbytes: int
    batch_bytes: int

    @classmethod
    def within(cls, budget: Budget, block_bytes: int) -> Arena:
        """The arena from which all buffers of a load come, or of a write in the foreground. It has two for each thread,
        or as many as fit; a buffer holds a block at least."""
        nbytes = _floor_power_of_two(min(budget.nbytes, ARENA_BYTES_PER_THREAD * budget.threads))
        batch_bytes = max((nbytes // (2 * budget.threads) - 3 * PAGE_BYTES) // block_bytes, 1) * block_bytes
        one = cls(nbytes, batch_bytes)
        return one if one.buffers else one.for_buffers(1)

    @property
    def buffers(self) -> int:
        """How many buffers the arena holds. One page is left over, because pinned memory need not begin at a page."""
        return (self.nbytes - PAGE_BYTES) // (self.batch_bytes + 2 * PAGE_BYTES)

    def for_buffers(self, count: int) -> Arena:
        """An arena with at least ``count`` buffers of the same size."""
        return replace(self, nbytes=_ceil_power_of_two(count * (self.batch_bytes + 2 * PAGE_BYTES) + PAGE_BYTES))


class PinnedPool(StagingPool):
    """A pool of pinned buffers, which are cut from arenas. The memory goes back to the system when the last user has
    left."""

    pinned = True

    def __init__(self, arena: Arena, buffers: int) -> None:
        super().__init__(arena.batch_bytes, buffers)
        self._arena = arena

    def kept(self) -> AbstractContextManager[None]:
        return self.work()

    def _put_back(self, buffer: StagingBuffer) -> None:
        self._idle.append(buffer)  # its copies have just been queued

    def _make(self) -> list[StagingBuffer]:
        missing = min(self.buffers, self._items) - len(self._buffers)
        if missing <= 0:
            return []
        arena = self._arena if missing >= self._arena.buffers else self._arena.for_buffers(missing)
        memory = aligned(pinned_memory(arena.nbytes), arena.buffers * self.nbytes, PAGE_BYTES)
        parts = memory.view(arena.buffers, self.nbytes)
        return [StagingBuffer(part, self._queue) for part in parts]

    def _end(self) -> None:
        self._idle.clear()
        while self._buffers:
            self._buffers.pop().close()
        while self._queues:
            self._queues.popitem()[1].close()
        give_back_pinned_memory()


@lru_cache(maxsize=4)
def host_pool(batch_bytes: int) -> StagingPool:
    """Buffers in memory that is not pinned, shared by all who ask for the same size."""
    return StagingPool(batch_bytes)


def pool_for(devices: Iterable[torch.device], budget: Budget, block_bytes: int, snapshot_bytes: int = 0) -> StagingPool:
    """Returns the pool for reads and writes of whole blocks between files, these devices and host memory. A pinned pool
    takes at most ``snapshot_bytes`` or the budget, whichever is more."""
    with_streams = [has_streams(device) for device in devices]  # of each, before: to find out pins a byte of memory
    if not any(with_streams):
        return host_pool(budget.batch_bytes(block_bytes))
    arena = Arena.within(budget, block_bytes)
    return PinnedPool(arena, arena.buffers * max(snapshot_bytes // arena.nbytes, 1))


def _floor_power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _ceil_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
