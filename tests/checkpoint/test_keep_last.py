"""With keep_last and keep_every, a write and a save of an attached engine remove older checkpoints after the commit."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.litter import directory_names
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine, engines_are_adapters

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


@pytest.mark.parametrize("background", [False, True])
def test_a_write_removes_older_checkpoints(tmp_path: Path, background: bool) -> None:
    engine = Engine()
    with engines_are_adapters():
        for engine.step in range(1, 8):
            zckpt.write(engine, tmp_path / f"s{engine.step}", keep_last=2, keep_every=3, background=background)
        zckpt.wait()
        assert directory_names(tmp_path) == ["s3", "s6", "s7"]
        zckpt.write(engine, tmp_path / "s8")
        assert directory_names(tmp_path) == ["s3", "s6", "s7", "s8"], "nothing is removed unasked"


@pytest.mark.parametrize("background", [False, True])
def test_a_write_never_removes_what_it_has_written(tmp_path: Path, background: bool) -> None:
    """The times of the older checkpoints come from another clock, which is ahead. No `latest` protects the new
    checkpoint."""
    engine = Engine()
    with engines_are_adapters():
        for engine.step in (8, 9, 5):
            keep_last = {"latest": False, "keep_last": 2} if engine.step == 5 else {}
            zckpt.write(engine, tmp_path / f"s{engine.step}", background=background, **keep_last)  # type: ignore[call-overload]
            zckpt.wait()
            if engine.step > 5:
                at = time.time() + 1000 * engine.step
                os.utime(tmp_path / f"s{engine.step}" / "manifest.msgpack", (at, at))
    assert directory_names(tmp_path) == ["s5", "s9"]


@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_cannot_remove_older_checkpoints_is_committed(tmp_path: Path, background: bool) -> None:
    engine = Engine()
    with engines_are_adapters():
        for step in (1, 2):
            zckpt.write(engine, tmp_path / f"s{step}")
    (tmp_path / "latest").write_text("../nothing\n")

    def write() -> None:
        with engines_are_adapters():
            zckpt.write(engine, tmp_path / "s3", keep_last=1, latest=False, background=background)
        zckpt.wait()

    with pytest.warns(UserWarning, match=r"s3 is written.* not be removed.*L001"):
        write()
    assert directory_names(tmp_path) == ["s1", "s2", "s3"]
    assert zckpt.validate(tmp_path / "s3").ok


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ({"keep_last": 0}, "keep_last must"),
        ({"keep_last": 2, "keep_every": 1.5}, "keep_every must"),
        ({"keep_every": 10}, "pass keep_last too"),
    ],
)
def test_a_write_refuses_wrong_numbers_before_it_begins(tmp_path: Path, numbers: dict[str, Any], why: str) -> None:
    with engines_are_adapters(), pytest.raises(ValueError, match=why):
        zckpt.write(Engine(), tmp_path / "s1", **numbers)
    assert directory_names(tmp_path) == []


def save_often(run: str) -> list[str]:
    engine = make_engine(stage=1)
    with pytest.raises(ValueError, match="pass keep_last too"):
        zckpt.attach(engine, keep_every=2)
    zckpt.attach(engine, keep_last=1, keep_every=2)
    for _ in range(5):
        train(engine, 1)
        engine.save_checkpoint(run)
    return sorted(name for name in os.listdir(run) if name != "latest")


def test_saves_of_an_attached_engine_remove_older_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    steps, _ = cluster.run(save_often, 2, str(tmp_path))
    assert steps == ["global_step2", "global_step4", "global_step5"]
    assert zckpt.open(tmp_path).step == 5
