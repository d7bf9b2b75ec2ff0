"""The steps of reads and writes: many items go through them, with a bounded number of buffers in between."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from zckpt.ranks.heartbeat import sign_of_life
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zckpt.transfer.budget import Budget
    from zckpt.transfer.snapshot import Snapshot
    from zckpt.transfer.staging import StagingBuffer, StagingPool

Item = TypeVar("Item")


class Pipeline(Generic[Item]):
    """Does up to three steps for each of many items. ``take`` fills a buffer from the item's source, or queues copies
    that fill it. It returns the item for the next step, or None if nothing is left to do for this item. ``digest``
    works on the bytes in the buffer: it computes or compares their digests, and in a read it also copies the bytes to
    their targets. ``put`` writes the bytes to a file. In a read it does nothing.

    The threads of the budget read and write. One further thread, the digest thread, does the step ``digest``, so that
    the other threads can keep the disk busy. They do this step too, but only if there is nothing to read or write.

    An item is put as soon as it is digested, but as long as there are sources, one of three or more threads is left to
    read them. If all threads put, the disk would have nothing to do once they are done, until they have read the next
    sources together. Only if a caller waits for a snapshot, sources come first: as long as a buffer is free, the next
    source is read. The sources of the first ``urgent`` items are read before all others. The snapshot is told when all
    urgent sources have been read, and again when all sources have been read. While all buffers are in use, no source is
    read until a buffer is free again. While copies to a buffer are under way, the other steps are done for buffers that
    are full.

    Some files take bytes only in their order. ``is_next`` says whether the bytes of an item are the next ones. Other
    items wait with their buffers, unless nothing else can be done.

    An item is ``straight`` if its bytes do not go through the buffer, except for a few pages at the edges. Two such
    items count as one buffer, unless the buffers are pinned. So the disk stays busy while digests are computed, and the
    memory in use does not grow.
    """

    def __init__(
        self,
        items: Sequence[Item],
        take: Callable[[Item, StagingBuffer], Item | None],
        digest: Callable[[Item, StagingBuffer], None],
        put: Callable[[Item, StagingBuffer], None],
        straight: Callable[[Item], bool],
        staging: StagingPool,
        snapshot: Snapshot,
        urgent: int,
        is_next: Callable[[Item], bool] = lambda item: True,
    ) -> None:
        self._take, self._digest, self._put, self._is_next = take, digest, put, is_next
        self._staging = staging
        self._snapshot = snapshot
        self._urgent = urgent
        self._waiting = deque(enumerate(items))
        self._halves = [1 if straight(item) and not staging.pinned else 2 for item in items]
        """How many half buffers each item counts as."""
        self._filling: deque[tuple[int, Item, StagingBuffer]] = deque()
        """The items whose buffers are being filled by copies from a device. Each entry has the number of the item, the
        item that ``take`` has returned, and the buffer."""
        self._full: deque[tuple[int, Item, StagingBuffer]] = deque()
        """The items whose buffers are full, with the same three fields."""
        self._digested: deque[tuple[int, Item, StagingBuffer]] = deque()
        """The items whose digests are known, with the same three fields."""
        self._unread = [urgent, len(items) - urgent]
        """How many sources have not been read yet: of the urgent items, and of the others."""
        self._unfinished = len(items)
        """For how many items not all steps are done yet."""
        self._free_halves = 0
        """How many half buffers are not in use."""
        self._puts = self._puts_max = 0
        """How many items are being put, and how many may be as long as there are sources to read."""
        self._sources_first = False
        self._stopped = False
        self._changed = threading.Condition()

    def run(self, budget: Budget, snapshot_bytes: int = 0, beside: Sequence[Callable[[], object]] = ()) -> None:
        """Does all steps of all items. The buffers take as many bytes as the budget allows, or ``snapshot_bytes`` if
        this is more. ``beside`` are functions that are called in further threads, as many as the budget has. If one of
        them raises an error, the steps end. The caller is inside of ``staging.work``, for at least as many items as
        there are here. Raises what the steps raise, and ZckptError once the snapshot is given up."""
        items = len(self._waiting)
        if not items:
            self._snapshot.end()
            run_tasks(beside, budget.threads)
            return
        self._free_halves = 2 * self._staging.buffers_within(budget, snapshot_bytes)
        self._puts_max, self._sources_first = max(budget.threads - 1, 2), snapshot_bytes > 0
        threads = min(budget.threads, items)
        steps = [self._next] * threads + [self._next_digest]
        work: list[Callable[[], object]] = [partial(self._work, next_step) for next_step in steps]
        tasks = [partial(self._call, function) for function in (*beside, *work)]
        run_tasks(tasks, len(work) + min(len(beside), budget.threads), self._interrupt)

    def _work(self, next_step: Callable[[], Callable[[], None] | None]) -> None:
        """Does steps until ``next_step`` returns None."""
        while (step := next_step()) is not None:
            self._snapshot.check()
            step()
            sign_of_life()

    def _call(self, function: Callable[[], object]) -> None:
        """Calls a function. If it fails, all threads end."""
        try:
            function()
        except BaseException:
            self._stop()
            raise

    def _interrupt(self) -> None:
        self._snapshot.give_up("it was interrupted")
        self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Returns the next step, or None if there is none any more. Waits while other threads may still make one
        possible."""
        with self._changed:
            while self._unfinished and not self._stopped:
                if not self._sources_first and (put := self._next_put()):
                    return put
                if self._waiting and self._free_halves >= self._halves[self._waiting[0][0]]:
                    number, item = self._waiting.popleft()
                    self._free_halves -= self._halves[number]
                    return partial(self._take_item, number, item)
                full = self._full or self._digested
                if self._filling and (not full or self._filling[0][-1].is_done()):
                    return partial(self._finish_item, *self._filling.popleft())
                if put := self._next_put():
                    return put
                if self._full:
                    return partial(self._digest_item, *self._full.popleft())
                if self._filling:  # Nobody tells when a copy from a device has ended.
                    return partial(self._finish_item, *self._filling.popleft())
                if self._digested and self._unfinished == len(self._waiting) + len(self._digested):
                    return self._put_at(0)  # No item is next, and no thread works on one, so nothing else goes on.
                self._changed.wait()
        return None

    def _next_put(self) -> Callable[[], None] | None:
        """Returns the step ``put`` of an item that is next in its file, or None if none can be put now. The caller
        holds ``self._changed``."""
        if self._waiting and self._puts >= self._puts_max:
            return None
        place = next((place for place, entry in enumerate(self._digested) if self._is_next(entry[1])), None)
        return None if place is None else self._put_at(place)

    def _put_at(self, place: int) -> Callable[[], None]:
        """Returns the step ``put`` of an item that is digested. The caller holds ``self._changed``."""
        entry = self._digested[place]
        del self._digested[place]
        self._puts += 1
        return partial(self._put_item, *entry)

    def _next_digest(self) -> Callable[[], None] | None:
        """Returns the next step ``digest``, or None if there is none any more. Waits while other threads may still fill
        a buffer."""
        with self._changed:
            while self._unfinished and not self._stopped:
                if self._full:
                    return partial(self._digest_item, *self._full.popleft())
                self._changed.wait()
        return None

    def _take_item(self, number: int, item: Item) -> None:
        stage = self._staging.acquire()
        taken = self._take(item, stage)
        if taken is None:
            self._note_read(number)
            self._release(number, stage)
        elif stage.is_done():
            self._finish_item(number, taken, stage)
        else:
            with self._changed:
                self._filling.append((number, taken, stage))
                self._changed.notify_all()

    def _finish_item(self, number: int, item: Item, stage: StagingBuffer) -> None:
        stage.wait()
        with self._changed:
            self._full.append((number, item, stage))
            self._changed.notify_all()
        self._note_read(number)

    def _note_read(self, number: int) -> None:
        """Notes that the source of an item has been read."""
        with self._changed:
            self._unread[number >= self._urgent] -= 1
            copied, taken = not self._unread[0], not any(self._unread)
        if copied:
            self._snapshot.copied.set()
        if taken:
            self._snapshot.taken.set()

    def _digest_item(self, number: int, item: Item, stage: StagingBuffer) -> None:
        self._digest(item, stage)
        with self._changed:
            self._digested.append((number, item, stage))
            self._changed.notify_all()

    def _put_item(self, number: int, item: Item, stage: StagingBuffer) -> None:
        self._put(item, stage)
        with self._changed:
            self._puts -= 1
        self._release(number, stage)

    def _release(self, number: int, stage: StagingBuffer) -> None:
        """Gives back the buffer of an item whose steps are all done. Copies from the buffer to a device may still be
        under way."""
        self._staging.release(stage)
        with self._changed:
            self._free_halves += self._halves[number]
            self._unfinished -= 1
            self._changed.notify_all()
