"""Signs of life: they tell which rank goes on, and which rank has died or hangs.

Every rank that is inside a call of zckpt keeps an entry in the store of the job. The entry says that the rank is
inside, and how many steps it has taken. While a rank waits for other ranks, it watches its parent and its children
(``tree``). So at least one rank sees which rank takes no more steps, and tells the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from zckpt.errors import RankError, first_few
from zckpt.ranks.tree import children, neighbors, parent
from zckpt.system.threads import Watcher
from zckpt.system.waits import is_in_bounded_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch._C._distributed_c10d import Store

TIMEOUT_SECONDS = 1800
"""After this many seconds without a sign of life, a rank is given up. torch.distributed has the same default."""

PERIOD_SECONDS = 1.0
"""The longest time between two looks at the entries of other ranks."""

WAITING_SECONDS = 60
"""If a rank has not come, or has taken no step, for this many seconds, one of the waiting ranks prints a message."""

FIRST_FEW = 8
"""A message about late ranks names at most this many of them."""

GRACE_SECONDS = 5
"""The other ranks wait this many seconds longer than rank 0, because rank 0 tells them which rank is missing."""

LOST_PERIODS = 3
"""Once a connection is lost, a rank that has not shown that it runs for this many periods is taken for dead."""

DOUBT_PERIODS = 10
"""As long as none or several of the watched ranks seem to have died, there is another look after each period, up to
this many. A machine may be so busy that a rank which is alive shows nothing for a while."""

_OUTSIDE, _INSIDE, _LEFT = "0", "1", "2"
"""The first word of the entry of a rank: it is outside or inside of a call of zckpt, or has given up the group, mostly
because its process ends."""

_STORE_IS_GONE = "has died, or the process that holds the job's store has died"

_steps = 0

_of_thread = threading.local()
"""``acting`` has the groups in whose steps this thread is running an action, the innermost last."""


def sign_of_life() -> None:
    """Notes that this process has taken a step: a read or a write has ended."""
    global _steps  # noqa: PLW0603  that one of several at the same time is lost does not matter
    _steps += 1


def timeout_seconds() -> int:
    """Returns after how many seconds without a sign of life a rank is given up. Raises ValueError."""
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
        raise RankError(f"rank 0 {_STORE_IS_GONE}", rank=0) from error


def _acting() -> tuple[Lives, ...]:
    return getattr(_of_thread, "acting", ())


def meet(store: Store, channel: str, rank: int, members: Sequence[int], call: str) -> str:
    """Waits until all ranks of a group have come. Returns a name that no group has had before, the same on all ranks.

    ``channel`` says what the group is for. ``members`` has the numbers of its ranks in the job. ``call`` is the
    function that all of them have to call. If they meet inside of a step of a larger group, its signs of life tell
    whether a rank for which they wait has died or has failed.

    Every rank stores a random number under its own key. The first rank removes these numbers and answers each rank by
    its number. A rank that gives up removes its own, or the first rank would take it for present the next time.
    """
    timeout, own_number, name = timeout_seconds(), secrets.randbits(62), secrets.token_hex(8)
    group = hashlib.sha256(repr([*members]).encode()).hexdigest()[:16]  # a list of all ranks would be a long key
    about = f"zckpt/{group}{channel}"
    around = next((lives for lives in reversed(_acting()) if lives.has(members)), None)

    def key_of(other: int) -> str:
        return f"{about}/number/{other}"

    def missing_ranks() -> list[int]:
        return [other for other in members if not store.check([key_of(other)])]

    def late() -> None:
        # The rank with the lowest number that has come says it, if it is among the first.
        if rank < FIRST_FEW and not any(store.check([key_of(other)]) for other in members[:rank]):
            missing = missing_ranks()
            if missing:
                _say_late(members[rank], missing, call, "begin", timeout)

    with _using_the_store():
        try:
            store.set(key_of(members[rank]), str(own_number))
            if rank:
                own_answer = f"{about}/answer/{own_number}"
                look = None if around is None else partial(around.look_at, lambda: members[:1])
                if _await(store, [own_answer], timeout + GRACE_SECONDS, late, look):
                    ok, _, text = store.get(own_answer).decode().partition(" ")
                    store.delete_key(own_answer)
                    if ok == "name":
                        return text
                    gone = int(text)
                else:
                    gone = next((other for other in members if not store.check([key_of(other)])), members[0])
            else:
                look = None if around is None else partial(around.look_at, missing_ranks)
                missing = [] if _await(store, [*map(key_of, members)], timeout, late, look) else missing_ranks()
                answer = f"missing {missing[0]}" if missing else f"name {name}"
                for other in {*members} - {*missing}:
                    if other != members[rank]:
                        # Unlike ``get``, this does not wait for the number of a rank that has just given up.
                        store.set(f"{about}/answer/{store.add(key_of(other), 0)}", answer)
                    store.delete_key(key_of(other))
                if not missing:
                    return name
                gone = missing[0]
            raise RankError(f"rank {gone} has not come for {timeout} s: every rank must call {call}", rank=gone)
        except BaseException:
            with suppress(RuntimeError):  # If the store is gone, so is the number.
                store.delete_key(key_of(members[rank]))
            raise


def _await(
    store: Store,
    keys: list[str],
    seconds: float,
    late: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> bool:
    """Returns whether all these keys are in the store within ``seconds``. Calls ``late`` once if they are not there
    after ``WAITING_SECONDS``, and ``meanwhile`` again and again. It asks again and again, because no other thread can
    use the store while one thread waits in it."""
    began, pause = time.monotonic(), 0.001
    while not store.check(keys):
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        if late is not None and waited > WAITING_SECONDS:
            late()
            late = None
        if meanwhile is not None:
            meanwhile()
        time.sleep(pause)
        pause = min(2 * pause, PERIOD_SECONDS / 4)
    return True


def _say_late(waiting: int, missing: Sequence[int], call: str, doing: str, timeout: int) -> None:
    few = first_few(missing, FIRST_FEW, ", ...")
    ranks = f"rank {few}" if len(missing) == 1 else f"{len(missing)} ranks ({few})"
    print(
        f"zckpt: rank {waiting} has waited for {ranks} for {WAITING_SECONDS} s, in {call} (to {doing}). "
        f"Every rank must call {call}; one that has called it may be held up, by its disk for instance. "
        f"A rank without a sign of life is given up after {timeout} s (ZCKPT_RANK_TIMEOUT).",
        file=sys.stderr,
        flush=True,
    )


class Lives:
    """The signs of life of the ranks of one group. All ranks have to make this object together. ``name`` is a name that
    no group has had before, ``rank`` is the number of this rank in the group, and ``members`` has the numbers in the
    job of all ranks of the group."""

    def __init__(self, store: Store, name: str, rank: int, members: Sequence[int]) -> None:
        self._store, self._rank, self._members = store, rank, members
        self._timeout = timeout_seconds()
        self.period = min(PERIOD_SECONDS, self._timeout / 4)
        self._name = f"zckpt/{name}"
        self._verdict_key = f"{self._name}/gone"
        self._heard_key = f"{self._name}/heard"
        """Counts the ranks that have heard which rank is gone."""
        self._failure_key = f"{self._name}/failure"
        self._failure: tuple[int, str, int | None, str | None] | None = None
        """What ``tell_failure`` has told last, as far as this rank has heard it."""
        self._actions = 0
        """How many actions of steps this rank has begun."""
        self._watched = neighbors(rank, len(members))
        self._beats = 0
        """How many periods the thread of this object has run. It shows the others that the process is alive."""
        self._waits = False
        self._said = False
        """Whether late ranks were found in this wait already. There is only one message about them."""
        self._waits_since = 0.0
        self._call = ""
        """The function of zckpt that all ranks have to call."""
        self._heard: dict[int, tuple[str, float]] = {}
        """The last number of steps of each rank that is watched, and when it was first seen."""
        self._shown: dict[int, tuple[list[str], float]] = {}
        """The last entry of each rank that ``look_at`` has looked at, and when it was first seen."""
        self._looked_at = 0.0
        """When ``look_at`` looked the last time."""
        self._looked = 0.0
        """When the entries were read the last time."""
        self._store_gone: float | None = None
        """When the store could not be used any more."""
        self._verdict: tuple[int, str] | None = None
        """The rank that is gone, and why, as soon as this rank knows of it."""
        self._doing: str | None = None
        """What this rank is doing, or None outside of a call of zckpt."""
        self._here = False
        """Whether this rank's entry in the store says that it is inside a call of zckpt."""
        self._lock = threading.Lock()
        """Held while the entry of this rank is written."""
        self._told = False
        """Whether this rank was counted under ``_heard_key``."""
        self._telling = threading.Lock()
        """Held while it is counted."""
        with _using_the_store():
            self._show()
            self._await_neighbors()
        self._watcher = Watcher(self._beat, "zckpt-life")
        self._watcher.start()

    def _await_neighbors(self) -> None:
        """Waits until the parent and the children have come. Others wait for this rank meanwhile, so it gives signs of
        life, and tells them if one of its own has not come."""

        def meanwhile() -> None:
            sign_of_life()
            self._show()
            self._hear_verdict()
            self.check()

        keys = {rank: self._key(rank) for rank in self._watched}
        if not _await(self._store, [*keys.values()], self._timeout, meanwhile=meanwhile):
            missing = next((rank for rank, key in keys.items() if not self._store.check([key])), self._watched[0])
            self._give_up(missing, f"has not come for {self._timeout} s", tell=True)
            self.check()

    @contextmanager
    def shown(self, doing: str, call: str) -> Iterator[None]:
        """Inside this block, this rank is working. If it shows no sign of life meanwhile, the other ranks take it for
        dead or hanging. ``call`` is the function that all ranks have to call."""
        if self._doing is not None:
            yield
            return
        self._looked = time.monotonic()
        self._heard = dict.fromkeys(self._watched, ("", self._looked))
        with self._lock, _using_the_store():
            if not self._here:  # The thread would do this later, when this process may be dead already.
                self._here = True
                self._show()
            self._doing, self._call = doing, call
        try:
            yield
        finally:
            self._doing = None

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Inside this block, this rank runs its action of a step of the group. If the action fails on another rank,
        this thread raises an error where it waits for ranks in the block."""
        self._actions += 1
        before = _acting()
        _of_thread.acting = (*before, self)
        try:
            yield
        finally:
            _of_thread.acting = before

    def tell_failure(self, error: RankError) -> None:
        """Is called if the action has failed on this rank. ``error``: what ranks raise that wait for others in it."""
        if time.monotonic() > self._looked + LOST_PERIODS * self.period:
            return  # The store seems to hang with the process that has it, and so would this rank.
        with suppress(RuntimeError):  # If the store is gone, they notice that.
            self._store.set(self._failure_key, json.dumps([self._actions, error.message, error.rank, error.hint]))

    def _hear_failure(self) -> None:
        if self._store.check([self._failure_key]):
            self._failure = json.loads(self._store.get(self._failure_key))

    def _refuse_failure(self) -> None:
        """Raises RankError if another rank has failed in the action that this rank is running. Does not ask the store,
        which may hang with the process that has it."""
        if self._failure is None:
            return
        number, message, rank, hint = self._failure
        if number == self._actions:  # and not in an earlier step
            raise RankError(message, rank=rank, hint=hint)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside this block, waiting for other ranks counts as a sign of life."""
        self._waits_since, self._said = time.monotonic(), False
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _beat(self) -> None:
        """Writes and reads the entries until the object is closed. It runs in a thread of its own, because all other
        threads may be busy or hang."""
        try:
            while not self._watcher.closed.wait(self.period):
                self._beats += 1
                with self._lock:
                    was_here, self._here = self._here, self._doing is not None
                    if self._waits or is_in_bounded_wait():
                        sign_of_life()
                    if was_here or self._here:
                        self._show()
                if self._here:
                    self._look()
                    if self._waits and not self._said:
                        self._say_who_is_late()
            with self._lock:  # This rank will show no more signs of life, and has not died.
                self._show(_LEFT)
        except RuntimeError:
            self._store_gone = time.monotonic()

    def close(self) -> None:
        """Ends the thread, and waits for its end, but no longer than a period. If a rank was lost, rank 0 waits up to
        ``LOST_PERIODS`` periods more."""
        self._watcher.close(self.period)
        if self._verdict is None or self._members[self._rank] != 0:
            return
        # The process of rank 0 may have the store, and may end at once after its error. So it waits until all other
        # ranks have heard from the store which rank is gone.
        give_up = time.monotonic() + LOST_PERIODS * self.period
        with suppress(RuntimeError):
            while self._store.add(self._heard_key, 0) < len(self._members) - 1 and time.monotonic() < give_up:
                time.sleep(self.period / 20)

    def _show(self, state: str = "") -> None:
        state = state or (_INSIDE if self._here else _OUTSIDE)
        self._store.set(self._key(self._rank), f"{state} {self._beats} {_steps}")

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def _entries(self, ranks: Sequence[int]) -> dict[int, list[str]]:
        """Returns the entries of these ranks, with one question to the store if it can answer several at once."""
        keys = [*map(self._key, ranks)]
        at_once = self._store.has_extended_api()  # type: ignore[attr-defined]
        entries = self._store.multi_get(keys) if at_once else map(self._store.get, keys)
        return {rank: entry.decode().split() for rank, entry in zip(ranks, entries, strict=True)}

    def _look(self) -> None:
        for rank, (_, _, steps) in self._entries(self._watched).items():
            if steps != self._heard[rank][0]:
                self._heard[rank] = (steps, time.monotonic())
        self._looked = time.monotonic()
        self._hear_verdict()
        self._hear_failure()

    def _hear_verdict(self) -> None:
        if self._store.check([self._verdict_key]):
            gone, _, why = self._store.get(self._verdict_key).decode().partition(" ")
            self._verdict = int(gone), why
            self._count_as_told()

    def _say_who_is_late(self) -> None:
        since = time.monotonic() - WAITING_SECONDS
        late = [rank for rank, (_, heard) in self._heard.items() if heard < since]
        if late and self._waits_since < since:
            self._said = True
            if self._says_it(late):
                names = [self._members[rank] for rank in late]
                _say_late(self._members[self._rank], names, self._call, self._doing or "go on", self._timeout)

    def _says_it(self, late: Sequence[int]) -> bool:
        """Returns whether this rank prints the message about these ranks. Their parent does, or if a parent is late,
        its first child that is present."""
        if late[-1] > self._rank:
            return True
        earlier = [rank for rank in self._present_siblings() if rank < self._rank]
        return all(entry[0] != _INSIDE for entry in self._entries(earlier).values())

    def _present_siblings(self) -> list[int]:
        """Returns the other children of this rank's parent that have an entry. A store waits for an entry that is not
        there yet, and no other thread could use it meanwhile."""
        siblings = children(parent(self._rank), len(self._members)) if self._rank else ()
        return [rank for rank in siblings if rank != self._rank and self._store.check([self._key(rank)])]

    @property
    def given_up(self) -> bool:
        """Whether a rank was given up, by this rank or by another one. Asks the store."""
        with suppress(RuntimeError):  # If the store is gone, the next message fails.
            self._hear_verdict()
        return self._verdict is not None

    def has(self, numbers: Iterable[int]) -> bool:
        """Returns whether these are numbers, in the job, of ranks of the group."""
        return {*numbers} <= {*self._members}

    def look_at(self, numbers: Callable[[], Iterable[int]]) -> None:
        """Is called again and again while this rank waits for other ranks of the group, but not for a message of
        theirs, so that no connection ends if one of them dies. ``numbers`` returns their numbers in the job. Looks at
        them once in a period. Raises RankError if one of them is inside of a step and has not shown for
        ``WAITING_SECONDS`` that its process runs, if it has left the group, or if another rank says that a rank is
        gone, or that it has failed in this action. A rank that is in no step shows nothing, and may come at any
        time."""
        now = time.monotonic()
        if now < self._looked_at + self.period:
            return
        self._looked_at = now
        self._hear_failure()
        self._refuse_failure()
        self._hear_verdict()
        for rank, entry in self._entries([self._members.index(number) for number in numbers()]).items():
            shown, since = self._shown.get(rank, ([], now))
            if entry != shown or entry[0] == _OUTSIDE:
                self._shown[rank] = entry, now
            elif now > since + WAITING_SECONDS and self._verdict is None:
                why = "has died" if entry[0] == _INSIDE else "has ended, or has given up this call"
                self._give_up(rank, why, tell=True)
        if self._verdict is not None:
            self.check()

    def check(self) -> None:
        """Raises RankError if a watched rank has shown no sign of life for too long, or if another rank says so about
        any rank. Does so, too, if a rank has failed in an action in which this rank waits."""
        try:
            for around in _acting():
                around._refuse_failure()
        except RankError as error:
            self.give_up_self(f"has left this call ({error.message})")
            raise
        if self._verdict is None:
            since = time.monotonic() - self._timeout
            silent = [rank for rank, (_, heard) in self._heard.items() if heard < since]
            if silent:
                why = f"has shown no sign of life for {self._timeout} s (ZCKPT_RANK_TIMEOUT)"
                # The process of rank 0 may have the store. Then the store hangs with it, and nobody else can be seen.
                gone = silent[0] if self._looked > time.monotonic() - self._timeout / 2 else 0
                self._give_up(gone, why, tell=gone != 0)
            elif self._store_gone is not None and time.monotonic() > self._store_gone + DOUBT_PERIODS * self.period:
                # The process of rank 0 may have ended well, while its last answer is still on its way to this rank.
                self._verdict = 0, _STORE_IS_GONE
        if self._verdict is not None:
            rank, why = self._members[self._verdict[0]], self._verdict[1]
            raise RankError(f"rank {rank} {why}; the ranks were to {self._doing or 'begin'}", rank=rank)

    def lost(self, error: Exception, *, connecting: bool = False) -> RankError:
        """Returns the error for a lost connection to another rank. It names the rank if that can be found out. Each
        rank looks at the ranks that it watches only, and hears from the others which of theirs has died. If it was
        ``connecting``, it looks at its siblings too, with which it connects as well."""
        try:
            with _using_the_store():
                looked_at = [*self._watched, *(self._present_siblings() if connecting else ())]
                before = self._entries(looked_at)
                silent = [rank for rank, entry in before.items() if entry[0] == _INSIDE]
                for period in range(DOUBT_PERIODS):
                    if period >= LOST_PERIODS and len(silent) == 1:
                        break
                    time.sleep(self.period)
                    self._look()
                    self.check()
                    silent = [rank for rank, entry in self._entries(silent).items() if entry == before[rank]]
                entries = self._entries(looked_at)
                # A sibling may have left because it could not connect either, so it does not count.
                left = [rank for rank in self._watched if entries[rank][0] == _LEFT]
                # A rank whose entry has changed since the connection was lost is alive.
                outside = [rank for rank, entry in entries.items() if entry[0] == _OUTSIDE and entry == before[rank]]
                if silent or len(outside) == 1:
                    self._give_up((silent or outside)[0], "has died", tell=True)
                elif left:
                    self._give_up(left[0], "has ended, or has given up this call", tell=True)
                self.check()
        except RankError as known_error:
            return known_error
        return RankError(f"lost the connection to another rank: {error}")

    def give_up_self(self, why: str) -> None:
        """Tells the others that this rank cannot go on."""
        with suppress(RankError), _using_the_store():
            self._give_up(self._rank, why, tell=True)

    def _give_up(self, rank: int, why: str, *, tell: bool) -> None:
        self._verdict = rank, why
        if tell:
            self._store.set(self._verdict_key, f"{rank} {why}")
            self._count_as_told()

    def _count_as_told(self) -> None:
        """Counts this rank, once, among those that know from the store which other rank is gone."""
        assert self._verdict is not None, "a rank is gone"
        with self._telling:
            if not self._told and self._verdict[0] != self._rank:
                self._store.add(self._heard_key, 1)
                self._told = True
