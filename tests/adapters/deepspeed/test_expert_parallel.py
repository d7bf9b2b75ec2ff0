"""Engines of ``deepspeed.moe`` and AutoEP: a checkpoint has all experts, and fits any other number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import zckpt
from tests.support.divided import Setup, check_division
from tests.support.expert_parallel import make

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

SETUPS: list[tuple[Setup, int]] = [
    ({"ep": 2, "stage": 0}, 2), ({"ep": 2, "stage": 1}, 4), ({"ep": 4, "stage": 2}, 4), ({"ep": 1, "stage": 1}, 2),
    ({"ep": 2, "stage": 2, "use_data_before_expert_parallelism": True}, 4), ({"ep": 1, "stage": 0}, 1),
]  # fmt: skip
AUTO: list[tuple[Setup, int]] = [
    ({"auto": True, "ep": 2, "stage": 0}, 4), ({"auto": True, "ep": 2, "stage": 3}, 4),
    ({"auto": True, "ep": 4, "stage": 1}, 4), ({"auto": True, "ep": 0, "stage": 3}, 2),
    ({"auto": True, "ep": 2, "stage": 2}, 2), ({"auto": True, "ep": 0, "stage": 0}, 1),
]  # fmt: skip
FROZEN: list[tuple[Setup, int]] = [
    ({"auto": True, "frozen": True, "ep": 2, "stage": 1}, 4), ({"auto": True, "frozen": True, "ep": 0, "stage": 2}, 2),
    ({"auto": True, "frozen": True, "ep": 2, "stage": 3}, 4),
]  # fmt: skip
"""Engines, each with a number of ranks."""


@pytest.mark.parametrize("there", [1, 4])
def test_a_division_restores_into_itself_and_into_another_one(cluster: Cluster, tmp_path: Path, there: int) -> None:
    check_division(cluster, str(tmp_path / "c"), "expert_parallel", SETUPS, there)


@pytest.mark.parametrize("there", [1, 4])
def test_a_division_by_autoep_restores_into_another_one(cluster: Cluster, tmp_path: Path, there: int) -> None:
    check_division(cluster, str(tmp_path / "c"), "expert_parallel", AUTO, there)


@pytest.mark.matrix
@pytest.mark.parametrize("setups", [SETUPS, AUTO, FROZEN])
def test_every_division_restores_into_every_other_one(
    cluster: Cluster, tmp_path: Path, setups: list[tuple[Setup, int]]
) -> None:
    for there in range(len(setups)):
        check_division(cluster, str(tmp_path / str(there)), "expert_parallel", setups, there, everywhere=True)


def write_half_trained(path: str) -> None:
    engine = make(2, 0, auto=True)
    engine.module.get_parameter("model.layers.0.mlp.experts.w3").requires_grad_(False)
    with pytest.raises(zckpt.UnsupportedError, match=r"experts\.gate_up_proj"):
        zckpt.write(engine, path)


@pytest.mark.matrix
def test_a_tensor_of_which_one_half_is_trained_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_half_trained, 2, str(tmp_path / "c"))
