"""Modules of a sharded model whose hooks change its ``state_dict``: they divide a weight, or add a tensor of their
own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

import zckpt

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


class Joined(nn.Module):
    """A module that has the weights of a query and a key in one parameter. Its state dict has them apart, and gathers
    them on all ranks for this. The state dict also has a factor, which is an attribute of the module."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.both = nn.Linear(4, 6, bias=False)
        self.factor = torch.full((3,), factor)
        self.register_state_dict_post_hook(self._divide)
        self.register_load_state_dict_pre_hook(self._take_factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = self.both(x).chunk(2, dim=-1)
        out: torch.Tensor = query * key * self.factor
        return out

    @staticmethod
    def _divide(module: Joined, state: Any, prefix: str, _: object) -> None:
        both = state.pop(f"{prefix}both.weight")
        both = both.redistribute(both.device_mesh, [Replicate()])
        state[f"{prefix}query"], state[f"{prefix}key"] = (half.contiguous() for half in both.chunk(2))
        state[f"{prefix}factor"] = module.factor.type_as(module.both.weight)

    @staticmethod
    def _take_factor(module: Joined, state: Any, prefix: str, *_: object) -> None:
        module.factor = state.pop(f"{prefix}factor")
        state[f"{prefix}both.weight"] = module.both.weight


def make(factor: float) -> zckpt.TrainState:
    torch.manual_seed(int(factor))
    compiled: Any = torch.compile(nn.Linear(3, 3), backend="eager")
    model: Any = nn.Sequential(Joined(factor), compiled)
    fully_shard(model)
    state = zckpt.TrainState(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    state.optimizers[0].step()
    return state


def write_and_restore(path: str) -> list[Any]:
    written, restored = make(2), make(3)
    zckpt.write(written, f"{path}1")
    zckpt.write(written, path)
    zckpt.restore(restored, path)
    values = []
    for state in (written, restored):
        joined: Any = state.model.get_submodule("0")
        values.append([joined.both.weight.full_tensor().tolist(), joined.factor.tolist()])
    return values


def test_weights_that_a_hook_divides_are_saved_as_they_are(cluster: Cluster, tmp_path: Path) -> None:
    """A write also leaves a compiled module as it is."""
    for written, restored in cluster.run(write_and_restore, 2, str(tmp_path / "c")):
        assert restored == written
        assert written[1] == [2.0] * 3
    checkpoint = zckpt.open(tmp_path / "c")
    assert {key for key in checkpoint if key.startswith(("master", "buffer"))} == {
        "master/0.both.weight",
        "buffer/0.factor",
        "master/1.weight",
        "master/1.bias",
    }


def write_alone(path: str) -> None:
    """Only rank 1 has a buffer that is refused. It must not fail before the hook has gathered the weights of both
    ranks."""
    state = make(2)
    if torch.distributed.get_rank() == 1:
        state.model.register_buffer("halves", torch.zeros(2, dtype=torch.complex32))
    zckpt.write(state, path)


def test_a_rank_that_fails_leaves_no_other_one_in_a_hook(cluster: Cluster, tmp_path: Path) -> None:
    outcomes = cluster.outcomes(write_alone, 2, str(tmp_path / "c"), timeout=60)
    first, second = (str(outcome.error) for outcome in outcomes)
    assert "zckpt.errors.RankError" in first
    assert "halves of dtype torch.complex32, which safetensors does not know" in second
