"""Each machine writes the files of its own ranks to a disk of its own, and all machines commit together."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.own_disks import own_disk
from tests.support.runs import assert_goes_on_alike, restore_and_go_on, write_and_go_on
from zckpt.checkpoint.restoring.peers import Peers
from zckpt.checkpoint.writing.machines import Machines
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.ranks.groups import Group
from zckpt.storage.local_store import Temporary
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster

SETUP: dict[str, Any] = {"stage": 2}
TWO_MACHINES = ["a", "a", "b", "b"]
"""The names of the disks of four ranks on two machines."""


def on_disks(disks: list[str], root: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a function on a rank that sees only the disk of its machine."""
    with own_disk(os.path.join(root, disks[int(os.environ["RANK"])])):
        return function(*args, **options)


def manifests(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("*/run/*/manifest.msgpack")}


@pytest.mark.parametrize("disks", [TWO_MACHINES, ["a", "b", "b"]], ids=" ".join)
def test_a_resume_on_the_same_machines_reads_local_files_only(
    cluster: Cluster, tmp_path: Path, disks: list[str]
) -> None:
    run = [disks, str(tmp_path)]
    through = cluster.run(on_disks, len(disks), *run, write_and_go_on, "disk://run/c", SETUP, node_local=True)
    written = manifests(tmp_path)
    assert {*written} == {"a/run/c/manifest.msgpack", "b/run/c/manifest.msgpack"}
    assert len({*written.values()}) == 1
    for disk in "ab":
        (data,) = (tmp_path / disk / "run" / "c").glob("data-*")
        ranks = [rank for rank, name in enumerate(disks) if name == disk]
        assert sorted(os.listdir(data)) == ["index.bin", *(f"rank-{rank:05}" for rank in ranks)]
        assert (tmp_path / disk / "run" / "latest").read_text() == "c\n"
        assert sorted(os.listdir(tmp_path / disk / "run" / "c")) == [data.name, "manifest.msgpack"]
    resumed = cluster.run(on_disks, len(disks), *run, restore_without_peers, "disk://run", SETUP, 0)
    assert_goes_on_alike(through, resumed)


@contextmanager
def only_shared_values_from_peers() -> Iterator[None]:
    """Inside this block, only values that all ranks share, which are stored once, may come from another rank."""
    read = Peers.read

    def look(peers: Peers, holder: int, path: str, *others: Any) -> int:
        assert path.endswith(("/rank-00000/host.state.safetensors", "/rank-00000/digests.bin"))
        return read(peers, holder, path, *others)

    with mock.patch.object(Peers, "read", look):
        yield


def restore_without_peers(*args: Any) -> dict[str, Any]:
    with only_shared_values_from_peers():
        return restore_and_go_on(*args)


@pytest.mark.parametrize("moved", [["b", "b", "a", "a"], ["a", "b", "a", "b"]], ids=" ".join)
def test_ranks_that_have_moved_get_their_bytes_from_the_ranks_that_have_them(
    cluster: Cluster, tmp_path: Path, moved: list[str]
) -> None:
    run = str(tmp_path)
    through = cluster.run(on_disks, 4, TWO_MACHINES, run, write_and_go_on, "disk://run/c", SETUP, node_local=True)
    resumed = cluster.run(on_disks, 4, moved, run, restore_and_go_on, "disk://run", SETUP, 0)
    assert_goes_on_alike(through, resumed)


def weights(path: str, ranks: int) -> tuple[list[torch.Tensor], str]:
    engine = make_engine(**SETUP, seed=3)
    zckpt.restore(engine, path)
    return [parameter.detach().clone() for parameter in engine.module.parameters()], ""


@pytest.mark.parametrize("disks", [["a", "b"], ["b", "b", "a"], ["b", "c", "a"]], ids=" ".join)
def test_another_number_of_ranks_and_a_new_machine(cluster: Cluster, tmp_path: Path, disks: list[str]) -> None:
    """The machine c is new, and has nothing on its disk."""
    run = str(tmp_path)
    cluster.run(on_disks, 4, TWO_MACHINES, run, write_and_go_on, "disk://run/c", SETUP, node_local=True)
    shutil.copytree(tmp_path / "a" / "run", tmp_path / "all" / "run")
    shutil.copytree(tmp_path / "b" / "run", tmp_path / "all" / "run", dirs_exist_ok=True)
    assert zckpt.validate(tmp_path / "all" / "run").ok
    ((expected, _),) = cluster.run(weights, 1, str(tmp_path / "all" / "run"), 1)
    for restored, _ in cluster.run(on_disks, len(disks), disks, run, weights, "disk://run", len(disks)):
        assert all(torch.equal(a, b) for a, b in zip(restored, expected, strict=True))


