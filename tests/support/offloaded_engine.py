"""A trained reference engine, and whether it is as it was once its states are back."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.reference_engine import held
from tests.support.scratch import flip_a_bit
from zckpt.offloading.away import away
from zckpt.testing import ReferenceEngine

SHAPES = {"wide": (1024, 1025), "odd": (63, 65), "one": (1,), "scalar": (), "empty": (0, 3), "frozen": (63, 63)}
ALL = ("param", "master", "exp_avg", "exp_avg_sq")


def trained(steps: int = 2, seed: int = 0, **options: Any) -> ReferenceEngine:
    engine = ReferenceEngine(SHAPES, seed=seed, **options)
    engine.train(steps)
    return engine


def assert_equal(engine: ReferenceEngine, expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(held(engine), expected, rtol=0, atol=0, equal_nan=True)


def assert_as_before(engine: ReferenceEngine, expected: dict[str, torch.Tensor]) -> None:
    """With all in memory, nothing watched, and training as it would have been."""
    assert away(engine) is None
    assert not {"step", "backward", "_zckpt_away"} & vars(engine).keys()
    assert_equal(engine, expected)
    engine.train(1)


def damage(engine: ReferenceEngine, part: str, name: str, at: int = 100) -> None:
    out = away(engine)
    assert out is not None
    flip_a_bit(next(one for one in out.moved if (one.parts, one.name) == ((part,), name)), at)
