"""Two steps over many items, with a bounded number of buffers between them."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from zckpt.ranks.heartbeat import sign_of_life

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zckpt.transfer.snapshot import Snapshot
    from zckpt.transfer.staging import StagingBuffer, StagingPool

Item = TypeVar("Item")


class Pipeline(Generic[Item]):
    """Two steps: ``take`` fills a buffer from an item's source, or queues copies that fill it; ``put`` empties the
    buffer. ``put`` gets what ``take`` returned. All threads that call ``work`` share the steps. There is at least one
    item.

    Taking comes first: as long as there is a buffer, the sources are read, those of the first ``urgent`` items before
    all others. The snapshot is told when all urgent sources have been read, and again when all sources have been read.
    While all ``buffers`` are in use, no source is read until one buffer has been put. While copies are under way,
    buffers that are full are put.
    """

    def __init__(
        self,
        items: Sequence[Item],
        take: Callable[[Item, StagingBuffer], Item],
        put: Callable[[Item, StagingBuffer], None],
        staging: StagingPool,
        buffers: int,
        snapshot: Snapshot,
        urgent: int,
    ) -> None:
        self._take, self._put = take, put
        self._staging = staging
        self._snapshot = snapshot
        self._urgent = urgent
        self._waiting = deque(enumerate(items))
        self._filling: deque[tuple[int, Item, StagingBuffer]] = deque()
        """Buffers with copies under way: the number of the item, what ``take`` returned, and the buffer."""
        self._full: deque[tuple[Item, StagingBuffer]] = deque()
        self._left = [urgent, len(items) - urgent]
        """The numbers of items whose source has not been read yet: of the urgent ones, and of the others."""
        self._free = buffers
        self._failed = False
        self._changed = threading.Condition()

    def work(self) -> None:
        """Returns when nothing is left to do, or another thread has failed. Raises what ``take`` and ``put`` raise, and
        ZckptError once the snapshot is given up."""
        try:
            while (step := self._next()) is not None:
                self._snapshot.check()
                step()
                sign_of_life()
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._failed:
                if self._waiting and self._free:
                    self._free -= 1
                    number, item = self._waiting.popleft()
                    return lambda: self._take_one(number, item)
                if self._filling and (not self._full or self._filling[0][-1].is_done()):
                    filling = self._filling.popleft()
                    return lambda: self._finish_one(*filling)
                if self._full:
                    one = self._full.popleft()
                    return lambda: self._put_one(*one)
                if not any(self._left):
                    return None
                self._changed.wait()
        return None

    def _take_one(self, number: int, item: Item) -> None:
        stage = self._staging.acquire()
        taken = self._take(item, stage)
        if stage.is_done():
            self._finish_one(number, taken, stage)
        else:
            with self._changed:
                self._filling.append((number, taken, stage))
                self._changed.notify()

    def _finish_one(self, number: int, taken: Item, stage: StagingBuffer) -> None:
        stage.wait()
        with self._changed:
            self._full.append((taken, stage))
            self._left[number >= self._urgent] -= 1
            copied, last = not self._left[0], not any(self._left)
            self._changed.notify_all() if last else self._changed.notify()
        if copied:
            self._snapshot.copied.set()
        if last:
            self._snapshot.taken.set()

    def _put_one(self, item: Item, stage: StagingBuffer) -> None:
        self._put(item, stage)
        self._staging.release(stage)
        with self._changed:
            self._free += 1
            self._changed.notify()
