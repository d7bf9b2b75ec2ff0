"""What those who watch are told: every byte once, a beginning and an end, also where an operation fails."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine, engines_are_adapters
from tests.support.progress import Told
from tests.support.states import write_state

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


@pytest.mark.parametrize("verify", [True, False])
def test_loads(tmp_path: Path, verify: bool) -> None:
    write_state(tmp_path / "c", 2, {"a": (3000, 1009), "b": (5,), "none": (0,)})
    checkpoint = zckpt.open(tmp_path / "c")
    one, other, third = Told(), Told(), Told()
    checkpoint.load("master/*", progress=one, verify=verify)
    assert one.assert_complete("load") == 4 * (3000 * 1009 + 5)
    for _ in checkpoint.iter(progress=other, verify=verify):
        pass
    assert other.assert_complete("load") == 3 * 4 * (3000 * 1009 + 5)
    checkpoint.state_dict(dtype=torch.bfloat16, progress=third, verify=verify)
    assert third.assert_complete("load") == 4 * (3000 * 1009 + 5)


def test_validation(tmp_path: Path) -> None:
    write_state(tmp_path / "c", 2, {"a": (3000, 1009), "b": (5,)})
    told = Told()
    zckpt.validate(tmp_path / "c", progress=told)
    assert told.assert_complete("validate") == zckpt.open(tmp_path / "c").nbytes


def write_and_restore(path: str, stage: int) -> list[int]:
    engine = make_engine(stage=stage, model="odd")
    train(engine, 1)
    told = [Told() for _ in range(3)]
    zckpt.write(engine, f"{path}/one", progress=told[0])
    zckpt.write(engine, f"{path}/two", progress=told[1], background=True).wait()
    zckpt.restore(engine, path, progress=told[2])
    return [one.assert_complete(action) for one, action in zip(told, ("write", "write", "restore"), strict=True)]


@pytest.mark.parametrize("stage", [1, 3])
def test_writes_and_restores(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    told = cluster.run(write_and_restore, 2, str(tmp_path), stage)
    checkpoint = zckpt.open(tmp_path)
    stored = sum(piece.nbytes for info in checkpoint.values() for piece in info.pieces)
    written = sum(one[0] for one in told)
    assert stored < written < stored + 50_000  # with the trees of state
    assert [one[0] for one in told] == [one[1] for one in told]
    assert sum(one[2] for one in told) >= stored - sum(checkpoint[key].nbytes for key in checkpoint if "buffer" in key)


def test_a_failure_ends_it(tmp_path: Path) -> None:
    told = Told()
    with (
        engines_are_adapters(),
        mock.patch("os.pwritev", side_effect=OSError(5, "Input/output error")),
        pytest.raises(zckpt.StorageError),
    ):
        zckpt.write(Engine(), tmp_path / "c", progress=told)
    (action, _), last = told.calls
    assert (action, last) == ("write", ("end", 0))


@pytest.mark.parametrize(("terminal", "rank", "shown"), [(True, "0", True), (False, "0", False), (True, "1", False)])
def test_the_bar_is_on_rank_0_and_on_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, rank: str, shown: bool
) -> None:
    write_state(tmp_path / "c", 1, {"a": (3000, 1009)}, parts=("master",))
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("RANK", rank)
    zckpt.open(tmp_path / "c").load(progress=zckpt.ProgressBar())
    assert ("zckpt load: 100%" in stderr.getvalue()) == shown
