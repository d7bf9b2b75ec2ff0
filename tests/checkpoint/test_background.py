"""Writes in the background contain the state at the time of the call, whatever the training does in the meantime."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
from tests.support.endings import ended, ends, started
from tests.support.memory import memory
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine, engines_are_adapters
from tests.support.runs import SNAPSHOTS, assert_goes_on_alike, restore_and_go_on, write_in_background_and_go_on
from tests.support.slow_writes import held, slow
from zckpt.engines.hooks import call_before

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import Cluster

MIB = 1 << 20
CPU = {"offload_optimizer": {"device": "cpu"}}
MODES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "model": "odd"},
    "0-fp32": {"stage": 0, "dtype": "fp32", "model": "odd"},
    "1-bf16-optimizer": {"stage": 1, "model": "odd", "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "2-cpu": {"stage": 2, "model": "odd", **CPU},
    "3": {"stage": 3, "model": "odd", "groups": True, "scheduler": True},
    "3-cpu": {"stage": 3, "model": "odd", **CPU},
}
EVERY_TIME = {("0", "copy"), ("3", "lazy"), ("2-cpu", "lazy"), ("0-fp32", "lazy"), ("3-cpu", "little-memory")}


@pytest.mark.parametrize(
    ("mode", "snapshot"),
    [
        pytest.param(mode, snapshot, marks=[] if (mode, snapshot) in EVERY_TIME else pytest.mark.matrix)
        for mode in MODES
        for snapshot in SNAPSHOTS
    ],
)
def test_the_checkpoint_is_of_the_state_at_the_call(cluster: Cluster, tmp_path: Path, mode: str, snapshot: str) -> None:
    """Before the checkpoint is there, training goes on, and changes weights, moments, buffers and the client_state."""
    path = str(tmp_path / "run" / "global_step3")
    through = cluster.run(write_in_background_and_go_on, 2, path, MODES[mode], SNAPSHOTS[snapshot])
    assert zckpt.validate(path).ok
    resumed = cluster.run(restore_and_go_on, 2, path, MODES[mode], 0)
    assert_goes_on_alike(through, resumed)


def fail_in_background(path: str, next_call: str) -> str:
    """Training goes on while the disk of rank 1 refuses to write. Returns the type of the error that the call
    ``next_call`` raises."""
    engine = make_engine(model="odd")
    train(engine, 1)
    zckpt.write(engine, f"{path}/old")
    failing = engine.global_rank == 1
    full = OSError(28, "No space left on device")
    with mock.patch.object(os, "pwritev", side_effect=full) if failing else nullcontext():
        pending = zckpt.write(engine, f"{path}/new", background=True)
        train(engine, 2, 1)
        while not pending.done:
            time.sleep(0.01)
    assert pending.error is not None
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: zckpt.write(engine, f"{path}/third"),
        "restore": lambda: zckpt.restore(engine, f"{path}/old"),
        "wait": pending.wait,
    }
    with pytest.raises(zckpt.ZckptError) as caught:
        calls[next_call]()
    assert caught.value is pending.error
    train(engine, 1, 3)
    zckpt.write(engine, f"{path}/fourth", background=True).wait()
    return type(caught.value).__name__


@pytest.mark.parametrize("next_call", ["write", "restore", "wait"])
def test_the_next_call_raises_the_error_on_every_rank(cluster: Cluster, tmp_path: Path, next_call: str) -> None:
    assert cluster.run(fail_in_background, 2, str(tmp_path), next_call) == ["RankError", "NoSpaceError"]
    assert sorted(os.listdir(tmp_path)) == ["fourth", "latest", "old"]
    assert zckpt.validate(tmp_path / "old").ok
    assert zckpt.validate(tmp_path).ok  # `latest` names the fourth


def wait_on_one_rank_first(path: str) -> str:
    """Rank 0 alone first asks for the result of the write. Then both ranks go on, and no collective call may hang."""
    engine = make_engine()
    train(engine, 1)
    full = OSError(28, "No space left on device")
    with mock.patch.object(os, "pwritev", side_effect=full) if engine.global_rank == 1 else nullcontext():
        pending = zckpt.write(engine, f"{path}/new", background=True)
        while not pending.done:
            time.sleep(0.01)
    if engine.global_rank == 0:
        with pytest.raises(zckpt.RankError):
            pending.wait()
    with pytest.raises(zckpt.ZckptError) as caught:
        zckpt.wait()
    zckpt.wait()
    zckpt.write(engine, f"{path}/next")
    return type(caught.value).__name__


def test_an_error_that_one_rank_has_seen_is_still_raised_on_all(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(wait_on_one_rank_first, 2, str(tmp_path)) == ["RankError", "NoSpaceError"]


def die_in_background(path: str) -> str:
    engine = make_engine()
    train(engine, 1)
    zckpt.write(engine, f"{path}/old")
    with held() as go_on:
        pending = zckpt.write(engine, f"{path}/new", background=True)
        torch.distributed.barrier()  # On both ranks, the call has returned, and the write is under way.
        if engine.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        go_on()
        with pytest.raises(zckpt.RankError) as caught:
            pending.wait()
    return str(caught.value)


def test_a_rank_that_dies_is_noticed(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.outcomes(die_in_background, 2, str(tmp_path))
    assert first.value.startswith("rank 1 has died")
    assert second.signal == signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["latest", "old"]
    assert zckpt.validate(tmp_path).ok


def give_up_process_groups(path: str) -> None:
    engine = make_engine()
    train(engine, 1)
    with held() as go_on:
        pending = zckpt.write(engine, path, background=True)
        torch.distributed.destroy_process_group()
        go_on()
        pending.wait()


def test_it_does_not_use_the_process_groups_of_the_training(cluster: Cluster, tmp_path: Path) -> None:
    """The training destroys its process groups while the write is under way."""
    cluster.run(give_up_process_groups, 2, str(tmp_path / "c"))
    assert zckpt.validate(tmp_path).ok


SCRIPT = """
import os, sys, time
import torch
sys.path.insert(0, {root!r})
from tests.support.plain_engine import Engine
from tests.support.faults import BROKEN, Fault, faulty
import zckpt, zckpt.checkpoint.writing.prepare
zckpt.checkpoint.writing.prepare.readable = lambda engine: engine
def slow(operation, file):
    time.sleep(1)
    return BROKEN(operation, file) if {fails!r} else operation()
