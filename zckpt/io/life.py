"""Signs of life: which rank gets on, and which has died or hangs.

Every rank that is about something of zckpt's has an entry in the store through which the job's ranks have found each
other: that it is there, and how many steps it has taken. Rank 0 watches all others while it waits for them, and they
watch rank 0: so one of them is sure to see who takes no more steps. It tells the others.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from zckpt.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

TIMEOUT_SECONDS = 1800
"""As torch.distributed's own."""

PERIOD_SECONDS = 1.0
"""Between two looks, at most."""

_steps = 0


def sign_of_life() -> None:
    """This process has taken a step: a read or write has ended."""
    global _steps  # noqa: PLW0603  that one of several at the same time is lost does not matter
    _steps += 1


def timeout_seconds() -> int:
    """Without a sign of life from a rank, after which it is given up. Raises ValueError."""
    value = os.environ.get("ZCKPT_RANK_TIMEOUT", str(TIMEOUT_SECONDS))
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"ZCKPT_RANK_TIMEOUT must be a number of seconds, 1 or more, got {value!r}")
    return int(value)


@contextmanager
def _using_the_store() -> Iterator[None]:
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError("rank 0 has died, or who else holds the store of the job's ranks", rank=0) from error


class Lives:
    """Of the ranks of one group, whose name nobody has used before. Collective."""

    def __init__(self, store: Store, group: str, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._timeout = timeout_seconds()
        self.period = min(PERIOD_SECONDS, self._timeout / 4)
        self._keys = [f"zckpt/{group}/{other}" for other in range(size)]
        self._verdict_key = f"zckpt/{group}/gone"
        self._watched = [0] if rank else range(1, size)
        self._beats = 0
        self._waits = False
        self._heard: dict[int, tuple[str, float]] = {}
        """The last entry of each rank that is watched, and when it came."""
        self._verdict: tuple[int, str] | None = None
        self._doing: str | None = None
        """None while this rank is about nothing."""
        self._here = False
        """Whether the store says that it is about something."""
        self._lock = threading.Lock()
        with _using_the_store():
            self._show()
            self._await_all()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="zckpt-life", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _await_all(self) -> None:
        try:
            self._store.wait(self._keys, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            for rank, key in enumerate(self._keys):
                if not self._store.check([key]):
                    raise RankError(f"rank {rank} has not come for {self._timeout} s", rank=rank) from error
            raise

    @contextmanager
    def shown(self, doing: str) -> Iterator[None]:
        """This rank is about something: it has died or hangs if it shows no sign of life meanwhile."""
        if self._doing is not None:
            yield
            return
        with self._lock, _using_the_store():
            if not self._here:  # at once, and not when the thread comes to it: it may be dead by then
                self._here = True
                self._show()
            self._heard = dict.fromkeys(self._watched, ("", time.monotonic()))
            self._doing = doing
        try:
            yield
        finally:
            self._doing = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """To wait for others is to live."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _exchange(self) -> None:
        """A thread's work, for all others may be busy or hang."""
        try:
            while not self._closed.wait(self.period):
                self._beats += 1
                with self._lock:
                    was_here, self._here = self._here, self._doing is not None
                    if self._waits:
                        sign_of_life()
                    if was_here or self._here:
                        self._show()
                if self._here:
                    self._look()
        except RuntimeError:
            return  # the store is gone, and whoever holds it: the ranks that are watched are silent from now on

    def close(self) -> None:
        """When the group is given up, and before the interpreter is: its end would abort a thread inside the store."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join(self.period)  # no longer: it may be stuck there

    def _show(self) -> None:
        self._store.set(self._keys[self._rank], f"{int(self._here)} {self._beats} {_steps}")

    def _entry(self, rank: int) -> list[str]:
        entry: bytes = self._store.get(self._keys[rank])
        return entry.decode().split()

    def _look(self) -> None:
        for rank in self._watched:
            steps = self._entry(rank)[2]
            if steps != self._heard[rank][0]:
                self._heard[rank] = (steps, time.monotonic())
        if self._store.check([self._verdict_key]):
            gone, _, why = self._store.get(self._verdict_key).decode().partition(" ")
            self._verdict = int(gone), why

    def check(self) -> None:
        """Raises RankError if a rank that is watched has shown no sign of life for too long, or another one says so."""
        if self._verdict is None:
            since = time.monotonic() - self._timeout
            silent = [rank for rank, (_, heard) in self._heard.items() if heard < since]
            if silent:
                why = f"has shown no sign of life for {self._timeout} s (ZCKPT_RANK_TIMEOUT)"
                self._give_up(silent[0], why, tell=silent[0] != 0)  # which may hold the store; and all watch it
        if self._verdict is not None:
            rank, why = self._verdict
            raise RankError(f"rank {rank} {why}; the ranks were to {self._doing or 'begin'}", rank=rank)

    def lost(self, error: Exception) -> RankError:
        """The error after the connection to another rank was lost; it names the rank, if it can be told which."""
        try:
            with _using_the_store():
                before = [self._entry(rank) for rank in range(len(self._keys))]
                for _ in range(3):
                    time.sleep(self.period)
                    self._look()
                    self.check()
                for rank, entry in enumerate(before):
                    if rank != self._rank and entry[0] == "1" and self._entry(rank) == entry:
                        self._give_up(rank, "has died", tell=True)
                        self.check()
        except RankError as found:
            return found
        return RankError(f"lost the connection to another rank: {error}")

    def _give_up(self, rank: int, why: str, *, tell: bool) -> None:
        self._verdict = rank, why
        if tell:
            self._store.set(self._verdict_key, f"{rank} {why}")
