"""Real ZeRO-3 engines: what is written is what they held, and a restored run goes on as if it had never stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from runs import BEFORE, assert_goes_on_alike, restore_and_go_on, write_and_go_on

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster

CASES = {
    "bf16": {},
    "fp32": {"dtype": "fp32"},
    "torch-adamw": {"optimizer": "torch_adamw"},
    "sgd": {"optimizer": "sgd"},
    "groups-scheduler": {"groups": True, "scheduler": True},
    "odd": {"model": "odd", "groups": True},
    "odd-fp32-sub-groups": {"model": "odd", "dtype": "fp32", "sub_group_size": 1000},
    "frozen-gpt2": {"model": "gpt2", "frozen": True, "groups": True, "scheduler": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
def test_a_restored_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, case: str, trained: int) -> None:
    path = str(tmp_path / "run" / "global_step3")
    through = cluster.run(write_and_go_on, 2, path, CASES[case])
    resumed = cluster.run(restore_and_go_on, 2, path, CASES[case], trained)
    assert_goes_on_alike(through, resumed)


@pytest.mark.parametrize("case", CASES)
def test_loaded_tensors_are_what_the_engines_held(cluster: Cluster, tmp_path: Path, case: str) -> None:
    path = str(tmp_path / "run" / "global_step3")
    ranks = [result["before"][0] for result in cluster.run(write_and_go_on, 2, path, CASES[case])]
    checkpoint = zckpt.open(tmp_path / "run")
    assert checkpoint.step == BEFORE
    assert checkpoint.world_size == 2
    loaded = checkpoint.load()
    assert set(loaded) == set(checkpoint)
    covered: dict[str, int] = {}
    for rank, pieces in enumerate(ranks):
        for (key, start, stop), value in pieces.items():
            if key in loaded and not (key.startswith("buffer/") and rank):
                assert torch.equal(loaded[key].reshape(-1)[start:stop], value), key
                covered[key] = covered.get(key, 0) + stop - start
    assert covered == {key: tensor.numel() for key, tensor in loaded.items()}
    report = zckpt.validate(path)
    assert report.ok, str(report)
