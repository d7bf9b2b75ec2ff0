"""Forty ranks, as threads of one process, run the code of real ranks: a write, a restore and a lost rank."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.reference_engine import tensors_of
from tests.support.states import same_all
from tests.support.thread_ranks import ONE_THREAD, ThreadRanks
from zckpt.ranks import heartbeat, tree
from zckpt.storage.local_reader import LocalReader
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RANKS = 40
SHAPES = {"matrix": (8, 25), "vector": (160,), "few": (3,)}


@pytest.fixture(autouse=True)
def one_thread_for_each_rank() -> Iterator[None]:
    """Otherwise each of the ranks would have threads of torch of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def values(size: int, function: Callable[[int], Any]) -> tuple[list[Any], ThreadRanks]:
    ranks = ThreadRanks(size)
    outcomes = ranks.run(function)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes], ranks


def write_and_restore(path: str) -> Callable[[int], bool]:
    """Returns what each rank does: it writes a checkpoint and restores it into another engine. Its value says whether
    that engine has the same bits."""

    def run(rank: int) -> bool:
        engine, other = (ReferenceEngine(SHAPES, frozen=("few",), seed=seed) for seed in (0, 1))
        engine.train(1)
        zckpt.write(engine, path, budget=ONE_THREAD)
        zckpt.restore(other, path, budget=ONE_THREAD)
        return same_all(tensors_of(other), tensors_of(engine))

    return run


def restored_sum(path: str) -> Callable[[int], torch.Tensor]:
    def run(rank: int) -> torch.Tensor:
        engine = ReferenceEngine(SHAPES, frozen=("few",), seed=2)
        zckpt.restore(engine, path, parts=["master"], budget=ONE_THREAD)
        return engine.tensors["master"]["matrix"]

    return run


def test_forty_ranks_write_and_restore_bit_for_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "c")
    assert values(RANKS, write_and_restore(path))[0] == [True] * RANKS
    assert zckpt.validate(path).ok
    checkpoint = zckpt.open(tmp_path / "run")
    assert checkpoint.world_size == RANKS
    whole = torch.cat(values(7, restored_sum(path))[0])
    assert torch.equal(whole, checkpoint.load("master/matrix")["master/matrix"].reshape(-1))


def test_threads_write_a_state_dict_with_empty_tensors(tmp_path: Path) -> None:
    """Only rank 2 has one of the empty tensors. Each rank has a value of its own."""
    path = tmp_path / "c"

    def write_and_load(rank: int) -> list[float]:
        shared = {"empty": torch.empty(0, 4), "one": torch.ones(1)}
        own = {"of two": torch.empty(0)} if rank == 2 else {}
        state = {**shared, **own, "own": torch.tensor([float(rank)])}
        zckpt.write_state_dict(state, path, budget=ONE_THREAD, per_rank=["own"])
        loaded = {"own": torch.zeros(1)}
        zckpt.open(path, budget=ONE_THREAD).load_into(loaded)
        return loaded["own"].tolist()

    assert values(3, write_and_load)[0] == [[0.0], [1.0], [2.0]]
    assert {key: tuple(info.shape) for key, info in zckpt.open(path).items()} == {
        "param/empty": (0, 4),
        "param/one": (1,),
        "param/of two": (0,),
        "buffer/own": (1,),
    }


def test_what_a_leaf_does_is_independent_of_the_number_of_ranks(tmp_path: Path) -> None:
    """Each rank has at most three children. The traffic is that of the messages, and of the files that are looked at.
    How often a rank uses the store of the job depends on the time that all of it takes."""
    seen: list[tuple[int, ...]] = []
    size_of = LocalReader.size
    for size in (13, RANKS):
        sizes: Counter[str] = Counter()

        def counted(reader: LocalReader, path: str, sizes: Counter[str] = sizes) -> int:
            sizes[threading.current_thread().name] += 1
            return size_of(reader, path)

        with mock.patch.object(tree, "FAN_OUT", 3), mock.patch.object(LocalReader, "size", counted):
            _, ranks = values(size, write_and_restore(str(tmp_path / f"{size}" / "c")))
        leaf = ranks.traffic[size - 1]
        messages = leaf.sent_messages, leaf.sent_bytes, leaf.received_messages, leaf.received_bytes
        seen.append((*messages, leaf.connections, sizes[f"rank-{size - 1}"]))
        assert max(of_rank.connections for of_rank in ranks.traffic) <= 6
    assert seen[0] == seen[1]


class Dies:
    """A progress that lets a rank die when it has moved its first bytes."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def begin(self, action: str, nbytes: int) -> None: ...

    def advance(self, nbytes: int) -> None:
        self._ranks.die(self._rank)

    def end(self) -> None: ...


@pytest.mark.parametrize("who", [0, 1, pytest.param(RANKS - 1, marks=pytest.mark.matrix)])
def test_a_lost_rank_is_named_by_all_others(tmp_path: Path, who: int) -> None:
    """Rank 1 has children. Rank 0 has the store, which is lost with it."""
    ranks = ThreadRanks(RANKS)

    def run(rank: int) -> int | None:
        progress = Dies(ranks, rank) if rank == who else None
        try:
            zckpt.write(ReferenceEngine(SHAPES), tmp_path / "c", budget=ONE_THREAD, progress=progress)
        except zckpt.RankError as error:
            return error.rank
        return None

    with mock.patch.object(heartbeat, "PERIOD_SECONDS", 0.25):
        outcomes = ranks.run(run)
    named = [outcome.value for outcome in outcomes]
    assert named == [None if rank == who else who for rank in range(RANKS)], [outcome.error for outcome in outcomes]
    assert not (tmp_path / "c" / "manifest.msgpack").exists()
