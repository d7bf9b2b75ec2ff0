"""The pipeline between memory and files: the order of its steps, and how it ends if a step fails."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from tests.support.no_threads import no_further_threads
from tests.support.waiting import wait_until
from zckpt import Budget, ZckptError
from zckpt.system.threads import Worker
from zckpt.transfer.pipeline import Pipeline
from zckpt.transfer.snapshot import Snapshot
from zckpt.transfer.staging import StagingBuffer, StagingPool

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
STEPS = ("take", "digest", "put")


def not_straight(item: int) -> bool:
    return False


class Steps:
    """Records each step. ``before`` is called first, with the step and its item."""

    def __init__(self, before: Callable[[str, int], None] = lambda step, item: None) -> None:
        self.done: list[tuple[str, int]] = []
        self.before = before

    def step(self, step: str, item: int) -> None:
        self.before(step, item)
        self.done.append((step, item))

    def take(self, item: int, stage: StagingBuffer) -> int:
        self.step("take", item)
        stage.bytes[:8] = item
        return item

    def digest(self, item: int, stage: StagingBuffer) -> None:
        assert (stage.bytes[:8] == item).all()
        self.step("digest", item)

    def put(self, item: int, stage: StagingBuffer) -> None:
        assert (stage.bytes[:8] == item).all()
        self.step("put", item)

    def run(self, items: int, threads: int, buffers: int) -> Snapshot:
        snapshot = Snapshot()
        pool = StagingPool(MIB, buffers)
        pipeline = Pipeline(range(items), self.take, self.digest, self.put, not_straight, pool, snapshot, items)
        with pool.work(items):
            pipeline.run(Budget(threads=threads))
        return snapshot


@pytest.mark.parametrize(("threads", "buffers"), [(1, 1), (1, 3), (4, 4), (4, 8), (3, 2)])
def test_each_item_goes_through_all_steps_in_order(threads: int, buffers: int) -> None:
    steps = Steps()
    snapshot = steps.run(50, threads, buffers)
    assert snapshot.taken.is_set()
    for item in range(50):
        assert [step for step, number in steps.done if number == item] == list(STEPS)


@pytest.mark.parametrize(("threads", "buffers"), [(1, 1), (4, 4), (3, 8)])
def test_items_of_files_that_take_bytes_in_order_are_put_in_order(threads: int, buffers: int) -> None:
    """Item 49 is that of a file of its own, and item 20 is never next, because what is in front of it comes later."""
    steps, pool = Steps(), StagingPool(MIB, buffers)

    def is_next(item: int) -> bool:
        return item == 49 or (item != 20 and all(("put", other) in steps.done for other in range(item) if other != 20))

    pipeline = Pipeline(
        range(50), steps.take, steps.digest, steps.put, not_straight, pool, Snapshot(), 50, is_next=is_next
    )
    with pool.work(50):
        pipeline.run(Budget(threads=threads))
    put = [item for step, item in steps.done if step == "put"]
    assert sorted(put) == list(range(50))
    assert [item for item in put if item not in (20, 49)] == [item for item in range(49) if item != 20]


class CopyUnderWay:
    """Stands for the event of a copy from a device that ends later."""

    def __init__(self) -> None:
        self.end = time.monotonic() + 0.3

    def query(self) -> bool:
        return time.monotonic() > self.end

    def synchronize(self) -> None:
        time.sleep(max(0, self.end - time.monotonic()))


def test_a_copy_from_a_device_is_finished_if_nothing_else_can_be_put() -> None:
    """Item 1 is digested before the copy of item 0 has ended, and has to wait for item 0."""
    steps, pool = Steps(), StagingPool(MIB, 4)

    def take(item: int, stage: StagingBuffer) -> int:
        if item == 0:
            stage._queued.append(CopyUnderWay())  # type: ignore[arg-type]
        return steps.take(item, stage)

    pipeline = Pipeline(
        range(2), take, steps.digest, steps.put, not_straight, pool, Snapshot(), 2,
        is_next=lambda item: item == 0 or ("put", 0) in steps.done,
    )  # fmt: skip
    with pool.work(2):
        pipeline.run(Budget(threads=1))
    assert [item for step, item in steps.done if step == "put"] == [0, 1]


def test_an_item_for_which_nothing_is_left_to_do_gives_its_buffer_back() -> None:
    taken = []

    def take(item: int, stage: StagingBuffer) -> None:
        taken.append(item)

    def fail(item: int, stage: StagingBuffer) -> None:
        raise AssertionError

    pool = StagingPool(MIB, 2)
    with pool.work(20):
        Pipeline(range(20), take, fail, fail, not_straight, pool, Snapshot(), 0).run(Budget(threads=3))
    assert sorted(taken) == list(range(20))


def test_the_next_source_is_read_while_digests_are_computed() -> None:
    """Only one thread reads. While it reads a source, another thread computes the digests of the source before."""
    digesting = [threading.Event() for _ in range(4)]

    def before(step: str, item: int) -> None:
        if step == "digest":
            digesting[item].set()
        elif step == "take" and item > 0:
            assert digesting[item - 1].wait(60)

    Steps(before).run(4, 1, 2)


def test_a_thread_that_has_nothing_else_to_do_computes_digests_too() -> None:
    """The first digest is finished only when another thread computes the second one."""
    second = threading.Event()

    def before(step: str, item: int) -> None:
        if step == "digest" and item == 1:
            second.set()
        elif step == "digest":
            assert second.wait(60)

    Steps(before).run(2, 1, 2)


@pytest.mark.parametrize(
    ("snapshot_bytes", "expected"), [(0, [("put", 0), ("take", 2)]), (1, [("take", 2), ("put", 0)])]
)
def test_sources_come_first_only_for_a_snapshot(snapshot_bytes: int, expected: list[tuple[str, int]]) -> None:
    """One thread reads. When it has read item 1, item 0 is digested, and there is a buffer for item 2."""
    steps, pool = Steps(), StagingPool(MIB, 3)

    def take(item: int, stage: StagingBuffer) -> int:
        if item == 1:
            wait_until(lambda: bool(pipeline._digested))
        return steps.take(item, stage)

    pipeline = Pipeline(range(3), take, steps.digest, steps.put, not_straight, pool, Snapshot(), 3)
    with pool.work(3):
        pipeline.run(Budget(threads=1), snapshot_bytes)
    assert [step for step in steps.done if step in expected] == expected


def test_one_thread_is_left_to_read_sources_while_the_others_put() -> None:
    """Otherwise all threads would put, and then all of them would read, while the disk has nothing to do."""
    putting: set[int] = set()
    most = [0]

    def put(item: int, stage: StagingBuffer) -> None:
        putting.add(item)
        time.sleep(0.01)
        if any(("take", later) not in steps.done for later in range(20)):
            most[0] = max(most[0], len(putting))
        putting.remove(item)

    steps, pool = Steps(), StagingPool(MIB, 6)
    with pool.work(20):
        pipeline = Pipeline(range(20), steps.take, steps.digest, put, not_straight, pool, Snapshot(), 20)
        pipeline.run(Budget(threads=4))
    assert most[0] <= 3


@pytest.mark.parametrize("failing", STEPS)
@pytest.mark.parametrize("item", [0, 7, 19])
def test_an_error_in_a_step_ends_all_threads(failing: str, item: int) -> None:
    def before(step: str, number: int) -> None:
        if (step, number) == (failing, item):
            raise ValueError(f"{failing} of {item}")

    steps = Steps(before)
    with pytest.raises(ValueError, match=f"{failing} of {item}"):
        steps.run(20, 3, 4)
    assert (failing, item) not in steps.done


def test_no_step_begins_once_the_snapshot_is_given_up() -> None:
    snapshot = Snapshot()
    steps = Steps(lambda step, item: snapshot.give_up("enough"))
    pool = StagingPool(MIB, 4)
    pipeline = Pipeline(range(9), steps.take, steps.digest, steps.put, not_straight, pool, snapshot, 9)
    with pool.work(9), pytest.raises(ZckptError, match="given up: enough"):
        pipeline.run(Budget(threads=1))
    assert steps.done == [("take", 0)]


@pytest.mark.parametrize("threads", range(5))
def test_the_steps_are_done_by_as_many_threads_as_there_can_be(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, start = itertools.count(), Worker.start

    def start_some(worker: Worker) -> None:
        with nullcontext() if next(count) < threads else no_further_threads():
            start(worker)

    monkeypatch.setattr(Worker, "start", start_some)
    steps = Steps()
    steps.run(9, 3, 4)
    assert sorted(steps.done) == sorted((step, item) for step in STEPS for item in range(9))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(4))
def test_all_threads_end_if_the_start_of_one_is_interrupted(
    number: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are three threads that read, and one for digests. The first source is read after the interrupt, so the
    threads that have been started wait for each other."""
    starts, start, failed = itertools.count(), Worker.start, threading.Event()

    def fail_once(worker: Worker) -> None:
        fails = next(starts) == number
        if when == "after" or not fails:
            start(worker)
        if fails:
            failed.set()
            raise KeyboardInterrupt

    def before(step: str, item: int) -> None:
        assert failed.wait(60)

    monkeypatch.setattr(Worker, "start", fail_once)
    with pytest.raises(KeyboardInterrupt):
        Steps(before).run(9, 3, 4)


