"""Staging buffers: memory through which tensors pass between a file and host or device memory."""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from zckpt.storage.buffers import PAGE_BYTES
from zckpt.system.linux import free_lazily
from zckpt.transfer.devices import CopyQueue, give_back_pinned_memory, has_streams, pinned_memory, runs_of
from zckpt.transfer.memory import aligned, fresh_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zckpt.storage.buffers import Bytes
    from zckpt.transfer.budget import Budget
    from zckpt.transfer.devices import FromDevice, ToDevice

ARENA_BYTES_PER_THREAD = 16 << 20
"""The pinned memory for one thread, in bytes. It is enough for two buffers: the thread reads into one while the bytes
in the other one are checked, or copied to a device."""
BUFFERS_AHEAD = 2
"""How many more buffers than threads there are, if they are not pinned. While each thread reads or writes, digests are
computed in another buffer, and one more buffer is ready for the next write."""


class StagingBuffer:
    """A staging buffer and the copies between it and devices. One thread uses it at a time."""

    def __init__(self, tensor: torch.Tensor, queue: Callable[[torch.device], CopyQueue]) -> None:
        """Makes a buffer of ``tensor``, which is 1-D uint8 in host memory, aligned for direct I/O. ``queue`` returns
        the queue of a device."""
        self.tensor = tensor
        self.bytes: Bytes = tensor.numpy()
        self.address = tensor.data_ptr()
        self._queue = queue
        self._queued: list[torch.Event] = []
        """One event for each batch of copies that may be under way."""
        self._system_may_take = False

    def to_device(self, device: torch.device, copies: Sequence[ToDevice]) -> None:
        """Queues copies to a device."""
        self._add(self._queue(device).to_device(self.tensor, copies))

    def from_device(self, device: torch.device, copies: Sequence[FromDevice]) -> None:
        """Queues copies from a device."""
        self._add(self._queue(device).from_device(self.tensor, copies))

    def _add(self, event: torch.Event | None) -> None:
        if event is not None:
            self._queued.append(event)

    def is_done(self) -> bool:
        """Returns whether all queued copies are done."""
        return all(event.query() for event in self._queued)

    def wait(self) -> None:
        """Waits for all queued copies."""
        for event in self._queued:
            event.synchronize()
        self._queued.clear()

    def mark_used(self) -> None:
        """Records that the content is needed again."""
        self._system_may_take = False

    def let_system_take(self) -> None:
        """Tells the system that the content is not needed any more. The system takes the memory when it runs short.
        Memory that it does not take stays as fast to write to as before."""
        if not self._system_may_take:
            free_lazily(self.address, len(self.bytes))
            self._system_may_take = True

    def close(self) -> None:
        """Drops the references to the memory, so that it is freed even if other code still holds this object. All
        copies are done by then."""
        del self.tensor, self.bytes


