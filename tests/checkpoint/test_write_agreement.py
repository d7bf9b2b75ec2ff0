"""All ranks leave a write together: whatever fails on one of them, at whatever point, and whatever they disagree
about."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.crashes import Half
from tests.support.failing_functions import called_functions, failing_once
from tests.support.faults import BROKEN, Fault, faulty
from tests.support.interrupts import interrupt_in, wait_until_main_is_in
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine, engines_are_adapters, everything
from tests.support.states import fragment, same
from zckpt.checkpoint.background import BackgroundWork
from zckpt.checkpoint.write import write_engine
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.plan.inventory import Inventory
from zckpt.ranks import heartbeat as life
from zckpt.ranks.collectives import Ranks
from zckpt.storage.local_writer import LocalWriter
from zckpt.system.threads import Worker, stop
from zckpt.transfer import write as io_write
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from tests.support.cluster import Cluster
    from zckpt.transfer.snapshot import Snapshot

NOT_STEPS = {
    "write",
    "write_engine",
    "write_together",
    "only_earlier",
    "refuse_unknown",
    "engine_of",
    "find_machines",
    "group_of",
    "_adapter_of",
    "__init__",
    "_finish",
    "__exit__",
}
"""Functions that only call the steps of a write, or that run before the first step or after the last one."""


class Whole(Half):
    """An engine that also has a buffer, which is equal on all ranks, and state of the optimizer that belongs to no
    parameter."""

    def inventory(self, parts: object) -> Inventory:
        buffer = fragment("buffer", "b", torch.ones(3), 0, 3, copy=int(os.environ["RANK"]))
        return Inventory((*super().inventory(parts).fragments, buffer))

    def state(self) -> dict[str, object]:
        return {"optimizer": {"step": torch.tensor(self.step)}}


def is_step(code: CodeType) -> bool:
    """Whether this is the code of a function that a step of a write runs."""
    between = (
        "collectives.py", "groups.py", "family.py", "tree.py", "heartbeat.py", "interrupts.py", "background.py",
        "job.py", "gloo.py",
    )  # fmt: skip
    # Before Python 3.12, a list comprehension has code of its own. It belongs to the function that contains it.
    name = code.co_qualname.removesuffix(".<locals>.<listcomp>").rpartition(".")[2]
    return not code.co_filename.endswith(between) and name not in NOT_STEPS


def fail_everywhere(path: str, who: int, every: int, ranks_per_file: int) -> dict[str, int]:
    """Writes again and again. Each time, rank ``who`` runs out of memory in another function of the write, when this is
    first called. Tries only one of ``every`` functions. Returns how often each outcome occurred."""
    os.environ["ZCKPT_RANK_TIMEOUT"] = "300"
    life.PERIOD_SECONDS = 0.2
    mine = int(os.environ["RANK"]) == who
    seen: dict[str, int] = {}

    def write(step: int) -> str:
        try:
            zckpt.write(
                Whole(step), f"{path}/c", client_state={"seen": np.arange(3)}, overwrite=True,
                ranks_per_file=ranks_per_file,
            )  # fmt: skip
        except (zckpt.ZckptError, MemoryError) as error:
            return type(error).__name__ if "no sign of life" not in str(error) else str(error)
        return "ok"

    with engines_are_adapters():
        codes: dict[CodeType, None] = {}
        with called_functions(codes):
            write(5)
            write(5)
        steps = [code for code in codes if is_step(code)]
        count = [len(steps)]
        torch.distributed.broadcast_object_list(count, who)
        for number in range(0, count[0], every):
            with failing_once(steps[number]) if mine else nullcontext():
                outcome = write(6)
            seen[outcome] = seen.get(outcome, 0) + 1
            torch.distributed.barrier()
            checkpoint = zckpt.open(f"{path}/c")
            assert checkpoint.step in (5, 6)
            torch.distributed.barrier()
        assert write(7) == "ok"
    assert zckpt.validate(path).ok
    seen["functions"] = count[0]
    return seen


EVERY = [
    (0, 4, 1),
    (1, 4, 1),
    *(pytest.param(who, 1, files, marks=pytest.mark.matrix) for who in (0, 1) for files in (1, 2)),
]


@pytest.mark.parametrize(("who", "every", "ranks_per_file"), EVERY)
def test_if_one_rank_fails_at_any_point_all_ranks_fail(
    cluster: Cluster, tmp_path: Path, who: int, every: int, ranks_per_file: int
) -> None:
    first, second = cluster.run(fail_everywhere, 2, str(tmp_path / "run"), who, every, ranks_per_file)
    failed, other = (first, second) if who == 0 else (second, first)
    assert failed.keys() <= {"MemoryError", "ok", "functions"}  # "ok": a step that must not fail, such as the clean-up
    assert other.keys() <= {"RankError", "ok", "functions"}
    assert failed["MemoryError"] > 50 // every
    # After the commit, a rank queues its copy, and rank 0 releases its lock and looks for older checkpoints, in seven
    # functions. If one of these fails, only this rank raises.
    assert abs(other["RankError"] - failed["MemoryError"]) <= 7
    assert zckpt.open(tmp_path / "run").step == 7


def interrupt(path: str) -> tuple[str, str]:
    """Rank 1 is interrupted while it waits for rank 0, whose disk is slow. In a second write, it is interrupted while
    it is writing."""
    rank = int(os.environ["RANK"])
    outcomes = []
    put, done, waiting = LocalWriter.write, list[int](), Path(path, "waiting")
    write_data_files = RankWrite.write_data_files

    def slow(*args: Any) -> None:
        while not waiting.exists():
            time.sleep(0.01)
        put(*args)

    def signalled() -> None:
        wait_until_main_is_in(Ranks._waiting)
        os.kill(os.getpid(), signal.SIGINT)
        waiting.touch()

    def quick(rank_write: RankWrite, snapshot: Snapshot) -> bytes:
        digest = write_data_files(rank_write, snapshot)
        threading.Thread(target=signalled).start()
        return digest

    with engines_are_adapters():
        zckpt.write(Half(5), f"{path}/old")
        for slowed, write_on_1 in ((slow, quick), (put, write_data_files)):
            put_here = slowed if rank == 0 else put if write_on_1 is quick else interrupting(put, done)
            with (
                mock.patch.object(LocalWriter, "write", put_here),
                mock.patch.object(RankWrite, "write_data_files", write_on_1 if rank == 1 else write_data_files),
            ):
                try:
                    zckpt.write(Large(6), f"{path}/new", budget=zckpt.Budget(nbytes=4 << 20, threads=2), overwrite=True)
                except (KeyboardInterrupt, zckpt.RankError) as error:
                    outcomes.append(type(error).__name__)
            torch.distributed.barrier()
            assert sorted(os.listdir(path)) == ["latest", "old", "waiting"]
            torch.distributed.barrier()
        assert done[4:] == [], "a write that is not interrupted makes 15 writes to files on each rank"
        zckpt.write(Half(7), f"{path}/new")
    return tuple(outcomes)  # type: ignore[return-value]


def interrupting(put: Callable[..., None], numbers: list[int]) -> Callable[..., None]:
    """Returns a function that does what ``put`` does, and whose third call interrupts the main thread first.

    From then on, each call begins once the main thread waits for the end of the threads. Appends the number of each
    call to ``numbers``.
    """
    count = itertools.count(1)

    def call(*args: Any) -> None:
        number = next(count)
        numbers.append(number)
        if number == 3:
            interrupt_in(run_tasks, Worker.wait)
        if number >= 3:
            wait_until_main_is_in(stop)
        put(*args)

    return call


def interrupting_the_copy(put: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that does what ``put`` does, once the main thread was interrupted in its wait for the copy of
    the state."""
    count, interrupted = itertools.count(), threading.Event()

    def call(*args: Any) -> None:
        if next(count) == 0:
            wait_until_main_is_in(BackgroundWork.wait_until_copied, threading.Event.wait)
            interrupt_in(BackgroundWork.wait_until_copied)
            interrupted.set()
        assert interrupted.wait(60)
        put(*args)

    return call


