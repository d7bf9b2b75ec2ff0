"""With ``copy_to``, checkpoints are copied to another place while the training goes on."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
import warnings
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.endings import ended, ends, started
from tests.support.faults import NO_SPACE, Fault, faulty
from tests.support.litter import directory_names
from tests.support.plain_engine import everything
from tests.support.slow_writes import held
from tests.support.waiting import wait_until
from zckpt.checkpoint import background
from zckpt.checkpoint.tiers import queue
from zckpt.frameworks import patches as frameworks
from zckpt.frameworks.trainer_files import kind_of_models
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.faults import Operations


def trained(steps: int) -> ReferenceEngine:
    engine = ReferenceEngine()
    engine.train(steps)
    return engine


def write(engine: ReferenceEngine, tmp_path: Path, **options: Any) -> None:
    """Does one more step, and writes a checkpoint that is copied to ``far``."""
    engine.train(1)
    zckpt.write(engine, tmp_path / "near" / f"step{engine.steps}", **{"copy_to": tmp_path / "far", **options})


@contextmanager
def told(*expected: str) -> Iterator[None]:
    """Checks that exactly these warnings are given, each of which contains the expected text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == len(expected), messages
    assert all(text in message for text, message in zip(expected, messages, strict=True)), messages


def is_under_way() -> bool:
    return queue.all_uploads()[0]._under_way != []


def made(operations: Operations, place: Path) -> list[str]:
    """Returns the names of the files that were created below ``place``."""
    return [os.path.basename(file) for name, file in operations.done if name == "create" and str(place) in file]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_copy_has_the_same_bytes_and_exists_only_when_it_is_whole(tmp_path: Path, in_background: bool) -> None:
    engine = trained(1)
    with held("far") as go_on:
        write(engine, tmp_path, background=in_background)
        engine.train(1)
        wait_until((tmp_path / "near" / "latest").exists)
        with pytest.raises(zckpt.CheckpointNotFoundError):
            zckpt.open(tmp_path / "far")
        go_on()
        zckpt.wait()
    assert everything(tmp_path / "far") == everything(tmp_path / "near")
    assert zckpt.validate(tmp_path / "far").ok


def test_a_copy_keeps_no_state_of_the_engine_in_memory(tmp_path: Path) -> None:
    engine = trained(1)
    there = weakref.ref(engine)
    with held("far") as go_on:
        write(engine, tmp_path, background=True)
        wait_until((tmp_path / "near" / "latest").exists)
        background.wait_until_all_ended()
        del engine
        gc.collect()
        assert there() is None
        go_on()
        zckpt.wait()


def test_the_newest_checkpoint_that_waits_is_copied_next_and_keep_last_leaves_it(tmp_path: Path) -> None:
    engine = trained(0)
    near = tmp_path / "near"
    with told(f"because a newer checkpoint was there first: {near / 'step2'}, {near / 'step3'}"):
        with held("far") as go_on:
            for _ in range(4):
                write(engine, tmp_path, keep_last=1)
                wait_until(is_under_way)
            assert directory_names(tmp_path / "near") == ["step1", "step4"], "step1 is being copied, step4 waits"
            go_on()
            zckpt.wait()
        assert directory_names(tmp_path / "far") == ["step1", "step4"]
        write(engine, tmp_path, keep_last=1)
        zckpt.wait()
    assert directory_names(tmp_path / "near") == ["step5"]
    assert directory_names(tmp_path / "far") == ["step1", "step4", "step5"], "keep_last is not about the copies"
    assert zckpt.open(tmp_path / "far").step == 5


@pytest.mark.parametrize("earlier", [False, True])
def test_each_place_keeps_its_own_number(tmp_path: Path, earlier: bool) -> None:
    engine = trained(0)
    of_copies: dict[str, Any] = {"copy_to": zckpt.CopyTo(tmp_path / "far", keep_last=1, keep_every=3)}
    for _ in range(6):
        write(engine, tmp_path, keep_last=2, **{"copy_keep_last": 1, "copy_keep_every": 3} if earlier else of_copies)
        zckpt.wait()
    assert directory_names(tmp_path / "near") == ["step5", "step6"]
    assert directory_names(tmp_path / "far") == ["step3", "step6"]