with faulty(Fault(slow, names=("write",))):
    zckpt.write(Engine(), {path!r}, background=True)
print("main thread done", flush=True)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_waits_for_the_write_before_it_ends_and_shows_an_error(tmp_path: Path, fails: bool) -> None:
    script = SCRIPT.format(root=str(Path(__file__).parents[2]), path=str(tmp_path / "c"), fails=fails)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert ended.stdout == "main thread done\n"
    if fails:
        assert "Input/output error" in ended.stderr
        assert os.listdir(tmp_path) == []
    else:
        assert ended.stderr == ""
        assert zckpt.validate(tmp_path).ok


AT_THE_END = """
import os, signal, sys, threading
import torch.distributed as dist
import zckpt
from tests.support.faults import Fault, faulty
from zckpt.testing import ReferenceEngine

signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may have started pytest in the background.
if os.environ["WORLD_SIZE"] != "1":
    dist.init_process_group("gloo")

def slow(operation, file):
    print("writing", flush=True)
    threading.Event().wait({seconds})
    return operation()

with faulty(Fault(slow, at=0 if {stuck} else 1, names=("write",), lasting=True)):
    zckpt.write(ReferenceEngine(), sys.argv[1], background=True, budget=zckpt.Budget(threads=1))
"""


def interrupted_at_the_end(path: Path, ranks: int, times: int, seconds: float) -> list[tuple[int, str]]:
    """Ends a process on each rank while each write of the rank takes ``seconds``, and sends it Ctrl-C so many
    ``times``. Returns the exit status and the output on stderr of each rank."""
    with started(AT_THE_END.format(stuck=times > 1, seconds=seconds), path, ranks=ranks) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
        time.sleep(2)  # until Python waits for the write
        for number in range(times):
            time.sleep(number)  # Two signals at once would count as one.
            for process in processes:
                process.send_signal(signal.SIGINT)
        return [(status, errors) for status, _, errors in map(ended, processes)]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_ctrl_c_at_the_end_of_the_process_gives_the_write_up(tmp_path: Path, ranks: int) -> None:
    for status, errors in interrupted_at_the_end(tmp_path / "c", ranks, times=1, seconds=5):
        assert status == -signal.SIGINT
        assert "the write was given up: Ctrl-C" in errors
        assert "Traceback" not in errors
        assert "raises this error" not in errors
    assert os.listdir(tmp_path) == []