def failing_restore(path: str) -> str:
    engine = make_engine(**SETUP)
    with pytest.raises(zckpt.ZckptError) as caught:
        zckpt.restore(engine, path)
    return str(caught.value)


def write_twice(path: str) -> None:
    engine = make_engine(**SETUP)
    for name in ("older", "newer"):
        train(engine, 1)
        zckpt.write(engine, f"{path}/{name}", node_local=True)


def test_a_machine_that_is_gone_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(on_disks, 2, ["a", "b"], str(tmp_path), write_twice, "disk://run")
    (data,) = (tmp_path / "b" / "run" / "newer").glob("data-*")
    shutil.rmtree(data)
    for path in ("disk://run", "disk://run/newer"):
        for message in cluster.run(on_disks, 2, ["a", "b"], str(tmp_path), failing_restore, path):
            assert "with ranks 1" in message
            assert "F001" in message
            assert "whole, newest first: older" in message


def test_one_process_says_which_machines_have_the_files(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(on_disks, 2, ["a", "b"], str(tmp_path), write_twice, "disk://run")
    run, host = tmp_path / "a" / "run", socket.gethostname()
    machines = re.escape(f"({host} with ranks 0 and {host} with ranks 1): zckpt cp on all of them")
    with pytest.raises(zckpt.MissingFileError, match=f"{machines}.*newest first: {run}/older"):
        zckpt.open(run).load()
    with pytest.raises(zckpt.MissingFileError, match=f"no checkpoint .*{machines}"):
        zckpt.open([run, tmp_path / "nothing"])
    messages = {finding.message for finding in zckpt.validate(run, level="structure").findings}
    assert messages == {f"the file is missing; it was on a disk of {host} with ranks 1"}


def failing_write(path: str, fails_on: int) -> str:
    engine = make_engine(**SETUP)
    train(engine, 2)
    refused = zckpt.StorageError("refused") if int(os.environ["RANK"]) == fails_on else Temporary.commit
    commit = mock.patch.object(Temporary, "commit", autospec=True, side_effect=refused)
    with pytest.raises(zckpt.ZckptError) as caught, commit:
        zckpt.write(engine, path, node_local=True)
    return type(caught.value).__name__


def overwrite_without_an_answer(path: str) -> None:
    """Rank 1 does not hear that all ranks have prepared, and rank 0 commits."""
    engine = make_engine(**SETUP)
    train(engine, 3)
    zckpt.write(engine, path, node_local=True)
    train(engine, 1, 1)
    ask = Group.ask

    def lose_the_answer(group: Group, message: bytes) -> bytes:
        answer = ask(group, message)
        if group.lives._doing == "commit":
            raise zckpt.RankError("lost")
        return answer

    on_1 = mock.patch.object(Group, "ask", lose_the_answer) if os.environ["RANK"] == "1" else nullcontext()
    with on_1, pytest.raises(zckpt.RankError):
        zckpt.write(engine, path, node_local=True, overwrite=True)


def test_a_machine_that_does_not_hear_the_others_keeps_what_it_has_prepared(cluster: Cluster, tmp_path: Path) -> None:
    run = str(tmp_path)
    cluster.run(on_disks, 2, ["a", "b"], run, overwrite_without_an_answer, "disk://run/c")
    cluster.run(on_disks, 2, ["a", "b"], run, weights, "disk://run/c", 2)
    assert len({*manifests(tmp_path).values()}) == 1
    assert zckpt.open(tmp_path / "a" / "run" / "c").step == 4


@pytest.mark.parametrize("fails_on", [0, 1])
def test_a_commit_that_fails_on_one_machine_is_completed_by_the_next_restore(
    cluster: Cluster, tmp_path: Path, fails_on: int
) -> None:
    """The other machine has committed, so the checkpoint exists."""
    run = str(tmp_path)
    names = cluster.run(on_disks, 2, ["a", "b"], run, failing_write, "disk://run/c", fails_on)
    assert sorted(names) == ["RankError", "StorageError"]
    assert {*manifests(tmp_path)} == {f"{'ba'[fails_on]}/run/c/manifest.msgpack"}
    failed = tmp_path / "ab"[fails_on] / "run"
    cleanup = zckpt.gc(failed)
    assert (cleanup.removed, cleanup.recoverable) == ((), (str(failed / "c"),)), "nobody can tell from one machine"
    cluster.run(on_disks, 2, ["a", "b"], run, weights, "disk://run/c", 2)
    assert len(manifests(tmp_path)) == 2
    assert not list(tmp_path.rglob("*.tmp"))


def prepare_only(path: str) -> str:
    """Writes, but no machine commits what all have prepared."""
    engine = make_engine(**SETUP)

    def refuse(rank_write: RankWrite) -> None:
        rank_write._in_doubt = True
        raise zckpt.StorageError("refused")

    with mock.patch.object(RankWrite, "commit_prepared", refuse), pytest.raises(zckpt.ZckptError):
        zckpt.write(engine, path, node_local=True)
    return path


def write_again(path: str) -> int:
    zckpt.write(make_engine(**SETUP), path, node_local=True)
    return zckpt.open(path).step


def test_what_no_machine_has_committed_is_settled_only_when_all_machines_are_there(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = str(tmp_path)
    cluster.run(on_disks, 2, ["a", "b"], run, prepare_only, "disk://run/c")
    assert len(list(tmp_path.rglob("manifest.msgpack.*.tmp"))) == 2
    with pytest.raises(zckpt.CheckpointExistsError, match="another machine"), own_disk(f"{run}/a"):
        zckpt.write(ReferenceEngine(), "disk://run/c")
    with pytest.raises(zckpt.CheckpointExistsError, match="another machine"):
        zckpt.repair(tmp_path / "a" / "run" / "c")
    assert len(list(tmp_path.rglob("manifest.msgpack.*.tmp"))) == 2
    assert cluster.run(on_disks, 2, ["a", "b"], run, write_again, "disk://run/c") == [0, 0]
    assert not list(tmp_path.rglob("*.tmp"))


def test_keep_last_removes_older_checkpoints_on_every_machine(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(on_disks, 2, ["a", "b"], str(tmp_path), write_three, "disk://run")
    for disk in "ab":
        assert sorted(os.listdir(tmp_path / disk / "run")) == ["latest", "step2", "step3"]


def write_three(path: str) -> None:
    engine = make_engine(**SETUP)
    for step in (1, 2, 3):
        train(engine, 1)
        zckpt.write(engine, f"{path}/step{step}", node_local=True, keep_last=2)


def test_a_rank_checks_the_files_of_a_rank_that_sees_the_same_directory_on_another_host_if_there_is_one() -> None:
    hosts = ["x", "y", "x", "y", "x", "z", "x"]
    together = Machines.seen([(0, "")] * 7).checked_by(hosts)
    assert sorted(together) == list(range(7))
    assert sum(hosts[rank] == hosts[other] for rank, other in enumerate(together)) == 1  # four of seven ranks are on x
    apart = Machines.seen([(0, ""), (1, ""), (0, ""), (3, ""), (0, ""), (1, ""), (0, "")]).checked_by(hosts)
    assert apart == [2, 5, 4, 3, 6, 1, 0]


def test_ranks_that_share_a_directory_write_one_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_and_go_on, 2, str(tmp_path / "run" / "c"), SETUP, node_local=True)
    assert zckpt.validate(tmp_path / "run").ok
    assert "machines" not in zckpt.open(tmp_path / "run").state


def test_a_copy_gathers_the_files_of_all_machines(cluster: Cluster, tmp_path: Path) -> None:
    run = str(tmp_path)
    cluster.run(on_disks, 2, ["a", "b"], run, write_and_go_on, "disk://run/c", SETUP, node_local=True)
    for destination, keys in (("whole", None), ("part", "master/*")):
        cluster.run(on_disks, 2, ["b", "a"], run, zckpt.cp, "disk://run", str(tmp_path / destination), keys)
        assert zckpt.validate(tmp_path / destination, level="deep").ok
    assert zckpt.open(tmp_path / "whole").step == 3


def write_with_copy(path: str, copy_to: str) -> dict[str, Any]:
    result = write_and_go_on(path, SETUP, node_local=True, copy_to=copy_to)
    zckpt.wait()
    return result


def test_each_machine_copies_its_own_files_to_another_place(cluster: Cluster, tmp_path: Path) -> None:
    """Afterwards, the files of a machine that is gone are read from there."""
    run, there = str(tmp_path), str(tmp_path / "there")
    through = cluster.run(on_disks, 2, ["a", "b"], run, write_with_copy, "disk://run/c", there)
    assert zckpt.validate(there, level="deep").ok
    shutil.rmtree(tmp_path / "b")
    places = ["disk://run", there]
    assert_goes_on_alike(through, cluster.run(on_disks, 2, ["a", "b"], run, restore_and_go_on, places, SETUP, 0))


LOCAL_STORAGE = {"checkpoint": {"use_node_local_storage": True}}


def save_and_go_on(run: str) -> list[float]:
    engine = zckpt.attach(make_engine(**SETUP, config=LOCAL_STORAGE))
    train(engine, 2)
    engine.save_checkpoint(run, client_state={"epoch": 7})
    return train(engine, 2, 2)


def load_and_go_on(run: str) -> list[float]:
    engine = zckpt.attach(make_engine(**SETUP, config=LOCAL_STORAGE, seed=1))
    path, client_state = engine.load_checkpoint(run)
    assert path is not None
    assert client_state["epoch"] == 7
    return train(engine, 2, 2)


@pytest.mark.parametrize("disks", [["a", "b", "b"], ["c", "a", "b"]], ids=" ".join)
def test_an_attached_engine_follows_deepspeeds_configuration(
    cluster: Cluster, tmp_path: Path, disks: list[str]
) -> None:
    """At the load, rank 0 may be on a new machine, c, with an empty disk."""
    run = str(tmp_path)
    expected = cluster.run(on_disks, 3, ["a", "a", "b"], run, save_and_go_on, "disk://run")
    assert len(manifests(tmp_path)) == 2
    assert cluster.run(on_disks, 3, disks, run, load_and_go_on, "disk://run") == expected


def validation(path: str) -> str:
    with only_shared_values_from_peers():
        return zckpt.validate(path, level="deep").to_json()


def test_ranks_validate_what_their_machines_have(cluster: Cluster, tmp_path: Path) -> None:
    """The machines have other node ranks than when they wrote, and c is new."""
    run, moved = str(tmp_path), ["b", "c", "a"]
    cluster.run(on_disks, 3, ["a", "b", "b"], run, write_and_go_on, "disk://run/c", SETUP, node_local=True)
    shutil.copytree(tmp_path / "a" / "run", tmp_path / "all" / "run")
    shutil.copytree(tmp_path / "b" / "run", tmp_path / "all" / "run", dirs_exist_ok=True)
    alone = zckpt.validate(tmp_path / "all" / "run", level="deep")
    reports = cluster.run(on_disks, 3, moved, run, validation, "disk://run")
    assert reports == reports[:1] * 3
    report = json.loads(reports[0])
    assert report["findings"] == []
    assert report["files"] == alone.files
    assert alone.bytes_read < report["bytes_read"] < alone.bytes_read * 1.01, "two machines have an index"

    (data,) = (tmp_path / "b" / "run" / "c").glob("data-*")
    for path in ("rank-00001/exp_avg.safetensors", "index.bin", "../manifest.msgpack"):
        raw = bytearray((data / path).read_bytes())
        raw[-1] ^= 1
        (data / path).write_bytes(raw)
    (data / "rank-00002" / "exp_avg.safetensors").unlink()
    reports = cluster.run(on_disks, 3, moved, run, validation, "disk://run/c")
    assert reports == reports[:1] * 3
    host, exp_avg = socket.gethostname(), "exp_avg.safetensors"
    assert [
        (found["rule"], found["file"].removeprefix(f"{data.name}/"), found["message"])
        for found in json.loads(reports[0])["findings"]
    ] == [
        ("I002", "index.bin", f"the chunk is damaged (on {host})"),
        ("D003", f"rank-00001/{exp_avg}", f"the data is damaged (on {host})"),
        ("F001", f"rank-00002/{exp_avg}", f"the file is missing; it was on a disk of {host} with ranks 1, 2"),
        ("M003", "disk://run/c/manifest.msgpack", f"the manifest is damaged (on {host})"),
    ]


def test_a_machine_whose_manifest_is_lost_is_found_by_a_validation(cluster: Cluster, tmp_path: Path) -> None:
    run = str(tmp_path)
    cluster.run(on_disks, 2, ["a", "b"], run, write_and_go_on, "disk://run/c", SETUP, node_local=True)
    (tmp_path / "b" / "run" / "c" / "manifest.msgpack").unlink()
    first, second = cluster.run(on_disks, 2, ["a", "b"], run, validation, "disk://run/c")
    assert first == second
    assert "manifest.msgpack" in first
    assert "the file is missing" in first
