"""Training in which states are moved to disk and back between any two calls equals training without this, bit for
bit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import batch, make_engine
from tests.support.offload import CPU
from tests.support.runs import everything

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.offload
STEPS = 3
PARTS: tuple[Any, ...] = (
    None,
    ["master"],
    ["exp_avg", "lp_params"],
    ["optim_states"],
    ["param"],
    ["gradient", "hp_params"],
)
SETUPS: dict[str, dict[str, Any]] = {
    "0-fp32": {"stage": 0, "dtype": "fp32", "optimizer": "torch_adamw"},
    "0-bf16": {"stage": 0},
    "1": {"stage": 1, "groups": True, "frozen": True},
    "1-accumulating": {"stage": 1, "config": {"gradient_accumulation_steps": 2}},
    "1-torch": {"stage": 1, "optimizer": "torch_adamw"},
    "1-bf16-optimizer": {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "2": {"stage": 2, "frozen": True},
    "2-cpu": {"stage": 2, "offload_optimizer": CPU},
    "2-accumulating": {"stage": 2, "config": {"gradient_accumulation_steps": 2}},
    "2-cpu-pinned": {"stage": 2, "offload_optimizer": {**CPU, "pin_memory": True}},
    "3": {"stage": 3, "model": "odd", "groups": True},
    "3-plain": {"stage": 3},  # DeepSpeed's own offload_states() fails with several groups
    "3-accumulating": {"stage": 3, "model": "odd", "groups": True, "config": {"gradient_accumulation_steps": 2}},
    "3-torch": {"stage": 3, "optimizer": "torch_adamw", "frozen": True},
    "3-cpu": {"stage": 3, "offload_optimizer": CPU},
    "3-cpu+cpu": {"stage": 3, "model": "odd", "offload_optimizer": CPU, "offload_param": {**CPU, "pin_memory": True}},
}
CORE: dict[str, dict[str, bool]] = {"1": {"moved": True}, "2-cpu": {"auto": True}, "3-accumulating": {}}


def train(setup: dict[str, Any], directory: str, parts: Any = (), *, auto: bool = False, moved: bool = False) -> Any:
    """Trains, and returns the losses and what the engine holds at the end. Between any two calls, moves one element of
    ``parts``, in turns, or nothing if ``parts`` is empty. With ``moved``, DeepSpeed first moves all states to host
    memory."""
    engine = make_engine(**setup)
    losses, moves = [], 0

    def pause() -> None:
        nonlocal moves
        moves += 1
        if moved:
            engine.offload_states()
        # Before the first step, the moments have no names.
        if parts and (engine.global_steps or "exp_avg" not in (parts[moves % len(parts)] or ())):
            move(parts[moves % len(parts)])
        if moved:
            engine.reload_states()  # with `auto`, this first brings back what zckpt has moved

    def move(asked: Any) -> None:
        out = zckpt.offload(engine, directory, parts=asked, auto=auto, background=moves % 3 == 0)
        if not auto:
            zckpt.reload(engine, out.parts[:1])
            zckpt.reload(engine)

    for step in range(STEPS * engine.gradient_accumulation_steps()):
        pause()
        loss = engine(**batch(engine, step))
        loss = getattr(loss, "loss", loss)
        engine.backward(loss)
        if not moved:  # because offload_states() drops gradients
            pause()
        with torch.no_grad():
            engine.step()
        losses.append(loss.item())
    zckpt.reload(engine)
    assert not hasattr(engine, "_zckpt_away")
    assert "forward" not in vars(engine)
    return losses, everything(engine)


def core(directory: str) -> None:
    for name, options in CORE.items():
        expected = train(SETUPS[name], directory, moved=options.get("moved", False))
        assert train(SETUPS[name], directory, PARTS, **options) == expected, name


def test_training_is_the_same(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(core, 2, str(tmp_path / "scratch"))
    assert not os.listdir(tmp_path / "scratch")


def each(name: str, directory: str) -> None:
    expected = train(SETUPS[name], directory)
    for parts in (PARTS, *((part,) for part in PARTS)):
        for auto in (False, True):
            assert train(SETUPS[name], directory, parts, auto=auto) == expected, (parts, auto)
        if name in ("1", "2", "3-plain"):
            expected_moved = train(SETUPS[name], directory, moved=True)  # DeepSpeed's moves may change the result
            assert train(SETUPS[name], directory, parts, moved=True) == expected_moved, parts


@pytest.mark.matrix
@pytest.mark.parametrize("name", SETUPS)
def test_training_is_the_same_in_every_setup(cluster: Cluster, tmp_path: Path, name: str) -> None:
    cluster.run(each, 2, name, str(tmp_path / "scratch"), timeout=3000)
    assert not os.listdir(tmp_path / "scratch")
