"""A signal that is about to end a job: one last checkpoint, right after the same step on all ranks."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

import zckpt
from tests.support.cluster import free_port
from tests.support.launches import SCRIPTS
from tests.support.models import make_engine, train
from tests.support.slow_writes import slow
from zckpt.ranks import last_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster

LIMIT_SECONDS = 60


def send(after_seconds: float = 0) -> None:
    if after_seconds:
        threading.Timer(after_seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def until_preempted(run: str, who: list[int], step: int, *, times: int = 1, background: bool = False) -> dict[str, Any]:
    """Trains until the process is to end. The ranks ``who`` get the signal in step ``step``."""
    engine, losses, status = make_engine(stage=2, scheduler=True), [], None
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
    found = cluster.run(until_preempted, 2, str(tmp_path), who, step, times=times, background=background)
    steps = {one["step"] for one in found}
    assert len(steps) == 1, "both ranks have stopped after the same step"
    (last,) = steps
    assert last > step
    for rank, one in enumerate(found):
        assert one["status"] == 143
        assert one["earlier"] == (times if rank in who else 0) + 1, "the handler of before, and after the end again"
        assert len(one["losses"]) == last - 1, "the process ends inside of the step"
    assert zckpt.validate(tmp_path / "checkpoints" / f"global_step{last}").ok
    assert zckpt.open(tmp_path / "checkpoints").step == last
    expected = cluster.run(never_stopped, 2, last + 4)
    assert cluster.run(resume, 2, str(tmp_path), 4) == [losses[last:] for losses in expected]


def stay(run: str) -> tuple[bool, int, object, bool]:
    """Without the end of the process: the loop ends because of ``requested``, on all ranks after the same step."""
    engine = make_engine(stage=1, config={"gradient_accumulation_steps": 2})
    preemption = zckpt.on_preemption(engine, os.path.join(run, "last"), client_state={"a": 1}, exit=False)
    assert not preemption.requested
    if dist.get_rank() == 1:
        send(after_seconds=0.3)
    for number in range(3000):
        train(engine, 1, number)
        if preemption.requested:
            break
        time.sleep(0.01)
    last = zckpt.open(os.path.join(run, "last"))
    step, restored = last.step, dict(last.state["client_state"])
    assert engine.micro_steps % 2 == 0
    return preemption.requested, engine.global_steps - step, restored, "step" in vars(engine)


def test_a_loop_that_ends_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(stay, 2, str(tmp_path)) == [(True, 0, {"a": 1}, False)] * 2


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


def test_nothing_is_left_of_what_is_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(cancelled, 2, str(tmp_path)) == [1, 1]


def left_alone(run: str) -> str:
    """The other rank does not answer."""
    last_step.AGREE_SECONDS = 2
    last_step.GRACE_SECONDS = 1
    engine = make_engine(stage=1)
    preemption = zckpt.on_preemption(engine, os.path.join(run, "last"))
    train(engine, 1)
    if dist.get_rank() == 1:
        preemption.cancel()
    else:
        send()
        time.sleep(1)
    try:
        for number in range(20):
            train(engine, 1, number)
            dist.barrier()
            if number == 0:
                time.sleep(4)
    except zckpt.RankError as error:
        dist.barrier()
        return str(error)
    return ""


@pytest.mark.matrix  # half a minute: the other rank waits for the one that has given up
def test_a_rank_that_does_not_answer_is_not_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    outcomes = cluster.outcomes(left_alone, 2, str(tmp_path), timeout=30)
    assert "could not agree on a last step" in str(outcomes[0].value)
    assert not (tmp_path / "last").exists()


# As users start it


def started(launcher: str, run: Path) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    world = base64.urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    # What the command `deepspeed` starts on each machine; it does not pass signals on itself.
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--no_local_rank"]
    deepspeed += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    command = [*(torchrun if launcher == "torchrun" else deepspeed), str(SCRIPTS / "preempted.py"), str(run)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def statuses(run: Path) -> Iterator[str]:
    for rank in range(2):
        yield (run / f"status-{rank}").read_text()


@pytest.mark.parametrize("to", ["launcher", pytest.param("rank 1", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.matrix)])
def test_under_a_launcher(tmp_path: Path, launcher: str, to: str) -> None:
    process = started(launcher, tmp_path)
    try:
        wait_for(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)))
        pid = process.pid if to == "launcher" else int((tmp_path / "pid-1").read_text())
        os.kill(pid, signal.SIGTERM)
        assert process.wait(LIMIT_SECONDS) != 0
    finally:
        process.kill()
        process.wait()
    one, other = statuses(tmp_path)
    assert one == other
    status, step = one.split()
    assert status == "143"
    assert zckpt.open(tmp_path / "checkpoints").step == int(step)
    assert zckpt.validate(tmp_path / "checkpoints").ok
