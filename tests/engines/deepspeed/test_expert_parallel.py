"""Engines of ``deepspeed.moe`` and AutoEP: a checkpoint has all experts, and fits any other number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.divided import Setup, check_division

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

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
    check_division(cluster, str(tmp_path / "c"), "expert_parallel", SETUPS, there)


@pytest.mark.parametrize("there", range(len(AUTO)))
def test_a_division_by_autoep_restores_into_another_one(cluster: Cluster, tmp_path: Path, there: int) -> None:
    check_division(cluster, str(tmp_path / "c"), "expert_parallel", AUTO, there)


@pytest.mark.matrix
@pytest.mark.parametrize("setups", [SETUPS, AUTO])
def test_every_division_restores_into_every_other_one(
    cluster: Cluster, tmp_path: Path, setups: list[tuple[Setup, int]]
) -> None:
    for there in range(len(setups)):
        check_division(cluster, str(tmp_path / str(there)), "expert_parallel", setups, there, everywhere=True)
