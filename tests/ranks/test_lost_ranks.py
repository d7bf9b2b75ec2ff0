"""If a rank dies or hangs, every other rank learns in a bounded time which one it is, and goes on."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support import faults
from tests.support.crashes import Half, pids_of_ranks
from tests.support.faults import Fault, faulty
from tests.support.interrupts import threads_left
from tests.support.models import make_engine, train
from tests.support.patience import give_up_after
from tests.support.plain_engine import engines_are_adapters
from tests.support.states import write_state
from zckpt.ranks import heartbeat as life
from zckpt.ranks import tree
from zckpt.ranks.collectives import Ranks
from zckpt.ranks.groups import Group, _connected

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import Cluster


def act_once(directory: str, who: int, how: str) -> tuple[str, int | None]:
    """Takes a step in which rank ``who`` dies, hangs or stops.

    Returns "done" and None, or the message and the rank of the RankError that this rank sees.
    """
    give_up_after(300 if how == "die" else 4)
    pids = pids_of_ranks()

    def step() -> str:
        if os.environ["RANK"] != str(who):
            return "done"
        if how == "hang":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        return "it has gone on"

    ranks = Ranks()
    ranks.together(lambda: None, "begin")
    try:
        return ranks.together(step, "take a step"), None
    except zckpt.RankError as error:
        return str(error), error.rank
    finally:
        kill_after_all_others(directory, who, pids)


def kill_after_all_others(directory: str, who: int, pids: list[int]) -> None:
    """Ends rank ``who``, which may hang, once all other ranks have called this."""
    rank = torch.distributed.get_rank()
    Path(directory, str(rank)).touch()
    others = [other for other in range(len(pids)) if other != who]
    if rank == others[0]:
        while not all(Path(directory, str(other)).exists() for other in others):
            time.sleep(0.01)
        with suppress(ProcessLookupError):
            os.kill(pids[who], signal.SIGKILL)


def test_a_rank_that_gets_no_processor_for_a_moment_is_not_taken_for_dead() -> None:
    """Ranks 1 and 2 show nothing after a connection was lost, but rank 1 goes on after five periods."""
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    for other in (1, 2):
        store.set(f"zckpt/job/{other}", "1 7 7")
    with mock.patch.object(life, "PERIOD_SECONDS", 0.01):
        lives = life.Lives(store, "job", 0, (0, 1, 2))
    look, looks = lives._look, itertools.count(1)

    def look_while_rank_1_goes_on() -> None:
        if next(looks) == 5:
            store.set("zckpt/job/1", "1 8 7")
        look()

    lives._look = look_while_rank_1_goes_on  # type: ignore[method-assign]
    lives._heard = dict.fromkeys((1, 2), ("7", time.monotonic()))
    try:
        assert str(lives.lost(RuntimeError("connection closed"))).startswith("rank 2 has died")
    finally:
        lives.close()


def test_a_rank_that_dies_while_its_sibling_connects_is_named() -> None:
    """Rank 2 cannot connect to rank 1, which has died. Rank 0 has connected, and is outside of any call since, and rank
    3 has not come yet."""

    def connect(*_: object) -> None:
        raise RuntimeError("connection closed")

    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    store.set("zckpt/job/0", "0 7 7")
    store.set("zckpt/job/1", "1 7 7")
    members = (0, 1, 2, 3)
    with mock.patch.object(life, "PERIOD_SECONDS", 0.01):
        lives = life.Lives(store, "job", 2, members)
    try:
        with lives.shown("connect", "zckpt.write"), pytest.raises(zckpt.RankError, match="rank 1 has died"):
            _connected(mock.Mock(connect=connect), "gloo", 2, members, lives, members)
    finally:
        lives.close()


def decide_for_ever(directory: str) -> tuple[str, int | None]:
    """Rank 0 hangs while it decides, and the other ranks wait for its answer."""
    give_up_after(4)
    pids = pids_of_ranks()
    ranks = Ranks()
    ranks.together(lambda: None, "begin")
    try:
        ranks.decide(int, lambda _: time.sleep(600), "decide")
    except zckpt.RankError as error:
        return str(error), error.rank
    finally:
        kill_after_all_others(directory, 0, pids)
    return "decided", None


def test_a_rank_0_that_hangs_in_a_decision_is_named(cluster: Cluster, tmp_path: Path) -> None:
    for outcome in cluster.outcomes(decide_for_ever, 3, str(tmp_path))[1:]:
        assert outcome.value is not None, outcome.error
        assert outcome.value[1] == 0, outcome.value


def leave_a_step() -> list[str]:
    """Rank 1 leaves a step by another error than that of a lost rank. Then all ranks take another step."""
    give_up_after(20)
    ranks = Ranks()
    ranks.together(lambda: None, "begin")
    errors = []
    leaving = mock.patch.object(Group, "ask", side_effect=KeyboardInterrupt) if ranks.rank == 1 else nullcontext()
    with leaving:
        try:
            ranks.together(lambda: None, "go on")
        except (KeyboardInterrupt, zckpt.RankError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    torch.distributed.barrier()
    Ranks().together(lambda: None, "go on")
    return errors


def test_a_rank_that_leaves_a_step_ends_it_on_all_ranks(cluster: Cluster) -> None:
    first, second, third = cluster.run(leave_a_step, 3)
    assert second == ["KeyboardInterrupt: "]
    for errors in (first, third):
        assert errors[0].startswith("RankError: rank 1 has left this call (KeyboardInterrupt)")


def be_slow() -> str:
    """Rank 1 takes a step for longer than the ranks wait for a sign of life, and gives such signs meanwhile."""
    give_up_after(4)

    def step() -> str:
        if os.environ["RANK"] == "1":
            for _ in range(60):
                time.sleep(0.1)
                life.sign_of_life()
        return "done"

    ranks = Ranks()
    ranks.together(lambda: None, "begin")
    return ranks.together(step, "take a step")


def share_values() -> list[Any]:
    """Shares values that msgpack can pack, and one on rank 1 that it cannot pack.

    Returns the values and the errors that this rank gets.
    """
    ranks, path = Ranks(), os.fsdecode(b"/scratch/caf\xe9")
    value = {"rank": ranks.rank, 7: (path, b"\xff", None, 0.5, [True, ()])}
    results: list[Any] = [ranks.decide(lambda: value, list, "share"), ranks.first(lambda: (ranks.rank, path), "look")]
    assert ranks.agree((1, path), "numbers") == (1, path)
    assert ranks.together(lambda: {path}, "make a set") == {path}
    for action in (lambda: {ranks.rank} if ranks.rank else 0, lambda: ranks.agree(ranks.rank, "numbers")):
        with pytest.raises((TypeError, zckpt.RankError)) as caught:
            ranks.decide(action, list, "share")
        results.append(f"{type(caught.value).__name__}: {caught.value}")
    return results


def test_each_rank_gets_the_values_of_all_ranks(cluster: Cluster) -> None:
    path = os.fsdecode(b"/scratch/caf\xe9")
    values = [{"rank": rank, 7: [path, b"\xff", None, 0.5, [True, []]]} for rank in range(2)]
    first, second = cluster.run(share_values, 2)
    assert first[:2] == second[:2] == [values, [0, path]]
    assert first[2].startswith("RankError: rank 1 failed to share: TypeError: can not serialize 'set' object")
    assert second[2].startswith("TypeError: can not serialize 'set' object")
    for results in (first, second):
        assert results[3].startswith("RankError: the ranks have different numbers: 0 on rank 0, 1 on rank 1")
    shared: Any = Ranks().decide(lambda: (1, {2: ()}), list, "share")
    assert shared == [[1, {2: []}]]
    with pytest.raises(TypeError, match="can not serialize"):
        Ranks().decide(set, list, "share")


def exchange_tensors(dies: int | None) -> list[list[int]] | int | None:
    """Rank r sends r + 1 bytes of the value 10 * r + s to each other rank s.

    Returns the bytes from each rank, or the rank that a RankError names.
    """
    give_up_after(300)
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


def test_a_rank_that_dies_before_an_exchange_is_named_by_every_other_rank(cluster: Cluster) -> None:
    outcomes = cluster.outcomes(exchange_tensors, 3, 1)
    assert [outcome.value for outcome in outcomes] == [1, None, 1]


CASES = [(0, "die"), (1, "die")]
MORE = [
    (2, "die"),
    (0, "stop"),  # rank 0 has the store of all ranks, which stops, too
    (2, "stop"),
    (0, "hang"),
    (1, "hang"),
    (2, "hang"),
]


def act_in_a_tree(directory: str, who: int, how: str) -> tuple[str, int | None]:
    """Does what ``act_once`` does, with ranks that have at most two children."""
    with mock.patch.object(tree, "FAN_OUT", 2):
        return act_once(directory, who, how)


TREE = [(1, "die"), (6, "die")]
MORE_OF_TREE = [(0, "die"), (0, "stop"), (2, "hang"), (5, "stop")]
"""Rank 1 has the children 3 and 4, and rank 6 is a child of rank 2."""


@pytest.mark.parametrize(
    ("who", "how"), [*TREE, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE_OF_TREE)]
)
def test_a_rank_of_a_tree_that_is_gone_is_named_by_every_other_rank(
    cluster: Cluster, tmp_path: Path, who: int, how: str
) -> None:
    outcomes = cluster.outcomes(act_in_a_tree, 7, str(tmp_path), who, how)
    named = [outcome.value and outcome.value[1] for outcome in outcomes]
    assert named == [None if rank == who else who for rank in range(7)], outcomes


def die_before_the_first_sign() -> int | None:
    """Rank 4 of a tree dies after it has come, and before it has shown that it runs."""
    give_up_after(4)
    torch.distributed.barrier()
    if os.environ["RANK"] == "4":
        life.Lives._show = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with mock.patch.object(tree, "FAN_OUT", 2), pytest.raises(zckpt.RankError) as caught:
        Ranks()
    return caught.value.rank


@pytest.mark.matrix
def test_a_rank_that_dies_before_its_first_sign_of_life_is_named(cluster: Cluster) -> None:
    outcomes = cluster.outcomes(die_before_the_first_sign, 7)
    assert [outcome.value for outcome in outcomes] == [None if rank == 4 else 4 for rank in range(7)]


def die_before_a_part_meets() -> int | None:
    """Rank 1 comes late to one part. Then it dies in a step of all ranks, before it meets the others of its part."""
    give_up_after(300)
    ranks = Ranks()
    ranks.together(lambda: None, "begin")

    def act() -> None:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if ranks.rank < 3:
            ranks.part([0, 1, 2])

    with mock.patch.object(life, "WAITING_SECONDS", 3):
        if ranks.rank == 1:
            time.sleep(4)  # In no step, a rank shows no signs of life, and is waited for all the same.
        # This step ends once all ranks of the part are connected. Rank 1 must not die before.
        ranks.together(lambda: ranks.part([0, 1, 2, 3]).together(lambda: None, "connect"), "connect")
        with pytest.raises(zckpt.RankError, match="has died") as caught:
            ranks.together(act, "meet")
    return caught.value.rank


def test_a_rank_that_dies_before_a_part_of_the_ranks_meets_is_named(cluster: Cluster) -> None:
    outcomes = cluster.outcomes(die_before_a_part_meets, 4)
    assert [outcome.value for outcome in outcomes] == [1, None, 1, 1], outcomes


def fail_outside_of_a_part() -> list[str]:
    """Rank 1, and then rank 3, fails in a step of all ranks while other ranks wait for rank 1 in a step of a part: when
    they meet for the first time, and when they have met before. Then all ranks take these steps together.

    Returns the error of this rank in each case.
    """
    give_up_after(30)
    ranks = Ranks()
    errors = []

    def act(who: int, meets: bool) -> None:
        if ranks.rank < 3:
            part = ranks.part([0, 1, 2]) if meets else None
            if ranks.rank == who:
                raise ValueError("it is broken")
            if who == 3 and ranks.rank == 1:
                time.sleep(2)  # so that the other ranks of the part wait for this one when rank 3 fails
            (part or ranks.part([0, 1, 2])).together(lambda: None, "go on")
        elif ranks.rank == who:
            raise ValueError("it is broken")

    for who, meets in ((1, False), (1, True), (3, True)):
        with pytest.raises((ValueError, zckpt.RankError)) as caught:
            ranks.together(partial(act, who, meets), "act", interruptible=False)
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
        ranks.together(partial(act, -1, True), "act", interruptible=False)
    return errors


def test_the_ranks_of_a_part_hear_of_a_failure_outside_of_their_steps(cluster: Cluster) -> None:
    for rank, errors in enumerate(cluster.run(fail_outside_of_a_part, 4)):
        for who, error in zip((1, 1, 3), errors, strict=True):
            assert "it is broken" in error
            assert ("ValueError: it" if rank == who else f"rank {who} failed to act: ValueError: it") in error
            assert (rank == who) == error.startswith("ValueError")


def stop_in_a_common_file(directory: str, operation: str) -> tuple[str, int | None]:
    """Rank 0, which has the store of all ranks, stops in the middle of a write of both ranks to one file.

    Returns what rank 1 sees of that.
    """
    give_up_after(6)
    pids = pids_of_ranks()
    stops = Fault(lambda *_: os.kill(os.getpid(), signal.SIGSTOP), names=(operation,), path=".safetensors")
    try:
        with engines_are_adapters(), faulty(None if torch.distributed.get_rank() else stops):
            zckpt.write(Half(6), f"{directory}/c", ranks_per_file=2)
    except zckpt.RankError as error:
        return str(error), error.rank
    finally:
        kill_after_all_others(directory, 0, pids)
    return "written", None


@pytest.mark.parametrize("operation", [pytest.param("make", marks=pytest.mark.matrix), "write"])
def test_a_rank_0_that_stops_while_ranks_write_to_one_file_is_named(
    cluster: Cluster, tmp_path: Path, operation: str
) -> None:
    outcomes = cluster.outcomes(stop_in_a_common_file, 2, str(tmp_path), operation, timeout=120)
    assert outcomes[0].signal == signal.SIGKILL, outcomes[0]
    assert outcomes[1].value is not None, outcomes[1].error
    message, named = outcomes[1].value
    assert named == 0, message
    assert message.startswith("rank 0 has shown no sign of life for 6 s"), message


def repeated(count: int, values: list[int]) -> tuple[str, dict[int, list[int]]]:
    return "common", {value: [value] * count for value in values if value}


def total(values: list[int]) -> int:
    return sum(values)


def divide(values: list[int]) -> int:
    return 1 // sum(values)


def refuse(_: list[int]) -> None:
    raise zckpt.StateError("a", key="b", hint="c")


def share_in_a_tree(fan_out: int) -> list[Any]:
    """Sends short and long values along a tree. Returns what this rank gets."""
    results: list[Any] = []
    with mock.patch.object(tree, "FAN_OUT", fan_out):
        ranks = Ranks()
        for nbytes in (1, 900, 5000):
            own = bytes([ranks.rank]) * nbytes * (ranks.rank % 3)
            values = ranks.decide(partial(bytes, own), list, "share")
            results.append([len(value) for value in values])
            assert all({*value} <= {rank} for rank, value in enumerate(values))
            results.append(ranks.decide(partial(int, ranks.rank), total, "add"))
            results.append(ranks.decide_each(lambda: ranks.rank, partial(repeated, nbytes), "tell"))
            with pytest.raises(zckpt.StateError, match=r"a \(key b\)\n  c") as same:
                ranks.decide(int, refuse, "refuse")
            assert same.value.key == "b"
        with pytest.raises((zckpt.RankError, ZeroDivisionError)) as failed:
            ranks.decide(int, divide, "divide")
        with pytest.raises((zckpt.RankError, KeyError)) as others:
            ranks.together(lambda: os.environ["nothing" if ranks.rank in (3, 5) else "RANK"], "look")
        with pytest.raises(zckpt.RankError, match=r"to come' on rank 0.*to go' on rank 5"):
            ranks.together(lambda: None, "go" if ranks.rank == 5 else "come")
    return [results, *(f"{type(caught.value).__name__}: {caught.value}" for caught in (failed, others))]


@pytest.mark.parametrize("fan_out", [2, 4])
def test_ranks_of_a_tree_share_values(cluster: Cluster, fan_out: int) -> None:
    for rank, (results, failed, others) in enumerate(cluster.run(share_in_a_tree, 7, fan_out)):
        assert results == [
            result
            for nbytes in (1, 900, 5000)
            for result in ([nbytes * (n % 3) for n in range(7)], 21, ("common", [rank] * nbytes if rank else None))
        ]
        assert failed.startswith("RankError: rank 0 failed to divide: Zero" if rank else "ZeroDivisionError")
        assert others.startswith(
            "KeyError" if rank in (3, 5) else "RankError: rank 3 (and 1 more ranks) failed to look: Key"
        )


@pytest.mark.parametrize(("who", "how"), [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE)])
def test_a_rank_that_is_gone_is_named_by_every_other_rank(cluster: Cluster, tmp_path: Path, who: int, how: str) -> None:
    outcomes = cluster.outcomes(act_once, 3, str(tmp_path), who, how)
    assert outcomes[who].signal == signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert outcome.value is not None, outcome.error
            message, named = outcome.value
            assert named == who, message
            assert f"rank {who} has " in message
            assert how != "hang" or "take a step" in message


@pytest.mark.skipif(torch.__version__.startswith("2.7."), reason="this torch cannot change the timeout of gloo")
def test_a_slow_rank_is_waited_for(cluster: Cluster) -> None:
    assert cluster.run(be_slow, 3) == ["done"] * 3


def come_alone() -> Any:
    give_up_after(4)
    if os.environ["RANK"] == "1":
        return None
    with pytest.raises(zckpt.RankError, match="rank 1 has not come for 4 s") as caught:
        Ranks()
    return caught.value.rank


def test_a_rank_that_never_makes_the_call_is_named_by_every_other_rank(cluster: Cluster) -> None:
    assert cluster.run(come_alone, 3) == [1, None, 1]


def stop_while_connecting(directory: str) -> tuple[str, int | None]:
    """Stops rank 1 after it has made the call and before it has connected. Returns what another rank sees of that."""
    give_up_after(4)
    pids = pids_of_ranks()
    if os.environ["RANK"] == "1":
        torch.distributed.ProcessGroupGloo = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[misc, assignment]
    try:
        Ranks()
    except zckpt.RankError as error:
        return str(error), error.rank
    finally:
        kill_after_all_others(directory, 1, pids)
    return "connected", None


def test_a_rank_that_stops_while_it_connects_is_named_by_every_other_rank(cluster: Cluster, tmp_path: Path) -> None:
    outcomes = cluster.outcomes(stop_while_connecting, 3, str(tmp_path))
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.error
        message, named = outcome.value
        assert named == 1, message


def hang_for_a_while(path: str, background: bool) -> tuple[Any, list[str], list[float]]:
    """Rank 1 hangs in a write for longer than the other ranks wait for it. Then all ranks go on.

    Returns the error on this rank, the files after the write, and the losses of the step after that.
    """
    engine = make_engine()
    give_up_after(8)  # and not sooner, because the other writes must not fail, even if the disk is slow
    train(engine, 1)
    zckpt.write(engine, f"{path}/old")
    given_up = Path(f"{path}-given-up")

    def hang(operation: Callable[[], Any], file: str) -> Any:
        while not given_up.exists():
            time.sleep(0.01)
        return operation()

    def write() -> None:
        if background:
            zckpt.write(engine, f"{path}/new", background=True).wait()
        else:
            zckpt.write(engine, f"{path}/new")

    hangs = engine.global_rank == 1
    with faulty(Fault(hang, names=("write",)) if hangs else None), pytest.raises(zckpt.ZckptError) as caught:
        write()
    given_up.touch()
    error = type(caught.value).__name__, getattr(caught.value, "rank", None)
    torch.distributed.barrier()
    there = sorted(os.listdir(path))
    with suppress(zckpt.ZckptError) if background else nullcontext():  # raised on all ranks, once more
        zckpt.wait()
    losses = train(engine, 1, 1)
    zckpt.write(engine, f"{path}/new")
    return error, there, losses


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_all_ranks_go_on_after_a_rank_has_hung_for_a_while(cluster: Cluster, tmp_path: Path, background: bool) -> None:
    (error, there, losses), (error_1, _, losses_1) = cluster.run(hang_for_a_while, 2, str(tmp_path), background)
    assert error == ("RankError", 1)
    assert error_1[0] in ("RankError", "StorageError")
    assert [name for name in there if name != "new"] == ["latest", "old"]
    assert losses
    assert losses_1
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
    """Lets rank 1 fail in each of these ways, in the foreground and in the background, and writes again after each.

    Returns the error that this rank sees each time.
    """
    counts, errors = [], []
    for (act, _), background in itertools.product(ON_ONE_RANK.values(), (False, True)):
        with (
            engines_are_adapters(),
            act() if os.environ["RANK"] == "1" else nullcontext(),
        ):
            try:
                pending = zckpt.write(Half(6), f"{path}/c", overwrite=True, background=background)
                if background:
                    pending.wait()
            except (zckpt.ZckptError, MemoryError) as error:
                errors.append((type(error).__name__, str(error), getattr(error, "rank", None)))
        with engines_are_adapters(), suppress(zckpt.ZckptError, MemoryError):
            zckpt.wait()  # raises the error of a background write once more
        torch.distributed.barrier()
        assert zckpt.open(path).step == 5
        assert zckpt.validate(path).ok
        torch.distributed.barrier()
        with engines_are_adapters():
            zckpt.write(Half(5), f"{path}/c", overwrite=True)
        gc.collect()
        assert threads_left() == []
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[1:] == counts[1:2] * 5, "descriptors or threads are left over"
    return errors


def test_a_failure_of_one_rank_is_an_error_on_every_rank(cluster: Cluster, tmp_path: Path) -> None:
    write_state(tmp_path / "c", 2, step=5)
    first, second = cluster.run(fail_on_one_rank, 2, str(tmp_path))
    assert len(first) == len(second) == 2 * len(ON_ONE_RANK)
    for number, (_, kind) in enumerate(ON_ONE_RANK.values()):
        pairs = zip(first[2 * number : 2 * number + 2], second[2 * number : 2 * number + 2], strict=True)
        for error_on_0, error_on_1 in pairs:
            assert error_on_1[0] == kind
            assert error_on_0[0] == "RankError"
            assert error_on_0[2] == 1
            assert error_on_0[1].startswith(f"rank 1 failed to write: {kind}: {error_on_1[1].splitlines()[0]}")
