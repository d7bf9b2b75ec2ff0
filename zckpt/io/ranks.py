"""The ranks of a job: what they tell each other, and how a failure on one reaches all."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import msgpack
import torch
import torch.distributed as dist

from zckpt.errors import RankError
from zckpt.io.interrupts import Interrupts
from zckpt.io.life import Lives, timeout_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

T = TypeVar("T")

_FOREVER = timedelta(days=365)
"""For gloo, once all have connected: it cannot tell a slow rank from one that hangs. That is up to signs of life."""

_groups: dict[bool, tuple[object, _Group]] = {}
"""The world's default group and what was made beside it, for the background and for the rest."""
_made = itertools.count()


@dataclass(frozen=True)
class _Group:
    """A gloo group of all ranks: the default group may be NCCL's, which cannot carry host memory."""

    group: dist.ProcessGroup
    lives: Lives


def _group(background: bool) -> _Group:
    """Made once per process and world, for it is itself a collective; made anew after a rank was lost."""
    world = dist.group.WORLD
    made_for, group = _groups.get(background, (None, None))
    if group is None or made_for is not world:
        if group is not None:
            group.lives.close()
        store = dist.distributed_c10d._get_default_store()
        lives = Lives(store, str(next(_made)), dist.get_rank(), dist.get_world_size())
        try:
            with lives.shown("connect"), lives.waiting():
                made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds()))
            dist.distributed_c10d._set_pg_timeout(_FOREVER, made)
        except RuntimeError as error:
            lost = lives.lost(error)
            lives.close()
            raise lost from error
        group = _Group(made, lives)
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
        self._background = background
        self._interrupts = Interrupts()
        self._group = None if self.size == 1 else _group(background)

    def undivided(self) -> AbstractContextManager[None]:
        """Inside of it, Ctrl-C is raised by the actions of ``share`` and ``together`` alone, or at its end: while this
        rank waits for others, it would leave them alone with the rest. Once for each object."""
        return self._interrupts.held()

    def gather(self, data: bytes, doing: str = "go on") -> list[bytes]:
        """``data`` of every rank, on every rank. Raises RankError, which names the rank, if one is gone or hangs."""
        if self._group is None:
            return [data]
        try:
            with self._group.lives.shown(doing), self._group.lives.waiting():
                return self._gather(self._group, data)
        except RankError:
            # A thread of gloo's may wait for that rank until this process ends. To destroy the group would wait too.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group.group))
            self._group.lives.close()
            _groups.pop(self._background, None)
            raise

    def _gather(self, group: _Group, data: bytes) -> list[bytes]:
        def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
            # The group's own method: torch.distributed's refuses a group that was destroyed by its users
            found = [torch.zeros_like(mine) for _ in range(self.size)]
            work = group.group.allgather([found], [mine])
            while True:
                try:
                    work.wait(timedelta(seconds=group.lives.period))
                except RuntimeError as error:
                    if work.is_completed():
                        raise group.lives.lost(error) from error
                    group.lives.check()
                else:
                    return found

        sizes = [int(size) for size in all_gather(torch.tensor([len(data)]))]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return [bytes(one[:size].numpy()) for one, size in zip(all_gather(mine), sizes, strict=True)]

    def together(self, action: Callable[[], T], doing: str) -> T:
        """Runs ``action`` on every rank; returns its result only if it succeeded on all.

        A rank where it failed raises its own error, every other one a RankError that names the first failed rank.
        """
        results: list[T] = []

        def run() -> bytes:
            results.append(action())
            return b""

        self.share(run, doing)
        return results[0]

    def share(self, action: Callable[[], bytes], doing: str) -> list[bytes]:
        """Runs ``action`` on every rank; returns its results of all ranks, on every rank, only if it succeeded on all.
        Raises as ``together`` does.

        A chain of these, with all that can fail inside of the actions, is one that all ranks leave together.
        """
        if self._group is None:
            with self._interrupts.allowed():
                return [action()]
        with self._group.lives.shown(doing):
            return self._share(action, doing)

    def _share(self, action: Callable[[], bytes], doing: str) -> list[bytes]:
        error: BaseException | None = None
        result = b""
        try:
            with self._interrupts.allowed():
                result = action()
        except BaseException as caught:  # raised again below, once the others know
            error = caught
        message = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            report = msgpack.packb([error is not None, message, result])
            reports = [msgpack.unpackb(one) for one in self.gather(report, doing)]
        except RankError as lost:
            raise error or lost from None
        if error is not None:
            raise error
        failed = [rank for rank, (bad, *_) in enumerate(reports) if bad]
        if failed:
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise RankError(f"rank {failed[0]}{others} failed to {doing}: {reports[failed[0]][1]}", rank=failed[0])
        return [data for *_, data in reports]

    def first(self, action: Callable[[], bytes], doing: str) -> bytes:
        """Runs ``action`` on rank 0 alone; every rank gets its result, or an error."""
        return self.share(lambda: action() if self.rank == 0 else b"", doing)[0]

    def agree(self, value: str, what: str) -> str:
        """``value``, if it is the same on every rank; otherwise RankError on all."""
        check_equal([one.decode() for one in self.gather(value.encode())], what)
        return value


def check_equal(values: Sequence[str], what: str) -> None:
    """Raises RankError unless the values of all ranks are the same."""
    for rank, other in enumerate(values):
        if other != values[0]:
            raise RankError(
                f"the ranks have different {what}: {values[0]!r} on rank 0, {other!r} on rank {rank}", rank=rank
            )
