"""A trained reference engine, and checks of its states once an offload has brought them back."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.reference_engine import tensors_of
from tests.support.scratch import flip_a_bit
from zckpt.offloading.away import away_of
from zckpt.testing import ReferenceEngine

SHAPES = {"wide": (1024, 1025), "odd": (63, 65), "one": (1,), "scalar": (), "empty": (0, 3), "frozen": (63, 63)}
ALL = ("param", "master", "exp_avg", "exp_avg_sq")


def trained(steps: int = 2, seed: int = 0, **options: Any) -> ReferenceEngine:
    engine = ReferenceEngine(SHAPES, seed=seed, **options)
    engine.train(steps)
    return engine


def assert_equal(engine: ReferenceEngine, expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(tensors_of(engine), expected, rtol=0, atol=0, equal_nan=True)


def assert_as_before(engine: ReferenceEngine, expected: dict[str, torch.Tensor]) -> None:
    """Checks that all states are in memory and unchanged, that no call is watched, and that the engine can train."""
    assert away_of(engine) is None
    assert not {"step", "backward", "_zckpt_away"} & vars(engine).keys()
    assert_equal(engine, expected)
    engine.train(1)


def damage(engine: ReferenceEngine, part: str, name: str, at: int = 100) -> None:
    """Flips a bit of byte ``at`` of a tensor in its scratch file."""
    offloaded = away_of(engine)
    assert offloaded is not None
    flip_a_bit(next(moved for moved in offloaded.moved if (moved.parts, moved.name) == ((part,), name)), at)
