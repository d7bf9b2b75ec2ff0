"""Every optimizer that DeepSpeed runs on the CPU: a restored run goes on as if it had never stopped, whatever it keeps.

AdamW, DeepSpeed's own and torch's, and SGD without offload are in test_stages.py and test_offload.py.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from models import make_engine, train
from runs import AFTER, assert_at_rest, everything

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from cluster import Cluster

CPU, NVME = {"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": {"device": "nvme"}}
WIDE: dict[str, Any] = {"model": "wide", "sub_group_size": 500000}
MODES: dict[str, dict[str, Any]] = {
    "0": {"model": "mlp", "stage": 0},
    "1": {"model": "odd", "stage": 1},
    "1-cpu": {"model": "odd", "stage": 1, **CPU},
    "2": {"model": "odd", "stage": 2},
    "2-cpu": {"model": "odd", "stage": 2, **CPU},
    "3": {"model": "odd", "stage": 3, "sub_group_size": 1000},
    "3-cpu": {"model": "odd", "stage": 3, "sub_group_size": 1000, **CPU},
    "3-nvme": {**WIDE, "stage": 3, **NVME},
}
MUON: dict[str, Any] = {"optimizer": "muon", "reduce_scatter": False}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in ("lion", "adagrad", "sgd", "factored", "adafactor")},
    "muon": MUON,
}
FP32_GRADIENTS = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
IN_MEMORY = {"save_muon_momentum_buffer_in_memory": True}


def runs_in_deepspeed(optimizer: str, mode: str, groups: bool) -> bool:
    offloaded = "offload_optimizer" in MODES[mode]
    if optimizer == "lion" and not offloaded:  # there it is in CUDA
        return False
    # From stage 1 on, DeepSpeed makes torch's Adagrad anew, with one param group, and fails where there were two.
    return not (optimizer == "adagrad" and groups and mode in ("1", "2", "3"))


def combinations() -> dict[str, dict[str, Any]]:
    found = {}
    for optimizer, mode, dtype in itertools.product(OPTIMIZERS, MODES, ("bf16", "fp32", "fp16")):
        for groups in (False, True):
            if runs_in_deepspeed(optimizer, mode, groups):
                name = "-".join((optimizer, mode, dtype)) + ("-groups" if groups else "")
                found[name] = {**MODES[mode], **OPTIMIZERS[optimizer], "dtype": dtype, "groups": groups}
    return found


CASES: dict[str, dict[str, Any]] = {
    **combinations(),
    # 20 steps: fewer do not show whether the running products of Muon's Adam are restored.
    "muon-0-20": {**MODES["0"], **MUON, "steps": 20},
    "muon-1-20": {**MODES["1"], **MUON, "steps": 20},
    "muon-3-cpu-20": {**MODES["3-cpu"], **MUON, "steps": 20},
    "muon-1-bf16-optimizer": {**MODES["1"], **MUON, **FP32_GRADIENTS},
    "muon-1-one-behind": {**MODES["1"], **MUON, "model": "uneven"},
    "muon-2-round-robin": {**MODES["2"], **MUON, "model": "gpt2", "round_robin_gradients": True, "groups": True},
    "muon-3-nvme-in-memory": {**MODES["3-nvme"], **MUON, **IN_MEMORY},
}
EVERY_COMMIT = {
    "lion-3-nvme-bf16-groups",
    "adagrad-2-cpu-fp32-groups",
    "muon-1-20",
    "muon-1-one-behind",
    "muon-3-cpu-bf16-groups",
    "factored-0-fp32",
    "factored-2-bf16-groups",
    "factored-3-fp16",
    "adafactor-0-bf16",
}


def marked(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(c, marks=[] if c in EVERY_COMMIT else [pytest.mark.matrix]) for c in cases]


def go(path: str, setup: dict[str, Any], swap: str, trained: int | None = None, steps: int = 3) -> dict[str, Any]:
    """Trains and writes or, with ``trained``, restores into an engine that has trained as much; then trains on."""
    engine = make_engine(**setup, swap=swap, seed=int(trained is not None))
    if trained is None:
        train(engine, steps)
        before = everything(engine)
        zckpt.write(engine, path)
        assert everything(engine) == before
    else:
        train(engine, trained, 100)
        zckpt.restore(engine, path, rng=True)
        before = everything(engine)
    if setup["stage"] == 3:
        assert_at_rest(engine)
    return {"before": before, "losses": train(engine, AFTER, steps), "after": everything(engine)}


@pytest.mark.parametrize("case", marked(CASES))
def test_a_restored_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, case: str) -> None:
    setup, path = dict(CASES[case]), str(tmp_path / "checkpoint")
    steps = setup.pop("steps", 3)
    through = cluster.run(go, 2, path, setup, str(tmp_path / "swap"), steps=steps)
    for trained in (0, 2):
        resumed = cluster.run(go, 2, path, setup, str(tmp_path / f"swap{trained}"), trained, steps)
        assert resumed == through
    report = zckpt.validate(path)
    assert report.ok, str(report)
