"""DeepSpeed engines with tensor parallelism: the checkpoint has whole tensors, and fits any other number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from tests.support.divided import Setup, check_division, check_stored, restore_whole, write_trained
from tests.support.tensor_parallel import HIDDEN, make, train
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

AUTOTP: list[tuple[Setup, int]] = [
    ({"tp": 2, "stage": 0}, 2), ({"tp": 2, "stage": 1}, 4), ({"tp": 3, "stage": 2}, 3), ({"tp": 2, "stage": 3}, 4),
    ({"tp": 3, "stage": 1}, 6), ({"tp": 1, "stage": 2}, 2), ({"tp": 1, "stage": 3}, 1),
]  # fmt: skip
MPU: list[tuple[Setup, int]] = [
    ({"way": "patterns", "tp": 2, "stage": 0}, 4), ({"way": "strided", "tp": 2, "stage": 1}, 4),
    ({"way": "mpu", "tp": 2, "stage": 3}, 2), ({"way": "mpu", "tp": 1, "stage": 2}, 3),
]  # fmt: skip
"""Engines, each with a number of ranks."""


@pytest.mark.parametrize("there", [1, 3])
def test_a_division_restores_into_itself_and_into_another_one(cluster: Cluster, tmp_path: Path, there: int) -> None:
    check_division(cluster, str(tmp_path / "c"), "tensor_parallel", AUTOTP, there)


def test_a_division_by_an_mpu_restores_into_another_one(cluster: Cluster, tmp_path: Path) -> None:
    check_division(cluster, str(tmp_path / "c"), "tensor_parallel", MPU, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("setups", [AUTOTP, MPU])
def test_every_division_restores_into_every_other_one(
    cluster: Cluster, tmp_path: Path, setups: list[tuple[Setup, int]]
) -> None:
    for there in range(len(setups)):
        check_division(cluster, str(tmp_path / str(there)), "tensor_parallel", setups, there, everywhere=True)


OTHERS: list[Setup] = [
    {"tp": 2, "stage": 0, "dtype": "bf16"}, {"tp": 2, "stage": 3, "dtype": "bf16", "offload": True},
    {"tp": 2, "stage": 1, "dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
    {"way": "mpu", "tp": 2, "stage": 2, "dtype": "bf16", "frozen": True},
    {"way": "mpu", "tp": 2, "stage": 1, "frozen": True},
]  # fmt: skip


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number in (1, 3) else pytest.mark.matrix) for number in range(len(OTHERS))],
)
def test_a_resumed_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, number: int) -> None:
    path = str(tmp_path / "c")
    written = cluster.run(write_trained, 4, "tensor_parallel", path, OTHERS[number])
    check_stored(path, written[0][0])
    resumed = cluster.run(restore_whole, 4, "tensor_parallel", path, OTHERS[number], 1)
    assert frozen(resumed) == frozen(written)


def write_parts(path: str) -> None:
    engine = make(2, 1, way="mpu", frozen=True)
    train(engine, 1)
    zckpt.write(engine, path, parts=["master", "param"])


def test_masters_and_all_weights_are_written(cluster: Cluster, tmp_path: Path) -> None:
    """At stage 1, a rank has whole weights beside partitions of the master weights."""
    cluster.run(write_parts, 4, str(tmp_path / "c"))
    assert zckpt.validate(tmp_path / "c").ok


def save_and_load(directory: str, setup: Setup) -> None:
    engine = make(**setup)
    zckpt.attach(engine)
    train(engine, 3)
    engine.save_checkpoint(directory)
    expected = train(engine, 2)
    other = make(**setup, seed=1)
    zckpt.attach(other)
    assert other.load_checkpoint(directory)[0] is not None
    assert train(other, 2) == expected


def test_an_attached_engine_saves_and_loads(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_and_load, 4, str(tmp_path), {"tp": 2, "stage": 1})
    assert zckpt.validate(tmp_path / "global_step3").ok


def write_with_other_replicas(path: str, setup: Setup, message: str) -> None:
    engine = make(**setup)
    train(engine, 1)
    with torch.no_grad():
        if torch.distributed.get_rank() and "way" in setup:
            engine.optimizer.single_partition_of_fp32_groups[0].add_(1)
        elif torch.distributed.get_rank():
            engine.module.norm.weight.view(-1)[-1] += 1
    with pytest.raises(zckpt.ZckptError, match=message):
        zckpt.write(engine, path)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"way": "mpu", "tp": 2, "stage": 2}, r"master/down_bias has other values on rank 1"),
        ({"tp": 2, "stage": 0}, "its weights are others, such as norm.weight"),
        ({"tp": 3, "stage": 2}, "its weights are others, such as norm.weight"),
    ],
)
def test_replicas_that_differ_between_tensor_parallel_ranks(
    cluster: Cluster, tmp_path: Path, setup: Setup, message: str
) -> None:
    """Layers that are cut unevenly give the partitions of ZeRO other borders on each rank. Then the weights are
    compared in their place."""
    cluster.run(write_with_other_replicas, setup["tp"], str(tmp_path / "c"), setup, message)
    assert not (tmp_path / "c").exists()


def write_without_description(path: str) -> None:
    engine = make(2, 1, way="mpu")
    for parameter in engine.module.parameters():
        parameter.tensor_model_parallel = False
    with pytest.raises(zckpt.UnsupportedError, match=r"2 ranks.*\n.*universal_checkpoint_info"):
        zckpt.write(engine, path)
    engine.module.down.tensor_model_parallel, engine.module.down.partition_dim = True, 2
    with pytest.raises(zckpt.UnsupportedError, match=r"down, .*partition_dim 2.*partition_stride 1"):
        zckpt.write(engine, path)
    engine = make(2, 1, way="patterns")
    info = engine.module.universal_checkpoint_info()
    info["parameter_with_sub_params"][0]["shape"] = ((HIDDEN - 1, HIDDEN + 1),)
    for more, message in (([], r"gate_up_bias, whose parts of \[11, 13\]"), (["affine_map"], "with affine_map")):
        engine.module.universal_checkpoint_info = info | {key: {} for key in more}
        with pytest.raises(zckpt.UnsupportedError, match=message):
            zckpt.write(engine, path)


def write_with_a_reason(path: str) -> None:
    engine = make(2, 1)
    described = engine.module.o.weight.ds_autotp_universal_checkpoint_meta
    described["conversion"]["unsupported_reason"] = "heads are shared"
    with pytest.raises(zckpt.UnsupportedError, match=r"o\.weight, .*AutoTP.*heads"):
        zckpt.write(engine, path)


def test_cuts_that_are_not_described_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    for function in (write_without_description, write_with_a_reason):
        cluster.run(function, 2, str(tmp_path / "c"))
        assert not (tmp_path / "c").exists()
