"""Trainer's own options with zckpt behind its checkpoints: which checkpoints stay, which one a run resumes from, and
what is loaded."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.launches import launch_module
from tests.support.trainer import STEPS, assert_losses_equal, attached, folders, killed_at_random, train
from zckpt.frameworks import patches as frameworks
from zckpt.frameworks.trainer_files import DirectoryKind, kind_of, last_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

BACKGROUND = {"background": True}


def run(cluster: Cluster, directory: Path, attach: dict[str, Any], options: dict[str, Any], **more: Any) -> Any:
    return cluster.run(attached, 2, str(directory), attach, options, init=False, **more)[0]


def test_a_limit_of_one_leaves_a_complete_checkpoint_if_the_run_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """The run is killed while a save in the background is under way. What is left is enough to go on."""
    directory, through = tmp_path / "run", tmp_path / "through"
    options = {"save_total_limit": 1}
    result = run(cluster, through, BACKGROUND, options)
    assert (result["last"], result["at the end"]) == (None, [STEPS])
    outcomes = cluster.outcomes(
        attached, 2, str(directory), BACKGROUND, options, init=False, killed_at=10, uncommitted=9
    )
    assert all(outcome.signal for outcome in outcomes)
    assert {step: kind_of(str(directory / f"checkpoint-{step}")) for step in folders(directory)} == {
        6: DirectoryKind.FULL,
        9: DirectoryKind.UNFINISHED,
    }
    result = run(cluster, directory, BACKGROUND, options)
    assert (result["last"], result["at the end"]) == ("checkpoint-6", [STEPS])
    assert_losses_equal(directory, through)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3, "fsdp"])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_killed_anywhere_goes_on(cluster: Cluster, tmp_path: Path, stage: int | str, seed: int) -> None:
    directory, through = tmp_path / "run", tmp_path / "through"
    options = {"save_total_limit": 1}
    run(cluster, through, {}, options, stage=stage)
    for number in range(4):
        ends = (100 * seed + number, 1.5)
        cluster.outcomes(
            killed_at_random, 2, str(directory), BACKGROUND, options, *ends, init=False, grace=2, stage=stage
        )
        if any(step > 3 for step in folders(directory)):
            assert last_checkpoint(str(directory)), "once there was one, there always is"
    result = run(cluster, directory, BACKGROUND, options, stage=stage)
    # If the run was killed after its last save, nothing is trained now, so no older checkpoint is removed either.
    if result["last"] == f"checkpoint-{STEPS}":
        assert result["at the end"][-1] == STEPS
    else:
        assert result["at the end"] == [STEPS]
    assert_losses_equal(directory, through)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3, "fsdp"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_and_the_newest_full_checkpoint_stay(
    cluster: Cluster, tmp_path: Path, stage: int | str, background: bool, limit: int
) -> None:
    """There are saves after 3, 6, 9, 12 and 13 steps. The second and the fourth save contain only weights."""
    attach = {"full_every": 2, "background": background}
    for best_at, left in ((6, [6, 13]), (9, [9] if limit == 1 else [9, 13])):
        directory = tmp_path / str(best_at)
        result = run(cluster, directory, attach, {"save_total_limit": limit}, stage=stage, best_at=best_at)
        assert result["best"].endswith(f"checkpoint-{best_at}")
        assert result["after training"] == result["at the end"] == left
        assert kind_of(result["best"]) is (DirectoryKind.WEIGHTS if best_at == 6 else DirectoryKind.FULL)
        if stage != 3:  # with ZeRO-2, rank 0 has the first half of each group
            whole = torch.cat([tensor.flatten() for tensor in zckpt.open(result["best"]).load("master/*").values()])
            assert torch.isin(result["masters"][0], torch.cat([whole, torch.zeros(1)])).all(), "the best weights"


@pytest.mark.matrix
def test_a_resumed_run_saves_full_checkpoints_at_the_same_steps(cluster: Cluster, tmp_path: Path) -> None:
    directory, through = tmp_path / "run", tmp_path / "through"
    attach = {"full_every": 3, "background": True}
    run(cluster, through, attach, {})
    for killed_at in (8, 13):  # after a checkpoint of weights alone, and after a full one
        cluster.outcomes(attached, 2, str(directory), attach, {}, init=False, killed_at=killed_at)
    result = run(cluster, directory, attach, {})
    assert result["last"] in ("checkpoint-3", "checkpoint-12")
    kinds = [kind_of(str(directory / f"checkpoint-{step}")) for step in folders(directory)]
    assert kinds == [
        DirectoryKind.FULL,
        DirectoryKind.WEIGHTS,
        DirectoryKind.WEIGHTS,
        DirectoryKind.FULL,
        DirectoryKind.FULL,
    ]
    assert kinds == [kind_of(str(through / f"checkpoint-{step}")) for step in folders(through)]
    assert_losses_equal(directory, through)


def test_the_last_checkpoint_is_full_although_a_save_is_under_way(cluster: Cluster, tmp_path: Path) -> None:
    """The save of step 12 ends, and is counted as a full one, after Trainer has begun that of step 13."""
    run(cluster, tmp_path / "run", {"full_every": 3, "background": True}, {}, write_seconds=0.02)
    kinds = {step: kind_of(str(tmp_path / "run" / f"checkpoint-{step}")) for step in folders(tmp_path / "run")}
    assert [step for step, kind in kinds.items() if kind is DirectoryKind.FULL] == [3, 12, 13]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3])
def test_save_only_model(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    options = {"save_only_model": True, "save_total_limit": 2}
    result = run(cluster, tmp_path / "run", BACKGROUND, options, stage=stage)
    assert result["at the end"] == [12, 13]
    kind = DirectoryKind.FOREIGN if stage == 2 else DirectoryKind.FULL  # with ZeRO-3, Trainer has no weights to write
    assert kind_of(str(tmp_path / "run" / "checkpoint-13")) is kind
    outcomes = cluster.outcomes(
        attached, 2, str(tmp_path / "refused"), {}, {"save_only_model": True}, stage=stage, best_at=3, init=False
    )
    assert all("can't be used with `save_only_model`" in str(outcome.error) for outcome in outcomes)


@pytest.mark.matrix
def test_a_run_of_deepspeed_is_resumed_with_zckpt(cluster: Cluster, tmp_path: Path) -> None:
    """A run that DeepSpeed itself has saved is resumed with zckpt. The limit counts the checkpoints of both
    together."""
    directory = tmp_path / "run"
    outcomes = cluster.outcomes(train, 2, str(directory), {"save_total_limit": 2}, killed_at=8, init=False)
    assert all(outcome.signal for outcome in outcomes)
    assert [kind_of(str(directory / f"checkpoint-{step}")) for step in folders(directory)] == [
        DirectoryKind.FOREIGN,
        DirectoryKind.FOREIGN,
    ]
    result = run(cluster, directory, BACKGROUND, {"save_total_limit": 2})
    assert result["last"] == "checkpoint-6"
    assert result["at the end"] == [12, 13]


@pytest.mark.matrix
@pytest.mark.parametrize(("rank", "stage"), [(0, 2), (1, 2), (1, "fsdp")])
def test_a_signal_to_one_rank_saves_on_all(tmp_path: Path, rank: int, stage: int | str) -> None:
    """The run is started by torchrun. Trainer waits for 3 seconds after a signal, and a step takes half a second."""
    directory, through = tmp_path / "run", tmp_path / "through"
    options = {"enable_jit_checkpoint": True, "save_strategy": "no"}
    command = ["tests.support.trainer", directory, json.dumps(options)]
    assert launch_module(*command, json.dumps({"stage": stage, "signalled": [rank, 2], "step_seconds": 0.5}))
    (step,) = folders(directory)
    assert 2 <= step < STEPS
    assert kind_of(str(directory / f"checkpoint-{step}")) is DirectoryKind.FULL
    assert not list(directory.rglob("checkpoint-is-incomplete.txt"))
    assert launch_module(*command, json.dumps({"stage": stage}))
    assert launch_module("tests.support.trainer", through, json.dumps(options), json.dumps({"stage": stage}))
    assert_losses_equal(directory, through)


def test_if_a_checkpoint_is_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    kept, link, newer = tmp_path / "kept", tmp_path / "run" / "checkpoint-3", tmp_path / "run" / "checkpoint-6"
    for folder in (kept, newer):
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text("{}")
    link.symlink_to(kept)
    frameworks._remove_superseded([str(link), str(newer)], 1, None)
    assert (os.listdir(newer.parent), os.listdir(kept)) == (["checkpoint-6"], ["trainer_state.json"])


# The replacement of functions of the frameworks


def test_functions_are_replaced_when_their_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changed.py").write_text("add = lambda a, b: a + b\nclass Owner:\n    name = lambda self: 'x'\n")
    (tmp_path / "importer.py").write_text("from changed import add\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [frameworks._Finder(), *sys.meta_path])
    monkeypatch.setitem(frameworks._REPLACEMENTS, "changed", ("", {"add": lambda stock, a, b: 10 * stock(a, b)}))
    importer, changed = (importlib.import_module(name) for name in ("importer", "changed"))
    assert changed.add(1, b=2) == importer.add(1, 2) == 30
    monkeypatch.setitem(frameworks._REPLACEMENTS, "changed", ("Owner", {"name": lambda stock, self: stock(self) * 2}))
    frameworks._replace_in(changed)
    frameworks._replace_in(changed)
    assert changed.Owner().name() == "xx"
    for name in ("changed", "importer"):
        del sys.modules[name]


@pytest.mark.matrix
def test_functions_of_transformers_are_replaced_when_the_script_imports_it() -> None:
    script = """
