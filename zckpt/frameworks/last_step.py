"""How the ranks of a job agree on a last step, after which all of them stop, without a collective in any step."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from zckpt.errors import RankError
from zckpt.system.threads import Watcher

if TYPE_CHECKING:
    from zckpt.ranks.collectives import Ranks

PERIOD_SECONDS = 0.25
"""The time between two looks at the store of the job."""
AGREE_SECONDS = 15
"""If a rank has not answered for this many seconds, it is taken for dead. A thread answers, so a long step does no
harm."""
GRACE_SECONDS = 5
"""The other ranks wait this many seconds longer than rank 0, because rank 0 collects the answers."""
_NEVER = 0
"""The decision if the ranks could not agree."""


class LastStep:
    """Agrees on the last step of a job, if any rank asks for its end.

    Then a thread on each rank stores how many steps the rank has counted. From then on until the decision, ``ended``
    waits instead of counting. So a rank that has stored a number can be in the step after it, but cannot end that step.
    No rank has ended the step after the highest of these numbers yet, so that step is the last one. The threads agree
    while the training is in the middle of a step, so the ranks may be any number of steps apart.

    All ranks have to make this object together, after the same step, and have to close it together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.reason: int | None = None
        """The number with which a rank has asked for the end: this rank, or else the first other one. None until
        then."""
        self._rank, self._size, self._members = ranks.rank, ranks.size, ranks.members
        self._steps = 0
        self._last: int | None = None
        self._counting = threading.Lock()
        """Held while steps may not be counted."""
        name = ranks.first(lambda: secrets.token_hex(8), "begin")
        self._watcher = Watcher(self._watch, "zckpt-last-step")
        try:
            if self._size > 1:
                ranks.together(lambda: self._begin(name), "begin")
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"zckpt/{name}/last_step", store)
        self._watcher.start()

    def ask(self, reason: int) -> None:
        """Asks for the end of the job, once. It only sets an attribute, so a handler of signals may call it at any
        time."""
        if self.reason is None:
            self.reason = reason

    def ended(self) -> bool:
        """Returns whether the step that has just ended was the last one. All ranks return True after the same step. The
        thread that trains calls it after each step. Raises RankError if another rank did not answer when the end was
        asked for."""
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
        """Ends the thread, and waits for its end, but no longer than four periods."""
        self._watcher.close(PERIOD_SECONDS * 4)

    def _watch(self) -> None:
        try:
            while not self._watcher.closed.wait(PERIOD_SECONDS):
                if self.reason is not None:
                    self._store.compare_set("reason", "", str(self.reason))  # the number of the rank that asked first
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
            elif self._watcher.closed.wait(PERIOD_SECONDS / 10):  # the training is over, so nobody asks any more
                return _NEVER
        return int(self._store.get("decision"))

    def _decide(self, last: int) -> None:
        """Stores a decision if there is none yet. All ranks read the same decision."""
        self._store.compare_set("decision", "", str(last))
