"""torchtitan's own trainer with zckpt as its manager of checkpoints. `make test-torchtitan` installs torchtitan."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.launches import ROOT, SCRIPTS
from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.listing.runs import can_resume

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torchtitan")


def train(directory: Path, steps: int, ranks: int = 2, manager: str = "zckpt", **options: Any) -> str:
    """Trains to the end and returns what the ranks have printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, str(SCRIPTS / "titan.py"), str(directory), manager, str(steps), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def checkpoints(directory: Path) -> dict[int, bool]:
    """Returns for each checkpoint of a run, by its step, whether training can go on from it."""
    found = {path.parent for path in (directory / "checkpoint").glob("step-*/manifest.msgpack")}
    return {int(path.name[5:]): can_resume(find(path)) for path in sorted(found)}


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_training_resumes_bit_for_bit(tmp_path: Path, async_mode: str) -> None:
    options: dict[str, Any] = {"last_save_model_only": False, "async_mode": async_mode}
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    train(through, 6, **options)
    assert checkpoints(through) == {3: True, 6: True}
    shutil.copytree(through, resumed)
    shutil.rmtree(resumed / "checkpoint" / "step-6")
    train(resumed, 6, **options)
    last = "checkpoint/step-6"
    difference = zckpt.diff(through / last, resumed / last)
    assert difference.compared
    assert not difference.tensors + difference.only_in_a + difference.only_in_b
    # torchtitan does not restore the random number generators, and its trainer uses none after the first step.
    assert [entry.path for entry in difference.state if ".rng." not in entry.path] == []
    assert zckpt.open(resumed / last).state["client_state"]["train_state"]["step"] == 6
    assert not [*tmp_path.rglob(".metadata")]
    train(resumed, 9, ranks=1, **options)
    assert zckpt.open(resumed / "checkpoint" / "step-9").step == 9


def test_the_last_checkpoint_has_the_weights_and_the_older_ones_are_removed(tmp_path: Path) -> None:
    train(tmp_path, 10, keep_latest_k=2)
    assert checkpoints(tmp_path) == {6: True, 9: True, 10: False}
    assert zckpt.open(tmp_path / "checkpoint" / "step-10").parts == ("master",)
    train(tmp_path, 12, keep_latest_k=2)  # goes on from step 9, and repeats step 10
    assert checkpoints(tmp_path) == {6: True, 9: True, 10: False, 12: False}


def test_a_training_of_torchtitans_own_manager_goes_on(tmp_path: Path) -> None:
    train(tmp_path, 3, manager="torchtitan", last_save_model_only=False)
    train(tmp_path, 6, last_save_model_only=False)
    assert checkpoints(tmp_path) == {6: True}
    assert zckpt.open(tmp_path / "checkpoint" / "step-6").step == 6


def test_a_training_begins_with_the_weights_of_another_one(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(first, 3)
    train(second, 1, initial_load_path=str(first / "checkpoint"), enable_first_step_checkpoint=True)
    before, after = (zckpt.open(path / "checkpoint").load("master/*") for path in (first, second))
    assert max((before[key] - after[key]).abs().max().item() for key in before) < 1e-3, "one step of 4e-4"
