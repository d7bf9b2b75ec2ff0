"""FSDP2 models and state dicts on a real GPU, with one rank: nothing changes on the way to the disk and back.

These tests have the marker ``gpu``. They run in this process, because a process that has used a GPU cannot be forked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

import zckpt
import zckpt.dcp
from tests.support.one_rank import one_rank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEVICE, BACKEND, WIDTH = "cuda", "cuda:nccl,cpu:gloo", 256
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # torch warns in this process


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank(29513, lambda: dist.init_process_group(BACKEND)):
        yield


def make_state(seed: int = 0, *, mixed: bool = False) -> zckpt.TrainState:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(seed)
    layers = (torch.nn.Linear(WIDTH, WIDTH + 3), torch.nn.LayerNorm(WIDTH + 3), torch.nn.Linear(WIDTH + 3, WIDTH))
    model = torch.nn.Sequential(*layers).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
    mesh = init_device_mesh(DEVICE, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zckpt.TrainState(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))


def train(state: zckpt.TrainState, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        loss = state.model(torch.randn(4, WIDTH).to(DEVICE)).float().square().mean()
        loss.backward()
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state.scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path, background: bool, mixed: bool, trained: int) -> None:
    state, other = make_state(mixed=mixed), make_state(1, mixed=mixed)
    train(state, 3)
    zckpt.write(state, tmp_path / "c", background=background)
    expected = train(state, 3, 3)
    zckpt.wait()
    train(other, trained)
    zckpt.restore(other, tmp_path / "c")
    assert train(other, 3, 3) == expected
    assert zckpt.validate(tmp_path / "c").ok


def some_tensors(seed: int) -> dict[str, Any]:
    """Returns 2000 small tensors and some larger ones on the GPU, one of which is not contiguous."""
    torch.manual_seed(seed)
    small = {str(i): torch.randn(37, device=DEVICE) for i in range(2000)}
    strided = torch.randn(515, 301, device=DEVICE).T
    return {"small": small, "strided": strided, "half": torch.randn(1 << 22, device=DEVICE).bfloat16(), "step": seed}


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["step"] == second["step"]
    for name in ("strided", "half"):
        assert second[name].device.type == DEVICE
        assert torch.equal(first[name], second[name])
    assert all(torch.equal(tensor, second["small"][name]) for name, tensor in first["small"].items())


def test_a_state_dict_comes_back_to_the_device(tmp_path: Path) -> None:
    saved, loaded = some_tensors(1), some_tensors(2)
    zckpt.write_state_dict(saved, tmp_path / "c")
    zckpt.open(tmp_path / "c").load_into(loaded)
    assert_equal(saved, loaded)


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "async_save"])
def test_dcp_saves_and_loads_what_is_on_the_device(tmp_path: Path, in_background: bool) -> None:
    saved, loaded = some_tensors(1), some_tensors(2)
    writer = zckpt.dcp.Writer(tmp_path / "c")
    if in_background:
        future: Any = dcp.async_save(saved, storage_writer=writer)
        future.result()
    else:
        dcp.save(saved, storage_writer=writer)
    dcp.load(loaded, storage_reader=zckpt.dcp.Reader(tmp_path / "c"))
    assert_equal(saved, loaded)