@pytest.mark.parametrize("at", range(3))
def test_a_copy_that_fails_is_tried_again_with_the_next_one(tmp_path: Path, at: int) -> None:
    """Files that are whole are not written again."""
    engine, near, far = trained(0), tmp_path / "near", tmp_path / "far"
    with told(f"{near / 'step1'} was not copied to {far / 'step1'}: NoSpaceError"):
        with faulty(Fault(NO_SPACE, at=at, names=("create",), path=f"{far}/")) as failing:
            write(engine, tmp_path)
            with pytest.raises(zckpt.NoSpaceError):
                zckpt.wait()
        zckpt.wait()  # The error is raised once.
    assert zckpt.validate(near).ok
    assert not far.exists() or directory_names(far) == ["step1"]
    with pytest.raises(zckpt.CheckpointNotFoundError):
        zckpt.open(far)
    with faulty() as operations:
        write(engine, tmp_path)
        zckpt.wait()
    assert everything(far) == everything(near)
    all_files = made(operations, far / "step2")
    assert sorted(made(operations, far / "step1")) == sorted(set(all_files) - set(made(failing, far / "step1")[:at]))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("put_new", "step1/data-"),
        ("prepare", "step1/manifest.msgpack"),
        ("commit", "step1/manifest.msgpack"),
        ("prepare", "latest"),
        ("commit", "latest"),
    ],
)
def test_a_commit_that_fails_is_tried_again(tmp_path: Path, name: str, path: str) -> None:
    engine, far = trained(0), tmp_path / "far"
    with told("step1 was not copied"), faulty(Fault(NO_SPACE, names=(name,), path=f"{far}/{path}")):
        write(engine, tmp_path)
        with pytest.raises(zckpt.NoSpaceError):
            zckpt.wait()
    write(engine, tmp_path)
    zckpt.wait()
    assert everything(far) == everything(tmp_path / "near")


def test_a_copy_that_fails_twice_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    engine, far = trained(0), tmp_path / "far"
    again, given_up = "It is tried again with the next checkpoint.", "It is given up; zckpt.cp("
    with told(again, given_up), faulty(Fault(NO_SPACE, at=1, names=("create",), path=f"{far}/step1", lasting=True)):
        write(engine, tmp_path)
        with pytest.raises(zckpt.NoSpaceError):
            zckpt.wait()
        write(engine, tmp_path)
        zckpt.wait()
    assert directory_names(far) == ["step2"]
    write(engine, tmp_path)
    zckpt.wait()
    assert directory_names(far) == ["step2", "step3"]


def test_the_same_path_may_be_written_again_and_again(tmp_path: Path) -> None:
    engine = trained(0)
    for _ in range(3):
        engine.train(1)
        zckpt.write(engine, tmp_path / "near" / "c", copy_to=tmp_path / "far", overwrite=True)
        zckpt.wait()
    assert everything(tmp_path / "far") == everything(tmp_path / "near")


