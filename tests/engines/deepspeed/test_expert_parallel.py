"""Engines of ``deepspeed.moe`` and AutoEP: a checkpoint has all experts, and fits any other number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.expert_parallel import make, train, whole
from tests.support.runs import settings
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

Setup = dict[str, Any]


def write_trained(path: str, setup: Setup) -> tuple[dict[str, Any], list[float]]:
    engine = make(**setup)
    train(engine, 3)
    zckpt.write(engine, path)
    return whole(engine), train(engine, 2)


def restore_whole(path: str, setup: Setup, trained: int) -> tuple[dict[str, Any], list[float]]:
    engine = make(**setup, seed=1)
    train(engine, trained)
    zckpt.restore(engine, path)
    assert settings(engine)["global_steps"] == 3
    return whole(engine), train(engine, 2)


SETUPS: list[tuple[Setup, int]] = [
    ({"ep": 2, "stage": 0}, 2), ({"ep": 2, "stage": 1}, 4), ({"ep": 4, "stage": 2}, 4), ({"ep": 1, "stage": 1}, 2),
    ({"ep": 2, "stage": 2, "use_data_before_expert_parallelism": True}, 4), ({"ep": 1, "stage": 0}, 1),
]  # fmt: skip
AUTO: list[tuple[Setup, int]] = [
    ({"auto": True, "ep": 2, "stage": 0}, 4), ({"auto": True, "ep": 2, "stage": 3}, 4),
    ({"auto": True, "ep": 4, "stage": 1}, 4), ({"auto": True, "ep": 2, "stage": 2}, 2),
]  # fmt: skip
"""Engines, each with a number of ranks."""


@pytest.mark.parametrize("there", range(len(SETUPS)))
def test_a_division_restores_into_itself_and_into_another_one(cluster: Cluster, tmp_path: Path, there: int) -> None:
    check(cluster, str(tmp_path / "c"), SETUPS, there)


@pytest.mark.parametrize("there", range(len(AUTO)))
def test_a_division_by_autoep_restores_into_another_one(cluster: Cluster, tmp_path: Path, there: int) -> None:
    check(cluster, str(tmp_path / "c"), AUTO, there)


@pytest.mark.matrix
@pytest.mark.parametrize("setups", [SETUPS, AUTO])
def test_every_division_restores_into_every_other_one(
    cluster: Cluster, tmp_path: Path, setups: list[tuple[Setup, int]]
) -> None:
    for there in range(len(setups)):
        check(cluster, str(tmp_path / str(there)), setups, there, everything=True)


def check(
    cluster: Cluster, path: str, setups: list[tuple[Setup, int]], there: int, *, everything: bool = False
) -> None:
    setup, ranks = setups[there]
    written = cluster.run(write_trained, ranks, path, setup)
    assert zckpt.validate(path).ok
    stored = zckpt.open(path).load()
    for key, tensor in written[0][0].items():
        if not key.startswith("param/") or key in stored:
            assert torch.equal(stored[key], tensor), key
    assert {key for key in stored if not key.startswith("param/")} == {
        key for key in written[0][0] if not key.startswith("param/")
    }
    for number, (other, here) in enumerate(setups):
        # The next one, too, at every commit; all of them in the long run.
        if not everything and number not in (there, (there + 1) % len(setups)):
            continue
        for rank, (tensors, losses) in enumerate(cluster.run(restore_whole, here, path, other, number % 2)):
            assert frozen(tensors) == frozen(written[0][0]), other
            if number == there:
                assert losses == written[rank][1]
