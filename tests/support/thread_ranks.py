"""Ranks that are threads of one process, and reach each other through its memory. So a test can have thousands of them.

All that the ranks do is the code of real ranks. Only the groups of gloo and the store of ``torch.distributed`` are
replaced, by what ``zckpt.ranks.job.Job`` asks for:

    def save(rank: int) -> str:
        return zckpt.write(ReferenceEngine(), "checkpoints/a", budget=ONE_THREAD)

    paths = [outcome.value for outcome in ThreadRanks(1024).run(save)]

The state of a process is shared by all of them: environment variables, the default generators, signal handlers, and
the number of steps that a rank shows as its sign of life. So a rank that dies is noticed, and one that hangs is not.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.ranks.groups import close_groups
from zckpt.ranks.job import Job, in_job
from zckpt.transfer.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    import torch

STACK_BYTES = 512 << 10
"""The size of the stack of each thread. With the default of 8 MiB, thousands of threads would reserve tens of GiB of
the address space, which not every system allows."""
SWITCH_SECONDS = 0.5
"""How often a thread that waits for the interpreter asks for it. Python's default of 5 ms would have thousands of
threads do little else."""
JOIN_SECONDS = 5
"""How often a rank that waits for others to join looks whether it should give up."""
ONE_THREAD = Budget(2 << 20, threads=1)
"""A budget for many ranks in one process: one thread and 2 MiB for each of them."""


class Died(BaseException):
    """Ends the thread of a rank that has died, once all other ranks have ended."""


class Outcome(NamedTuple):
    """How one rank has ended."""

    value: Any = None
    error: BaseException | None = None
    """What it has raised. None if it has returned a value, or has died."""


@dataclass
class Traffic:
    """What one rank has sent and received, and how often it has used the store."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0
    connections: int = 0
    """How many connections to other ranks it has made."""
    store_calls: Counter[str] = field(default_factory=Counter)


