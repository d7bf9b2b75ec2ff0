"""A job may have several models, each on some of the job's ranks.

Only the ranks of a model write and restore its engine, and the models do not affect each other.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zckpt
from tests.support import reference_engine
from tests.support.forks import fork, result_of
from tests.support.models import make_engine, train
from tests.support.patience import give_up_after
from tests.support.runs import assert_same, tensors_of, weights
from tests.support.slow_writes import held
from zckpt.checkpoint import background
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.engines import group_of
from zckpt.offloading.files import write_out
from zckpt.ranks import heartbeat as life
from zckpt.ranks.collectives import BACKGROUND, Ranks
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.cluster import Cluster


def own_group(all_members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    groups = [dist.new_group(list(members)) for members in all_members]
    return next(group for group, members in zip(groups, all_members, strict=True) if dist.get_rank() in members)


def talk_in_groups(directory: str) -> list[Any]:
    """Calls ``Ranks`` for the groups {1, 0} and {2, 3} of a job of four ranks.

    The first group makes more calls, and loses a rank. Returns the values and the errors that this rank gets.
    """
    give_up_after(4)
    given_up = Path(directory, "given up")
    is_in_first = dist.get_rank() < 2
    group = own_group([[1, 0], [2, 3]])  # torch sorts the ranks of a group
    ranks = Ranks(group)

    def hang() -> None:
        while ranks.rank == 1 and not given_up.exists():
            time.sleep(0.01)

    results: list[Any] = [ranks.rank, ranks.size, ranks.decide(dist.get_rank, list, "share")]
    if is_in_first:
        assert Ranks(group, channel=BACKGROUND).agree("the same", "words") == "the same"
        with pytest.raises(zckpt.RankError) as caught:
            ranks.together(hang, "hang")
        given_up.touch()
        results.append(caught.value.rank)
        if ranks.rank == 0:  # makes the next call before rank 1, which it has given up
            with pytest.raises(zckpt.RankError) as caught:
                Ranks(group)
            results.append(caught.value.rank)
    else:
        with pytest.raises((zckpt.RankError, ZeroDivisionError)) as failed:
            ranks.together(lambda: 1 // (3 - dist.get_rank()), "divide")
        results.append(getattr(failed.value, "rank", None))
        results.append(str(failed.value))
    dist.barrier()
    results.append(Ranks(group).decide(lambda: "again", list, "share"))
    results.append(Ranks().decide(lambda: "all", list, "share"))
    return results


def test_groups_of_ranks_do_not_affect_each_other(cluster: Cluster, tmp_path: Path) -> None:
    rank_0, rank_1, rank_2, rank_3 = cluster.run(talk_in_groups, 4, str(tmp_path))
    assert rank_0 == [0, 2, [0, 1], 1, 1, ["again"] * 2, ["all"] * 4]
    assert rank_1 == [1, 2, [0, 1], 1, ["again"] * 2, ["all"] * 4]
    assert rank_2[:4] == [0, 2, [2, 3], 3]
    assert rank_2[4].startswith("rank 3 failed to divide: ZeroDivisionError")
    assert rank_3[:4] == [1, 2, [2, 3], None]
    assert rank_2[5:] == rank_3[5:] == [["again"] * 2, ["all"] * 4]


class Mpu:
    """Lets DeepSpeed make an engine over the ranks of one group."""

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        self.group = own_group(members)
        self.alone = own_group([[rank] for rank in range(dist.get_world_size())])

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_data_parallel_world_size(self) -> int:
        return self.group.size()

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def two_models(path: str, members: Sequence[Sequence[int]], stage: int) -> tuple[int, int, bool]:
    """Writes and restores each model at its own pace, with a path of its own.

    Returns the step of the checkpoint, the size of the model's group, and whether the restored state is right.
    """
    give_up_after(300)
    mpu = Mpu(members)
    engine = make_engine(stage=stage, model="odd", mpu=mpu)
    number = next(n for n, ranks in enumerate(members) if dist.get_rank() in ranks)
    path = f"{path}/{number}"
    train(engine, 1 + number)
    for _ in range(1 + number):
        zckpt.write(engine, f"{path}/now", overwrite=True)
    zckpt.write(engine, f"{path}/later", background=True)
    if number == 0:
        zckpt.wait()
    before = tensors_of(engine)
    train(engine, 1, 100)
    zckpt.restore(engine, f"{path}/later")
    after = tensors_of(engine)
    group = group_of(engine)
    size = 0 if group is None else group.size()
    return zckpt.open(path).step, size, all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("members", "stage"),
    [
        ([[0], [1]], 2),
        pytest.param([[0, 1], [2, 3]], 2, marks=pytest.mark.matrix),
        pytest.param([[0, 2], [1, 3]], 3, marks=pytest.mark.matrix),
    ],
)
def test_two_models_in_one_job_are_written_and_restored(
    cluster: Cluster, tmp_path: Path, members: list[list[int]], stage: int
) -> None:
    results = cluster.run(two_models, sum(map(len, members)), str(tmp_path), members, stage)
    for number, ranks in enumerate(members):
        for rank in ranks:
            assert results[rank] == (1 + number, len(ranks), True)
        assert zckpt.open(tmp_path / str(number)).world_size == len(ranks)
        assert zckpt.validate(tmp_path / str(number)).ok


def reach_a_limit(limit: str) -> tuple[str, int | None]:
    """Makes rank 1 unable to connect to the other ranks. Returns the message and the rank of the error."""
    give_up_after(300)
    if os.environ["RANK"] == "1":
        if limit == "files":
            descriptors = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors + 1, 1 << 12))
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    try:
        Ranks()
    except zckpt.RankError as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 12, 1 << 12))
        return str(error), error.rank
    return "connected", None


@pytest.mark.parametrize(("limit", "named"), [("files", "ulimit -n"), ("interface", "GLOO_SOCKET_IFNAME")])
def test_a_limit_of_the_system_is_named(cluster: Cluster, limit: str, named: str) -> None:
    for message, rank in cluster.run(reach_a_limit, 2, limit):
        assert rank == 1, message
        assert named in message


def come_late() -> str:
    """Rank 1 is late twice in the first call, rank 0 is late in the second call, and rank 2 takes long in it. Each of
    them waits until another rank has printed a message about it."""
    life.PERIOD_SECONDS, life.WAITING_SECONDS = 0.1, 2
    number = dist.get_rank()
    dist.barrier()
    for late in (1, 0):
        if number == late:
            wait_for_messages(1 - late, 1)
        ranks = Ranks(call="zckpt.write")
        ranks.together(lambda: None, "begin")
        dist.barrier()
        if late:
            if number == 1:
                wait_for_messages(0, 2)
            ranks.together(lambda: None, "begin")
    ranks.together(lambda: wait_for_messages(0, 3) if number == 2 else None, "write")
    return ""


def wait_for_messages(rank: int, count: int) -> None:
    """Waits until a rank has printed so many messages."""
    output = Path(os.readlink("/proc/self/fd/2")).with_name(f"{rank}.out")
    while len(messages_in(output.read_text())) < count:
        time.sleep(0.01)


def messages_in(output: str) -> list[str]:
    """Returns the messages of zckpt, except for those about all ranks. If the machine is too busy to let any rank go on
    for two seconds, a rank reports that it waits for all of them."""
    lines = [line for line in output.splitlines() if line.startswith("zckpt: ")]
    return [line for line in lines if "for 3 ranks (0, 1, 2)" not in line]


def test_a_rank_prints_which_rank_it_waits_for(cluster: Cluster) -> None:
    outcomes = cluster.outcomes(come_late, 3)
    assert not any(outcome.failed for outcome in outcomes), outcomes
    lines = [messages_in(outcome.output) for outcome in outcomes]
    first, again, third = lines[0]
    assert "rank 0 has waited for rank 1 for 2 s, in zckpt.write (to begin). Every rank must call zckpt.write" in first
    assert "rank 0 has waited for rank 1 for 2 s, in zckpt.write (to begin)" in again
    assert "rank 0 has waited for rank 2 for 2 s, in zckpt.write (to write)" in third
    (fourth,) = lines[1]
    assert "rank 1 has waited for rank 0 for 2 s" in fourth
    assert lines[2] == []


def call_another(path: str) -> str:
    os.environ["ZCKPT_RANK_TIMEOUT"] = "300"
    engine = make_engine()
    zckpt.write(engine, path)
    with pytest.raises(zckpt.RankError) as refused:
        zckpt.validate(path) if dist.get_rank() == 0 else zckpt.restore(engine, path)
    zckpt.restore(engine, path)
    return str(refused.value)


def test_the_error_of_ranks_that_call_different_functions_names_the_functions(cluster: Cluster, tmp_path: Path) -> None:
    for message in cluster.run(call_another, 2, str(tmp_path / "c")):
        assert "every rank must make the same calls of zckpt" in message
        assert "'zckpt.validate, to " in message
        assert "'zckpt.restore, to " in message


MODELS = {"actor": [0, 2], "critic": [1]}
"""The ranks of each model."""


class Share:
    """An object that DeepSpeed calls an mpu. It names the ranks of one model, all of which are data parallel."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_data_parallel_world_size(self) -> int:
        return self.group.size()

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> Any:
        return self.alone

    alone: Any = None