def test_a_second_ctrl_c_at_the_end_of_the_process_does_not_wait(tmp_path: Path) -> None:
    ((status, errors),) = interrupted_at_the_end(tmp_path / "c", 1, times=2, seconds=1e6)
    assert (status, errors) == (-signal.SIGINT, "")
    zckpt.gc(tmp_path)
    assert os.listdir(tmp_path) == []


AS_THE_LAST_THING = """
import atexit, sys
import torch

def write():
    import zckpt
    from zckpt.testing import ReferenceEngine
    zckpt.write(ReferenceEngine(), sys.argv[1], background={background})

atexit.register(write)
{then}
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 starts no threads while the interpreter ends")
@pytest.mark.parametrize("then", ["", "import zckpt.checkpoint.background"])
@pytest.mark.parametrize("background", [False, True])
def test_an_exit_handler_may_be_the_first_to_write(tmp_path: Path, background: bool, then: str) -> None:
    """If zckpt was imported after the handler was registered, Python has called zckpt's own handlers before it."""
    assert ends(AS_THE_LAST_THING.format(background=background, then=then), tmp_path / "c") == [(0, "", "")]
    assert zckpt.validate(tmp_path).ok


FORKS = """
import os, signal, sys, threading
import torch
import zckpt, zckpt.transfer.write
from zckpt.testing import ReferenceEngine

run, scratch = sys.argv[1] + "/run", sys.argv[1] + "/scratch"
engine, other = ReferenceEngine(), ReferenceEngine(seed=1)
engine.train(1)
go_on, put = threading.Event(), zckpt.transfer.write._put

def held(*arguments):
    go_on.wait()
    put(*arguments)

def values():
    return {(part, name): tensor.clone() for part, of in engine.tensors.items() for name, tensor in of.items()}

def forked(*actions):
    for action in actions:
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            try:
                action()
            except zckpt.ZckptError as error:
                print(type(error).__name__, "goes on in another process" in str(error), flush=True)
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

def write_and_restore():
    zckpt.transfer.write._put = put
    zckpt.restore(other, zckpt.write(other, f"{sys.argv[1]}/{os.getpid()}/c", background=True).path)
    engine.train(1)

before = values()
zckpt.write(engine, run + "/step0")
zckpt.transfer.write._put = held
pending = zckpt.write(engine, run + "/step1", background=zckpt.Background(snapshot="lazy"), reuse=None)
forked(zckpt.wait, pending.wait, lambda: zckpt.gc(run), write_and_restore, lambda: os.kill(os.getpid(), 9))
assert pending.state == "under way"
go_on.set()
pending.wait()
go_on.clear()
moved = zckpt.offload(engine, scratch, background=True)
forked(zckpt.wait, moved.wait, lambda: zckpt.reload(engine), write_and_restore)
go_on.set()
moved.wait()
forked(lambda: zckpt.reload(engine), zckpt.wait)
zckpt.reload(engine, parts=["master"])  # A thread reads the next part ahead, and another one closes files.
forked(lambda: zckpt.reload(engine), lambda: zckpt.offload(engine, scratch))
zckpt.reload(engine)
after = values()
assert all(torch.equal(before[key], after[key]) for key in before)
assert zckpt.validate(run, level="digests").ok
"""


