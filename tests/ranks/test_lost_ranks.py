"""Ranks that die, hang or are slow: every other one learns which, in a bounded time, and goes on."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support import faults
from tests.support.crashes import Half
from tests.support.faults import Fault, faulty
from tests.support.models import make_engine, train
from tests.support.patience import give_up_after
from tests.support.plain_engine import engines_are_adapters
from tests.support.states import write_state
from zckpt.ranks import heartbeat as life
from zckpt.ranks.collectives import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster


def act_once(who: int, how: str, seconds: float) -> tuple[str, int | None]:
    """What a rank sees of a step in which rank ``who`` dies, hangs, stops or is slow."""
    give_up_after(2)

    def step() -> str:
        if os.environ["RANK"] != str(who):
            return "done"
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.1)
            if how == "slow":
                life.sign_of_life()
        return "done"

    ranks = Ranks()
    ranks.together(lambda: None, "begin")
    try:
        return ranks.together(step, "take a step"), None
    except zckpt.RankError as error:
        return str(error), error.rank


def share_values() -> list[Any]:
    """What comes of values that msgpack carries, and of one on rank 1 that it does not."""
    ranks, path = Ranks(), os.fsdecode(b"/scratch/caf\xe9")
    own = {"rank": ranks.rank, 7: (path, b"\xff", None, 0.5, [True, ()])}
    said: list[Any] = [ranks.share(lambda: own, "share"), ranks.first(lambda: (ranks.rank, path), "look")]
    assert ranks.agree((1, path), "numbers") == (1, path)
    assert ranks.together(lambda: {path}, "make a set") == {path}
    for action in (lambda: {ranks.rank} if ranks.rank else 0, lambda: ranks.agree(ranks.rank, "numbers")):
        with pytest.raises((TypeError, zckpt.RankError)) as caught:
            ranks.share(action, "share")
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_values_are_shared(cluster: Cluster) -> None:
    path = os.fsdecode(b"/scratch/caf\xe9")
    values = [{"rank": rank, 7: [path, b"\xff", None, 0.5, [True, []]]} for rank in range(2)]
    first, second = cluster.run(share_values, 2)
    assert first[:2] == second[:2] == [values, [0, path]]
    assert first[2].startswith("RankError: rank 1 failed to share: TypeError: can not serialize 'set' object")
    assert second[2].startswith("TypeError: can not serialize 'set' object")
    for said in (first, second):
        assert said[3].startswith("RankError: the ranks have different numbers: 0 on rank 0, 1 on rank 1")
    assert Ranks().share(lambda: (1, {2: ()}), "share") == [[1, {2: []}]]
    with pytest.raises(TypeError, match="can not serialize"):
        Ranks().share(set, "share")


def exchange_tensors(dies: int | None) -> list[list[int]] | int | None:
    """Rank r sends r + 1 bytes of value 10 * r + s to rank s, but none to itself."""
    give_up_after(2)
    ranks = Ranks()
    ranks.together(lambda: None, "begin")
    if ranks.rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    others = [other != ranks.rank for other in range(ranks.size)]
    sent_bytes = [(ranks.rank + 1) * other for other in others]
    received_bytes = [(other + 1) * others[other] for other in range(ranks.size)]
    sent = torch.tensor([10 * ranks.rank + to for to in range(ranks.size)], dtype=torch.uint8)
    received = torch.zeros(sum(received_bytes), dtype=torch.uint8)
    try:
        ranks.exchange(sent.repeat_interleave(torch.tensor(sent_bytes)), sent_bytes, received, received_bytes)
    except zckpt.RankError as error:
        return error.rank
    return [part.tolist() for part in received.split(received_bytes)]


def test_tensors_are_exchanged(cluster: Cluster) -> None:
    expected = [[[10 * r + s] * (r + 1) * (r != s) for r in range(3)] for s in range(3)]
    assert cluster.run(exchange_tensors, 3, None) == expected


def test_a_rank_that_dies_before_an_exchange_is_named_by_every_other(cluster: Cluster) -> None:
    outcomes = cluster.outcomes(exchange_tensors, 3, 1, timeout=8, grace=1)
    assert [outcome.value for outcome in outcomes] == [1, None, 1]


CASES = [(0, "die"), (1, "die")]
MORE = [
    (2, "die"),
    (0, "stop"),  # and with it the store of all ranks
    (2, "stop"),
    (0, "hang"),
    (1, "hang"),
    (2, "hang"),
]


@pytest.mark.parametrize(("who", "how"), [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE)])
def test_a_rank_that_is_gone_is_named_by_every_other(cluster: Cluster, who: int, how: str) -> None:
    outcomes = cluster.outcomes(act_once, 3, who, how, 60, timeout=6, grace=1)
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert outcome.value is not None, outcome.error  # such as that it took longer than 6 seconds
            message, named = outcome.value
            assert named == who, message
            assert f"rank {who} has " in message
            assert how != "hang" or "take a step" in message


def test_a_slow_rank_is_waited_for(cluster: Cluster) -> None:
    assert [value[0] for value in cluster.run(act_once, 3, 1, "slow", 3)] == ["done"] * 3


def come_alone() -> Any:
    give_up_after(1)
    if os.environ["RANK"] != "1":
        with pytest.raises(zckpt.RankError, match="rank 1 has not come for 1 s") as caught:
            Ranks()
        return caught.value.rank
    time.sleep(3)
    return None


def test_a_rank_that_never_comes(cluster: Cluster) -> None:
    assert cluster.run(come_alone, 3) == [1, None, 1]


def stop_while_connecting() -> tuple[str, int | None]:
    """What the others see of a rank that stops after it has come and before it has connected."""
    give_up_after(2)
    if os.environ["RANK"] == "1":
        torch.distributed.ProcessGroupGloo = lambda *options: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        Ranks()
    except zckpt.RankError as error:
        return str(error), error.rank
    return "connected", None


def test_a_rank_that_stops_while_it_connects(cluster: Cluster) -> None:
    outcomes = cluster.outcomes(stop_while_connecting, 3, timeout=6, grace=1)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.error  # such as that it took longer than 6 seconds
        message, named = outcome.value
        assert named == 1, message


def hang_for_a_while(path: str, background: bool) -> tuple[Any, list[float]]:
    """Rank 1 hangs in a write, until long after the others have given it up. Then all go on."""
    engine = make_engine()
    give_up_after(2)
    train(engine, 1)
    zckpt.write(engine, f"{path}/old")

    def hang(operation: Callable[[], Any], file: str) -> Any:
        time.sleep(5)
        return operation()

    def write() -> None:
        if background:
            zckpt.write(engine, f"{path}/new", background=True).wait()
        else:
            zckpt.write(engine, f"{path}/new")

    hangs = engine.global_rank == 1
    with faulty(Fault(hang, names=("write",)) if hangs else None), pytest.raises(zckpt.ZckptError) as caught:
        write()
    error = type(caught.value).__name__, getattr(caught.value, "rank", None)
    torch.distributed.barrier()
    there = sorted(os.listdir(path))
    with suppress(zckpt.ZckptError) if background else nullcontext():  # the error, on all
        zckpt.wait()
    losses = train(engine, 1, 1)
    zckpt.write(engine, f"{path}/new")
    return error, there, losses


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_a_rank_that_hangs_for_a_while(cluster: Cluster, tmp_path: Path, background: bool) -> None:
    (error, there, losses), (own_error, _, own_losses) = cluster.run(hang_for_a_while, 2, str(tmp_path), background)
    assert error == ("RankError", 1)
    assert own_error[0] in ("RankError", "StorageError")
    assert [name for name in there if name != "new"] == ["latest", "old"]
    assert losses
    assert own_losses
    assert zckpt.open(tmp_path).path == str(tmp_path / "new")
    assert all(zckpt.validate(tmp_path / name).ok for name in ("old", "new"))
    assert len(os.listdir(tmp_path / "new")) == 2


def out_of_memory() -> Any:
    return mock.patch("zckpt.transfer.staging.StagingPool.acquire", side_effect=MemoryError("no memory for a buffer"))


ON_ONE_RANK: dict[str, tuple[Callable[[], Any], str]] = {
    "no space": (lambda: faulty(Fault(faults.NO_SPACE, names=("create",))), "NoSpaceError"),
    "I/O error": (lambda: faulty(Fault(faults.BROKEN, names=("sync",))), "StorageError"),
    "out of memory": (out_of_memory, "MemoryError"),
}


def fail_on_one_rank(path: str) -> list[tuple[str, str, int | None]]:
    """What a rank sees of each of these on rank 1, now and in the background; the next write works after each."""
    held, errors = [], []
    for (act, _), background in itertools.product(ON_ONE_RANK.values(), (False, True)):
        with (
            engines_are_adapters(),
            act() if os.environ["RANK"] == "1" else nullcontext(),
        ):
            try:
                pending = zckpt.write(Half(6), f"{path}/c", overwrite=True, background=background)  # type: ignore[call-overload]
                if background:
                    pending.wait()
            except (zckpt.ZckptError, MemoryError) as error:
                errors.append((type(error).__name__, str(error), getattr(error, "rank", None)))
        with engines_are_adapters(), suppress(zckpt.ZckptError, MemoryError):
            zckpt.wait()  # the background's, once more
        torch.distributed.barrier()
        assert zckpt.open(path).step == 5
        assert zckpt.validate(path).ok
        torch.distributed.barrier()
        with engines_are_adapters():
            zckpt.write(Half(5), f"{path}/c", overwrite=True)
        gc.collect()
        held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert held[1:] == held[1:2] * 5, "descriptors or threads are left over"
    return errors


def test_a_failure_of_one_rank_is_every_ranks(cluster: Cluster, tmp_path: Path) -> None:
    write_state(tmp_path / "c", 2, step=5)
    first, second = cluster.run(fail_on_one_rank, 2, str(tmp_path))
    assert len(first) == len(second) == 2 * len(ON_ONE_RANK)
    for number, (_, kind) in enumerate(ON_ONE_RANK.values()):
        for error, own in zip(first[2 * number : 2 * number + 2], second[2 * number : 2 * number + 2], strict=True):
            assert own[0] == kind
            assert error[0] == "RankError"
            assert error[2] == 1
            assert error[1].startswith(f"rank 1 failed to write: {kind}: {own[1].splitlines()[0]}")