def each_model_alone(directory: str) -> None:
    rank = dist.get_rank()
    groups = {name: dist.new_group(ranks) for name, ranks in MODELS.items()}
    alone = [dist.new_group([number]) for number in range(dist.get_world_size())]
    name = next(name for name, ranks in MODELS.items() if rank in ranks)
    share = Share(groups[name])
    share.alone = alone[rank]
    assert group_of(share) is None
    for stage in range(4):
        # At stage 3, DeepSpeed itself waits for all ranks of the job while it makes an engine.
        if name == "actor" or stage in (0, 3):
            write_and_restore(os.path.join(directory, f"{name}-{stage}"), stage, share, MODELS[name])


def write_and_restore(path: str, stage: int, share: Share, ranks: list[int]) -> None:
    setup: dict[str, Any] = {"stage": stage, "model": "gpt2", "frozen": True, "groups": True, "mpu": share}
    engine = make_engine(**setup)
    group = group_of(engine)
    assert group is not None
    assert dist.get_process_group_ranks(group) == ranks
    steps = 1 + len(ranks)
    train(engine, steps)
    zckpt.write(engine, path)
    checkpoint = zckpt.open(path)
    assert (checkpoint.step, checkpoint.world_size) == (steps, len(ranks))
    before = tensors_of(engine)
    other = make_engine(**setup, seed=1)
    zckpt.restore(other, path, rng=True)
    assert_same(tensors_of(other), before)
    assert_same(weights(other), weights(engine))
    assert train(other, 1, steps) == train(engine, 1, steps)
    assert_same(tensors_of(other), tensors_of(engine))


