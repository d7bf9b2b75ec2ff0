"""The machines of a checkpoint of which each has the files of its own ranks on a disk of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

from zckpt.errors import first_few
from zckpt.format import names


class Machine(NamedTuple):
    """A machine that has the files of some ranks on a disk of its own."""

    host: str
    """The name of the host of the first of these ranks."""
    ranks: tuple[int, ...]
    """The numbers of the ranks that see this disk, in ascending order."""

    def __str__(self) -> str:
        return f"{self.host} with ranks {first_few(self.ranks, 8)}"


def machines_in(root: dict[Any, Any]) -> tuple[Machine, ...]:
    """Returns the machines that the root tree of a checkpoint records, or none if it does not record any, or not in the
    right form. ``root``: the tree that all ranks share."""
    recorded, machines = root.get(names.MACHINES), []
    for machine in recorded if isinstance(recorded, (list, tuple)) else ():
        match machine:
            case {"host": str(host), "ranks": [int(), *_] as ranks} if all(type(rank) is int for rank in ranks):
                machines.append(Machine(host, tuple(ranks)))
            case _:
                return ()
    return tuple(machines)
