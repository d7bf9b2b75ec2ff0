"""Writes of two ranks in which a rank is killed, and checks of what must be true afterwards."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

import zckpt
from tests.support.faults import Fault, faulty, kill
from tests.support.plain_engine import Engine, engines_are_adapters
from tests.support.states import fragment
from zckpt.format import names
from zckpt.plan.inventory import Inventory
from zckpt.ranks import heartbeat as life

if TYPE_CHECKING:
    from pathlib import Path

    from zckpt.plan.inventory import Fragment

OLD, NEW, NEXT = 5, 6, 7
BOTH = 2


def pids_of_ranks() -> list[int]:
    """Returns the process ids of all ranks. Every rank calls this."""
    pids = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(pids, os.getpid())
    return pids


class Half(Engine):
    """An engine that holds one of two ranks' share of the state at a step."""

    def __init__(self, step: int, frozen: bool = False) -> None:
        """Makes the state. With ``frozen``, it also has weights that are the same at each step, and the data files are
        large enough to be shared between checkpoints.
        """
        super().__init__(160_000 if frozen else 40_000, seed=step, step=step)
        self.frozen = torch.arange(40_000.0) if frozen else None

    def fragments(self) -> list[Fragment]:
        if self.frozen is None:
            return super().fragments()
        return [*super().fragments(), fragment("param", "frozen", self.frozen, 0, len(self.frozen))]

    def inventory(self, parts: object) -> Inventory:
        middle = len(self.weight) // 2
        start, stop = (0, middle) if os.environ["RANK"] == "0" else (middle, len(self.weight))
        halves = [(f, f.data) for f in self.fragments()]
        return Inventory(
            tuple(
                f._replace(span=f.span.narrow(start, stop - start), data=d[start:stop])  # type: ignore[index]
                for f, d in halves
                if d is not None
            )
        )


def write_frozen(path: str) -> None:
    """Writes a checkpoint that ``write_and_die`` may share files with."""
    with engines_are_adapters():
        zckpt.write(Half(OLD, frozen=True), path)


def write_and_die(
    path: str,
    who: int,
    *,
    at: int | None = None,
    seconds: float = 0,
    background: bool = False,
    real: bool = False,
    frozen: bool = False,
    ranks_per_file: int = 1,
) -> Any:
    """Writes a checkpoint in which rank ``who``, or both ranks if it is ``BOTH``, are killed.

    A rank is killed before operation ``at`` on its store, or after ``seconds`` if ``at`` is None. With ``real``, the
    engine is one of DeepSpeed. ``frozen`` is that of ``Half``.

    Returns the number of operations on the store, and the message and the rank of the RankError that the surviving rank
    has seen, or "" and None.
    """
    life.PERIOD_SECONDS = 0.2  # so that a dead rank is named soon, after a few periods
    dies = who in (BOTH, int(os.environ["RANK"]))
    if real:
        from tests.support.models import make_engine, train

        engine = make_engine()
        train(engine, NEW)
    else:
        engine = Half(NEW, frozen)
    torch.distributed.barrier()
    if dies and at is None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with (
        nullcontext() if real else engines_are_adapters(),
        faulty(Fault(kill, at) if dies and at is not None else None) as operations,
    ):
        try:
            if background:
                zckpt.write(engine, path, overwrite=True, background=True).wait()
            else:
                zckpt.write(engine, path, overwrite=True, ranks_per_file=ranks_per_file)
        except zckpt.RankError as error:
            return len(operations.done), str(error), error.rank
    return len(operations.done), "", None


def check_after(run: Path, name: str, old: str) -> bool:
    """Checks that there are only whole checkpoints, the older one or the new one.

    The write to ``name`` has been killed, and the older checkpoint is ``old``. Returns whether the new one was
    committed.
    """
    committed = False
    try:
        checkpoint = zckpt.open(run / name)
    except zckpt.CheckpointNotFoundError:
        assert name != old
    else:
        committed = checkpoint.step == NEW
        assert checkpoint.step in ((OLD, NEW) if name == old else (NEW,))
        assert zckpt.validate(run / name).ok
    if name != old:
        assert zckpt.open(run / old).step == OLD
        assert zckpt.validate(run / old).ok
    assert zckpt.open(run).step in ((OLD, NEW) if committed else (OLD,))
    assert zckpt.validate(run).ok
    return committed


def check_next(run: Path, name: str) -> None:
    """Checks that the next write to the path works, and that it leaves no file of the killed write."""
    engine = Engine(seed=NEXT, step=NEXT)
    with engines_are_adapters():
        zckpt.write(engine, run / name, overwrite=True)
    assert zckpt.open(run).step == NEXT
    assert zckpt.validate(run).ok
    manifest, data = sorted((run / name).iterdir(), reverse=True)
    assert (manifest.name, names.is_data_dir(data.name)) == (names.MANIFEST, True)
    assert not list(run.glob("latest.*"))
