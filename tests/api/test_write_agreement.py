"""All ranks leave a write together: whatever fails on one of them, wherever, and whatever they do not agree about."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager
from datetime import date, datetime, timezone
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.crashes import Half
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine, engines_are_adapters, everything
from tests.support.states import fragment, same
from zckpt.api.write import write_engine
from zckpt.ranks import heartbeat as life
from zckpt.state.inventory import Inventory
from zckpt.storage.local_store import LocalStore
from zckpt.transfer import write as io_write
from zckpt.writing.options import WriteOptions
from zckpt.writing.rank_write import RankWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from tests.support.cluster import Cluster
    from zckpt.transfer.snapshot import Snapshot

OURS = str(Path(zckpt.__file__).parent)
NOT_STEPS = {"write", "write_engine", "group_of", "_adapter_of", "__init__", "_finish", "__exit__"}
"""Functions that do nothing but call the steps, or come before the first or after the last."""


class Whole(Half):
    """With a buffer, equal on all ranks, and what the optimizer keeps once."""

    def inventory(self, parts: object) -> Inventory:
        buffer = fragment("buffer", "b", torch.ones(3), 0, 3, copy=int(os.environ["RANK"]))
        return Inventory((*super().inventory(parts).fragments, buffer))

    def state(self) -> dict[str, object]:
        return {"optimizer": {"step": torch.tensor(self.step)}}


@contextmanager
def ours() -> Iterator[None]:
    with engines_are_adapters():
        yield


def called(act: Callable[[CodeType], None]) -> Callable[[FrameType, str, object], object]:
    """For ``sys.settrace``: ``act`` at the first line of each function that a step of a write runs.

    A profile function could act at the call itself, but where it raises there, Python 3.11 may crash.
    """
    between = ("collectives.py", "heartbeat.py", "interrupts.py", "background.py")

    def at_first_line(frame: FrameType, event: str, _: object) -> None:
        if event == "line":
            frame.f_trace = None
            act(frame.f_code)

    def look(frame: FrameType, event: str, _: object) -> object:
        code = frame.f_code
        of_ours = code.co_filename.startswith(OURS) and not code.co_filename.endswith(between)
        return at_first_line if of_ours and code.co_name not in NOT_STEPS else None

    return look


def fail_everywhere(path: str, who: int, every: int) -> dict[str, int]:
    """Rank ``who`` is out of memory at the first call of each function, or of one in ``every``, that a write calls."""
    os.environ["ZCKPT_RANK_TIMEOUT"] = "20"
    life.PERIOD_SECONDS = 0.2
    mine = int(os.environ["RANK"]) == who
    functions: dict[CodeType, None] = {}
    seen: dict[str, int] = {}

    def write(step: int, fails_at: CodeType | None) -> str:
        def fail(code: CodeType) -> None:
            functions.setdefault(code)
            if code is fails_at:
                raise MemoryError  # Python takes a trace function that raises away by itself

        if mine:
            sys.settrace(called(fail))
        try:
            zckpt.write(Whole(step), f"{path}/c", client_state={"seen": np.arange(3)}, overwrite=True)
        except (zckpt.ZckptError, MemoryError) as error:
            return type(error).__name__ if "no sign of life" not in str(error) else str(error)
        finally:
            sys.settrace(None)
        return "ok"

    with ours():
        write(5, None)
        write(5, None)
        count = [len(functions)]
        torch.distributed.broadcast_object_list(count, who)
        known = list(functions) if mine else [None] * count[0]
        for code in known[::every]:
            outcome = write(6, code)
            seen[outcome] = seen.get(outcome, 0) + 1
            torch.distributed.barrier()
            checkpoint = zckpt.open(f"{path}/c")
            assert checkpoint.step in (5, 6)
            torch.distributed.barrier()
        assert write(7, None) == "ok"
    assert zckpt.validate(path).ok
    seen["functions"] = count[0]
    return seen


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("who", [0, 1])
def test_wherever_one_rank_fails_all_do(cluster: Cluster, tmp_path: Path, who: int, every: int) -> None:
    first, second = cluster.run(fail_everywhere, 2, str(tmp_path / "run"), who, every)
    failed, other = (first, second) if who == 0 else (second, first)
    assert failed.keys() <= {"MemoryError", "ok", "functions"}  # ok: what must not fail, such as the clean-up
    assert other.keys() <= {"RankError", "ok", "functions"}
    assert failed["MemoryError"] > 50 // every
    # Rank 0 gives its lock back after the commit, in three functions: a failure there is its own.
    assert abs(other["RankError"] - failed["MemoryError"]) <= 3
    assert zckpt.open(tmp_path / "run").step == 7


def interrupt(path: str) -> tuple[str, str]:
    """Rank 1 is interrupted while it waits for rank 0, whose disk is slow; then in the middle of its own writing."""
    rank = int(os.environ["RANK"])
    found = []
    put, done, waiting = io_write._put, [], Path(path, "waiting")
    write_own = RankWrite.write_own

    def slow(*args: Any) -> None:
        while not waiting.exists():
            time.sleep(0.01)
        put(*args)

    def signalled() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        waiting.touch()

    def quick(own: RankWrite, snapshot: Snapshot) -> bytes:
        digest = write_own(own, snapshot)
        threading.Thread(target=signalled).start()
        return digest

    def counted(*args: Any) -> None:
        done.append(1)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # Python runs the handler in the main thread
        put(*args)

    with ours():
        zckpt.write(Half(5), f"{path}/old")
        for slowed, own in ((slow, quick), (put, write_own)):
            put_here = slowed if rank == 0 else put if own is quick else counted
            with (
                mock.patch.object(io_write, "_put", put_here),
                mock.patch.object(RankWrite, "write_own", own if rank == 1 else write_own),
            ):
                try:
                    zckpt.write(Large(6), f"{path}/new", budget=zckpt.Budget(nbytes=4 << 20, threads=2), overwrite=True)
                except (KeyboardInterrupt, zckpt.RankError) as error:
                    found.append(type(error).__name__)
            torch.distributed.barrier()
            assert sorted(os.listdir(path)) == ["latest", "old", "waiting"]
            torch.distributed.barrier()
        assert len(done) in (0, 3, 4)
        zckpt.write(Half(7), f"{path}/new")
    return tuple(found)  # type: ignore[return-value]


class Large(Half):
    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.weight = torch.zeros(12 << 20 >> 2)


def test_an_interrupt_ends_the_write_on_all_ranks(cluster: Cluster, tmp_path: Path) -> None:
    one, other = cluster.run(interrupt, 2, str(tmp_path))
    assert one == ("RankError", "RankError")
    assert other == ("KeyboardInterrupt", "KeyboardInterrupt")
    assert zckpt.open(tmp_path).step == 7


def interrupt_a_copy(path: str) -> tuple[str, int, str]:
    """Rank 1 is interrupted while the state is copied for a write in the background."""
    rank, gathered = int(os.environ["RANK"]), []
    put = io_write._put

    def interrupted(*args: Any) -> None:
        if not args[2].op.offset:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # Python runs the handler in the main thread
        put(*args)

    class Gathered(Large):
        def after_write(self) -> None:
            gathered.append(1)

    errors = []
    with ours():
        budget = zckpt.Budget(nbytes=4 << 20, threads=2)
        with mock.patch.object(io_write, "_put", interrupted if rank else put):
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


def test_an_interrupted_copy_keeps_no_rank_waiting_for_what_comes_after(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    first, second = cluster.run(interrupt_a_copy, 2, str(tmp_path / "run"))
    assert first == ("RankError", 1, "RankError")  # the second write alone has come to its end
    assert second == ("KeyboardInterrupt", 1, "ZckptError")


# Alone


@pytest.fixture
def engines_of_ours() -> Iterator[None]:
    with ours():
        yield


@pytest.mark.usefixtures("engines_of_ours")
def test_no_operation_begins_after_an_interrupt(tmp_path: Path) -> None:
    put, done = io_write._put, []

    def counted(*args: Any) -> None:
        done.append(1)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        put(*args)

    with mock.patch.object(io_write, "_put", counted), pytest.raises(KeyboardInterrupt):
        zckpt.write(Engine(32 << 20), tmp_path / "c", budget=zckpt.Budget(nbytes=4 << 20, threads=2))
    assert len(done) <= 4, "of more than 16"
    assert everything(tmp_path) == {}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("engines_of_ours")
@pytest.mark.parametrize("background", [False, True])
def test_an_interrupt_while_the_state_is_copied_in_the_background(tmp_path: Path, background: bool) -> None:
    """Then the state may change: nothing is committed, and whoever asks is told."""
    put = io_write._put

    def interrupted(*args: Any) -> None:
        if not args[2].op.offset:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        put(*args)

    budget = zckpt.Budget(nbytes=4 << 20, threads=2)
    options: dict[str, Any] = {"background": True, "snapshot_bytes": 0} if background else {}
    with mock.patch.object(io_write, "_put", interrupted):
        with pytest.raises(KeyboardInterrupt):
            zckpt.write(Engine(8 << 20), tmp_path / "c", budget=budget, **options)
        if background:
            with pytest.raises(zckpt.ZckptError, match="given up: it was interrupted"):
                zckpt.wait()
    assert everything(tmp_path) == {}


PLAIN: dict[str, tuple[Any, Any]] = {
    "numpy": ([np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("a")], [float(np.float32(0.1)), -3, True, "a"]),
    "size": (torch.Size([2, 3]), (2, 3)),
    "path": (PurePosixPath("/data/x"), "/data/x"),
    "time": (datetime(2026, 1, 2, 3, tzinfo=timezone.utc), "2026-01-02T03:00:00+00:00"),
    "date": (date(2026, 1, 2), "2026-01-02"),
    "set": ({"b", "a"}, ["a", "b"]),
    "frozen": (frozenset({2, (1,)}), [2, (1,)]),
    "default": (defaultdict(list, {"k": [np.int8(1)]}), {"k": [1]}),
}  # fmt: skip


@pytest.mark.usefixtures("engines_of_ours")
def test_client_state_takes_what_stands_for_plain_values(tmp_path: Path) -> None:
    zckpt.write(Engine(), tmp_path / "c", client_state={key: given for key, (given, _) in PLAIN.items()})
    found = zckpt.open(tmp_path).state["client_state"]
    for key, (_, kept) in PLAIN.items():
        assert (found[key], type(found[key])) == (kept, type(kept)), key
    engine = Engine()
    with mock.patch.object(engine, "state", {"seen": {1}}.copy), pytest.raises(zckpt.StateError, match="seen: set"):
        zckpt.write(engine, tmp_path / "d")  # an engine's own values come back as they were, or not at all


@pytest.mark.usefixtures("engines_of_ours")
def test_latest_is_prepared_before_the_commit(tmp_path: Path) -> None:
    zckpt.write(Engine(step=1), tmp_path / "c")
    before = everything(tmp_path)
    prepare, commit = LocalStore.prepare, LocalStore.commit

    def refused(name: str, action: Any) -> Any:
        def act(self: LocalStore, path: str, *others: Any) -> Any:
            if path == name:
                raise zckpt.StorageError("refused", file=path)
            return action(self, path, *others)

        return act

    with mock.patch.object(LocalStore, "prepare", refused("latest", prepare)), pytest.raises(zckpt.StorageError):
        zckpt.write(Engine(step=2), tmp_path / "c", overwrite=True)
    assert everything(tmp_path) == before
    with (
        mock.patch.object(LocalStore, "commit", refused("latest", commit)),
        pytest.raises(zckpt.StorageError, match="committed and whole; the file `latest` does not name it"),
    ):
        zckpt.write(Engine(step=3), tmp_path / "d")
    assert zckpt.open(tmp_path).step == 1
    assert zckpt.open(tmp_path / "d").step == 3
    assert not list(tmp_path.rglob("*.tmp"))


def differ(path: str) -> list[str]:
    rank = int(os.environ["RANK"])
    found = []
    with ours():
        for options in (
            {"parts": ["master"] if rank else None},
            {"exclude": ["exp_avg"] if rank else ()},
            {"background": bool(rank)},
        ):
            with pytest.raises(zckpt.RankError) as refused:
                zckpt.write(Half(3), f"{path}/c", **options)
            found.append(str(refused.value))
            assert os.listdir(path) == []
        for given in ({"parts": ["exp_avg", "master"]}, {"parts": {"master", "exp_avg"}}):
            zckpt.write(Half(3), f"{path}/c", overwrite=True, **(given if rank else {"parts": ("master", "exp_avg")}))
    engine = make_engine()
    train(engine, 1)
    with pytest.raises(zckpt.RankError, match="different parts arguments"):
        zckpt.restore(engine, f"{path}/c", parts=["master"] if rank else None)
    with pytest.raises(zckpt.RankError, match="different strict arguments"):
        zckpt.restore(engine, f"{path}/c", strict=not rank)
    return found


def test_arguments_that_differ_by_rank_are_refused_before_a_byte_is_written(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for messages in cluster.run(differ, 2, str(tmp_path / "run")):
        assert "different parts arguments: None on rank 0, ['master'] on rank 1" in messages[0]
        assert "different exclude arguments: [] on rank 0, ['exp_avg'] on rank 1" in messages[1]
        assert "different background arguments: False on rank 0, True on rank 1" in messages[2]


def test_ranks_that_differ_in_the_order_of_keys_alone_agree(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_in_any_order, 2, str(tmp_path / "c"))


def write_in_any_order(path: str) -> None:
    class Ordered(Half):
        def state(self) -> dict[str, object]:
            scalars = {"lr": 0.1, "betas": (0.9, 0.99)}
            return {"optimizer": scalars if os.environ["RANK"] == "0" else dict(reversed(scalars.items()))}

    with ours():
        zckpt.write(Ordered(3), path)


@pytest.mark.usefixtures("engines_of_ours")
def test_an_unknown_part_is_not_left_out_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no part moments; it has master, exp_avg"):
        zckpt.write(Engine(), tmp_path / "c", exclude=["moments"])
    with pytest.raises(ValueError, match="'refuse' or 'drop'"):
        zckpt.write(Engine(), tmp_path / "c", pending_gradients="keep")  # type: ignore[call-overload]
    assert everything(tmp_path) == {}
    zckpt.write(Engine(), tmp_path / "c", exclude=["exp_avg"])
    assert zckpt.open(tmp_path).parts == ("master",)


@pytest.mark.usefixtures("engines_of_ours")
def test_files_of_deepspeed_s_are_not_left_beside_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c" / "offloaded_tensors").mkdir(parents=True)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "mine.txt"):
        (tmp_path / "c" / name).write_bytes(b"x")
    before = everything(tmp_path)
    with mock.patch.object(RankWrite, "write_own", side_effect=AssertionError("a byte was written")):
        with pytest.raises(zckpt.CheckpointExistsError, match=r"DeepSpeed's own format here .*model_states\.pt"):
            zckpt.write(Engine(), tmp_path / "c")
        with pytest.raises(zckpt.CheckpointExistsError, match="replace_deepspeed=True"):
            write_engine(Engine(), tmp_path / "c", WriteOptions(overwrite=True))
    assert everything(tmp_path) == before
    with (
        mock.patch.object(RankWrite, "commit", side_effect=OSError("no")),
        pytest.raises(OSError, match="no"),
    ):
        zckpt.write(Engine(), tmp_path / "c", overwrite=True)
    assert everything(tmp_path) == before, "they go once the new one is there"
    zckpt.write(Engine(), tmp_path / "c", overwrite=True)
    assert sorted(one.name.partition("-")[0] for one in (tmp_path / "c").iterdir()) == [
        "data", "manifest.msgpack", "mine.txt",
    ]  # fmt: skip


@pytest.mark.usefixtures("engines_of_ours")
def test_latest_may_lie_in_a_directory_above(tmp_path: Path) -> None:
    write_engine(Engine(), tmp_path / "epoch0" / "step1", WriteOptions(run=tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["epoch0", "latest"]
    assert (tmp_path / "latest").read_text() == "epoch0/step1\n"
    with pytest.raises(ValueError, match="latest"):
        write_engine(Engine(), tmp_path / "other" / "c", WriteOptions(run=tmp_path / "run"))


@pytest.mark.usefixtures("engines_of_ours")
def test_a_failure_in_the_background_is_said_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(io_write, "_put", side_effect=OSError(5, "Input/output error")):
        pending = zckpt.write(Engine(), tmp_path / "c", background=True)
        while not pending.done:
            time.sleep(0.01)
    said = capfd.readouterr().err
    assert said.startswith(f"zckpt: the write of {tmp_path / 'c'} in the background has failed: OSError: [Errno 5]")
    with pytest.raises(OSError, match="Input/output"):
        zckpt.wait()
    assert capfd.readouterr().err == ""


# Real engines


class Adapted(torch.nn.Module):
    """Two tied embeddings, frozen, and an adapter that is trained, as LoRA has them; and a copy of the adapter that the
    forward pass updates, as MoCo's momentum encoder."""

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

    # An alias whose tensor is left out is left out too
    for name, options in {"frozen": {"exclude": ["param"]}, "master": {"parts": ["master"]}}.items():
        zckpt.write(engine, f"{path}/{name}", **options)  # type: ignore[arg-type]
        assert zckpt.validate(f"{path}/{name}").ok
        assert "head.weight" not in zckpt.open(f"{path}/{name}").state_dict()
    zckpt.write(engine, f"{path}/all")
    assert same(zckpt.open(f"{path}/all").state_dict()["head.weight"], engine.module.head.weight)

    # What the forward pass changes is of the time of the call, however little memory there is
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
    def write_own(own: object, each: bool) -> str:
        options = WriteOptions(overwrite=True, client_state=own, each_client_state=each)  # type: ignore[arg-type]
        return str(write_engine(engine, f"{path}/own", options))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning on rank 0 that is an error ends the write on all ranks
        with pytest.raises((UserWarning, zckpt.RankError), match="different client_state"):
            write_own({"rank": rank, "at": torch.tensor(rank)}, False)
        assert not Path(path, "own").exists()
        write_own({"rank": 0} if rank == 0 else None, False)
        write_own({"same": {"b", "a"}, "at": torch.ones(2)}, True)
        assert "client_state" not in zckpt.open(f"{path}/own").rank_state(rank)
        torch.distributed.barrier()
        write_own({"rank": rank, "at": torch.tensor(rank)}, True)
    checkpoint = zckpt.open(f"{path}/own")
    assert checkpoint.state["client_state"] == {"rank": 0, "at": torch.tensor(0)}
    assert checkpoint.rank_state(rank)["client_state"] == {"rank": rank, "at": torch.tensor(rank)}
    assert zckpt.validate(f"{path}/own").ok

    # Gradients that no step has used
    engine(x=torch.ones(4, 64, dtype=torch.bfloat16))
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(x=torch.ones(4, 64, dtype=torch.bfloat16)))
    with pytest.raises(zckpt.UnsupportedError, match="gradients"):
        zckpt.write(engine, f"{path}/half")
    assert not Path(path, "half").exists()
    zckpt.write(engine, f"{path}/half", pending_gradients="drop")


def test_what_a_real_engine_keeps_beside_its_optimizer(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_adapted, 2, str(tmp_path))


def refuse_old_muon(path: str) -> None:
    engine = make_engine(stage=1, optimizer="muon")
    train(engine, 1)
    with (
        mock.patch("zckpt.engines.deepspeed.zero12.Zero12.changes_only_in_step", return_value=False),
        pytest.raises(zckpt.UnsupportedError, match=r"Muon updates its momentum.*\n?.*snapshot='copy'"),
    ):
        zckpt.write(engine, path, background=True, snapshot="lazy")
    assert not Path(path).exists()
    zckpt.write(engine, path, background=True, snapshot="lazy").wait()


def test_a_momentum_that_gradients_change_is_not_copied_later(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refuse_old_muon, 1, str(tmp_path / "c"))
