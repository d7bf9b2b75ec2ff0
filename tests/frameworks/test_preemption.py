"""After a signal that is about to end the job, all ranks write one last checkpoint, right after the same step."""

from __future__ import annotations

import base64
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

import zckpt
from tests.support.cluster import ROOT, held_port
from tests.support.crashes import pids_of_ranks
from tests.support.launches import SCRIPTS
from tests.support.models import make_engine, train
from tests.support.slow_writes import slow
from tests.support.waiting import wait_until
from zckpt.frameworks import last_step
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Event

    from tests.support.cluster import Cluster

LIMIT_SECONDS = 600


def send(after_seconds: float = 0) -> None:
    if after_seconds:
        threading.Timer(after_seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def until_preempted(run: str, who: list[int], step: int, *, times: int = 1, background: bool = False) -> dict[str, Any]:
    """Trains until the process is to end. The ranks in ``who`` send themselves the signal in step ``step``."""
    engine, status = make_engine(stage=2, scheduler=True), None
    losses: list[float] = []
    earlier: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: earlier.append(1))
    zckpt.on_preemption(engine, client_state=lambda: {"losses": list(losses)})
    os.chdir(run)
    try:
        for number in range(1000):
            if background and number == step:
                with slow(0.5):
                    zckpt.write(engine, "checkpoints/earlier", background=True)
            if number == step and dist.get_rank() in who:
                for _ in range(times):
                    send()
            losses += train(engine, 1, number)
            time.sleep(0.02)
    except SystemExit as end:
        status = end.code
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    send()
    return {"status": status, "step": engine.global_steps, "losses": losses, "earlier": len(earlier)}


def train_until(last: zckpt.Preemption, engine: Any) -> None:
    for step in range(1000):
        train(engine, 1, step)
        if last.requested:
            return
        time.sleep(0.02)


def preempted_with_what_cannot_be_kept(run: str) -> None:
    engine = make_engine(stage=2)
    with pytest.raises((TypeError, zckpt.RankError), match="client_state must"):
        zckpt.on_preemption(engine, client_state=[1])  # type: ignore[arg-type]
    last = zckpt.on_preemption(engine, f"{run}/last", client_state={"epoch": 3, "fn": print}, exit=False)
    send()
    with pytest.warns(UserWarning, match=r"left out .*: client_state.fn: builtin_function"):
        train_until(last, engine)
    assert zckpt.open(run).state["client_state"] == {"epoch": 3}


def test_what_cannot_be_kept_does_not_prevent_the_last_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(preempted_with_what_cannot_be_kept, 1, str(tmp_path))


def resume(run: str, steps: int) -> list[float]:
    engine = make_engine(stage=2, scheduler=True, seed=1)
    zckpt.restore(engine, os.path.join(run, "checkpoints"))
    return train(engine, steps, engine.global_steps)


def never_stopped(steps: int) -> list[float]:
    return train(make_engine(stage=2, scheduler=True), steps)


@pytest.mark.parametrize(
    ("who", "step", "times", "background"),
    [
        ([1], 2, 2, True),
        pytest.param([0, 1], 3, 1, False, marks=pytest.mark.matrix),
        pytest.param([0], 0, 1, False, marks=pytest.mark.matrix),
        pytest.param([0], 5, 1, True, marks=pytest.mark.matrix),
        pytest.param([1], 0, 3, True, marks=pytest.mark.matrix),
    ],
)
def test_all_ranks_write_after_the_same_step(
    cluster: Cluster, tmp_path: Path, who: list[int], step: int, times: int, background: bool
) -> None:
    results = cluster.run(until_preempted, 2, str(tmp_path), who, step, times=times, background=background)
    steps = {result["step"] for result in results}
    assert len(steps) == 1, "both ranks have stopped after the same step"
    (last,) = steps
    assert last > step
    for rank, result in enumerate(results):
        assert result["status"] == 143
        assert result["earlier"] == (times if rank in who else 0) + 1, "the handler of before, and after the end again"
        assert len(result["losses"]) == last - 1, "the process ends inside of the step"
    assert zckpt.validate(tmp_path / "checkpoints" / f"global_step{last}").ok
    assert zckpt.open(tmp_path / "checkpoints").step == last
    expected = cluster.run(never_stopped, 2, last + 4)
    assert cluster.run(resume, 2, str(tmp_path), 4) == [losses[last:] for losses in expected]


