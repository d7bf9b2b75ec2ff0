"""Ctrl-C at any moment: no thread goes on with what was given up, and the ranks agree about what has happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.crashes import Half
from tests.support.interrupts import interrupt_after, threads_left
from tests.support.plain_engine import Engine, engines_are_adapters
from zckpt.ranks.collectives import Ranks
from zckpt.ranks.interrupts import Interrupts
from zckpt.system.threads import Worker, stop
from zckpt.transfer.budget import Budget
from zckpt.writing.rank_write import RankWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cluster import Cluster


@pytest.fixture(autouse=True)
def engines_of_ours() -> Iterator[None]:
    with engines_are_adapters():
        yield


def test_no_worker_runs_any_more_after_interrupts() -> None:
    ended = []

    def task() -> None:
        time.sleep(0.4)
        ended.append(1)

    interrupt_after(0.1, 0.2)
    with pytest.raises(KeyboardInterrupt):
        Budget(threads=2).run([task, task])
    assert ended == [1, 1]


def test_a_worker_that_has_not_begun_never_does() -> None:
    called: list[int] = []
    worker = Worker(lambda: called.append(1), "zckpt-0")
    stop([worker])
    worker.start()
    assert worker.wait()
    assert threads_left() == called == []


def test_an_interrupted_acquire_leaves_no_lock(tmp_path: Path) -> None:
    with mock.patch.object(Worker, "start", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        zckpt.write(Engine(), tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_an_interrupted_wait_waits_again(tmp_path: Path) -> None:
    """For the same write, which is still the one under way."""
    commit_write, go_on = RankWrite.commit, threading.Event()

    def commit(*arguments: Any, **options: Any) -> None:
        go_on.wait(60)
        commit_write(*arguments, **options)

    with mock.patch.object(RankWrite, "commit", commit):
        first = zckpt.write(Engine(), tmp_path / "first", background=True)
        for wait in (zckpt.wait, first.wait):
            interrupt_after(0.1)
            with pytest.raises(KeyboardInterrupt):
                wait()
            assert not first.done
        with pytest.raises(TimeoutError):
            first.wait(0)
        threading.Timer(0.2, go_on.set).start()
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
    def change(self) -> None:
        """What ``before_change`` gives is called before a change."""

    def refuse_lazy(self) -> None:
        pass

    def before_change(self, action: Callable[[], None]) -> None:
        self.change = action  # type: ignore[method-assign]


def interrupt_everywhere(path: str, who: int, options: dict[str, Any]) -> list[tuple[tuple[str, ...], bool]]:
    """Rank ``who`` is interrupted when it comes to each meeting of the ranks in a write, in turn, until one write is
    not interrupted. Returns how each ended on the ranks, and whether the checkpoint is committed."""
    os.environ["ZCKPT_RANK_TIMEOUT"] = "20"
    mine, gather = int(os.environ["RANK"]) == who, Ranks.gather
    meetings = 0

    def interrupted(ranks: Ranks, *arguments: Any) -> list[bytes]:
        nonlocal meetings
        if mine and threading.current_thread() is threading.main_thread():
            meetings -= 1
            if meetings == 0:
                os.kill(os.getpid(), signal.SIGINT)
        return gather(ranks, *arguments)

    found: list[tuple[tuple[str, ...], bool]] = []
    with (
        engines_are_adapters(),
        mock.patch.object(Ranks, "gather", interrupted),
    ):
        while not found or found[-1][0][who] != "ok":
            target, engine = Path(path, str(len(found))), Lazy(5)
            meetings = len(found) + 1
            outcome = "ok"
            try:
                zckpt.write(engine, target, latest=False, **options)
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
            found.append((tuple(outcomes), committed))
            torch.distributed.barrier()
    return found


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"background": True}, {"background": True, "snapshot": "lazy"}],
    ids=["foreground", "background", "lazy"],
)
def test_an_interrupt_at_any_meeting_of_the_ranks(
    cluster: Cluster, tmp_path: Path, who: int, options: dict[str, Any]
) -> None:
    """It ends the write on all ranks, and nothing is left; or it comes so late that the write has happened for all."""
    found, same = cluster.run(interrupt_everywhere, 2, str(tmp_path), who, options)
    assert found == same
    *found, last = found
    assert last == (("ok", "ok"), True)
    outcomes = [(one[who], one[1 - who], committed) for one, committed in found]
    assert set(outcomes) <= {
        ("KeyboardInterrupt", "ok", True),
        ("KeyboardInterrupt", "RankError", False),  # in the foreground or before the background has begun
        ("KeyboardInterrupt, not written", "RankError, not written", False),  # before all is copied
    }
    assert outcomes[0][2] is False
    assert outcomes[-1][2] is True


def tell_any_text() -> list[str]:
    """Rank 1 fails with the name of a file that is not UTF-8, or has an error that cannot be shown."""
    os.environ["ZCKPT_RANK_TIMEOUT"] = "5"
    ranks = Ranks()

    class MuteError(Exception):
        def __str__(self) -> str:
            raise KeyError

    def fail(error: Exception) -> None:
        if ranks.rank == 1:
            raise error

    said = []
    strange = os.fsdecode(b"/scratch/caf\xe9")
    for error in (zckpt.StorageError("cannot write", file=strange), MuteError()):
        try:
            ranks.together(lambda error=error: fail(error), "write")  # type: ignore[misc]
        except zckpt.RankError as told:
            said.append(str(told))
        except (zckpt.StorageError, MuteError) as own:
            said.append(type(own).__name__)
    assert ranks.agree(strange, "paths") == strange
    with pytest.raises(zckpt.RankError, match="different paths"):
        ranks.agree(strange if ranks.rank else "other", "paths")
    return said


def test_an_error_with_any_text_is_told(cluster: Cluster) -> None:
    first, second = cluster.run(tell_any_text, 2)
    assert first[0] == "rank 1 failed to write: StorageError: cannot write (file /scratch/caf\\udce9) (rank 1)"
    assert first[1] == "rank 1 failed to write: MuteError: it has no text, for KeyError was raised (rank 1)"
    assert second == ["StorageError", "MuteError"]


def wait_interrupted(path: str) -> list[str]:
    """Rank 1 is interrupted while both wait for a write in the background; then both write again."""
    commit_write, said = RankWrite.commit, []

    def commit(*arguments: Any, **options: Any) -> None:
        while not Path(path, "go on").exists():
            time.sleep(0.01)
        commit_write(*arguments, **options)

    with (
        engines_are_adapters(),
        mock.patch.object(RankWrite, "commit", commit),
    ):
        pending = zckpt.write(Half(5), f"{path}/first", background=True)
        if os.environ["RANK"] == "1":
            interrupt_after(0.1)
            threading.Timer(0.3, Path(path, "go on").touch).start()
        try:
            zckpt.wait()
        except (KeyboardInterrupt, zckpt.RankError) as error:
            said.append(type(error).__name__)
        zckpt.write(Half(6), f"{path}/second")
        assert pending.done
        zckpt.wait()
    return said


def test_a_wait_that_one_rank_interrupts_is_everybody_s_again(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(wait_interrupted, 2, str(tmp_path)) == [["RankError"], ["KeyboardInterrupt"]]
    assert all(zckpt.validate(tmp_path / name).ok for name in ("first", "second"))
