"""Several ranks of a host write to one data file. Every reader reads it, and a failure of one rank is one of all."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.crashes import Half, check_after, check_next, write_and_die
from tests.support.faults import BROKEN, NO_SPACE, Fault, faulty
from tests.support.independent_reader import Reader
from tests.support.models import make_engine
from tests.support.own_disks import own_disk
from tests.support.plain_engine import Engine, engines_are_adapters
from tests.support.reference_engine import tensors_of
from tests.support.runs import assert_goes_on_alike, restore_and_go_on, write_and_go_on
from tests.support.states import same_all
from tests.support.thread_ranks import ONE_THREAD, ThreadRanks
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import Cluster

SHAPES = {"matrix": (700, 900), "vector": (161,), "few": (4,), "none": (0, 3)}
"""The first tensor has several blocks of digests on all ranks together, and the third one is on the first ranks."""
SETUP = {"stage": 3}
EVERY = int(os.environ.get("ZCKPT_TEST_EVERY", "30"))


@pytest.fixture(autouse=True)
def one_thread_for_each_rank() -> None:
    torch.set_num_threads(1)


def on_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    outcomes = ThreadRanks(size).run(function)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def write(path: Path, ranks_per_file: int, **options: Any) -> Callable[[int], dict[str, torch.Tensor]]:
    """Returns what each rank does: it writes a checkpoint. Its value is what it has written."""

    def run(rank: int) -> dict[str, torch.Tensor]:
        engine = ReferenceEngine(SHAPES, frozen=("few",))
        engine.train(1)
        state = {"rank": rank, "more": torch.full((3,), rank)}
        options.update(budget=ONE_THREAD, rank_state=state, ranks_per_file=ranks_per_file)
        zckpt.write(engine, path, **options)
        return tensors_of(engine)

    return run


def restored(path: Path) -> Callable[[int], dict[str, torch.Tensor]]:
    def run(rank: int) -> dict[str, torch.Tensor]:
        engine = ReferenceEngine(SHAPES, frozen=("few",), seed=1)
        zckpt.restore(engine, path, budget=ONE_THREAD)
        return tensors_of(engine)

    return run


def files(path: Path) -> set[str]:
    """Returns the paths of the data files and digest tables that have a byte."""
    (data,) = path.glob("data-*")
    found = data.glob("rank-*/*")
    return {str(file.relative_to(data)) for file in found if file.stat().st_size}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of six ranks, each with files of its own, and one with files of four and of two ranks."""
    path = tmp_path_factory.mktemp("files") / "run"
    before, after = on_ranks(6, write(path / "own", 1)), on_ranks(6, write(path / "common", 4))
    assert all(map(same_all, after, before))
    return path


def test_the_first_rank_of_each_group_has_the_files(run: Path) -> None:
    parts = ("master", "exp_avg", "exp_avg_sq", "host.state", "param")
    common = {f"rank-{rank:05}/{part}.safetensors" for rank in (0, 4) for part in parts}
    common.remove("rank-00004/param.safetensors")
    own = {f"rank-{rank:05}/{name}" for rank in range(6) for name in ("buffer.safetensors", "digests.bin")}
    assert files(run / "common") == common | own
    assert len(files(run / "own")) == 6 * 7 - 2  # ranks 4 and 5 have nothing of "few"


def test_only_ranks_of_one_host_write_to_one_file(tmp_path: Path) -> None:
    def host() -> str:
        return "ab"[int(threading.current_thread().name.removeprefix("rank-")) % 2]

    with mock.patch("zckpt.checkpoint.writing.prepare.linux.boot_id", host):
        on_ranks(5, write(tmp_path / "c", 2))
    masters = {path.partition("/")[0] for path in files(tmp_path / "c") if path.endswith("master.safetensors")}
    assert masters == {"rank-00000", "rank-00001", "rank-00004"}  # of the ranks 0 and 2, 1 and 3, and 4


def test_every_reader_finds_the_same_values(run: Path) -> None:
    assert zckpt.validate(run / "common", level="digests").ok
    own, common = zckpt.open(run / "own"), zckpt.open(run / "common")
    tensors = own.load("*")
    assert same_all(common.load("*"), tensors)
    states: list[Any] = [common.client_rank_state(rank) for rank in range(6)]
    assert [(state["rank"], state["more"].tolist()) for state in states] == [(rank, [rank] * 3) for rank in range(6)]
    reader = Reader(run / "common")
    assert bytes(reader.load("master/matrix")) == tensors["master/matrix"].numpy().tobytes()


@pytest.mark.filterwarnings("ignore:each of the 6 ranks")
@pytest.mark.parametrize("size", [6, 4])
def test_it_is_restored_like_any_other(run: Path, size: int) -> None:
    expected = on_ranks(size, restored(run / "own"))
    assert all(map(same_all, on_ranks(size, restored(run / "common")), expected))


def test_what_is_lost_beside_the_data_is_rebuilt(run: Path, tmp_path: Path) -> None:
    zckpt.cp(run / "common", tmp_path / "c")
    tensors = zckpt.open(run / "own").load("master/*")
    for lost in ("digests.bin", "manifest.msgpack"):
        for file in (tmp_path / "c").rglob(lost):
            file.unlink()
        if lost == "manifest.msgpack":
            assert not zckpt.gc(tmp_path / "c").removed
        zckpt.repair(tmp_path / "c")
        assert zckpt.validate(tmp_path / "c").ok
        assert same_all(zckpt.open(tmp_path / "c").load("master/*"), tensors)


