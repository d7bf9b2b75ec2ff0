"""Several ranks copy a checkpoint together, each the files that it has written, and fail together."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

import zckpt
from tests.support.endings import ended, ends, execute, started
from tests.support.plain_engine import everything
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

SCRIPT = """
import json, os, sys, threading, warnings
import torch.distributed as dist
import zckpt
from tests.support.faults import NO_SPACE, Fault, faulty
from tests.support.slow_writes import held
from tests.support.waiting import wait_until
from zckpt.checkpoint import background
from zckpt.testing import ReferenceEngine
from zckpt.checkpoint.tiers import queue

near, far = sys.argv[1:3]
dist.init_process_group("gloo")
rank = dist.get_rank()
engine = ReferenceEngine()

def write(**options):
    engine.train(1)
    return zckpt.write(engine, f"{near}/step{engine.steps}", copy_to=far, **options)
"""

TOGETHER = """
with faulty() as operations:
    write(background=True)
    zckpt.wait()
print(json.dumps([os.path.relpath(file, far) for name, file in operations.done if name == "create" and far in file]))
dist.destroy_process_group()
"""


def test_each_rank_copies_the_files_that_it_has_written(cluster: Cluster, tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for rank, (out, _) in enumerate(cluster.run(execute, 2, SCRIPT + TOGETHER, near, far, init=False)):
        copied = json.loads(out)
        assert copied
        assert all(f"/rank-0000{rank}/" in name for name in copied)
    assert everything(far) == everything(near)


LATE = """
with held("far") as go_on:
    write()
    wait_until(lambda: queue.all_uploads()[0]._under_way != [])
    dist.barrier()
    if rank == 1:  # This rank is late: rank 0 has three checkpoints that wait before this one has any.
        add, later = queue.Uploads.add, []
        queue.Uploads.add = lambda uploads, upload: later.append((uploads, upload))
    for _ in range(3):
        write(keep_last=1)
    dist.barrier()
    go_on()
    if rank == 1:
        wait_until(lambda: queue.all_uploads()[0]._under_way == [])
        for uploads, upload in later:
            add(uploads, upload)
zckpt.wait()
"""


def test_rank_0_chooses_which_checkpoint_is_copied_next(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.run(execute, 2, SCRIPT + LATE, tmp_path / "near", tmp_path / "far", init=False)
    assert "a newer checkpoint was there first" in first[1]
    assert second[1] == ""
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["latest", "step1", "step4"]
    assert zckpt.validate(tmp_path / "far").ok


FAILING = """
fault = Fault(NO_SPACE, at=1, names=("create",), path=far) if rank == 1 else None
with faulty(fault):
    write()
    try:
        zckpt.wait()
    except zckpt.ZckptError as error:
        print(type(error).__name__)
write()
zckpt.wait()
"""


def test_if_one_rank_fails_all_try_again_with_the_next_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.run(execute, 2, SCRIPT + FAILING, tmp_path / "near", tmp_path / "far", init=False)
    assert (first[0], second[0]) == ("RankError\n", "NoSpaceError\n")
    assert "rank 1 failed to copy: NoSpaceError" in first[1]
    assert second[1] == ""
    assert everything(tmp_path / "far") == everything(tmp_path / "near")


DYING = """
with held("far"):
    write()
    wait_until(lambda: queue.all_uploads()[0]._under_way != [])
    dist.barrier()
    print("under way", flush=True)
    threading.Event().wait()
"""


def test_a_rank_that_dies_during_a_copy_harms_neither_place(tmp_path: Path) -> None:
    with started(SCRIPT + DYING, tmp_path / "near", tmp_path / "far", ranks=2) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "under way\n"
        processes[1].kill()
        processes[0].send_signal(signal.SIGINT)
        ended(processes[0])
    assert zckpt.validate(tmp_path / "near").ok
    assert not [*(tmp_path / "far").glob("*/manifest.msgpack")]


OVER = """
with held("far") as go_on:
    write()
    dist.destroy_process_group()
    go_on()
"""


def test_the_training_may_end_its_process_groups_before_the_copy_is_made(tmp_path: Path) -> None:
    outcomes = ends(SCRIPT + OVER, tmp_path / "near", tmp_path / "far", ranks=2)
    assert outcomes == [(0, "", ""), (0, "", "")]
    assert everything(tmp_path / "far") == everything(tmp_path / "near")


RESUMING = """
places = [near, far]
if sys.argv[3] == "train":
    write(rank_state={"rank": rank})
    zckpt.wait()
else:
    engine = ReferenceEngine(seed=1)
    _, states = zckpt.restore(engine, places, rng=True, with_rank_state=True)
    assert states[rank] == {"rank": rank}
engine.train(3)
for part, tensors in engine.tensors.items():
    print(part, {name: tensor.view(-1).double().numpy().tobytes().hex() for name, tensor in tensors.items()})
"""


def test_ranks_resume_from_both_places(cluster: Cluster, tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    through = cluster.run(execute, 2, SCRIPT + RESUMING, near, far, "train", init=False)
    (near / "step1" / "manifest.msgpack").unlink()
    (short,) = near.glob("step1/data-*/rank-00001/master.safetensors")
    short.write_bytes(short.read_bytes()[:-8])
    for gone in near.glob("step1/data-*/rank-00000/digests.bin"):
        gone.unlink()
    assert cluster.run(execute, 2, SCRIPT + RESUMING, near, far, "resume", init=False) == through


def restore_at_the_first_start(places: list[str]) -> str:
    with pytest.raises(zckpt.CheckpointNotFoundError) as caught:
        zckpt.restore(ReferenceEngine(), places)
    return str(caught.value)


def test_at_the_first_start_every_rank_finds_no_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    places = [str(tmp_path / "near"), str(tmp_path / "far")]
    for message in cluster.run(restore_at_the_first_start, 2, places):
        assert "there is no checkpoint in any of these places" in message
        assert all(place in message for place in places)
