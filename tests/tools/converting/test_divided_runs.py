"""zckpt.convert turns the folders that DeepSpeed itself has saved of runs with tensor, expert and pipeline parallelism
into what zckpt would have written, which fits every other division."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support import converting
from tests.support.deepspeed_folders import make_divided, refused
from tests.support.divided import Setup, check_conversion, save_both
from tests.support.memory import peak_growth

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

TP, EP, PP = "tensor_parallel", "expert_parallel", "pipelines"
PATTERNS: dict[str, Any] = {
    "universal_checkpoint_info": {
        "tp_replicated_parameter_patterns": ["down_bias", r"norm\.\w+", "head$"],
        "parameter_with_row_parallelism_patterns": ["down$"],
        "parameter_with_2_sub_params_cat_dim_0": ["gate_up.*"],
    }
}
"""How ``Megatron`` is cut, as DeepSpeed's own converter wants to know it."""
SLICED: dict[str, Any] = {
    "universal_checkpoint_info": {
        "tp_replicated_parameter_patterns": [
            r"tied_modules\.", r"\d+\.fc\.", r"\d+\.norm\.", r"\d+\.fixed\.", r"\d+\.bias$"
        ],
        "parameter_with_row_parallelism_patterns": [r"\d+\.weight$"],
    }
}  # fmt: skip
"""The same for the ``Sliced`` layers of a pipeline."""
Case = tuple[str, list[tuple[Setup, int]], dict[str, Any]]
CASES: dict[str, Case] = {
    "tp3-2": (TP, [({"tp": 3, "stage": 2}, 3), ({"tp": 2, "stage": 1}, 4)], {}),
    "tp2-0": (TP, [({"tp": 2, "stage": 0}, 4), ({"tp": 1, "stage": 3}, 2)], {}),
    "tp2-0-bf16": (TP, [({"tp": 2, "stage": 0, "dtype": "bf16"}, 2), ({"tp": 3, "stage": 2, "dtype": "bf16"}, 3)], {}),
    "tp2-1": (TP, [({"tp": 2, "stage": 1, "data_types": {"grad_accum_dtype": "fp32"}, "dtype": "bf16"}, 4)], {}),
    "tp2-3": (TP, [({"tp": 2, "stage": 3, "frozen": True, "offload": True}, 4)], {}),
    "mpu-1": (
        TP, [({"way": "strided", "tp": 2, "stage": 1}, 4), ({"way": "mpu", "tp": 1, "stage": 2}, 2)], PATTERNS
    ),
    "mpu-0": (TP, [({"way": "mpu", "tp": 2, "stage": 0}, 4)], PATTERNS),
    "mpu-3": (TP, [({"way": "mpu", "tp": 2, "stage": 3, "frozen": True}, 4)], PATTERNS),
    "moe-1": (EP, [({"ep": 2, "stage": 1}, 4), ({"ep": 1, "stage": 2}, 2)], {}),
    "moe-0": (EP, [({"ep": 2, "stage": 0}, 4), ({"ep": 4, "stage": 1}, 4)], {}),
    "moe-0-bf16": (EP, [({"ep": 2, "stage": 0, "dtype": "bf16"}, 2)], {}),
    "moe-2-strided": (EP, [({"ep": 2, "stage": 2, "use_data_before_expert_parallelism": True}, 4)], {}),
    "auto-1": (EP, [({"ep": 2, "stage": 1, "auto": True}, 4), ({"ep": 4, "stage": 3, "auto": True}, 4)], {}),
    "auto-3": (
        EP, [({"ep": 2, "stage": 3, "auto": True, "dtype": "bf16"}, 4),
             ({"ep": 0, "stage": 2, "auto": True, "dtype": "bf16"}, 2)], {}
    ),
    "pipe-1": (PP, [({"stages": 2, "zero": 1}, 4), ({"stages": 1, "zero": 1}, 2)], {}),
    "auto-0": (EP, [({"ep": 2, "stage": 0, "auto": True}, 4)], {}),
    "auto-0-bf16": (EP, [({"ep": 2, "stage": 0, "auto": True, "dtype": "bf16"}, 2)], {}),
    "auto-frozen": (EP, [({"ep": 2, "stage": 1, "auto": True, "frozen": True}, 4)], {}),
    "auto-tp": (EP, [({"ep": 2, "stage": 1, "auto": True, "tp": 2}, 4)], {}),
    "pipe-moe": (PP, [({"stages": 2, "zero": 1, "ep": 2}, 4), ({"stages": 1, "zero": 1, "ep": 1}, 2)], {}),
    "pipe-3d": (PP, [({"stages": 2, "zero": 1, "tp": 2}, 8), ({"stages": 1, "zero": 1, "tp": -1}, 2)], SLICED),
    "pipe-0-bf16": (PP, [({"stages": 2, "zero": 0, "dtype": "bf16"}, 4)], {}),
    "pipe-4-bf16": (PP, [({"stages": 4, "zero": 1, "dtype": "bf16"}, 4)], {}),
}  # fmt: skip
"""For each case, the way of dividing, the engines with their numbers of ranks, of which the first one saves, and its
``client_state``."""
EVERY_COMMIT = {"tp3-2", "moe-1", "pipe-1"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in EVERY_COMMIT else pytest.mark.matrix) for case in CASES]
)
def test_a_conversion_is_what_zckpt_would_have_written(cluster: Cluster, tmp_path: Path, case: str) -> None:
    module, setups, client_state = CASES[case]
    check_conversion(cluster, tmp_path, module, setups, client_state)


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["tp3-2", "tp2-1", "mpu-1", "auto-1", "auto-3", "pipe-1"])
def test_universal_checkpoints(cluster: Cluster, tmp_path: Path, case: str) -> None:
    module, [(setup, ranks), *_], client_state = CASES[case]
    cluster.run(save_both, ranks, module, str(tmp_path), setup, client_state)
    source, universal = tmp_path / "stock" / "global_step3", tmp_path / "all" / "at"
    cluster.run(converting.make_universal, 1, str(source), str(universal), init=False)
    if case == "pipe-1":
        refused(universal, zckpt.MissingFileError, r"layer_01-model_states\.pt\)\n.*made from into it")
        for file in source.glob("layer_*"):
            shutil.copy(file, universal)
    converted = zckpt.convert(tmp_path / "all", tmp_path / "converted")
    converting.assert_same_checkpoints(zckpt.open(tmp_path / "own"), zckpt.open(converted.path), same_files=False)


@pytest.mark.matrix
def test_memory_does_not_depend_on_the_size_of_the_tensors(tmp_path: Path) -> None:
    """The tensors that both ranks have are read to compare them, too."""
    budget = zckpt.Budget(nbytes=8 << 20)
    for name, rows in (("small", 2), ("large", 2 << 20)):
        make_divided(tmp_path / name, rows=rows)
    zckpt.convert(tmp_path / "small", tmp_path / "warm", budget=budget)
    grown = peak_growth(lambda: zckpt.convert(tmp_path / "large", tmp_path / "converted", budget=budget))
    assert grown < budget.nbytes + (32 << 20)  # The files have 224 MiB.
