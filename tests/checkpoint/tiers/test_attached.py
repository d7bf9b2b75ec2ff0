"""An attached engine copies each save with ``copy_to``, and loads the newest whole checkpoint of both places."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import settings, tensors_of
from zckpt.cli import main

if TYPE_CHECKING:
    import torch

    from tests.support.cluster import Cluster

State = tuple[dict[tuple[str, int, int], "torch.Tensor"], dict[str, Any]]


def save_and_go_on(near: str, far: str, run: str) -> State:
    engine = zckpt.attach(make_engine(), copy_to=far, background=True, keep_last=1)
    for _ in range(2):
        train(engine, 1, engine.global_steps)
        engine.save_checkpoint(os.path.join(near, run), client_state={"step": engine.global_steps})
        zckpt.wait()
    train(engine, 2, 2)
    return tensors_of(engine), settings(engine)


def load_and_go_on(near: str, far: str, run: str, tag: str | None) -> tuple[State, str]:
    engine = zckpt.attach(make_engine(seed=1), copy_to=far)
    path, client_state = engine.load_checkpoint(os.path.join(near, run), tag)
    assert client_state == {"step": 2}
    assert engine.global_steps == 2
    train(engine, 2, 2)
    return (tensors_of(engine), settings(engine)), path


def load_nothing(near: str, far: str) -> Any:
    engine = zckpt.attach(make_engine(), copy_to=far)
    with pytest.warns(UserWarning, match="there is no .*near/latest"):
        result = engine.load_checkpoint(near)
    os.mkdir(far)
    Path(far, "latest").write_text("global_step9\n")
    with pytest.raises(zckpt.CheckpointNotFoundError, match="`latest` names"):
        engine.load_checkpoint(near)
    return result


def assert_alike(through: list[State], resumed: list[tuple[State, str]], path: Path) -> None:
    for (tensors, other), ((loaded, loaded_other), loaded_path) in zip(through, resumed, strict=True):
        assert loaded_path == str(path)
        assert other == loaded_other
        assert tensors.keys() == loaded.keys()
        assert all(tensor.equal(loaded[key]) for key, tensor in tensors.items())


def test_a_run_is_resumed_from_either_place_or_both(cluster: Cluster, tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    places = str(near), str(far)
    through = cluster.run(save_and_go_on, 2, *places, "run")
    assert sorted(os.listdir(near / "run")) == ["global_step2", "latest"]
    assert sorted(os.listdir(far)) == ["global_step1", "global_step2", "latest"]
    here, there = near / "run" / "global_step2", far / "global_step2"
    assert_alike(through, cluster.run(load_and_go_on, 2, *places, "run", None), here)
    next(here.glob("data-*/rank-00001/*master.safetensors")).unlink()
    assert_alike(through, cluster.run(load_and_go_on, 2, *places, "run", "global_step2"), here)
    shutil.rmtree(near)
    assert_alike(through, cluster.run(load_and_go_on, 2, *places, "run", None), there)
    assert_alike(through, cluster.run(load_and_go_on, 2, *places, "run", "global_step2"), there)


def test_the_directory_that_a_framework_makes_for_a_save_is_part_of_the_copys_path(
    cluster: Cluster, tmp_path: Path
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    through = cluster.run(save_and_go_on, 2, str(near), str(far), "checkpoint-7")
    assert sorted(os.listdir(far)) == ["checkpoint-7"]
    shutil.rmtree(near)
    resumed = cluster.run(load_and_go_on, 2, str(near), str(far), "checkpoint-7", None)
    assert_alike(through, resumed, far / "checkpoint-7" / "global_step2")


def save_under_zckpt_run(directory: str) -> list[str]:
    script = Path(directory, "train.py")
    script.write_text(
        "import zckpt\n"
        "from tests.support.models import make_engine, train\n"
        "engine = make_engine()\n"
        "for step in range(3):\n"
        "    train(engine, 1, step)\n"
        "    engine.save_checkpoint('near')\n"
        "    zckpt.wait()\n"
    )
    os.chdir(directory)
    options = ["--copy-to", "far", "--copy-keep-last", "1", "--copy-keep-every", "2"]
    assert main(["run", *options, str(script)]) == 0
    return sorted(os.listdir("far"))


def test_zckpt_run_takes_the_options(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(save_under_zckpt_run, 1, str(tmp_path)) == [["global_step2", "global_step3", "latest"]]


def test_a_run_that_has_no_checkpoint_begins_anew(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(load_nothing, 1, str(tmp_path / "near"), str(tmp_path / "far")) == [(None, None)]