def test_threads_that_wait_for_a_step_end_if_another_one_fails() -> None:
    """The thread that reads the first source fails once both other threads of the pipeline wait for a step."""
    waiting = set()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.add(threading.current_thread())
            return super().wait(timeout)

    def take(item: int, stage: StagingBuffer) -> int:
        wait_until(lambda: len(waiting) == 2)
        raise ValueError("take")

    pool = StagingPool(MIB, 1)
    pipeline = Pipeline([0, 1], take, Steps().digest, Steps().put, not_straight, pool, Snapshot(), 2)
    pipeline._changed = Condition()
    with pool.work(2), pytest.raises(ValueError, match="take"):
        pipeline.run(Budget(threads=2))


@pytest.mark.parametrize("straight", [True, False])
def test_two_straight_items_count_as_one_buffer(straight: bool) -> None:
    """Two threads read. The second item is taken while the first one holds the only buffer if both are straight."""
    taken = [threading.Event(), threading.Event()]
    both: list[bool] = []

    def take(item: int, stage: StagingBuffer) -> int:
        taken[item].set()
        return item

    def digest(item: int, stage: StagingBuffer) -> None:
        if item == 0:
            both.append(taken[1].wait(60 if straight else 0.2))

    pool = StagingPool(MIB, 1)
    pipeline = Pipeline([0, 1], take, digest, lambda item, stage: None, lambda item: straight, pool, Snapshot(), 0)
    with pool.work(2):
        pipeline.run(Budget(threads=2))
    assert both == [straight]