def test_each_model_is_written_and_restored_by_its_own_ranks(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(each_model_alone, 3, str(tmp_path))


def beside_another_group(directory: str) -> None:
    """Both ranks write an engine in the background, and cannot finish this while rank 0 uses an engine of its own."""
    give_up_after(60)
    alone, committed = own_group([[0], [1]]), list[str]()
    engine = ReferenceEngine()
    engine.train(1)
    with held("both") as go_on:
        pending = zckpt.write(engine, f"{directory}/both/step1", background=True)
        if dist.get_rank() == 0:
            own = ReferenceEngine(group=alone, seed=1)
            own.train(1)
            before = reference_engine.tensors_of(own)
            path = zckpt.write(own, f"{directory}/own/step1")
            zckpt.write(own, f"{directory}/own/step2", background=True)
            background.after_commit(lambda: committed.append("all"))
            background.after_commit(lambda: committed.append("own"), Ranks(alone))
            zckpt.offload(own, f"{directory}/scratch", background=True)
            zckpt.reload(own)
            own.train(1)
            zckpt.restore(own, path)
            assert_same(reference_engine.tensors_of(own), before)
            assert committed == ["own"]
        assert not pending.done
        dist.barrier()  # Rank 1 comes here at once.
        go_on()
        zckpt.wait()
    assert pending.state == "done"
    assert committed == (["own", "all"] if dist.get_rank() == 0 else [])


@pytest.mark.offload
def test_ranks_do_not_wait_for_the_background_of_other_ranks(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(beside_another_group, 2, str(tmp_path))
    for name in ("both/step1", "own/step1", "own/step2"):
        assert zckpt.validate(tmp_path / name).ok


def one_for_each_pair(directory: str) -> tuple[str, list[str], list[bool]]:
    """Each rank writes two engines in the background, each together with one other rank. Two of the three writes fail.
    Returns the error of this rank and its notes, and which writes have ended after it."""
    give_up_after(60)
    groups = {name: dist.new_group(list(map(int, name))) for name in ("12", "02", "01")}
    rank, write_data_files = dist.get_rank(), RankWrite.write_data_files

    def fail(write: RankWrite, *arguments: Any) -> bytes:
        if os.path.basename(str(write.store.location)) in ("12", "02") and rank == 2:
            raise zckpt.StorageError("the disk is broken")
        return write_data_files(write, *arguments)

    with mock.patch.object(RankWrite, "write_data_files", fail), held("01") as go_on:
        pending = [
            zckpt.write(ReferenceEngine(group=group), f"{directory}/{name}", background=True)
            for name, group in groups.items()
            if str(rank) in name
        ]
        threading.Timer(1, go_on).start()
        with pytest.raises(zckpt.ZckptError) as caught:
            zckpt.wait()
        ended = [write.done for write in pending]
        zckpt.wait()
    return str(caught.value), getattr(caught.value, "__notes__", []), ended


def test_wait_waits_for_the_work_of_all_groups_and_raises_all_errors(cluster: Cluster, tmp_path: Path) -> None:
    results = cluster.run(one_for_each_pair, 3, str(tmp_path))
    assert [len(notes) for _, notes, _ in results] == [0, 0, 1]
    for error, notes, ended in results:
        assert all("the disk is broken" in text for text in (error, *notes))
        assert ended == [True, True]
    assert os.listdir(tmp_path) == ["01"] or sorted(os.listdir(tmp_path)) == ["01", "latest"]


def offload_shared_memory(directory: str) -> None:
    """Rank 0 writes a second engine that has the same tensors, while both ranks offload the first one."""
    give_up_after(60)
    alone = own_group([[0], [1]])
    engine = ReferenceEngine()
    engine.train(1)
    go_on = threading.Event()

    def wait_and_write_out(*arguments: Any, **options: Any) -> None:
        go_on.wait()
        write_out(*arguments, **options)

    with mock.patch("zckpt.offloading.offload.write_out", wait_and_write_out):
        moved = zckpt.offload(engine, f"{directory}/scratch", background=True)
        threading.Timer(1, go_on.set).start()
        if dist.get_rank() == 0:
            second = ReferenceEngine(group=alone)
            second.shapes = {name: tuple(tensor.shape) for name, tensor in engine.tensors["param"].items()}
            second.ranges = {name: (0, tensor.numel()) for name, tensor in engine.tensors["param"].items()}
            second.tensors = engine.tensors
            zckpt.write(second, f"{directory}/c")
            assert moved._pending is not None
            assert moved._pending.done
        moved.wait()
    zckpt.reload(engine)
    if dist.get_rank() == 0:
        written = zckpt.open(f"{directory}/c").load("master/*")
        assert_same(written, {f"master/{name}": tensor for name, tensor in engine.tensors["master"].items()})


@pytest.mark.offload
def test_a_write_waits_until_an_offload_of_other_ranks_has_moved_memory(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(offload_shared_memory, 2, str(tmp_path))


def call_in_a_fork(path: str) -> list[str]:
    """Makes calls for which several ranks are needed in a forked process, and then here. Returns the errors."""
    give_up_after(60)
    engine = ReferenceEngine()
    zckpt.write(engine, f"{path}/step0")
    calls: list[Callable[[], object]] = [
        lambda: zckpt.write(engine, f"{path}/other"),
        lambda: zckpt.restore(engine, f"{path}/step0"),
        lambda: zckpt.reload(engine),
    ]

    def errors() -> list[str]:
        signal.alarm(60)
        raised = []
        for call in calls:
            with pytest.raises(zckpt.RankError) as caught:
                call()
            raised.append(str(caught.value))
        return raised

    raised = result_of(fork(errors))
    zckpt.write(engine, f"{path}/step1")
    return raised


@pytest.mark.linux
def test_a_forked_process_is_no_rank(cluster: Cluster, tmp_path: Path) -> None:
    for errors in cluster.run(call_in_a_fork, 2, str(tmp_path)):
        assert len(errors) == 3
        assert all("was forked from a rank" in error for error in errors)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step0", "step1"]