import sys, zckpt
zckpt.attach_all()
assert not {"transformers", "accelerate", "lightning"}.intersection(sys.modules)
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints
from transformers import Trainer, trainer
changed = [get_last_checkpoint, rotate_checkpoints, trainer.sort_checkpoints, Trainer._save_checkpoint]
assert all(hasattr(one, "_zckpt_replaces") for one in changed)
assert trainer.get_last_checkpoint is get_last_checkpoint
"""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-W", "error:zckpt", "-c", script], env=environment, check=True)


def test_a_module_without_the_expected_functions_is_left_alone_with_a_warning() -> None:
    module = ModuleType("transformers.trainer_utils")
    module.get_last_checkpoint = lambda folder: folder  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="trainer_utils .*rotate_checkpoints.*sort_checkpoints"):
        frameworks._replace_in(module)


def test_a_run_with_tensor_parallelism_is_resumed(cluster: Cluster, tmp_path: Path) -> None:
    """DeepSpeed's own load merges the files of the ranks as Megatron's, and fails."""
    directory, through = tmp_path / "run", tmp_path / "through"
    options = {"save_steps": 4, "max_steps": STEPS}
    run(cluster, through, {}, options, stage=1, tp=2)
    outcomes = cluster.outcomes(attached, 2, str(directory), {}, options, init=False, stage=1, tp=2, killed_at=7)
    assert all(outcome.signal for outcome in outcomes)
    assert run(cluster, directory, {}, options, stage=1, tp=2)["last"] == "checkpoint-4"
    assert_losses_equal(directory, through)
