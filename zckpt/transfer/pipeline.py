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
    """Does two steps for each of many items. ``take`` fills a buffer from an item's source, or queues copies that fill
    it. ``put`` gets what ``take`` has returned, and empties the buffer. All threads that call ``work`` share the steps.
    There is at least one item.

    Sources come first: as long as a buffer is free, the next source is read. The sources of the first ``urgent`` items
    are read before all others. The snapshot is told when all urgent sources have been read, and again when all sources
    have been read. While all ``buffers`` are in use, no source is read until a buffer has been emptied. While copies to
    a buffer are under way, full buffers are emptied.
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
        """The buffers with copies under way, each with the number of its item and what ``take`` has returned."""
        self._full: deque[tuple[Item, StagingBuffer]] = deque()
        self._unread = [urgent, len(items) - urgent]
        """How many sources have not been read yet: of the urgent items, and of the others."""
        self._free = buffers
        self._failed = False
        self._changed = threading.Condition()

    def work(self) -> None:
        """Does steps until nothing is left to do, or until another thread has failed. Raises what ``take`` and ``put``
        raise, and ZckptError once the snapshot is given up."""
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
        """Returns the next step, or None if there is none any more. Waits while other threads may still make one
        possible."""
        with self._changed:
            while not self._failed:
                if self._waiting and self._free:
                    self._free -= 1
                    number, item = self._waiting.popleft()
                    return lambda: self._take_item(number, item)
                if self._filling and (not self._full or self._filling[0][-1].is_done()):
                    filling = self._filling.popleft()
                    return lambda: self._finish_item(*filling)
                if self._full:
                    full = self._full.popleft()
                    return lambda: self._put_item(*full)
                if not any(self._unread):
                    return None
                self._changed.wait()
        return None

    def _take_item(self, number: int, item: Item) -> None:
        stage = self._staging.acquire()
        taken = self._take(item, stage)
        if stage.is_done():
            self._finish_item(number, taken, stage)
        else:
            with self._changed:
                self._filling.append((number, taken, stage))
                self._changed.notify()

    def _finish_item(self, number: int, taken: Item, stage: StagingBuffer) -> None:
        stage.wait()
        with self._changed:
            self._full.append((taken, stage))
            self._unread[number >= self._urgent] -= 1
            copied, last = not self._unread[0], not any(self._unread)
            self._changed.notify_all() if last else self._changed.notify()
        if copied:
            self._snapshot.copied.set()
        if last:
            self._snapshot.taken.set()

    def _put_item(self, item: Item, stage: StagingBuffer) -> None:
        self._put(item, stage)
        self._staging.release(stage)
        with self._changed:
            self._free += 1
            self._changed.notify()
