"""How the ranks of a job agree on a last step, after which all of them stop, without a collective in any step."""

from __future__ import annotations

import atexit
import secrets
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from zckpt.errors import RankError
from zckpt.system.threads import Worker

if TYPE_CHECKING:
    from zckpt.ranks.collectives import Ranks

PERIOD_SECONDS = 0.25
"""The time between two looks at the store of the job."""
AGREE_SECONDS = 15
"""A rank that has not answered for so many seconds is taken for dead. A thread answers, however long a step takes."""
GRACE_SECONDS = 5
"""The other ranks wait this many seconds longer than rank 0, because rank 0 collects the answers."""
_NEVER = 0
"""The decision of ranks that could not agree."""


class LastStep:
    """Any rank may ask for the end of the job. Then each rank's thread stores how many steps that rank has counted, and
    from then on until the decision ``ended`` waits instead of counting. So no rank is further than one step behind
    what it has stored, and the step after the highest of these numbers is one that no rank has ended yet: it is the
    last one. The threads agree while the training is in the middle of a step, so ranks may be any number of steps
    apart.

    To make one is collective, and so is to close it. All ranks make it after the same step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.reason: int | None = None
        """The number with which this rank, or the first other one, has asked for the end."""
        self._rank, self._size, self._members = ranks.rank, ranks.size, ranks.members
        self._steps = 0
        self._last: int | None = None
        self._counting = threading.Lock()
        """Held while steps may not be counted."""
        self._closed = threading.Event()
        name = ranks.first(lambda: secrets.token_hex(8), "begin")
        if self._size > 1:
            store = dist.distributed_c10d._get_default_store()
            # A thread that waits on a store keeps others from using it.
            own = store.clone() if hasattr(store, "clone") else store
            self._store = dist.distributed_c10d.PrefixStore(f"zckpt/{name}/last_step", own)
            self._worker = Worker(self._watch, "zckpt-last-step", daemon=True)
            self._worker.start()
            atexit.register(self.close)

    def ask(self, reason: int) -> None:
        """Asks for the end, once. It does no more than to set an attribute, so that a handler of signals may call it
        at any time."""
        if self.reason is None:
            self.reason = reason

    def ended(self) -> bool:
        """To be called after each step, by the thread that trains. Returns whether this was the last one; all ranks
        return True after the same step. Raises RankError if another rank did not answer when the end was asked for."""
        with self._counting:
            self._steps += 1
            last = self._last
        if self._size == 1:
            return self.reason is not None
        if last == _NEVER:
            raise RankError(
                f"the ranks could not agree on a last step: one has not answered for {AGREE_SECONDS} s, or has ended",
                hint="it may have died; no last checkpoint was written, and the one before it is whole",
            )
        return last is not None and self._steps >= last

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._size > 1:
            atexit.unregister(self.close)
            self._worker.wait(PERIOD_SECONDS * 4)  # no longer: it may be stuck in the store

    def _watch(self) -> None:
        try:
            while not self._closed.wait(PERIOD_SECONDS):
                if self.reason is not None:
                    self._store.set("reason", str(self.reason))
                if self._store.check(["reason"]):
                    with self._counting:
                        self.reason = int(self._store.get("reason"))
                        self._last = self._agree()
                    return
        except RuntimeError:  # The store is gone, and with it the process that holds it.
            if self.reason is not None:
                self._last = _NEVER

    def _agree(self) -> int:
        keys = [f"steps/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], str(self._steps))
        deadline = time.monotonic() + AGREE_SECONDS + (GRACE_SECONDS if self._rank else 0)
        while not self._store.check(["decision"]):
            if self._rank == 0 and self._store.check(keys):
                self._decide(max(int(self._store.get(key)) for key in keys) + 1)
            elif time.monotonic() > deadline:
                self._decide(_NEVER)
            else:
                self._closed.wait(PERIOD_SECONDS / 10)
        return int(self._store.get("decision"))

    def _decide(self, last: int) -> None:
        """Stores a decision if there is none yet: all ranks read the same one."""
        self._store.compare_set("decision", "", str(last))
