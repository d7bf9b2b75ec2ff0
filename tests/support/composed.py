"""Runs with optimizers whose state is in tensors that have no memory of their own, such as those of torchao."""

from __future__ import annotations

from typing import Any

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import inner, plain

SETUPS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "dtype": "fp32"},
    "0-bf16": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2, "dtype": "fp32"},
    "2-cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3},
}


def held(engine: Any) -> list[Any]:
    """Returns all master weights and all that the optimizer keeps for them, with the tensors inside of others."""
    parts = []
    for master in [parameter for group in inner(engine).param_groups for parameter in group["params"]]:
        parts.append(plain(master))
        for key, value in sorted(inner(engine).state.get(master, {}).items()):
            names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
            parts.append([key, type(value).__name__, plain([getattr(value, name) for name in names] or value)])
    return parts


def composed_in(engine: Any) -> list[Any]:
    values = [value for state in inner(engine).state.values() for value in state.values()]
    return [value for value in values if hasattr(value, "__tensor_flatten__")]


def resume(path: str, setups: dict[str, dict[str, Any]], optimizer: str) -> None:
    for name, setup in setups.items():
        setup = {**setup, "optimizer": optimizer}
        engine = make_engine(**setup)
        train(engine, 2)
        before = held(engine)
        assert composed_in(engine), name
        zckpt.write(engine, f"{path}/{name}")
        assert held(engine) == before
        through = train(engine, 2, 2), held(engine)
        for trained in (0, 1):
            resumed = make_engine(**setup, seed=1)
            train(resumed, trained, 100)
            zckpt.restore(resumed, f"{path}/{name}", rng=True)
            assert held(resumed) == before, (name, trained)
            assert (train(resumed, 2, 2), held(resumed)) == through, (name, trained)
