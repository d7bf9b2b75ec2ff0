"""Some frameworks make the engine themselves. ``zckpt run`` and attach_all() let such an engine save and load with
zckpt."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.utils import zero_to_fp32
from safetensors.torch import load_file

import zckpt
from tests.support.launches import SCRIPTS, launch
from tests.support.models import Mlp, Odd, make_engine, train
from tests.support.runs import assert_same, tensors_of
from zckpt.cli import main
from zckpt.frameworks.trainer_files import DirectoryKind, kind_of

if TYPE_CHECKING:
    from tests.support.cluster import Cluster


def save_and_load_in_attached_engines(directory: str) -> None:
    get_fp32_state_dict_from_zero_checkpoint = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    stock = deepspeed.initialize
    zckpt.attach_all()
    attaching = deepspeed.initialize
    zckpt.attach_all()
    assert deepspeed.initialize is attaching is not stock
    engine = make_engine(model="odd")
    train(engine, 2)
    engine.save_checkpoint(directory)
    other = make_engine(model="odd", seed=1)
    other.load_checkpoint(directory)
    assert_same(tensors_of(engine), tensors_of(other))

    # Functions that were imported before attach_all() read the folders of both, and find the same weights in them
    zckpt.detach(engine).save_checkpoint(directory + "-theirs")
    ours = get_fp32_state_dict_from_zero_checkpoint(directory)
    theirs = get_fp32_state_dict_from_zero_checkpoint(directory + "-theirs")
    assert_same(
        ours, {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in theirs.items()}
    )
    assert ours["head.weight"] is ours["embed.weight"]
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(directory, f"{directory}-{engine.global_rank}")
    with pytest.raises(zckpt.UnsupportedError, match="get_optim_files"):
        zero_to_fp32.get_optim_files(checkpoint_dir=f"{directory}/global_step2")
    theirs_at = f"{directory}-theirs/global_step2"
    assert len(zero_to_fp32.get_optim_files(theirs_at)) == 2
    assert os.path.isfile(zero_to_fp32.get_model_state_file(checkpoint_dir=theirs_at, zero_stage=3))


def test_attach_all_names_the_options_that_it_has() -> None:
    message = r"attach_all has no keep_lsat \(did you mean 'keep_last'\?\): it has on_attach, .*, ranks_per_file$"
    with pytest.raises(TypeError, match=message):
        zckpt.attach_all(keep_lsat=3)  # type: ignore[call-arg]


def test_every_engine_made_after_attach_all_is_attached(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cluster.run(save_and_load_in_attached_engines, 2, str(run))
    assert zckpt.open(run).step == 2
    assert_converted(run, torch.load(tmp_path / "run-0" / "pytorch_model.bin"))


def assert_converted(run: Path, by_deepspeed: dict[str, torch.Tensor]) -> None:
    """Checks that zckpt's replacements for DeepSpeed's conversion functions find the same weights as DeepSpeed's own,
    which have read the same folder."""
    weights = zckpt.get_fp32_state_dict_from_zero_checkpoint(run)
    assert_same(weights, by_deepspeed)
    lazy = zckpt.get_fp32_state_dict_from_zero_checkpoint(run, "global_step2", lazy_mode=True)
    assert_same(weights, {name: tensor.contiguous() for name, tensor in lazy.items()})
    trained = zckpt.get_fp32_state_dict_from_zero_checkpoint(run, exclude_frozen_parameters=True)
    assert weights.keys() - trained.keys() == {"frozen.weight", "frozen.bias", "unused.empty"}
    model = Odd()
    assert zckpt.load_state_dict_from_zero_checkpoint(model, run) is model
    assert_same(weights, model.state_dict())
    with pytest.warns(UserWarning, match="lacks 4 tensors: layers.0.weight, .*lacks 12"):
        zckpt.load_state_dict_from_zero_checkpoint(Mlp(), run)

    for safe, suffix in ((False, "bin"), (True, "safetensors")):
        out = run.parent / suffix
        zckpt.convert_zero_checkpoint_to_fp32_state_dict(run, out, "10KB", safe_serialization=safe)
        (index,) = out.glob("*.json")
        files = json.loads(index.read_text())["weight_map"]
        assert len(set(files.values())) > 1
        parts = {file: load_file(out / file) if safe else torch.load(out / file) for file in set(files.values())}
        assert_same(weights, {name: parts[file][name] for name, file in files.items()})
    zckpt.convert_zero_checkpoint_to_fp32_state_dict(run, run.parent / "one", None)
    whole = torch.load(run.parent / "one" / "pytorch_model.bin")
    assert_same(weights, whole)
    assert whole["head.weight"] is whole["embed.weight"]

    def fail(state_dict: object, path: str) -> None:
        Path(path).write_bytes(b"half of a file")
        raise OSError("the disk is full")

    with mock.patch.object(torch, "save", fail), pytest.raises(OSError, match="full"):
        zckpt.convert_zero_checkpoint_to_fp32_state_dict(run, run.parent / "one", None)
    assert os.listdir(run.parent / "one") == ["pytorch_model.bin"]
    assert_same(weights, torch.load(run.parent / "one" / "pytorch_model.bin"))


WITH_ENGINE = """
from tests.support.models import make_engine
make_engine()
"""


def run_command(arguments: list[str]) -> Any:
    os.chdir(SCRIPTS)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            status: object = main(arguments)
        except SystemExit as end:
            status = end.code
    out = Path(arguments[-1])
    output = json.loads(out.read_text()) if out.exists() else None
    return status, hasattr(deepspeed.initialize, "__wrapped__"), output, stderr.getvalue()


@pytest.mark.parametrize(
    ("before", "script", "after"),
    [
        pytest.param(["run"], [str(SCRIPTS / "show.py")], ["--help", "-m", "x"], id="script"),
        pytest.param(["run", "--replace-deepspeed", "-m"], ["show"], ["--engine"], id="module"),
        pytest.param(["--local_rank=1", "run"], ["show.py"], ["--lr", "1"], id="deepspeed's launcher"),
        pytest.param(["run"], ["show.py"], ["--fail"], id="failing"),
    ],
)
def test_a_script_gets_the_same_name_path_and_arguments_as_from_python(
    cluster: Cluster, tmp_path: Path, before: list[str], script: list[str], after: list[str]
) -> None:
    out = str(tmp_path / "found.json")
    ((status, attaches, output, stderr),) = cluster.run(run_command, 1, [*before, *script, *after, out], init=False)
    local_rank = ["--local_rank=1"] if "--local_rank=1" in before else []
    assert (status, attaches) == (3 if "--fail" in after else 0, True)
    assert output["name"] == "__main__"
    assert output["path"] == str(SCRIPTS)
    name = str(SCRIPTS / "show.py") if "-m" in before else script[0]
    assert output["argv"] == [name, *local_rank, *after, out]
    attached, nothing = "attached a DeepSpeedEngine", "nothing was attached: the script made neither an engine"
    died = "--fail" in after
    assert (stderr.count(attached), stderr.count(nothing)) == (
        ("--engine" in after),
        not died and "--engine" not in after,
    )


@pytest.mark.parametrize(
    ("ending", "engine"), [("", False), ("raise SystemExit", False), ("raise SystemExit(5)", False), ("", True)]
)
def test_a_script_without_an_engine_is_an_error_if_one_is_required(
    cluster: Cluster, tmp_path: Path, ending: str, engine: bool
) -> None:
    """This is so on every rank, whatever the others do. An error of the script keeps its own exit status."""
    script = tmp_path / "train.py"
    script.write_text(f"{WITH_ENGINE if engine else ''}\n{ending}")
    failed = 5 if "5" in ending else 0
    for options, status in (([], failed), (["--require-engine"], failed or (0 if engine else 2))):
        ended = cluster.run(run_command, 2, ["run", *options, str(script), str(tmp_path / "none")], init=False)
        assert [of_rank[0] or 0 for of_rank in ended] == [status] * 2
        told = [of_rank[3].count("nothing was attached") for of_rank in ended]
        assert told == ([0, 0] if engine or failed else [1, 1 if options else 0])


@pytest.mark.parametrize("script", [[str(SCRIPTS / "show.py")], ["-m", "show"]])
def test_an_error_of_a_script_is_reported_as_python_does(cluster: Cluster, tmp_path: Path, script: list[str]) -> None:
    out = str(tmp_path / "found.json")
    ((status, _, _, stderr),) = cluster.run(run_command, 1, ["run", *script, "--raise", out], init=False)
    assert status == 1
    assert stderr.startswith("Traceback (most recent call last):\n  File ")
    assert stderr.splitlines()[1].startswith(f'  File "{SCRIPTS}/show.py", line')
    assert stderr.endswith("ValueError: the script's own\n"), "and not that nothing was attached"


@pytest.mark.parametrize("arguments", [["nosuch.py"], ["-m", "nosuch"], ["-m", "nosuch.at.all"], ["-m", "json"], ["."]])
def test_a_script_that_cannot_be_run_is_reported_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["run", *arguments]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("zckpt run: ")
    assert stderr.count("\n") == 1
    assert not hasattr(deepspeed.initialize, "__wrapped__")


def assert_equal_checkpoints(expected_path: Path, found_path: Path) -> None:
    expected, actual = zckpt.open(expected_path), zckpt.open(found_path)
    assert actual.world_size == 2
    assert_same(expected.load(), actual.load())
    for checkpoint in (expected, actual):
        # The engine does not use this counter, because Accelerate counts micro steps itself.
        del checkpoint.state["engine"]["counters"]["micro_steps"]
    assert expected.state == actual.state


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_resumes_bit_for_bit(tmp_path: Path, stage: int) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    assert launch("trainer.py", through, stage, 5)
    assert launch("trainer.py", resumed, stage, 5, through / "checkpoint-3")
    assert json.loads((resumed / "losses.json").read_text()) == json.loads((through / "losses.json").read_text())
    assert_equal_checkpoints(through / "checkpoint-5", resumed / "checkpoint-5")


def test_a_trainer_with_fsdp_resumes_bit_for_bit(tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    assert launch("trainer.py", through, "fsdp", 5)
    assert launch("trainer.py", resumed, "fsdp", 5, through / "checkpoint-3")
    assert json.loads((resumed / "losses.json").read_text()) == json.loads((through / "losses.json").read_text())
    assert zckpt.diff(through / "checkpoint-5", resumed / "checkpoint-5").equal
    assert kind_of(str(through / "checkpoint-3")) is DirectoryKind.FULL
    assert not [*tmp_path.rglob("*.distcp")]


@pytest.mark.matrix
@pytest.mark.parametrize("with_what", ["deepspeed", "fsdp"])
def test_accelerate_saves_and_loads_bit_for_bit(tmp_path: Path, with_what: str) -> None:
    assert launch("accelerated.py", tmp_path, with_what, "save")
    assert launch("accelerated.py", tmp_path, with_what, "load")
    assert zckpt.open(tmp_path / "state").step == 3
    assert not [*tmp_path.rglob("*.distcp")]
    for rank in range(2):
        losses = json.loads((tmp_path / f"save-{rank}.json").read_text())
        assert len(losses) == 3
        assert json.loads((tmp_path / f"load-{rank}.json").read_text()) == losses
