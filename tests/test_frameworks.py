"""Frameworks that make the engine themselves: ``zckpt run`` and attach_all() put zckpt behind their checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest

import zckpt
from models import make_engine, train
from runs import assert_same, held
from zckpt.cli import main

if TYPE_CHECKING:
    from cluster import Cluster

SCRIPTS = Path(__file__).parent / "scripts"


def save_and_load_in_attached_engines(directory: str) -> None:
    stock = deepspeed.initialize
    zckpt.attach_all()
    attaching = deepspeed.initialize
    zckpt.attach_all()
    assert deepspeed.initialize is attaching is not stock
    engine = make_engine()
    train(engine, 2)
    engine.save_checkpoint(directory)
    other = make_engine(seed=1)
    other.load_checkpoint(directory)
    assert_same(held(engine), held(other))


def test_every_engine_made_after_attach_all_is_attached(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_and_load_in_attached_engines, 2, str(tmp_path))
    assert zckpt.open(tmp_path).step == 2


def run_command(arguments: list[str]) -> Any:
    os.chdir(SCRIPTS)
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    return status, hasattr(deepspeed.initialize, "__wrapped__"), json.loads(Path(arguments[-1]).read_text())


@pytest.mark.parametrize(
    ("before", "script", "after"),
    [
        pytest.param(["run"], [str(SCRIPTS / "show.py")], ["--help", "-m", "x"], id="script"),
        pytest.param(["run", "-m"], ["show"], ["--lr", "1"], id="module"),
        pytest.param(["--local_rank=1", "run"], ["show.py"], ["--lr", "1"], id="deepspeed's launcher"),
        pytest.param(["run"], ["show.py"], ["--fail"], id="failing"),
    ],
)
def test_a_script_finds_what_python_would_give_it(
    cluster: Cluster, tmp_path: Path, before: list[str], script: list[str], after: list[str]
) -> None:
    out = str(tmp_path / "found.json")
    ((status, attaches, found),) = cluster.run(run_command, 1, [*before, *script, *after, out], init=False)
    local_rank = ["--local_rank=1"] if "--local_rank=1" in before else []
    assert (status, attaches) == (3 if "--fail" in after else 0, True)
    assert found["name"] == "__main__"
    assert found["path"] == str(SCRIPTS)
    name = str(SCRIPTS / "show.py") if "-m" in before else script[0]
    assert found["argv"] == [name, *local_rank, *after, out]


def launch(script: str, *arguments: object) -> None:
    """Two ranks of a script, under ``zckpt run``."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "zckpt", "run", str(SCRIPTS / script), *map(str, arguments)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True)


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    expected, found = zckpt.open(one), zckpt.open(other)
    assert found.world_size == 2
    assert_same(expected.load(), found.load())
    for checkpoint in (expected, found):
        del checkpoint.state["engine"]["counters"][
            "micro_steps"
        ]  # of no meaning where, as here, Accelerate counts them
    assert expected.state == found.state


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_resumes_bit_for_bit(tmp_path: Path, stage: int) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    launch("trainer.py", through, stage, 5)
    launch("trainer.py", resumed, stage, 5, through / "checkpoint-3")
    assert json.loads((resumed / "losses.json").read_text()) == json.loads((through / "losses.json").read_text())
    assert_equal_checkpoints(through / "checkpoint-5", resumed / "checkpoint-5")


@pytest.mark.matrix
def test_accelerate_saves_and_loads_bit_for_bit(tmp_path: Path) -> None:
    launch("accelerated.py", tmp_path, "save")
    launch("accelerated.py", tmp_path, "load")
    assert zckpt.open(tmp_path / "state").step == 3
    for rank in range(2):
        losses = json.loads((tmp_path / f"save-{rank}.json").read_text())
        assert len(losses) == 3
        assert json.loads((tmp_path / f"load-{rank}.json").read_text()) == losses
