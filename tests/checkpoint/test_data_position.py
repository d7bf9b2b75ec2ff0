"""A run that is killed in the middle of an epoch goes on with the next sample, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import zckpt
from tests.support.interrupted import EPOCH, assert_goes_on_as_if_never_stopped, interruptions, run_example
from tests.support.launches import launch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")


@pytest.mark.parametrize("example", ["stateful_dataloader.py", "fsdp_run.py"])
@pytest.mark.parametrize(
    ("steps", "seed"),
    [
        ((7, EPOCH + 2), 0),
        *(pytest.param((4, 7, 11, EPOCH + 2), seed, marks=pytest.mark.matrix) for seed in range(6)),
    ],
)
def test_a_run_that_is_killed_at_any_point_sees_the_same_samples_as_one_that_is_not(
    cluster: Cluster, tmp_path: Path, example: str, steps: tuple[int, ...], seed: int
) -> None:
    through, run = tmp_path / "through", tmp_path / "run"
    cluster.run(run_example, 2, example, str(through), None, init=False)
    for ends in interruptions(steps, seed):
        outcomes = cluster.outcomes(run_example, 2, example, str(run), ends, init=False, grace=2)
        assert outcomes[ends[0]].failed, "it was stopped"
        assert zckpt.validate(run).ok
    cluster.run(run_example, 2, example, str(run), None, init=False)
    assert_goes_on_as_if_never_stopped(run, through, len(steps))


@pytest.mark.matrix
@pytest.mark.parametrize("loader", ["own", "accelerate"])
def test_a_run_of_trainer_that_is_killed_sees_the_same_samples(tmp_path: Path, loader: str) -> None:
    through, run = tmp_path / "through", tmp_path / "run"
    assert launch("stateful_trainer.py", through, loader, 0)
    for dies_at in (5, 8, 12):
        assert not launch("stateful_trainer.py", run, loader, dies_at)
    assert launch("stateful_trainer.py", run, loader, 0)
    assert_goes_on_as_if_never_stopped(run, through, 3)