def test_the_training_goes_on_if_the_checkpoint_vanishes_before_it_is_copied(tmp_path: Path) -> None:
    engine = trained(0)
    with told("step2 was not copied", "It is given up"):
        with held("far") as go_on:
            write(engine, tmp_path)
            wait_until(is_under_way)
            write(engine, tmp_path)
            shutil.rmtree(tmp_path / "near" / "step2")
            go_on()
            with pytest.raises(zckpt.CheckpointNotFoundError):
                zckpt.wait()
        write(engine, tmp_path)
        zckpt.wait()
    assert directory_names(tmp_path / "far") == ["step1", "step3"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"copy_to": "{near}"}, r"copy_to .*run itself"),
        ({"copy_to": "{link}"}, r"copy_to .*run itself"),
        ({"copy_to": "{near}/c"}, r"copy_to leads into the checkpoint .*itself"),
        ({"copy_to": "https://example.com/far"}, "a web server can only be read"),
        ({"copy_keep_last": 2}, "pass copy_to too"),
        ({"copy_to": "{far}", "copy_keep_last": 0}, "keep_last of copy_to must"),
        ({"copy_to": "{far}", "copy_keep_every": 2}, "keep_every of copy_to .* pass keep_last of copy_to"),
        ({"copy_to": "nowhere://far"}, "scheme 'nowhere'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    near, far, link = tmp_path / "near", tmp_path / "far", tmp_path / "link"
    link.symlink_to(near)
    options = {
        name: str(value).format(near=near, far=far, link=link) if "to" in name else value
        for name, value in options.items()
    }
    with pytest.raises((ValueError, zckpt.UnsupportedError), match=why):
        zckpt.write(trained(1), near / "c", **options)
    assert [*tmp_path.iterdir()] == [link]


@pytest.mark.parametrize(
    ("path", "copy_to", "why"),
    [
        ("near/step1", "far", r"already a checkpoint .*far/step1"),
        ("near/step2", "far/step1", r"far/step1 is a checkpoint, which would hide one .*far/step1/step2"),
        ("near/far", "", r"the directory of a run, with the file `latest`.*far"),
        ("near/near", "", r"copy_to leads to .*near, which .*near/near is in"),
    ],
)
def test_a_copy_that_would_replace_or_hide_a_checkpoint_is_refused_before_anything_is_written(
    tmp_path: Path, path: str, copy_to: str, why: str
) -> None:
    engine = trained(1)
    zckpt.write(engine, tmp_path / "far" / "step1")
    before = everything(tmp_path)
    with pytest.raises((ValueError, zckpt.CheckpointExistsError), match=why):
        zckpt.write(engine, tmp_path / path, copy_to=tmp_path / copy_to)
    assert everything(tmp_path) == before


SCRIPT = """
import sys
import torch.distributed as dist
import zckpt
from tests.support.slow_writes import held
from zckpt.checkpoint import background
from zckpt.frameworks import patches as frameworks
from zckpt.frameworks.trainer_files import kind_of_models
from zckpt.testing import ReferenceEngine

near, far, what = sys.argv[1:]
engine = ReferenceEngine()
engine.train(1)
if what == "held":
    context = held("far")
    context.__enter__()
zckpt.write(engine, f"{near}/step1", copy_to=far, background=True, overwrite=True)
print("written", flush=True)
"""


def test_the_end_of_the_process_waits_for_the_copy(tmp_path: Path) -> None:
    assert ends(SCRIPT, tmp_path / "near", tmp_path / "far", "") == [(0, "written\n", "")]
    assert everything(tmp_path / "far") == everything(tmp_path / "near")


def test_ctrl_c_at_the_end_of_the_process_gives_the_copy_up(tmp_path: Path) -> None:
    with started(SCRIPT, tmp_path / "near", tmp_path / "far", "held") as (process,):
        wait_until(lambda: [*tmp_path.glob("far/step1/data-*")] != [])
        while process.poll() is None:  # Two signals at once would count as one.
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        status, _, _ = ended(process)
    assert status == -signal.SIGINT
    assert zckpt.validate(tmp_path / "near").ok


def test_a_process_that_is_killed_during_a_copy_leaves_the_checkpoint_and_no_copy(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with started(SCRIPT, near, far, "held") as (process,):
        wait_until(lambda: [*far.glob("step1/data-*/*/*")] != [])
        process.kill()
        assert ended(process)[0] == -signal.SIGKILL
    assert zckpt.validate(near).ok
    with pytest.raises(zckpt.CheckpointNotFoundError):
        zckpt.open(far)
    engine = ReferenceEngine(seed=1)
    zckpt.restore(engine, [near, far])
    write(engine, tmp_path)
    zckpt.wait()
    assert zckpt.open(far).step == 2
    assert ends(SCRIPT, near, far, "") == [(0, "written\n", "")]
    assert everything(far) == everything(near), "the new copy has replaced what the killed process has left"


def test_a_copy_whose_checkpoint_is_replaced_meanwhile_is_no_failure(tmp_path: Path) -> None:
    """Trainer saves each checkpoint twice with ZeRO-3. The second save removes the files of the first one."""
    engine, near = trained(0), tmp_path / "near"
    with told(), held("far") as go_on:
        for _ in range(3):
            engine.train(1)
            zckpt.write(engine, near / "c", copy_to=tmp_path / "far", overwrite=True)
            wait_until(is_under_way)
        go_on()
        zckpt.wait()
    assert everything(tmp_path / "far") == everything(near)


def test_a_framework_leaves_the_folder_of_a_checkpoint_that_is_being_copied(tmp_path: Path) -> None:
    engine, folders = trained(0), [str(tmp_path / f"checkpoint_{number}") for number in range(2)]
    remove_older = partial(frameworks._remove_superseded, folders, 1, None, kind_of_models)
    with held("far") as go_on:
        for folder in folders:
            engine.train(1)
            zckpt.write(engine, f"{folder}/pytorch_model", copy_to=tmp_path / "far")
            (tmp_path / folder / "random_states_0.pkl").touch()
            wait_until(is_under_way)
        remove_older()
        assert directory_names(tmp_path) == ["checkpoint_0", "checkpoint_1", "far"]
        go_on()
        zckpt.wait()
    assert directory_names(tmp_path / "far") == ["checkpoint_0", "checkpoint_1"]
    remove_older()
    assert directory_names(tmp_path) == ["checkpoint_1", "far"]