def stay(run: str) -> tuple[bool, int, object, bool, str]:
    """Does not end the process. The loop ends because of ``requested``, on all ranks after the same step."""
    engine = make_engine(stage=1, config={"gradient_accumulation_steps": 2})
    path = lambda: os.path.join(run, f"last{engine.global_steps}")  # noqa: E731
    preemption = zckpt.on_preemption(engine, path, client_state={"a": 1}, exit=False)
    at_once = preemption.requested
    assert not at_once
    if dist.get_rank() == 1:
        send(after_seconds=0.3)
    with redirect_stderr(StringIO()) as said:
        for number in range(3000):
            train(engine, 1, number)
            if preemption.requested:
                break
            time.sleep(0.01)
    last = zckpt.open(path())
    step, restored = last.step, dict(last.state["client_state"])
    assert engine.micro_steps % 2 == 0
    message = next((line for line in said.getvalue().splitlines() if line.startswith("zckpt:")), "")
    return (
        preemption.requested,
        engine.global_steps - step,
        restored,
        "step" in vars(engine),
        message.replace(path(), "it"),
    )


def test_a_loop_can_end_itself(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.run(stay, 2, str(tmp_path))
    assert first[:-1] == second[:-1] == (True, 0, {"a": 1}, False)
    assert first[-1] == "zckpt: after the signal 15, the last checkpoint is it"
    assert second[-1] == ""


def restore_after_the_signal(run: str) -> tuple[int, int]:
    """The signal comes before the engine is restored, and therefore before its first step. Returns how many micro steps
    had been taken when the last checkpoint was written, and the step of that checkpoint."""
    engine = make_engine(stage=1, config={"gradient_accumulation_steps": 3})
    train(engine, 6)
    first = zckpt.write(engine, os.path.join(run, "first"))
    fresh = make_engine(stage=1, config={"gradient_accumulation_steps": 3})
    preemption = zckpt.on_preemption(fresh, os.path.join(run, "last"), exit=False)
    send()
    wait_until(lambda: preemption._last_step._last is not None)  # Meanwhile the ranks agree on the next step.
    zckpt.restore(fresh, first)
    for number in range(30):
        train(fresh, 1, number)
        if preemption.requested:
            return number + 1, zckpt.open(os.path.join(run, "last")).step
    return -1, -1


def test_no_last_step_in_the_middle_of_accumulation(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(restore_after_the_signal, 2, str(tmp_path)) == [(3, 3)] * 2


def sleep(ready: Event) -> None:
    ready.set()
    for _ in range(6000):  # A signal that comes just before a sleep begins is noticed only at its end.
        time.sleep(0.1)


def train_with_other_signals(run: str) -> list[object]:
    """Lists a signal twice, forks a child and ends it, and sends each rank another signal."""
    engine = make_engine(stage=1)
    path = os.path.join(run, "last")
    import torch

    with pytest.raises(ValueError, match="SIGKILL"):
        zckpt.on_preemption(engine, path, signals=[signal.SIGTERM, signal.SIGKILL])
    model = torch.nn.Linear(2, 2)
    state = zckpt.TrainState(model, torch.optim.SGD(model.parameters()))
    for without_step in (state, (model, state.optimizers[0])):
        with pytest.raises(zckpt.UnsupportedError, match="step"):
            zckpt.on_preemption(without_step)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    preemption = zckpt.on_preemption(engine, path, signals=[signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1], exit=False)
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    child = fork.Process(target=sleep, args=(ready,))
    child.start()
    ready.wait()  # Python loses a signal that reaches a child before it runs.
    child.terminate()
    child.join(30)
    child.kill()
    dist.barrier()
    os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1)[dist.get_rank()])
    while not preemption.requested:
        train(engine, 1)
    return [child.exitcode, zckpt.open(path).step == engine.global_steps, preemption._last_step.reason]


def test_repeated_and_different_signals_and_a_forked_child(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.run(train_with_other_signals, 2, str(tmp_path))
    assert first == second
    assert first[:2] == [-signal.SIGTERM, True]


def cancelled(run: str) -> int:
    engine = make_engine(stage=1)
    earlier: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: earlier.append(1))
    preemption = zckpt.on_preemption(engine, os.path.join(run, "last"))
    preemption.cancel()
    preemption.cancel()
    send()
    train(engine, 3)
    assert not os.path.exists(os.path.join(run, "last"))
    return len(earlier)