class ThreadRanks:
    """The ranks of one job. ``run`` may be called once for each object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.traffic = [Traffic() for _ in range(size)]
        self.hubs: dict[str, _Hub] = {}
        """The groups of connected ranks, by name."""
        self.values: dict[str, bytes] = {}
        """What is in the store."""
        self.adding = threading.Lock()
        """Held while a value of the store is counted up."""
        self.dead: set[int] = set()
        """The ranks that have died."""
        self._alive = threading.Semaphore(0)
        """Is released by each rank that ends or dies."""
        self._over = threading.Event()
        self._main = threading.local()
        """``rank`` is the rank whose main thread this is."""

    def run(self, function: Callable[[int], Any]) -> list[Outcome]:
        """Calls ``function`` with the number of each rank, in the thread of that rank. Returns how each of them has
        ended, once all have."""
        outcomes: dict[int, Outcome] = {}

        def run(rank: int) -> None:
            own = _ThreadJob(self, rank)
            self._main.rank = rank
            try:
                with in_job(own):
                    outcomes[rank] = Outcome(function(rank))
            except Died:
                return
            except BaseException as error:  # the caller looks at it
                outcomes[rank] = Outcome(error=error)
            if rank not in self.dead:
                close_groups(own)
                self._alive.release()

        before, switch_seconds = threading.stack_size(STACK_BYTES), sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for _ in threads:
                self._alive.acquire()
        finally:
            self._over.set()
            threading.stack_size(before)
            sys.setswitchinterval(switch_seconds)
        for thread in threads:
            thread.join()
        return [outcomes.get(rank, Outcome()) for rank in range(self.size)]

    def die(self, rank: int) -> None:
        """Lets a rank die, in any of its threads: from now on it does nothing any more, its connections are lost, and
        so is the store if it is rank 0. This never returns. Its threads end once all other ranks have ended."""
        self.dead.add(rank)
        for hub in [*self.hubs.values()]:
            hub.leave(rank)
        self._alive.release()
        self._stand_still()

    def refuse_dead(self, rank: int) -> None:
        """Stands still if this rank has died and this is its main thread. Raises RuntimeError in any other of its
        threads."""
        if rank in self.dead:
            if getattr(self._main, "rank", None) == rank:
                self._stand_still()
            raise RuntimeError("this rank has died")

    def _stand_still(self) -> None:
        self._over.wait()
        raise Died


class _ThreadJob(Job):
    """The job, as the rank with this number sees it."""

    is_over = False

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        super().__init__()
        self._ranks, self._rank = ranks, rank
        self._store: Any = _Values(ranks, rank)

    @property
    def rank(self) -> int:
        return self._rank

    def members(self, group: Any) -> tuple[int, ...]:
        assert group is None, "threads have no process groups"
        return tuple(range(self._ranks.size))

    @property
    def store(self) -> Any:
        return self._store

    def connect(self, name: str, number: int, size: int, timeout: timedelta, closed: threading.Event) -> _Connected:
        self._ranks.refuse_dead(self._rank)
        hub = self._ranks.hubs.setdefault(name, _Hub(size))
        hub.join(number, self._rank, timeout, closed)
        self._ranks.traffic[self._rank].connections += size - 1
        return _Connected(self._ranks, hub, self._rank, number)


class _Values:
    """The store, as one rank sees it. It is gone once rank 0 has died, whose process mostly holds it."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def _values(self, call: str) -> dict[str, bytes]:
        self._ranks.refuse_dead(self._rank)
        if 0 in self._ranks.dead:
            raise RuntimeError("the store is gone")
        self._ranks.traffic[self._rank].store_calls[call] += 1
        return self._ranks.values

    def set(self, key: str, value: str) -> None:
        self._values("set")[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values("get")[key]

    def add(self, key: str, amount: int) -> int:
        with self._ranks.adding:
            values = self._values("add")
            values[key] = str(int(values.get(key, b"0")) + amount).encode()
            return int(values[key])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._values("multi_get")
        return [values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        values = self._values("check")
        return all(key in values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values("delete_key").pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return True


class _Hub:
    """Connects ranks with each other. A message is on its way until it is taken. A rank that waits is woken only once
    all that it waits for is there, because a thousand threads that wake up for nothing take minutes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._woken = [threading.Condition(self._lock) for _ in range(size)]
        self._ranks: dict[int, int] = {}
        """The ranks that have joined, by their numbers among those that are connected here."""
        self._gone: set[int] = set()
        """The numbers of those that have left."""
        self._sent: dict[tuple[int, int], deque[torch.Tensor]] = {}
        """The messages on their way, by the numbers of sender and receiver."""
        self._awaited: dict[int, Sequence[int]] = {}
        """For each rank that waits for messages, the numbers of the senders."""

    def join(self, number: int, rank: int, timeout: timedelta, closed: threading.Event) -> None:
        """Returns once all ranks have joined."""
        deadline = time.monotonic() + timeout.total_seconds()
        with self._lock:
            self._ranks[number] = rank
            if len(self._ranks) == self.size:
                self._wake_all()
            while not self._woken[number].wait_for(lambda: len(self._ranks) == self.size, JOIN_SECONDS):
                if closed.is_set() or time.monotonic() > deadline:
                    raise RuntimeError("the wait was given up")

    def leave(self, rank: int) -> None:
        """Ends the connections of a rank, if it is here. What it has sent still arrives."""
        with self._lock:
            self._gone.update(number for number, other in self._ranks.items() if other == rank)
            self._wake_all()

    def send(self, sender: int, receiver: int, message: torch.Tensor) -> None:
        with self._lock:
            self._sent.setdefault((sender, receiver), deque()).append(message.clone())
            if receiver in self._awaited and not self._lacking(self._awaited[receiver], receiver):
                self._woken[receiver].notify()

    def receive(self, senders: Sequence[int], receiver: int, timeout: timedelta) -> list[torch.Tensor]:
        """Returns a message of each of the senders. Returns nothing if they have not come within ``timeout``. Raises
        RuntimeError if one of the senders has gone without it."""

        def there() -> bool:
            lacking = self._lacking(senders, receiver)
            if not self._gone.isdisjoint(lacking):
                raise RuntimeError("Connection closed by peer")
            return not lacking

        with self._lock:
            self._awaited[receiver] = senders
            try:
                if not self._woken[receiver].wait_for(there, timeout.total_seconds()):
                    return []
                return [self._sent[sender, receiver].popleft() for sender in senders]
            finally:
                del self._awaited[receiver]

    def _lacking(self, senders: Sequence[int], receiver: int) -> list[int]:
        return [sender for sender in senders if not self._sent.get((sender, receiver))]

    def _wake_all(self) -> None:
        for woken in self._woken:
            woken.notify_all()


class _Connected:
    """The connections of one rank with the others of a hub. It has the operations of a group of gloo."""

    def __init__(self, ranks: ThreadRanks, hub: _Hub, rank: int, number: int) -> None:
        self._ranks, self._hub, self._rank, self._number = ranks, hub, rank, number

    def __del__(self) -> None:
        self._hub.leave(self._rank)

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return self._hub.size

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], _: object) -> _Work:
        if self._number:
            return self._exchange({0: inputs[0]}, {})
        outputs[0][0].copy_(inputs[0])
        return self._exchange({}, dict(enumerate(outputs[0][1:], 1)))

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], _: object) -> _Work:
        if self._number:
            return self._exchange({}, {0: outputs[0]})
        outputs[0].copy_(inputs[0][0])
        return self._exchange(dict(enumerate(inputs[0][1:], 1)), {})

    def alltoall_base(
        self, received: torch.Tensor, sent: torch.Tensor, received_bytes: Sequence[int], sent_bytes: Sequence[int]
    ) -> _Work:
        own, others = self._number, [number for number in range(self._hub.size) if number != self._number]
        outputs, inputs = (tensor.split([*sizes]) for tensor, sizes in ((received, received_bytes), (sent, sent_bytes)))
        outputs[own].copy_(inputs[own])
        return self._exchange({other: inputs[other] for other in others}, {other: outputs[other] for other in others})

    def _exchange(self, sent: Mapping[int, torch.Tensor], targets: Mapping[int, torch.Tensor]) -> _Work:
        self._ranks.refuse_dead(self._rank)
        traffic = self._ranks.traffic[self._rank]
        for receiver, message in sent.items():
            self._hub.send(self._number, receiver, message)
        traffic.sent_messages += len(sent)
        traffic.sent_bytes += sum(message.nbytes for message in sent.values())
        return _Work(self._ranks, self._hub, self._rank, self._number, targets)


class _Work:
    """An operation that has sent its messages, and ends once those of the others are there."""

    def __init__(
        self, ranks: ThreadRanks, hub: _Hub, rank: int, number: int, targets: Mapping[int, torch.Tensor]
    ) -> None:
        self._ranks, self._hub, self._rank, self._number, self._targets = ranks, hub, rank, number, targets
        self._failed = False

    def is_completed(self) -> bool:
        return self._failed or not self._targets

    def wait(self, timeout: timedelta) -> None:
        if not self._targets:
            return
        try:
            messages = self._hub.receive([*self._targets], self._number, timeout)
        except RuntimeError:
            self._failed = True
            raise
        self._ranks.refuse_dead(self._rank)
        if not messages:
            raise RuntimeError("Operation timed out!")
        for target, message in zip(self._targets.values(), messages, strict=True):
            target.copy_(message)
        traffic = self._ranks.traffic[self._rank]
        traffic.received_messages += len(messages)
        traffic.received_bytes += sum(message.nbytes for message in messages)
        self._targets = {}
