"""Arguments of a wrong type end in an error that says what is accepted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt

NO_PATH: Any = 3
TEXT: Any = "32MB"
NO: Any = "no"
PATTERN: Any = re.compile("w")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def state() -> zckpt.TrainState:
    model = torch.nn.Linear(3, 2)
    return zckpt.TrainState(model, torch.optim.SGD(model.parameters()))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "c"
    zckpt.write_state_dict({"weight": torch.arange(6.0)}, path)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reuse": False}, "reuse must be a path or None, got False"),
        ({"copy_to": 3}, "copy_to must be a path, a zckpt.CopyTo or None, got 3"),
        ({"parts": [3]}, "a name must be a str, got 3"),
        ({"exclude": 3}, "names must be a str or a collection of them, got 3"),
        ({"latest": "no"}, "latest must be True or False, got 'no'"),
        ({"background": "lazy"}, "background must be True, False or a zckpt.Background, got 'lazy'"),
        ({"background": zckpt.Background(snapshot="eager")}, "snapshot must be 'copy' or 'lazy', got 'eager'"),  # type: ignore[arg-type]
        (
            {"background": zckpt.Background(), "snapshot": "lazy"},
            "background is a zckpt.Background: set snapshot there",
        ),
        (
            {"copy_to": zckpt.CopyTo("far", keep_last=0)},
            "keep_last of copy_to must be a whole number of 1 or more, got 0",
        ),
        ({"copy_to": zckpt.CopyTo("far"), "copy_keep_last": 2}, "copy_to is a zckpt.CopyTo: set keep_last there"),
        ({"keeplast": 3}, r"zckpt.write has no keeplast \(did you mean 'keep_last'\?\): it has engine, path, step"),
        ({"path": 3}, "a path must be a str or a Path, got int"),
        ({"keep_last": True}, "keep_last must be a whole number of 1 or more, got True"),
    ],
)
def test_options_of_a_write(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        zckpt.write(state(), **{"path": tmp_path / "c", **options})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda path: zckpt.open(NO_PATH), "a path must be a str or a Path, or a list of these, got int"),
        (lambda path: zckpt.open(path)[NO_PATH], "a key is a str, such as 'master/embed', got 3"),
        (lambda path: zckpt.open(path).load([NO_PATH]), "a name must be a str, got 3"),
        (lambda path: zckpt.open(path).load(PATTERN), "names must be a str or a collection of them"),
        (lambda path: zckpt.Budget(nbytes=TEXT), "nbytes must be a whole number, got '32MB'"),
        (lambda path: zckpt.dcp.Writer(NO_PATH), "a path must be a str or a Path, got int"),
        (lambda path: zckpt.dcp.Writer("c", per_rank=NO_PATH), "names must be a str or a collection of them, got 3"),
        (lambda path: zckpt.dcp.Writer("c", copy_to=NO_PATH), "copy_to must be a path, a zckpt.CopyTo or None, got 3"),
        (lambda path: zckpt.dcp.Reader(NO_PATH), "a path must be a str or a Path, got int"),
        (lambda path: zckpt.restore(state(), path, strict=NO), "strict must be True or False, got 'no'"),
        (lambda path: zckpt.restore(state(), path, rng=NO), "rng must be True or False, got 'no'"),
        (lambda path: zckpt.restore(state(), path, verify=NO), "verify must be True or False, got 'no'"),
        (lambda path: zckpt.restore(state(), path, with_rank_state=NO), "with_rank_state must be True or False"),
        (lambda path: zckpt.open(path).load_into({}, strict=NO), "strict must be True or False, got 'no'"),
        (lambda path: zckpt.open(path).load(verify=NO), "verify must be True or False, got 'no'"),
        (lambda path: zckpt.open(path).rank_state(0, lazy=NO), "lazy must be True or False, got 'no'"),
        (lambda path: zckpt.gc(path, dry_run=NO), "dry_run must be True or False, got 'no'"),
        (lambda path: zckpt.prune(path.parent, keep_last=1, dry_run=NO), "dry_run must be True or False, got 'no'"),
        (lambda path: zckpt.repair(path, accept_unverified=NO), "accept_unverified must be True or False, got 'no'"),
        (lambda path: zckpt.cp(path, path.parent / "d", verify=NO), "verify must be True or False, got 'no'"),
        (lambda path: zckpt.cp(path, path.parent / "d", overwrite=NO), "overwrite must be True or False, got 'no'"),
        (lambda path: zckpt.cp(path, path.parent / "d", share=NO), "share must be True or False, got 'no'"),
        (lambda path: zckpt.convert(path, path.parent / "d", overwrite=NO), "overwrite must be True or False"),
        (lambda path: zckpt.export(path, path.parent / "d", overwrite=NO), "overwrite must be True or False"),
        (lambda path: zckpt.report(path, path.parent / "d", statistics=NO), "statistics must be True or False"),
        (lambda path: zckpt.offload(state(), path.parent / "d", background=NO), "background must be True or False"),
        (lambda path: zckpt.offload(state(), path.parent / "d", auto=NO), "auto must be True or False, got 'no'"),
        (lambda path: zckpt.on_preemption(state(), exit=NO), "exit must be True or False, got 'no'"),
        (lambda path: zckpt.attach_all(replace_deepspeed=NO), "replace_deepspeed must be True or False, got 'no'"),
    ],
)
def test_arguments_of_reads(path: Path, read: Callable[[Path], object], message: str) -> None:
    there = sorted(path.parent.rglob("*"))
    with pytest.raises(TypeError, match=message):
        read(path)
    assert sorted(path.parent.rglob("*")) == there


def test_a_plain_model_is_no_source_of_an_export(tmp_path: Path) -> None:
    with pytest.raises(zckpt.UnsupportedError, match=r"Linear is not a training engine.*\n.*TrainState"):
        zckpt.export(torch.nn.Linear(3, 2), tmp_path / "out")


def test_a_misspelled_leaf_is_compared_with_those_of_the_checkpoint(path: Path) -> None:
    with pytest.raises(zckpt.MismatchError, match=r"missing: wieght.*\n.*nearest are: weight"):
        zckpt.open(path).load_into({"wieght": torch.zeros(6)})


def test_the_writer_of_dcp_accepts_earlier_options() -> None:
    zckpt.dcp.Writer("c", copy_to="far", copy_keep_last=2)
    with pytest.raises(ValueError, match="keep_last of copy_to must be a whole number of 1 or more, got 0"):
        zckpt.dcp.Writer("c", copy_to="far", copy_keep_last=0)
