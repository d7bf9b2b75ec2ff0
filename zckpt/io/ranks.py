"""The ranks of a job: what they tell each other, and how a failure on one reaches all."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import msgpack
import torch
import torch.distributed as dist

from zckpt.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

TIMEOUT = timedelta(days=365)
"""For one exchange. Ranks wait here for the slowest writer; one that has died is noticed at once."""

_groups: dict[bool, tuple[object, dist.ProcessGroup]] = {}
"""The world's default group and the CPU group made beside it, for the background and for the rest."""


def _cpu_group(background: bool) -> dist.ProcessGroup:
    """A gloo group of all ranks: the default group may be NCCL's, which cannot carry host memory. Collective."""
    world = dist.group.WORLD
    made_for, group = _groups.get(background, (None, None))
    if group is None or made_for is not world:  # once per process and world: creating a group is itself a collective
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        _groups[background] = (world, group)
    return group


class Ranks:
    """All ranks of the default process group, or this process alone where there is none.

    Every method is collective: all ranks call it, in the same order. Those of ``background`` ranks may be called by
    another thread at the same time, and go on when the training has given up its process groups.
    """

    def __init__(self, *, background: bool = False) -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self._group = None if self.size == 1 else _cpu_group(background)

    def gather(self, data: bytes) -> list[bytes]:
        """``data`` of every rank, on every rank. Raises RankError if a rank is gone."""
        if self._group is None:
            return [data]
        try:
            return self._gather(self._group, data)
        except RuntimeError as error:
            raise RankError(f"lost the connection to another rank: {error}") from error

    def _gather(self, group: dist.ProcessGroup, data: bytes) -> list[bytes]:
        def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
            # The group's own method: torch.distributed's refuses a group that was destroyed by its users
            found = [torch.zeros_like(mine) for _ in range(self.size)]
            group.allgather([found], [mine]).wait()
            return found

        sizes = [int(size) for size in all_gather(torch.tensor([len(data)]))]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return [bytes(one[:size].numpy()) for one, size in zip(all_gather(mine), sizes, strict=True)]

    def together(self, action: Callable[[], T], doing: str) -> T:
        """Runs ``action`` on every rank; returns its result only if it succeeded on all.

        A rank where it failed raises its own error, every other one a RankError that names the first failed rank.
        """
        error: BaseException | None = None
        result: T | None = None
        try:
            result = action()
        except BaseException as caught:  # raised again below, once the others know
            error = caught
        message = "" if error is None else f"{type(error).__name__}: {error}"
        reports = [msgpack.unpackb(report) for report in self.gather(msgpack.packb([error is not None, message]))]
        if error is not None:
            raise error
        failed = [rank for rank, (bad, _) in enumerate(reports) if bad]
        if failed:
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise RankError(f"rank {failed[0]}{others} failed to {doing}: {reports[failed[0]][1]}", rank=failed[0])
        return result  # type: ignore[return-value]

    def first(self, action: Callable[[], bytes], doing: str) -> bytes:
        """Runs ``action`` on rank 0 alone; every rank gets its result, or an error."""
        mine = self.together(lambda: action() if self.rank == 0 else b"", doing)
        return self.gather(mine)[0]

    def agree(self, value: str, what: str) -> str:
        """``value``, if it is the same on every rank; otherwise RankError on all."""
        values = [one.decode() for one in self.gather(value.encode())]
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankError(
                    f"the ranks have different {what}: {values[0]!r} on rank 0, {other!r} on rank {rank}", rank=rank
                )
        return value