class StagingPool:
    """Staging buffers that hold a read or a write of ``batch_bytes`` bytes, with a page to spare at both ends. They are
    made when they are needed, and used again. Several threads may use the pool at once.

    Buffers are used only inside of ``work``.
    """

    pinned = False

    def __init__(self, batch_bytes: int, buffers: int = 0) -> None:
        """Makes a pool of at most ``buffers`` buffers. 0 means that there is no limit."""
        self.batch_bytes = batch_bytes
        self.buffers = buffers
        self.nbytes = batch_bytes + 2 * PAGE_BYTES
        self._buffers: list[StagingBuffer] = []
        self._idle: deque[StagingBuffer] = deque()
        """The free buffers. The first one is used next."""
        self._queues: dict[torch.device, CopyQueue] = {}
        self._users = self._items = 0
        self._changed = threading.Condition()

    def buffers_within(self, budget: Budget, snapshot_bytes: int = 0) -> int:
        """Returns how many buffers of the pool may be full at the same time. If the pool has no limit, there is one for
        each thread of the budget and ``BUFFERS_AHEAD`` more if they fit, or as many as ``snapshot_bytes`` allows if
        these are more."""
        fitting = min(budget.nbytes // self.nbytes, budget.threads + BUFFERS_AHEAD)
        return self.buffers or max(snapshot_bytes // self.nbytes, budget.threads, fitting)

    @contextmanager
    def work(self, items: int = sys.maxsize) -> Iterator[None]:
        """Returns a context in which up to ``items`` reads or writes use buffers. At its end, it waits for all
        copies."""
        with self._changed:
            self._users += 1
            self._items += items
        try:
            yield
        except BaseException as error:
            if self.pinned:
                # The frames of the traceback refer to buffers. Their memory could not go back to the system as long as
                # the caller keeps the error.
                traceback.clear_frames(error.__traceback__)
            raise
        finally:
            try:
                self.wait()
            finally:
                with self._changed:
                    self._users -= 1
                    self._items -= items
                    if not self._users:
                        self._end()

    def kept(self) -> AbstractContextManager[None]:
        """Returns a context that keeps the buffers between several uses of ``work``."""
        return nullcontext()

    def acquire(self) -> StagingBuffer:
        """Waits for a free buffer and gives it to the caller until ``release``. No copy to or from it is under way
        then."""
        with self._changed:
            while not self._idle:
                if new_buffers := self._make():
                    self._buffers += new_buffers
                    self._idle += new_buffers
                else:
                    self._changed.wait()
            buffer = self._idle.popleft()
        buffer.mark_used()
        buffer.wait()
        return buffer

    def release(self, buffer: StagingBuffer) -> None:
        """Returns the buffer to the pool. Its copies may still be under way, and ``acquire`` waits for them."""
        with self._changed:
            self._put_back(buffer)
            self._changed.notify()

    @contextmanager
    def lend(self) -> Iterator[StagingBuffer]:
        """Acquires a buffer, and releases it at the end of the context."""
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

    def wait(self) -> None:
        """Waits for all copies that were queued before this call, including those of other users. The first error, such
        as an interrupt, is raised only at the end, because the memory may be freed after this method."""
        errors: list[BaseException] = []
        queues = list(self._queues.values())
        while queues:
            try:
                queues[-1].wait()
                queues.pop()
            except KeyboardInterrupt as error:  # raised below
                errors.append(error)
            except BaseException as error:  # raised below
                errors.append(error)
                queues.pop()
        if errors:
            raise errors.pop(0)

    def _make(self) -> list[StagingBuffer]:
        """Makes more buffers. Returns an empty list if the limit is reached."""
        return [StagingBuffer(self._room(), self._queue)]

    def _room(self) -> torch.Tensor:
        """Returns memory for one buffer of this pool, which is not pinned. It is in huge pages if it is large enough
        and the system has some."""
        return aligned(fresh_tensor((self.nbytes + PAGE_BYTES,), torch.uint8, "cpu"), self.nbytes, PAGE_BYTES)

    def _end(self) -> None:
        """Prepares the idle pool for the next user. It is called when the last user has left. The buffers stay
        allocated, because writing to fresh memory takes several times longer."""
        self._idle = deque(self._buffers)  # this includes buffers that were not released because of an error
        for buffer in self._buffers:
            buffer.let_system_take()


@dataclass(frozen=True, slots=True)
class Arena:
    """A range of pinned memory that is cut into buffers. ``nbytes`` is a power of two, because torch's allocator would
    round it up to one anyway."""

    nbytes: int
    batch_bytes: int

    @classmethod
    def within(cls, budget: Budget, block_bytes: int) -> Arena:
        """Returns the arena from which all buffers of a load, or of a write in the foreground, come. It has two buffers
        for each thread, or as many as fit. A buffer holds at least one block."""
        nbytes = _floor_power_of_two(min(budget.nbytes, ARENA_BYTES_PER_THREAD * budget.threads))
        batch_bytes = max((nbytes // (2 * budget.threads) - 3 * PAGE_BYTES) // block_bytes, 1) * block_bytes
        arena = cls(nbytes, batch_bytes)
        return arena if arena.buffers else arena.for_buffers(1)

    @property
    def buffers(self) -> int:
        """How many buffers the arena holds. One page stays unused, because pinned memory need not begin at a page."""
        return (self.nbytes - PAGE_BYTES) // (self.batch_bytes + 2 * PAGE_BYTES)

    def for_buffers(self, count: int) -> Arena:
        """Returns an arena with at least ``count`` buffers of the same size."""
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


class BounceBuffer(StagingBuffer):
    """A staging buffer in memory that is not pinned. Copies from a device go through a pinned buffer, and are done when
    ``from_device`` returns."""

    def __init__(self, tensor: torch.Tensor, queue: Callable[[torch.device], CopyQueue], pinned: PinnedPool) -> None:
        super().__init__(tensor, queue)
        self._pinned = pinned

    def from_device(self, device: torch.device, copies: Sequence[FromDevice]) -> None:
        with self._pinned.lend() as pinned:
            try:
                pinned.from_device(device, copies)
                pinned.wait()
            except BaseException:
                self._pinned.wait()  # A copy that is queued already must not reach the buffer when others use it.
                raise
            for run in runs_of(copies):
                start, stop = run[0].start, run[-1].stop
                ctypes.memmove(self.address + start, pinned.address + start, stop - start)


class BouncePool(StagingPool):
    """A pool for a snapshot of states on devices. Its buffers are not pinned, but copies from a device go through a few
    buffers that are. On an H200, this takes a fifth of the time of pinning as much memory as the snapshot takes. The
    buffers are kept for the next snapshot."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena.batch_bytes)
        self._pinned = PinnedPool(arena, arena.buffers)
        self._pinned_bytes = arena.nbytes

    def buffers_within(self, budget: Budget, snapshot_bytes: int = 0) -> int:
        return super().buffers_within(budget, snapshot_bytes - self._pinned_bytes)

    @contextmanager
    def work(self, items: int = sys.maxsize) -> Iterator[None]:
        with self._pinned.work(items), super().work(items):
            yield

    def _make(self) -> list[StagingBuffer]:
        return [BounceBuffer(self._room(), self._queue, self._pinned)]


@lru_cache(maxsize=4)
def host_pool(batch_bytes: int) -> StagingPool:
    """Returns the pool of buffers in memory that is not pinned. All callers that ask for the same size share one
    pool."""
    return StagingPool(batch_bytes)


@lru_cache(maxsize=4)
def snapshot_pool(arena: Arena) -> BouncePool:
    """Returns the pool for snapshots of states on devices. All callers with the same arena share one pool."""
    return BouncePool(arena)


def pool_for(devices: Iterable[torch.device], budget: Budget, block_bytes: int, snapshot_bytes: int = 0) -> StagingPool:
    """Returns the pool for reads and writes of whole blocks between files, these devices and host memory. A write that
    may take a snapshot of twice the pinned memory for ``budget``, or of more, gets a pool for snapshots."""
    # All devices are asked before the pool is made, because each question pins a byte of memory.
    with_streams = [has_streams(device) for device in devices]
    if not any(with_streams):
        return host_pool(budget.batch_bytes(block_bytes))
    arena = Arena.within(budget, block_bytes)
    return snapshot_pool(arena) if snapshot_bytes >= 2 * arena.nbytes else PinnedPool(arena, arena.buffers)


def _floor_power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _ceil_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