class Large(Half):
    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.weight = torch.zeros(12 << 20 >> 2)


def test_an_interrupt_ends_the_write_on_all_ranks(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.run(interrupt, 2, str(tmp_path))
    assert first == ("RankError", "RankError")
    assert second == ("KeyboardInterrupt", "KeyboardInterrupt")
    assert zckpt.open(tmp_path).step == 7


def interrupt_a_copy(path: str) -> tuple[str, int, str]:
    """Rank 1 is interrupted while the state is copied for a write in the background."""
    rank, gathered = int(os.environ["RANK"]), []
    put = io_write._put

    class Gathered(Large):
        def after_write(self) -> None:
            gathered.append(1)

    errors = []
    with engines_are_adapters():
        budget = zckpt.Budget(nbytes=4 << 20, threads=2)
        with mock.patch.object(io_write, "_put", interrupting_the_copy(put) if rank else put):
            for act in (
                lambda: zckpt.write(Gathered(6), f"{path}/c", background=True, snapshot_bytes=0, budget=budget),
                zckpt.wait,
            ):
                try:
                    act()
                except (KeyboardInterrupt, zckpt.ZckptError) as error:
                    errors.append(type(error).__name__)
        torch.distributed.barrier()
        assert os.listdir(path) == []
        zckpt.write(Gathered(7), f"{path}/c")
    return errors[0], len(gathered), errors[1]


def test_after_an_interrupted_copy_no_rank_waits_in_what_comes_next(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    first, second = cluster.run(interrupt_a_copy, 2, str(tmp_path / "run"))
    assert first == ("RankError", 1, "RankError")  # only the second write has ended
    assert second == ("KeyboardInterrupt", 1, "ZckptError")


# One rank


@pytest.mark.usefixtures("engines_are_adapters")
def test_no_operation_begins_after_an_interrupt(tmp_path: Path) -> None:
    done: list[int] = []
    with (
        mock.patch.object(LocalWriter, "write", interrupting(LocalWriter.write, done)),
        pytest.raises(KeyboardInterrupt),
    ):
        zckpt.write(Engine(32 << 20), tmp_path / "c", budget=zckpt.Budget(nbytes=4 << 20, threads=2))
    assert done[4:] == [], "of more than 16"
    assert everything(tmp_path) == {}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("engines_are_adapters")
def test_an_interrupt_while_the_state_is_copied_in_the_background(tmp_path: Path) -> None:
    """After the interrupt, the state may change. So nothing is committed, and zckpt.wait raises an error."""
    budget = zckpt.Budget(nbytes=4 << 20, threads=2)
    with mock.patch.object(io_write, "_put", interrupting_the_copy(io_write._put)):
        with pytest.raises(KeyboardInterrupt):
            zckpt.write(Engine(8 << 20), tmp_path / "c", budget=budget, background=True, snapshot_bytes=0)
        with pytest.raises(zckpt.ZckptError, match="interrupted"):
            zckpt.wait()
    assert everything(tmp_path) == {}


@pytest.mark.usefixtures("engines_are_adapters")
def test_latest_is_prepared_before_the_commit(tmp_path: Path) -> None:
    zckpt.write(Engine(step=1), tmp_path / "c")
    before = everything(tmp_path)
    of_latest = str(tmp_path / "latest")
    with faulty(Fault(BROKEN, names=("prepare",), path=of_latest)), pytest.raises(zckpt.StorageError):
        zckpt.write(Engine(step=2), tmp_path / "c", overwrite=True)
    assert everything(tmp_path) == before
    with (
        faulty(Fault(BROKEN, names=("commit",), path=of_latest)),
        pytest.raises(zckpt.StorageError, match=r"whole.* `latest`"),
    ):
        zckpt.write(Engine(step=3), tmp_path / "d")
    assert zckpt.open(tmp_path).step == 1
    assert zckpt.open(tmp_path / "d").step == 3
    assert not list(tmp_path.rglob("*.tmp"))


def differ(path: str) -> list[str]:
    rank = int(os.environ["RANK"])
    messages = []
    with engines_are_adapters():
        for options in (
            {"parts": ["master"] if rank else None},
            {"exclude": ["exp_avg"] if rank else ()},
            {"background": bool(rank)},
            {"keep_last": 1 + rank},
            {"copy_to": zckpt.CopyTo(f"{path}/far", keep_last=2, keep_every=4 + rank)},
        ):
            with pytest.raises(zckpt.RankError) as refused:
                zckpt.write(Half(3), f"{path}/c", **options)
            messages.append(str(refused.value))
            assert os.listdir(path) == []
        wrong = zckpt.Background(snapshot_bytes=-1) if rank else zckpt.Background()
        with pytest.raises(ValueError if rank else zckpt.RankError, match="snapshot_bytes must be"):
            zckpt.write(Half(3), f"{path}/c", background=wrong)
        for given in ({"parts": ["exp_avg", "master"]}, {"parts": {"master", "exp_avg"}}):
            zckpt.write(Half(3), f"{path}/c", overwrite=True, **(given if rank else {"parts": ("master", "exp_avg")}))
    engine = make_engine()
    train(engine, 1)
    with pytest.raises(zckpt.RankError, match="different parts arguments"):
        zckpt.restore(engine, f"{path}/c", parts=["master"] if rank else None)
    with pytest.raises(zckpt.RankError, match="different strict arguments"):
        zckpt.restore(engine, f"{path}/c", strict=not rank)
    with pytest.raises(TypeError if rank else zckpt.RankError, match="names must be a str"):
        zckpt.restore(engine, f"{path}/c", parts=5 if rank else None)  # type: ignore[arg-type]
    return messages


def test_arguments_that_differ_by_rank_are_refused_before_a_byte_is_written(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for messages in cluster.run(differ, 2, str(tmp_path / "run")):
        assert "different parts arguments: None on rank 0, ['master'] on rank 1" in messages[0]
        assert "different exclude arguments: [] on rank 0, ['exp_avg'] on rank 1" in messages[1]
        assert "different background arguments: False on rank 0, True on rank 1" in messages[2]
        assert "different keep_last arguments: 1 on rank 0, 2 on rank 1" in messages[3]
        assert "different keep_every of copy_to arguments: 4 on rank 0, 5 on rank 1" in messages[4]


def test_ranks_that_differ_in_the_order_of_keys_alone_agree(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_in_any_order, 2, str(tmp_path / "c"))


def write_in_any_order(path: str) -> None:
    class Ordered(Half):
        def state(self) -> dict[str, object]:
            scalars = {"lr": 0.1, "betas": (0.9, 0.99)}
            return {"optimizer": scalars if os.environ["RANK"] == "0" else dict(reversed(scalars.items()))}

    with engines_are_adapters():
        zckpt.write(Ordered(3), path)


@pytest.mark.usefixtures("engines_are_adapters")
def test_deepspeeds_files_are_not_left_beside_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c" / "offloaded_tensors").mkdir(parents=True)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "mine.txt"):
        (tmp_path / "c" / name).write_bytes(b"x")
    before = everything(tmp_path)
    with mock.patch.object(RankWrite, "write_data_files", side_effect=AssertionError("a byte was written")):
        with pytest.raises(zckpt.CheckpointExistsError, match=r"DeepSpeed's own format .*model_states\.pt"):
            zckpt.write(Engine(), tmp_path / "c")
        with pytest.raises(zckpt.CheckpointExistsError, match="replace_deepspeed=True"):
            write_engine(Engine(), tmp_path / "c", WriteOptions(overwrite=True))
    assert everything(tmp_path) == before
    with (
        mock.patch.object(RankWrite, "prepare_commit", side_effect=OSError("no")),
        pytest.raises(OSError, match="no"),
    ):
        zckpt.write(Engine(), tmp_path / "c", overwrite=True)
    assert everything(tmp_path) == before, "they go once the new one is there"
    zckpt.write(Engine(), tmp_path / "c", overwrite=True)
    assert sorted(entry.name.partition("-")[0] for entry in (tmp_path / "c").iterdir()) == [
        "data", "manifest.msgpack", "mine.txt",
    ]  # fmt: skip


@pytest.mark.usefixtures("engines_are_adapters")
def test_a_failure_in_the_background_is_printed_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(LocalWriter, "write", side_effect=OSError(5, "Input/output error")):
        pending = zckpt.write(Engine(), tmp_path / "c", background=True)
        while not pending.done:
            time.sleep(0.01)
    stderr = capfd.readouterr().err
    assert stderr.startswith(f"zckpt: the write of {tmp_path / 'c'} in the background has failed: OSError: [Errno 5]")
    with pytest.raises(OSError, match="Input/output"):
        zckpt.wait()
    assert capfd.readouterr().err == ""


# Real engines


class Adapted(torch.nn.Module):
    """A model with tied, frozen embeddings, and with an adapter that is trained, as with LoRA. The forward pass updates
    a copy of the adapter, like the momentum encoder of MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(64, 64).requires_grad_(False)
        self.head = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.head.weight = self.embed.weight
        self.adapter = torch.nn.Linear(64, 64)
        self.key = torch.nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, other in zip(self.key.parameters(), self.adapter.parameters(), strict=True):
                mine.data.mul_(0.5).add_(other.data, alpha=0.5)
        return (self.head(self.adapter(self.embed(x))) + self.key(x)).float().square().mean()


def save_adapted(path: str) -> None:
    with mock.patch("tests.support.models.Mlp", Adapted):
        engine = make_engine(stage=2)
    train(engine, 1)
    rank = engine.global_rank

    # An alias is left out if its tensor is left out
    left_out: dict[str, dict[str, Any]] = {"frozen": {"exclude": ["param"]}, "master": {"parts": ["master"]}}
    for name, options in left_out.items():
        zckpt.write(engine, f"{path}/{name}", **options)
        assert zckpt.validate(f"{path}/{name}").ok
        assert "head.weight" not in zckpt.open(f"{path}/{name}").state_dict()
    zckpt.write(engine, f"{path}/all")
    assert same(zckpt.open(f"{path}/all").state_dict()["head.weight"], engine.module.head.weight)

    # What the forward pass changes is written as it was at the call, even with little memory
    def slow(*args: Any, real: Any = io_write._take) -> Any:
        time.sleep(0.05)
        return real(*args)

    for snapshot_bytes in (0, None):
        key = engine.module.key.weight.clone()
        with mock.patch.object(io_write, "_take", slow):
            budget = zckpt.Budget(nbytes=2 << 20, threads=1)
            pending = zckpt.write(
                engine, f"{path}/lazy", overwrite=True, background=True, snapshot="lazy",
                snapshot_bytes=snapshot_bytes, budget=budget,
            )  # fmt: skip
            train(engine, 2, 1)
            pending.wait()
        assert not same(engine.module.key.weight, key)
        assert same(zckpt.open(f"{path}/lazy").load()["param/key.weight"], key)

    # Each rank's own client_state
    def write_client_state(client_state: object, each: bool) -> str:
        options = WriteOptions(overwrite=True, client_state=client_state, each_client_state=each)  # type: ignore[arg-type]
        return str(write_engine(engine, f"{path}/own", options))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning on rank 0 that is an error ends the write on all ranks
        with pytest.raises((UserWarning, zckpt.RankError), match="different client_state"):
            write_client_state({"rank": rank, "at": torch.tensor(rank)}, False)
        assert not Path(path, "own").exists()
        write_client_state({"rank": 0} if rank == 0 else None, False)
        write_client_state({"same": {"b", "a"}, "at": torch.ones(2)}, True)
        assert "client_state" not in zckpt.open(f"{path}/own").rank_state(rank)
        torch.distributed.barrier()
        write_client_state({"rank": rank, "at": torch.tensor(rank)}, True)
    checkpoint = zckpt.open(f"{path}/own")
    assert checkpoint.state["client_state"] == {"rank": 0, "at": torch.tensor(0)}
    assert checkpoint.rank_state(rank)["client_state"] == {"rank": rank, "at": torch.tensor(rank)}
    assert zckpt.validate(f"{path}/own").ok

    # The write refuses gradients that no step has used
    engine(x=torch.ones(4, 64, dtype=torch.bfloat16))
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(x=torch.ones(4, 64, dtype=torch.bfloat16)))
    with pytest.raises(zckpt.UnsupportedError, match="gradients"):
        zckpt.write(engine, f"{path}/half")
    assert not Path(path, "half").exists()
    zckpt.write(engine, f"{path}/half", pending_gradients="drop")


def test_a_real_engine_with_aliases_buffers_and_client_states(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_adapted, 2, str(tmp_path))


def refuse_old_muon(path: str) -> None:
    engine = make_engine(stage=1, optimizer="muon")
    train(engine, 1)
    with (
        mock.patch("zckpt.adapters.deepspeed.zero12.Zero12.changes_only_in_step", return_value=False),
        pytest.raises(zckpt.UnsupportedError, match=r"Muon .*\n?.*snapshot='copy'"),
    ):
        zckpt.write(engine, path, background=True, snapshot="lazy")
    assert not Path(path).exists()
    zckpt.write(engine, path, background=True, snapshot="lazy").wait()


def test_a_lazy_snapshot_is_refused_if_gradients_change_the_momentum(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refuse_old_muon, 1, str(tmp_path / "c"))
