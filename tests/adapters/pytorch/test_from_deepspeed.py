"""A run goes on in another framework: from DeepSpeed into PyTorch alone, and the reverse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zckpt
from tests.support.models import ADAMW, Mlp, batch, make_engine
from tests.support.models import train as train_engine
from tests.support.runs import weights
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

BEFORE, AFTER = 3, 3


def make_state(layout: str, seed: int) -> zckpt.TrainState:
    """Returns a TrainState of the model that ``make_engine`` makes too, with the same settings of the optimizer."""
    torch.manual_seed(seed)
    model: nn.Module = Mlp()
    if layout == "fsdp":
        fully_shard(model)
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    settings: dict[str, Any] = {**ADAMW}
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}]
    return zckpt.TrainState(model, torch.optim.AdamW(groups, **settings))


def train_state(state: zckpt.TrainState, steps: int, first: int) -> list[float]:
    losses = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, first + steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = state.model(x)
        loss.backward()
        losses.append(loss.item())
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in model.named_parameters():
        full: Any = weight.detach()
        found[name.removeprefix("module.")] = (full.full_tensor() if isinstance(full, DTensor) else full).clone()
    return found


def from_deepspeed(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup, groups=True)
    train_engine(engine, BEFORE)
    zckpt.write(engine, path)
    return {"losses": train_engine(engine, AFTER, BEFORE), "weights": weights(engine)}


def into_torch(path: str, layout: str) -> dict[str, Any]:
    state = make_state(layout, 1)
    zckpt.restore(state, path)
    assert state.step == BEFORE
    return {"losses": train_state(state, AFTER, BEFORE), "weights": whole(state.model)}


def from_torch(path: str, layout: str) -> dict[str, Any]:
    state = make_state(layout, 0)
    train_state(state, BEFORE, 0)
    zckpt.write(state, path)
    return {"losses": train_state(state, AFTER, BEFORE), "weights": whole(state.model)}


def into_deepspeed(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup, groups=True, seed=1)
    zckpt.restore(engine, path)
    assert engine.global_steps == BEFORE
    losses = train_engine(engine, AFTER, BEFORE)
    assert batch(engine, 0)["x"].dtype == torch.float32
    return {"losses": losses, "weights": weights(engine)}


STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_of_deepspeed_goes_on_bit_for_bit_with_the_same_optimizer(
    cluster: Cluster, tmp_path: Path, stage: int
) -> None:
    """DeepSpeed with torch's AdamW in fp32 does the same arithmetic on two ranks as FSDP2 and DDP."""
    setup = {"stage": stage, "dtype": "fp32", "optimizer": "torch_adamw"}
    through = cluster.run(from_deepspeed, 2, str(tmp_path / "c"), setup)
    for layout in ("fsdp", "ddp"):
        assert frozen(cluster.run(into_torch, 2, str(tmp_path / "c"), layout)) == frozen(through)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_of_torch_goes_on_bit_for_bit_in_deepspeed(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    setup = {"stage": stage, "dtype": "fp32", "optimizer": "torch_adamw"}
    for layout in ("fsdp", "ddp"):
        through = cluster.run(from_torch, 2, str(tmp_path / layout), layout)
        assert frozen(cluster.run(into_deepspeed, 2, str(tmp_path / layout), setup)) == frozen(through)


@pytest.mark.parametrize("optimizer", ["adamw"])
def test_the_optimizer_of_deepspeed_rounds_in_another_order(cluster: Cluster, tmp_path: Path, optimizer: str) -> None:
    """The state is equal, so the first loss is. DeepSpeed's kernel then rounds the last bit in another way."""
    setup = {"stage": 2, "dtype": "fp32", "optimizer": optimizer}
    through = cluster.run(from_deepspeed, 2, str(tmp_path / "a"), setup)
    for expected, result in zip(through, cluster.run(into_torch, 2, str(tmp_path / "a"), "fsdp"), strict=True):
        assert expected["losses"][0] == result["losses"][0]
        torch.testing.assert_close(expected["losses"], result["losses"], rtol=1e-5, atol=0)
    through = cluster.run(from_torch, 2, str(tmp_path / "b"), "fsdp")
    for expected, result in zip(through, cluster.run(into_deepspeed, 2, str(tmp_path / "b"), setup), strict=True):
        assert expected["losses"][0] == result["losses"][0]
        torch.testing.assert_close(expected["losses"], result["losses"], rtol=1e-5, atol=0)


def rewrite(path: str, copy: str, layout: str) -> None:
    """Restores a checkpoint into a new state of PyTorch alone, and writes it again."""
    state = make_state(layout, 1)
    zckpt.restore(state, path)
    zckpt.write(state, copy)


def rewrite_by_deepspeed(path: str, copy: str, setup: dict[str, Any]) -> None:
    engine = make_engine(**setup, groups=True, seed=1)
    zckpt.restore(engine, path)
    zckpt.write(engine, copy)


CPU = {"device": "cpu"}
ANY_STATE: list[dict[str, Any]] = [
    {"stage": 0, "dtype": "bf16"},
    {"stage": 1, "dtype": "fp16"},
    {"stage": 2, "dtype": "bf16", "offload_optimizer": CPU},
    {"stage": 3, "dtype": "bf16", "offload_optimizer": CPU, "offload_param": CPU},
    {"stage": 3, "dtype": "bf16", "offload_optimizer": {"device": "nvme"}},
]


@pytest.mark.matrix
@pytest.mark.parametrize("setup", ANY_STATE, ids=lambda setup: "-".join(map(str, setup.values())))
def test_the_state_of_any_engine_goes_through_pytorch_and_back(
    cluster: Cluster, tmp_path: Path, setup: dict[str, Any]
) -> None:
    """The master weights and the moments stay as they are, at any number of ranks."""
    if "nvme" in str(setup):
        setup = {**setup, "swap": str(tmp_path / "swap")}
    first = str(tmp_path / "first")
    cluster.run(from_deepspeed, 2, first, setup)
    for number, (layout, ranks) in enumerate([("fsdp", 3), ("ddp", 2), ("alone", 1)]):
        there, back = str(tmp_path / f"there{number}"), str(tmp_path / f"back{number}")
        cluster.run(rewrite, ranks, first, there, layout)
        cluster.run(rewrite_by_deepspeed, 3 - number, there, back, setup)
        for copy in (there, back):
            difference = zckpt.diff(first, copy)
            assert [entry.key for entry in difference.tensors if not entry.key.startswith("param/")] == []
            assert zckpt.open(copy).step == BEFORE
        assert {key for key in zckpt.open(first) if not key.startswith("param/")} == {*zckpt.open(there)}
