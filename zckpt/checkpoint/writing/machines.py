"""Finds out which ranks of a write see the same directory, because each machine may write to a disk of its own."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zckpt.format import names
from zckpt.plan.machines import Machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Store


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a write. The ranks of one machine see the same directory. The first of them is its *leader*: it
    takes the lock of the directory, and commits there."""

    all: tuple[Machine, ...]
    """The machines, in the order of their leaders. A rank other than rank 0 knows only its own one."""
    several: bool

    @classmethod
    def one(cls, size: int) -> Machines:
        """Returns the only machine, if all ranks see the same directory."""
        return cls((Machine("", tuple(range(size))),), False)

    @classmethod
    def seen(cls, marks: Sequence[tuple[int, str]]) -> Machines:
        """Returns all machines. ``marks``: for each rank, the lowest rank that sees the same directory, and the name of
        its own host."""
        members: dict[int, list[int]] = {}
        for rank, (leader, _) in enumerate(marks):
            members.setdefault(leader, []).append(rank)
        found = tuple(Machine(marks[leader][1], tuple(ranks)) for leader, ranks in sorted(members.items()))
        return cls(found, len(found) > 1)

    def of(self, rank: int) -> Machine:
        return next(machine for machine in self.all if rank in machine.ranks)

    def leads(self, rank: int) -> bool:
        """Returns whether this rank is the leader of its machine."""
        return self.of(rank).ranks[0] == rank

    @property
    def leaders(self) -> list[int]:
        """The leaders of all machines."""
        return [machine.ranks[0] for machine in self.all]

    def of_leaders(self, results: Sequence[Any]) -> tuple[Any, dict[int, Any]]:
        """Returns the result of rank 0, and for each rank of another machine that of its leader. ``results``: those of
        all ranks."""
        return results[0], {rank: results[ranks[0]] for _, ranks in self.all[1:] for rank in ranks}

    def checked_by(self, hosts: Sequence[str]) -> list[int]:
        """Returns for each rank the rank whose files it checks before the commit. That rank sees the same directory.
        If possible, it is on another host, because a rank that has written a file sees it even if its file server does
        not have it. ``hosts``: the host of each rank."""
        checked = list(range(len(hosts)))
        for machine in self.all:
            ranks = sorted(machine.ranks, key=lambda rank: (hosts[rank], rank))
            # No host has more ranks than this. So from any rank, this many ranks further on, another host has begun,
            # unless one host has more than half of the ranks. Then some of its ranks check each other's files.
            step = max(Counter(hosts[rank] for rank in ranks).values()) % len(ranks) or 1
            for number, rank in enumerate(ranks):
                checked[rank] = ranks[(number + step) % len(ranks)]
        return checked

    def tree(self) -> list[dict[str, object]]:
        """Returns the value that the tree of a checkpoint holds. It is empty if there is only one machine."""
        return [{"host": host, "ranks": list(ranks)} for host, ranks in self.all] if self.several else []


def find_machines(store: Store, save_id: str, ranks: Ranks) -> Machines:
    """Finds out which ranks see the same directory. Each rank puts a file with a name of its own into the directory of
    the checkpoint, looks which of the others it sees, and removes its file. This is collective. Raises StorageError and
    RankError."""
    found: list[Machines] = []

    def mark(rank: int) -> str:
        # The names differ from write to write, so that no client of a network file system remembers them.
        return names.temporary(names.LOCK, f"{(int(save_id[:8], 16) + rank) % 2**32:08x}")

    def look() -> tuple[int, str]:
        leader = next(rank for rank in range(ranks.rank + 1) if store.entry(mark(rank)) is not None)
        return leader, socket.gethostname()

    def arrange(marks: Sequence[Any]) -> tuple[bool, dict[int, Machine]]:
        machines = Machines.seen(marks)
        found.append(machines)
        return machines.several, {rank: machine for machine in machines.all for rank in machine.ranks}

    try:
        ranks.together(lambda: store.put(mark(ranks.rank), b""), "look for the other machines")
        several, own = ranks.decide_each(look, arrange, "look for the other machines")
        ranks.together(lambda: store.remove(mark(ranks.rank)), "look for the other machines")
    finally:
        store.remove(mark(ranks.rank))
        store.remove_made()  # The lock makes the directory again, and removes it if the write fails.
    if found:
        return found[0]
    assert own is not None, "rank 0 tells every rank its machine"
    host, members = own
    return Machines((Machine(host, tuple(members)),), several)
