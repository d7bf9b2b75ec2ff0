"""Two steps over many items, with a bounded number of buffers between them."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from zckpt.io.life import sign_of_life

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zckpt.io.memory import Stage, Staging

Item = TypeVar("Item")


class Pipeline(Generic[Item]):
    """``take`` fills a buffer from an item's source and returns what ``put``, which empties it, is to be given. Every
    thread that calls ``work`` helps. There is at least one item.

    Taking comes first: as long as there is a buffer, the sources are read, and ``taken`` is called as soon as none of
    them is needed any more. With all of ``buffers`` full, no source is read until one is put.
    """

    def __init__(
        self,
        items: Sequence[Item],
        take: Callable[[Item, Stage], Item],
        put: Callable[[Item, Stage], None],
        staging: Staging,
        buffers: int,
        taken: Callable[[], None],
    ) -> None:
        self._take, self._put, self._on_taken = take, put, taken
        self._staging = staging
        self._waiting = deque(items)
        self._full: deque[tuple[Item, Stage]] = deque()
        self._left = len(items)
        """Items whose source is still needed."""
        self._free = buffers
        self._failed = False
        self._changed = threading.Condition()

    def work(self) -> None:
        """Returns when nothing is left to do, or another thread has failed. Raises what ``take`` and ``put`` raise."""
        try:
            while (step := self._next()) is not None:
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
                    item = self._waiting.popleft()
                    return lambda: self._take_one(item)
                if self._full:
                    one = self._full.popleft()
                    return lambda: self._put_one(*one)
                if not self._left:
                    return None
                self._changed.wait()
        return None

    def _take_one(self, item: Item) -> None:
        stage = self._staging.acquire()
        taken = self._take(item, stage)
        with self._changed:
            self._full.append((taken, stage))
            self._left -= 1
            last = not self._left
            self._changed.notify_all() if last else self._changed.notify()
        if last:
            self._on_taken()

    def _put_one(self, item: Item, stage: Stage) -> None:
        self._put(item, stage)
        self._staging.release(stage)
        with self._changed:
            self._free += 1
            self._changed.notify()
