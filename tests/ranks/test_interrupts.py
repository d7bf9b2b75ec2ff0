"""Ctrl-C at any time: no thread goes on with a write that was given up, and the ranks agree on what has happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.crashes import Half
from tests.support.interrupts import interrupt_in, threads_left, wait_until_main_is_in
from tests.support.plain_engine import Engine, engines_are_adapters
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.ranks.collectives import Ranks
from zckpt.ranks.interrupts import Interrupts
from zckpt.system.threads import Worker, beside, stop
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cluster import Cluster


@pytest.fixture(autouse=True)
def _engines_are_adapters() -> Iterator[None]:
    with engines_are_adapters():
        yield


def test_no_worker_runs_on_after_interrupts() -> None:
    ends, tasks = [], threading.Barrier(2)

    def task() -> None:
        if tasks.wait(60) == 0:
            interrupt_in(run_tasks, Worker.wait)
            interrupt_in(stop, Worker.wait)  # where the first interrupt waits for the end of the tasks
        tasks.wait(60)
        ends.append(1)

    with pytest.raises(KeyboardInterrupt):
        run_tasks([task, task], 2)
    assert ends == [1, 1]


def test_a_worker_that_has_not_begun_never_does() -> None:
    called: list[int] = []
    worker = Worker(lambda: called.append(1), "zckpt-0")
    stop([worker])
    worker.start()
    assert worker.wait()
    assert threads_left() == []
    assert called == []


def test_an_interrupted_acquire_leaves_no_lock(tmp_path: Path) -> None:
    with mock.patch.object(Worker, "start", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        zckpt.write(Engine(), tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_an_interrupted_wait_waits_again(tmp_path: Path) -> None:
    """It waits for the same write, which is still under way."""
    commit_write, go_on = RankWrite.prepare_commit, threading.Event()

    def commit(*arguments: Any, **options: Any) -> None:
        go_on.wait(60)
        commit_write(*arguments, **options)

    def go_on_late() -> None:
        wait_until_main_is_in(Worker.wait)
        go_on.set()

    with mock.patch.object(RankWrite, "prepare_commit", commit):
        first = zckpt.write(Engine(), tmp_path / "first", background=True)
        for wait in (zckpt.wait, first.wait):
            with beside(partial(interrupt_in, Worker.wait), "interrupt") as interrupt:
                interrupt()
                with pytest.raises(KeyboardInterrupt):
                    wait()
            assert not first.done
        with pytest.raises(TimeoutError):
            first.wait(0)
        threading.Thread(target=go_on_late).start()
        second = zckpt.write(Engine(), tmp_path / "second", background=True)
        assert first.done
        assert first.wait() == str(tmp_path / "first")
        second.wait()
    assert zckpt.validate(tmp_path / "first").ok
    zckpt.wait()


def test_an_interrupt_is_raised_from_the_error_that_came_after_it() -> None:
    interrupts = Interrupts()

    def fail() -> None:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
            raise zckpt.RankError("rank 1 failed to write")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__cause__, zckpt.RankError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Several ranks


class Lazy(Half):
    """An engine whose state a lazy snapshot copies while the training goes on."""

    def change(self) -> None:
        """Stands for a step of the optimizer. ``before_change`` replaces it by an action that comes before the step."""

    def refuse_lazy(self) -> None:
        pass

    def before_change(self, action: Callable[[], None]) -> None:
        self.change = action  # type: ignore[method-assign]


def interrupt_everywhere(path: str, who: int, call: str, options: dict[str, Any]) -> list[tuple[tuple[str, ...], bool]]:
    """Writes again and again by this function of zckpt, and interrupts rank ``who`` at the first meeting of the ranks,
    then at the second, and so on, until a write is not interrupted.

    Returns the outcome of each write on the ranks, and whether its checkpoint is committed.
    """
    os.environ["ZCKPT_RANK_TIMEOUT"] = "300"
    is_interrupted, wait = int(os.environ["RANK"]) == who, Ranks._waiting
    meetings = 0

    def interrupted(ranks: Ranks, *arguments: Any) -> Any:
        nonlocal meetings
        if is_interrupted and threading.current_thread() is threading.main_thread():
            meetings -= 1
            if meetings == 0:
                os.kill(os.getpid(), signal.SIGINT)
        return wait(ranks, *arguments)

    results: list[tuple[tuple[str, ...], bool]] = []
    with (
        engines_are_adapters() if call == "write" else nullcontext(),
        mock.patch.object(Ranks, "_waiting", interrupted),
    ):
        while not results or results[-1][0][who] != "ok":
            target, engine = Path(path, str(len(results))), Lazy(5)
            contents = engine if call == "write" else {f"weight.{os.environ['RANK']}": engine.weight, "step": 5}
            meetings = len(results) + 1
            outcome = "ok"
            try:
                getattr(zckpt, call)(contents, target, latest=False, **options)
            except (KeyboardInterrupt, zckpt.RankError) as error:
                outcome = type(error).__name__
            meetings = 0
            engine.change()  # as the next step of the optimizer would
            try:
                zckpt.wait()
            except zckpt.ZckptError:
                outcome += ", not written"
            assert threads_left() == []
            outcomes = [""] * 2
            torch.distributed.all_gather_object(outcomes, outcome)
            committed = (target / "manifest.msgpack").exists()
            assert committed == target.exists(), "nothing is left of a write that is not committed"
            results.append((tuple(outcomes), committed))
            torch.distributed.barrier()
    return results


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("write", {}),
        ("write", {"background": True}),
        ("write", {"background": True, "snapshot": "lazy"}),
        ("write", {"ranks_per_file": 2}),
        ("write_state_dict", {}),
    ],
    ids=["foreground", "background", "lazy", "common-files", "state-dict"],
)
def test_an_interrupt_at_any_meeting_of_the_ranks_has_the_same_result_on_all_ranks(
    cluster: Cluster, tmp_path: Path, who: int, call: str, options: dict[str, Any]
) -> None:
    """Either the write ends on all ranks and leaves no files, or the interrupt comes after all ranks have written."""
    results, results_of_rank_1 = cluster.run(interrupt_everywhere, 2, str(tmp_path), who, call, options)
    assert results == results_of_rank_1
    *interrupted, last = results
    assert last == (("ok", "ok"), True)
    outcomes = [(by_rank[who], by_rank[1 - who], committed) for by_rank, committed in interrupted]
    assert set(outcomes) <= {
        ("KeyboardInterrupt", "ok", True),
        ("KeyboardInterrupt", "RankError", False),  # in the foreground or before the background has begun
        ("KeyboardInterrupt, not written", "RankError, not written", False),  # before all is copied
    }
    assert outcomes[0][2] is False
    assert outcomes[-1][2] is True


def tell_any_text() -> list[str]:
    """Rank 1 fails with an error that names a file whose name is not UTF-8, then with one whose text cannot be had,
    with one that has no text, and by an interrupt.

    Returns the errors that this rank sees.
    """
    os.environ["ZCKPT_RANK_TIMEOUT"] = "300"
    ranks = Ranks()

    class MuteError(Exception):
        def __str__(self) -> str:
            raise KeyError

    def fail(error: BaseException) -> None:
        if ranks.rank == 1:
            raise error

    messages = []
    path = os.fsdecode(b"/scratch/caf\xe9")
    errors = zckpt.StorageError("cannot write", file=path), MuteError(), ValueError(), KeyboardInterrupt()
    for error in errors:
        try:
            ranks.together(lambda error=error: fail(error), "write")  # type: ignore[misc]
        except zckpt.RankError as rank_error:
            messages.append(str(rank_error))
        except (zckpt.StorageError, MuteError, ValueError, KeyboardInterrupt) as original:
            messages.append(type(original).__name__)
    assert ranks.agree(path, "paths") == path
    with pytest.raises(zckpt.RankError, match="different paths"):
        ranks.agree(path if ranks.rank else "other", "paths")
    return messages


def test_an_error_with_any_text_reaches_the_other_ranks(cluster: Cluster) -> None:
    first, second = cluster.run(tell_any_text, 2)
    assert first[0] == "rank 1 failed to write: StorageError: cannot write (file /scratch/caf\\udce9)"
    assert first[1] == "rank 1 failed to write: MuteError: it has no text, for KeyError was raised"
    assert first[2] == "rank 1 failed to write: ValueError"
    assert first[3].startswith(
        "rank 1 was interrupted before it had finished its part of this step: write\n  Ctrl-C or "
    )
    assert second == ["StorageError", "MuteError", "ValueError", "KeyboardInterrupt"]


def wait_interrupted(path: str) -> list[str]:
    """Rank 1 is interrupted while both ranks wait for a write in the background. Then both ranks write again."""
    commit_write, errors = RankWrite.prepare_commit, []

    def commit(*arguments: Any, **options: Any) -> None:
        while not Path(path, "go on").exists():
            time.sleep(0.01)
        commit_write(*arguments, **options)

    def interrupt_and_go_on() -> None:
        interrupt_in(Ranks.decide, Worker.wait)
        Path(path, "go on").touch()

    with (
        engines_are_adapters(),
        mock.patch.object(RankWrite, "prepare_commit", commit),
    ):
        pending = zckpt.write(Half(5), f"{path}/first", background=True)
        if os.environ["RANK"] == "1":
            threading.Thread(target=interrupt_and_go_on).start()
        try:
            zckpt.wait()
        except (KeyboardInterrupt, zckpt.RankError) as error:
            errors.append(type(error).__name__)
        zckpt.write(Half(6), f"{path}/second")
        assert pending.done
        zckpt.wait()
    return errors


def test_all_ranks_wait_again_after_one_rank_was_interrupted(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(wait_interrupted, 2, str(tmp_path)) == [["RankError"], ["KeyboardInterrupt"]]
    assert all(zckpt.validate(tmp_path / name).ok for name in ("first", "second"))
