"""Learning rates and other settings may be numpy scalars, as in ``lr = base * np.sqrt(n)``. A resumed run goes on as
one that never stopped, bit for bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import AFTER, BEFORE, everything, inner, settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster

SCHEDULE = np.linspace(1e-2, 1e-3, 20)


def set_in_each_step(engine: Any, step: int, dtype: Callable[[float], Any]) -> None:
    for group in inner(engine).param_groups:
        group["lr"] = dtype(SCHEDULE[step]) * dtype(group["lr_scale"])


def set_in_the_first_step(engine: Any, step: int, dtype: Callable[[float], Any]) -> None:
    if step == 0:
        set_in_each_step(engine, step, dtype)
        inner(engine).param_groups[1].update(eps=dtype(1e-6), weight_decay=dtype(0.3), betas=(dtype(0.8), dtype(0.9)))


def set_when_it_is_made(engine: Any, step: int, dtype: Callable[[float], Any]) -> None:
    if step < 0:
        set_in_the_first_step(engine, 0, dtype)


def numpy_steps(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = np.float32(3e-3) * np.sqrt(2)
    gamma: Any = np.float32(0.3)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [*np.array([2, 4])], gamma=gamma)


def make(setup: dict[str, Any], change: Any, dtype: Any, seed: int) -> Any:
    engine = make_engine(**setup, groups=True, optimizer="torch_adamw", seed=seed)
    for number, group in enumerate(inner(engine).param_groups):
        group["lr_scale"] = 0.5 + number
    change(engine, -1, dtype)
    return engine


def go_on(engine: Any, change: Any, dtype: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        change(engine, step, dtype)
        losses += train(engine, 1, step)
    return losses


def resume(directory: str, setup: dict[str, Any], change: Any, dtype: Any) -> None:
    engine, resumed, attached = (make(setup, change, dtype, seed) for seed in range(3))
    go_on(engine, change, dtype, range(BEFORE))
    zckpt.attach(engine).save_checkpoint(directory, "c")
    zckpt.restore(resumed, directory)
    zckpt.attach(attached).load_checkpoint(directory)
    groups = zckpt.open(directory).state["engine"]["optimizer"]["param_groups"]
    for one, live, saved in zip(inner(resumed).param_groups, inner(engine).param_groups, groups, strict=True):
        assert type(saved["lr"]) is float
        for key in ("lr", "eps", "weight_decay"):
            assert one[key] == live[key] == saved[key]
            if change is set_when_it_is_made:
                assert type(one[key]) is type(live[key])
    steps = range(BEFORE, BEFORE + AFTER)
    losses = [go_on(one, change, dtype, steps) for one in (engine, resumed, attached)]
    assert losses[0] == losses[1] == losses[2]
    assert everything(engine) == everything(resumed) == everything(attached)


SETUPS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "dtype": "fp32"},
    "1": {"stage": 1},
    "2": {"stage": 2, "dtype": "fp16"},
    "2-scheduler": {"stage": 2, "scheduler": numpy_steps},
    "3": {"stage": 3},
}
CASES = [
    pytest.param(setup, change, dtype, marks=() if (setup, dtype) in commit else pytest.mark.matrix)
    for commit in [{("3", np.float64), ("2-scheduler", np.float32)}]
    for setup in SETUPS
    for change in (set_in_each_step, set_in_the_first_step, set_when_it_is_made)
    for dtype in (np.float64, np.float32)
]


@pytest.mark.parametrize(("setup", "change", "dtype"), CASES)
def test_a_run_with_numpy_scalars_is_resumed(
    cluster: Cluster, tmp_path: Path, setup: str, change: Any, dtype: Any
) -> None:
    cluster.run(resume, 2, str(tmp_path), SETUPS[setup], change, dtype)


def draw() -> list[Any]:
    return [random.random(), *np.random.random(3), np.random.standard_normal(), *torch.rand(2).tolist()]


def restore_generators(directory: str) -> None:
    engine = make_engine(stage=2)
    for kind in (np.random.PCG64, np.random.SFC64, np.random.Philox, np.random.MT19937):
        np.random.set_bit_generator(kind(7))  # type: ignore[attr-defined]
        draw()
        zckpt.write(engine, f"{directory}/{kind.__name__}")
        expected = draw()
        zckpt.restore(engine, f"{directory}/{kind.__name__}", rng=True)
        assert draw() == expected
    with pytest.raises(zckpt.FormatError, match="random number generator"):
        zckpt.restore(engine, f"{directory}/PCG64", rng=True)


def test_any_global_generator_of_numpy_is_restored(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(restore_generators, 1, str(tmp_path))


def write_narrow(directory: str) -> None:
    engine = make(SETUPS["2"] | {"dtype": "bf16"}, set_in_the_first_step, np.float32, 0)
    go_on(engine, set_in_the_first_step, np.float32, range(BEFORE))
    zckpt.write(engine, f"{directory}/run/c")


def load_narrow(directory: str) -> None:
    engine = make(SETUPS["2"] | {"dtype": "bf16"}, set_in_each_step, np.float64, 1)
    assert engine.load_checkpoint(f"{directory}/deepspeed/c")[0] is not None
    resumed = make(SETUPS["2"] | {"dtype": "bf16"}, set_in_each_step, np.float64, 2)
    zckpt.restore(resumed, f"{directory}/run/c")
    assert settings(engine)["groups"] == settings(resumed)["groups"]
    steps = range(BEFORE, BEFORE + AFTER)
    assert go_on(engine, set_in_the_first_step, None, steps) == go_on(resumed, set_in_the_first_step, None, steps)


def test_deepspeed_resumes_from_a_conversion_with_numpy_scalars(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_narrow, 2, str(tmp_path))
    zckpt.convert(tmp_path / "run", tmp_path / "deepspeed" / "c", to="deepspeed")
    cluster.run(load_narrow, 2, str(tmp_path))