@pytest.mark.linux
@pytest.mark.offload
def test_a_forked_process_neither_waits_for_the_work_of_its_parent_nor_disturbs_it(tmp_path: Path) -> None:
    ((status, out, errors),) = ends(FORKS, tmp_path)
    assert (status, errors) == (0, "")
    refused = "ZckptError True"
    during_write = ["7", refused, "7", "7", "7", "-9"]
    during_offload = ["7", refused, "7", "7", "7"]
    assert out.splitlines() == [*during_write, *during_offload, "7", "7", "7", "7"]


def one_at_a_time(path: str) -> None:
    engine = make_engine()
    train(engine, 1)
    with slow(0.3), held() as go_on:
        first = zckpt.write(engine, f"{path}/first", background=True)
        with pytest.raises(TimeoutError, match="first"):
            first.wait(timeout=0)
        threading.Timer(0.3, go_on).start()
        second = zckpt.write(engine, f"{path}/second", background=True, snapshot="lazy")
        assert first.done
        zckpt.restore(engine, f"{path}/first")
        assert second.done


def test_one_write_is_under_way_at_a_time(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(one_at_a_time, 2, str(tmp_path))
    assert all(zckpt.validate(tmp_path / name).ok for name in ("first", "second"))


def save_with_an_attached_engine(path: str) -> float:
    engine = zckpt.attach(make_engine(), background=True)
    train(engine, 1)
    with held() as go_on:
        assert engine.save_checkpoint(path) is True
        (loss,) = train(engine, 1, 1)
        assert not Path(path, "latest").exists()
        go_on()
        engine.load_checkpoint(path)
    assert train(engine, 1, 1) == [loss]
    return loss


def test_an_attached_engine_saves_in_the_background(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_with_an_attached_engine, 2, str(tmp_path))


@pytest.mark.parametrize("snapshot_bytes", [0, 40 * MIB])
def test_copies_take_no_more_memory_than_allowed(tmp_path: Path, snapshot_bytes: int) -> None:
    """The state has 128 MiB, and the disk is slow."""
    engine = Engine(64 * MIB)
    with engines_are_adapters(), slow(0.01):
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        pending = zckpt.write(engine, tmp_path / "c", background=zckpt.Background(snapshot_bytes=snapshot_bytes))
        engine.weight.zero_()
        pending.wait()
    buffers = max(snapshot_bytes, 4 * 8 * MIB)
    assert memory("VmHWM") - before < buffers + 24 * MIB
    assert torch.equal(zckpt.open(tmp_path / "c").load()["exp_avg/w"], Engine(64 * MIB).weight)


def test_an_unknown_snapshot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'copy' or 'lazy'"):
        zckpt.write(Engine(), tmp_path / "c", background=True, snapshot="eager")  # type: ignore[call-overload]


class Light:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on(self, level: int = 1) -> int:
        self.calls.append(f"on {level}")
        return level

    def off(self) -> None:
        self.calls.append("off")


def test_an_action_runs_once_before_the_first_of_several_calls() -> None:
    light = Light()
    call_before(lambda: light.calls.append("action"), [(light, "on"), (light, "off")])
    assert light.on(level=3) == 3
    light.off()
    assert light.calls == ["action", "on 3", "off"]
    assert vars(light).keys() == {"calls"}


def test_a_method_that_somebody_else_has_replaced_is_left_alone() -> None:
    light = Light()
    light.off = lambda: light.calls.append("my own")  # type: ignore[method-assign]
    method = light.off
    call_before(lambda: light.calls.append("action"), [(light, "on"), (light, "off")])
    wrapper = light.on
    light.on = partial(wrapper, 7)  # type: ignore[method-assign]
    theirs = light.on
    assert light.on() == 7
    assert light.on() == 7
    light.off()
    assert light.calls == ["action", "on 7", "on 7", "my own"]
    assert light.off is method
    assert light.on is theirs
