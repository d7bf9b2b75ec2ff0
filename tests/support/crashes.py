"""Writes of two ranks of which one is killed, and what must hold afterwards."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import zckpt
from tests.support.faults import Fault, faulty, kill
from tests.support.plain_engine import Engine, engines_are_adapters
from zckpt.format import names
from zckpt.ranks import heartbeat as life
from zckpt.state.inventory import Inventory

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW, NEXT = 5, 6, 7
BOTH = 2


class Half(Engine):
    """What one of two ranks holds of the state at a step."""

    def __init__(self, step: int) -> None:
        super().__init__(40_000, seed=step, step=step)

    def inventory(self, parts: object) -> Inventory:
        middle = len(self.weight) // 2
        start, stop = (0, middle) if os.environ["RANK"] == "0" else (middle, len(self.weight))
        halves = [(one, one.data) for one in self.fragments()]
        return Inventory(
            tuple(replace(f, start=start, stop=stop, data=d[start:stop]) for f, d in halves if d is not None)  # type: ignore[index]
        )


def write_and_die(
    path: str, who: int, *, at: int | None = None, seconds: float = 0, background: bool = False, real: bool = False
) -> Any:
    """Rank ``who``, or both, are killed before operation ``at`` on a store, or after some time. Returns the error that
    the other one sees. ``real``: with an engine of DeepSpeed's."""
    life.PERIOD_SECONDS = 0.2  # a dead rank is named after a few of these
    dies = who in (BOTH, int(os.environ["RANK"]))
    if real:
        from tests.support.models import make_engine, train

        engine = make_engine()
        train(engine, NEW)
    else:
        engine = Half(NEW)
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
                zckpt.write(engine, path, overwrite=True)
        except zckpt.RankError as error:
            return len(operations.done), str(error), error.rank
    return len(operations.done), "", None


def check_after(run: Path, name: str, old: str) -> bool:
    """That what was there is whole, or the new one. Returns whether the new one was committed."""
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
    """That the next write to the path works, and leaves nothing of the dead one."""
    engine = Engine(seed=NEXT, step=NEXT)
    with engines_are_adapters():
        zckpt.write(engine, run / name, overwrite=True)
    assert zckpt.open(run).step == NEXT
    assert zckpt.validate(run).ok
    manifest, data = sorted((run / name).iterdir(), reverse=True)
    assert (manifest.name, names.is_data_dir(data.name)) == (names.MANIFEST, True)
    assert not list(run.glob("latest.*"))