def test_files_of_one_rank_are_reused_and_those_of_several_are_not(tmp_path: Path) -> None:
    for name in "abc":
        on_ranks(2, write(tmp_path / name, 1 if name == "a" else 2, overwrite=True))
    links = {file.name for file in (tmp_path / "b").rglob("*") if file.stat().st_nlink > 1 and file.is_file()}
    assert links == set()
    assert zckpt.validate(tmp_path / "c").ok


def test_object_stores_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.memory_store import MemoryStore
    from zckpt.storage.schemes import SCHEMES

    monkeypatch.setitem(SCHEMES, "memory", MemoryStore)
    engine = ReferenceEngine()
    with pytest.raises(zckpt.UnsupportedError, match=r"not in a file system.*\n.*copy_to"):
        zckpt.write(engine, "memory://run/a", ranks_per_file=2)
    wrong: Any
    for wrong in (0, -1, 1.5, True, None, "2", 1 << 63):
        with pytest.raises(ValueError, match="ranks_per_file must be a whole number from 1 to"):
            zckpt.write(engine, tmp_path / "a", ranks_per_file=wrong)


def test_ranks_that_disagree_about_a_tensor_are_both_named(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        state = {"a": torch.ones(1000 + (rank == 2)), "b": torch.zeros(3)}
        zckpt.write_state_dict(state, tmp_path / "c", budget=ONE_THREAD, ranks_per_file=4)

    for outcome in ThreadRanks(4).run(run):
        assert "[1001] on rank 2, F32 [1000] on rank 0" in str(outcome.error)


def fail_to_write(path: str) -> list[tuple[str, str]]:
    """Returns the errors of this rank if an operation fails on rank 1, and then if one fails on rank 0."""
    errors = []
    for who, fault in (
        (1, Fault(BROKEN, names=("write",), path="master")),
        (1, Fault(BROKEN, names=("sync",), path="master")),
        (1, Fault(NO_SPACE, names=("open_range",))),
        (0, Fault(NO_SPACE, names=("make",))),
        (0, Fault(BROKEN, names=("put_new",))),
    ):
        torch.distributed.barrier()
        own = fault if torch.distributed.get_rank() == who else None
        with engines_are_adapters(), faulty(own), pytest.raises(zckpt.ZckptError) as caught:
            zckpt.write(Half(1), path, ranks_per_file=2)
        errors.append((type(caught.value).__name__, str(caught.value)))
        torch.distributed.barrier()
        assert not os.path.exists(path)
    return errors


def test_a_failure_of_one_rank_is_one_of_all(cluster: Cluster, tmp_path: Path) -> None:
    of_ranks = cluster.run(fail_to_write, 2, str(tmp_path / "c"))
    for number, who in enumerate((1, 1, 1, 0, 0)):
        assert of_ranks[who][number][0] != "RankError"
        name, said = of_ranks[1 - who][number]
        assert name == "RankError"
        assert f"rank {who} failed to write" in said


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_killed_at_any_operation_leaves_only_whole_checkpoints(cluster: Cluster, who: int) -> None:
    at = 7 * who % EVERY
    while True:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            run = Path(directory) / "run"
            with engines_are_adapters():
                zckpt.write(Engine(seed=5, step=5), run / "old")
            outcomes = cluster.outcomes(write_and_die, 2, str(run / "new"), who, at=at, ranks_per_file=2)
            committed = check_after(run, "new", "old")
            check_next(run, "new")
        if outcomes[who].signal is None:
            assert committed
            break
        other = outcomes[1 - who]
        assert other.value is not None, other.error
        _, message, rank = other.value
        assert committed if not message else rank == who
        at += EVERY


@pytest.mark.parametrize("disks", [["a"] * 3, ["a", "a", "b"]], ids=" ".join)
def test_a_run_of_deepspeed_goes_on_alike(cluster: Cluster, tmp_path: Path, disks: list[str]) -> None:
    arguments = [disks, str(tmp_path)]
    through = cluster.run(
        on_disks, 3, *arguments, write_and_go_on, "disk://run/c", SETUP, ranks_per_file=2, node_local=True
    )
    assert "rank-00000/master.safetensors" in files(tmp_path / "a" / "run" / "c")
    assert "rank-00001/master.safetensors" not in files(tmp_path / "a" / "run" / "c")
    resumed = cluster.run(on_disks, 3, *arguments, restore_and_go_on, "disk://run", SETUP, 0)
    assert_goes_on_alike(through, resumed)


def on_disks(disks: list[str], root: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with own_disk(os.path.join(root, disks[int(os.environ["RANK"])])):
        return function(*args, **options)


def save_in_background(path: str) -> dict[str, Any]:
    engine = zckpt.attach(make_engine(stage=2), background=True, ranks_per_file=2)
    engine.save_checkpoint(path)
    zckpt.wait()
    return {"ok": zckpt.validate(path).ok}


def test_an_attached_engine_writes_in_the_background(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(save_in_background, 2, str(tmp_path)) == [{"ok": True}] * 2
    (checkpoint,) = tmp_path.glob("global_step*")
    assert "rank-00001/master.safetensors" not in files(checkpoint)