def cancelled_while_the_ranks_agree(run: str) -> bool:
    """Rank 1 has cancelled, and therefore does not answer."""
    engine = make_engine(stage=1)
    preemption = zckpt.on_preemption(engine, os.path.join(run, "last"))
    if dist.get_rank() == 0:
        send()
        wait_until(preemption._last_step._counting.locked)  # until the thread of this rank waits for an answer
    preemption.cancel()
    return preemption._last_step._watcher._worker.wait(60)


def test_cancel_ends_the_thread(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(cancelled_while_the_ranks_agree, 2, str(tmp_path)) == [True, True]


def test_after_cancel_a_signal_does_what_it_did_before(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(cancelled, 2, str(tmp_path)) == [1, 1]


def left_alone(run: str) -> str:
    """Rank 0 gets the signal, but rank 1 does not answer. Returns the error that this rank raises, or an empty text.

    Rank 0 ends rank 1, which would wait for it in the next step.
    """
    last_step.AGREE_SECONDS = 2
    pids = pids_of_ranks()
    engine = make_engine(stage=1)
    preemption = zckpt.on_preemption(engine, os.path.join(run, "last"))
    train(engine, 1)
    if dist.get_rank() == 1:
        preemption.cancel()
    dist.barrier()
    if dist.get_rank() == 0:
        send()
        wait_until(lambda: preemption._last_step._last is not None)
    try:
        train(engine, 20, 1)
    except zckpt.RankError as error:
        os.kill(pids[1], signal.SIGKILL)
        return str(error)
    return ""


def test_a_rank_that_does_not_answer_is_not_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    outcomes = cluster.outcomes(left_alone, 2, str(tmp_path))
    assert "could not agree on a last step" in str(outcomes[0].value)
    assert not (tmp_path / "last").exists()


# Several engines


def several(run: str, setup: str, fails: bool = False) -> dict[str, Any]:
    """Trains two engines of this rank, "a" and "b", until the process is to end. Rank 0 sends itself the signal in the
    third step of the first one. ``setup``: "together" if both ranks have both engines, and otherwise the number of the
    rank that has "b" alone, which trains it in every second step only. ``fails``: whether "a" cannot be written."""
    rank, earlier = dist.get_rank(), list[int]()
    signal.signal(signal.SIGTERM, lambda *_: earlier.append(1))
    alone = [dist.new_group([number]) for number in range(2)][rank]
    engines = {"a": ReferenceEngine(seed=1)}
    if setup == "together":
        engines["b"] = ReferenceEngine(seed=2)
    elif setup == str(rank):
        engines["b"] = ReferenceEngine(seed=2, group=alone)
    for name, engine in engines.items():
        zckpt.on_preemption(engine, partial(path_of, run, name, engine, name == "a" and fails))
    status: object = None
    try:
        for number in range(1000):
            for name, engine in engines.items():
                if name == "a" or setup == "together" or number % 2:
                    engine.backward()
                    if name == "a" and number == 2 and rank == 0:
                        send()
                    engine.step()
            dist.barrier()
            time.sleep(0.02)
    except SystemExit as end:
        status = end.code
    except NotADirectoryError as error:
        status = str(error)
    send()
    return {"status": status, "steps": {name: engine.steps for name, engine in engines.items()}, "earlier": earlier}


def path_of(run: str, name: str, engine: ReferenceEngine, fails: bool) -> str:
    if fails:
        raise NotADirectoryError(f"no place for {name}")
    return f"{run}/{name}/step{engine.steps}"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("setup", ["together", "0", "1"])
def test_all_engines_of_a_process_are_written(cluster: Cluster, tmp_path: Path, setup: str, fails: bool) -> None:
    results = cluster.run(several, 2, str(tmp_path), setup, fails)
    for rank, result in enumerate(results):
        assert result["status"] == ("no place for a" if fails else 143)
        assert len(result["earlier"]) == 2 - rank, "the handler of before, and after the end again"
    assert (tmp_path / "a").exists() is not fails
    for name in ("b",) if fails else ("a", "b"):
        steps = {result["steps"][name] for result in results if name in result["steps"]}
        checkpoint = zckpt.open(tmp_path / name)
        assert zckpt.validate(checkpoint.path).ok
        assert len(steps) == 1
        assert 0 < checkpoint.step <= min(steps)


def cancel_the_first(run: str) -> list[object]:
    """Cancels one of two before the signal. Then sends another signal, to the handler of before."""
    earlier = list[int]()
    signal.signal(signal.SIGTERM, lambda *_: earlier.append(1))
    engines = [ReferenceEngine(seed=1), ReferenceEngine(seed=2)]
    first, second = (zckpt.on_preemption(engine, f"{run}/{n}", exit=False) for n, engine in enumerate(engines))
    first.cancel()
    send()
    while not second.requested:
        for engine in engines:
            engine.train(1)
        time.sleep(0.02)
    send()
    return [first.requested, sorted(os.listdir(run)), len(earlier)]


def test_a_cancelled_one_passes_signals_on(cluster: Cluster, tmp_path: Path) -> None:
    for result in cluster.run(cancel_the_first, 2, str(tmp_path)):
        assert result == [False, ["1", "latest"], 2]


def preempted_and_copied(run: str) -> object:
    engine = ReferenceEngine()
    zckpt.on_preemption(engine, f"{run}/near/last", copy_to=f"{run}/far")
    send()
    try:
        engine.train(1)
    except SystemExit as end:
        zckpt.wait()  # as the end of a process does
        return end.code
    return None


def test_the_last_checkpoint_is_copied(tmp_path: Path) -> None:
    """A machine that is taken away takes its disk with it."""
    with pytest.raises(zckpt.UnsupportedError, match="scheme 'nowhere'"):
        zckpt.on_preemption(ReferenceEngine(), copy_to="nowhere://run")
    assert preempted_and_copied(str(tmp_path)) == 128 + signal.SIGTERM
    assert zckpt.open(tmp_path / "far").step == 1


TOO_LATE = """
import os, signal, sys

import zckpt
from zckpt.testing import ReferenceEngine

engine = ReferenceEngine()
for how in ("cancel", "end"):
    preemption = zckpt.on_preemption(engine)
    engine.train(1)
    os.kill(os.getpid(), signal.SIGTERM)
    if how == "cancel":
        preemption.cancel()
    print(how, file=sys.stderr)
"""
SAID = (
    "zckpt: after the signal 15, no last checkpoint was written: the training has ended before the step after which "
    "all ranks write it"
)


def test_a_signal_after_the_last_step_is_not_lost_without_a_word(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TOO_LATE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines() == [SAID, "cancel", "end", SAID]
    assert os.listdir(tmp_path) == []


# Under the launchers that users start


def started(launcher: str, port: int, workers: int, run: Path) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    world = base64.urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    # The command `deepspeed` starts this on each machine. The command itself does not pass signals on.
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--no_local_rank"]
    deepspeed += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    command = [
        *(torchrun if launcher == "torchrun" else deepspeed),
        str(SCRIPTS / "preempted.py"),
        str(workers),
        str(run),
    ]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def statuses(run: Path) -> Iterator[str]:
    for rank in range(2):
        yield (run / f"status-{rank}").read_text()


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.parametrize(
    "to",
    ["launcher", *(pytest.param(to, marks=pytest.mark.matrix) for to in ("rank 1", "rank 1 and the workers"))],
)
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.matrix)])
def test_under_a_launcher(tmp_path: Path, launcher: str, to: str) -> None:
    """The launcher also sends the signal to the workers of data loaders."""
    with held_port() as port:
        process = started(launcher, port, 1, tmp_path)
        try:
            wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)))
            ranks = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
            workers = [pid for rank in ranks for pid in children(rank)] if "workers" in to else []
            for pid in (*workers, process.pid if to == "launcher" else ranks[1]):
                os.kill(pid, signal.SIGTERM)
            assert process.wait(LIMIT_SECONDS) != 0
        finally:
            process.kill()
            process.wait()
    first, second = statuses(tmp_path)
    assert first == second
    status, step = first.split()
    assert status == str(128 + signal.SIGTERM)
    assert zckpt.open(tmp_path / "checkpoints").step == int(step)
    assert zckpt.validate(tmp_path / "checkpoints").ok
