"""zckpt.convert turns a folder that DeepSpeed itself has saved into what zckpt would have written. A run resumes from
it as if it had never stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support import converting, deepspeed_folders
from tests.support.memory import peak_growth
from tests.support.offload import CASES, CPU, NVME, ODD, WIDE
from tests.support.runs import assert_same

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

GROUPS: dict[str, Any] = {"groups": True, "scheduler": True}
FP32_GRADIENTS = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
MODES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, **GROUPS},
    "0-odd": {"stage": 0, "model": "odd", "groups": True},
    "0-fp16-torch": {"stage": 0, "dtype": "fp16", "optimizer": "torch_adamw", **GROUPS},
    "0-fp32": {"stage": 0, "dtype": "fp32", **GROUPS},
    "0-fp32-sgd": {"stage": 0, "dtype": "fp32", "optimizer": "sgd"},
    "1": {"stage": 1, "model": "odd", "groups": True},
    "1-fp16": {"stage": 1, "dtype": "fp16", **GROUPS},
    "1-bf16-optimizer": {"stage": 1, "model": "odd", "groups": True, **FP32_GRADIENTS},
    "1-cpu": {"stage": 1, "model": "gpt2", "frozen": True, **GROUPS, "offload_optimizer": CPU},
    "2": {"stage": 2, "model": "gpt2", "frozen": True, **GROUPS},
    "2-fp32": {"stage": 2, "dtype": "fp32", "model": "odd", "optimizer": "torch_adamw"},
    "2-round-robin": {"stage": 2, "model": "odd", "groups": True, "round_robin_gradients": True},
    "2-aligned": {"stage": 2, "model": "odd", "groups": True, "parameter_alignment": True},
    "2-lion": {"stage": 2, "optimizer": "lion", "offload_optimizer": CPU},
    "2-muon": {"stage": 2, "optimizer": "muon"},
    "2-factored": {"stage": 2, "optimizer": "factored", **GROUPS},
    "3": {**ODD},
    "3-gpt2": {"model": "gpt2", "frozen": True, **GROUPS},
    "3-fp32": {**ODD, "dtype": "fp32", "optimizer": "torch_adamw"},
    "3-fp16-cpu": {**ODD, "dtype": "fp16", "offload_optimizer": CPU, "offload_param": CPU},
    "3-factored": {"optimizer": "factored", **GROUPS},
    "3-muon": {"optimizer": "muon", "reduce_scatter": False},
    "3-nvme": {**WIDE, "offload_optimizer": NVME},
    "3-nvme-small": {**ODD, "offload_optimizer": NVME},
    "3-nvme+cpu": {**WIDE, "offload_optimizer": NVME, "offload_param": CPU},
    "3-nvme+nvme": CASES["nvme+nvme"][1],
}
EVERY_COMMIT = {"0-odd", "0-fp32", "1-fp16", "1-bf16-optimizer", "2", "2-round-robin", "3", "3-nvme"}


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in EVERY_COMMIT else pytest.mark.matrix) for mode in MODES]
)
def test_a_conversion_is_what_zckpt_would_have_written(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    setup = MODES[mode]
    swaps = [str(tmp_path / f"swap-{number}") for number in range(2)]
    through = cluster.run(converting.save_both, 2, str(tmp_path), setup, swaps[0])
    converted = zckpt.convert(tmp_path / "stock", tmp_path / "converted")
    assert zckpt.validate(converted.path, level="deep").ok
    converting.assert_same_checkpoints(zckpt.open(tmp_path / "own"), zckpt.open(converted.path))

    resumed = cluster.run(converting.restore, 2, converted.path, setup, swaps[1])
    for rank, (expected, actual) in enumerate(zip(through, resumed, strict=True)):
        assert expected["losses"] == actual["losses"]
        for when in ("before", "after"):
            assert_same_state(*(without_buffers(run[when], setup, rank) for run in (expected, actual)))
        assert actual["client"]["note"] == "made by a test"
        assert torch.equal(actual["client"]["where"], torch.arange(3))


@pytest.mark.parametrize("mode", ["0-fp16-torch", "2-fp32", "3-fp32"])
@pytest.mark.matrix
def test_a_run_resumes_as_from_the_folder_itself(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """The optimizer keeps nothing that DeepSpeed does not save. So DeepSpeed's own resume from the folder is as good as
    zckpt's from the conversion."""
    cluster.run(converting.save_both, 2, str(tmp_path), MODES[mode])
    converted = zckpt.convert(tmp_path / "stock", tmp_path / "converted")
    stock = cluster.run(converting.load_stock, 2, str(tmp_path / "stock"), MODES[mode])
    resumed = cluster.run(converting.restore, 2, converted.path, MODES[mode])
    for expected, actual in zip(stock, resumed, strict=True):
        assert expected["losses"] == actual["losses"]
        assert_same_state(expected["after"], actual["after"])


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("2", marks=pytest.mark.matrix),
        pytest.param("3-gpt2"),
        pytest.param("1-fp16", marks=pytest.mark.matrix),
    ],
)
def test_universal_checkpoints(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """DeepSpeed's own converter makes a Universal Checkpoint of a folder. In these modes, it has everything that the
    folder had."""
    through = cluster.run(converting.save_both, 2, str(tmp_path), MODES[mode])
    cluster.run(
        converting.make_universal, 1, str(tmp_path / "stock" / converting.TAG), str(tmp_path / "all" / "at"), init=False
    )
    converted = zckpt.convert(tmp_path / "all", tmp_path / "converted")
    assert converted.found_format.startswith("Universal Checkpoint")
    assert zckpt.validate(converted.path, level="deep").ok
    converting.assert_same_checkpoints(zckpt.open(tmp_path / "own"), zckpt.open(converted.path))
    resumed = cluster.run(converting.restore, 2, converted.path, MODES[mode])
    for expected, actual in zip(through, resumed, strict=True):
        assert expected["losses"] == actual["losses"]
        assert_same_state(expected["after"], actual["after"])


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.matrix)])
def test_memory_is_bounded_by_the_budget(tmp_path: Path, stage: int) -> None:
    """The operating system counts the memory. The need for it does not depend on the size of the tensors."""
    budget = zckpt.Budget(nbytes=8 << 20)
    for name, numel in (("small", 8), ("large", 16 << 20)):
        weights: dict[str, Any] = {"module": {"weight": torch.zeros(numel, dtype=torch.float16)}, "buffer_names": []}
        inner, masters = deepspeed_folders.adam(length=numel), [torch.zeros(numel)]
        folder = tmp_path / name
        folder.mkdir()
        if stage:
            model = deepspeed_folders.model_state(**weights, param_shapes=[{"weight": torch.Size([numel])}])
            zero: dict[str, Any] = {"base_optimizer_state": inner, "single_partition_of_fp32_groups": masters}
            torch.save(deepspeed_folders.zero_state(**zero), folder / deepspeed_folders.OPTIMIZER)
        else:
            flat = {"optimizer_state_dict": inner, "fp32_groups_flat": masters, "cur_scale": 1.0}
            model = deepspeed_folders.model_state(**weights, param_shapes=None, optimizer=flat)
        torch.save(model, folder / deepspeed_folders.MODEL)
        del weights, inner, masters, model
    zckpt.convert(tmp_path / "small", tmp_path / "warm", budget=budget)
    grown = peak_growth(lambda: zckpt.convert(tmp_path / "large", tmp_path / "converted", budget=budget))
    assert (tmp_path / "large" / deepspeed_folders.MODEL).stat().st_size > 2 * budget.nbytes
    assert grown < budget.nbytes + (8 << 20)


def without_buffers(state: tuple[Any, ...], setup: dict[str, Any], rank: int) -> tuple[Any, ...]:
    """Returns the state without its buffers on ranks other than 0. Up to stage 2, DeepSpeed saves only the buffers of
    rank 0."""
    if rank == 0 or setup.get("stage", 3) == 3:
        return state
    return {key: value for key, value in state[0].items() if not key[0].startswith("buffer/")}, *state[1:]


def assert_same_state(expected: tuple[Any, ...], actual: tuple[Any, ...]) -> None:
    # Fingerprints stand for tensors that are in files.
    if all(isinstance(value, str) for value in expected[0].values()):
        assert expected[0] == actual[0]
    else:
        assert_same(expected[0], actual[0])
    assert_same(expected[1], actual[1])
    assert expected[2] == actual[2]
