"""The reference engine and DeepSpeed's engine, in a few modes, keep the contract of engine adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from tests.support.models import batch, make_engine, train
from tests.support.runs import everything
from zckpt.testing import EngineContract, ReferenceEngine
from zckpt.testing.engine import SHAPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.cluster import Cluster


class TestReferenceEngineAlone(EngineContract):
    """Runs the tests of the contract in this process, as the only rank."""

    @classmethod
    def make(cls, seed: int) -> ReferenceEngine:
        return ReferenceEngine(seed=seed)

    @classmethod
    def train(cls, engine: ReferenceEngine, steps: int) -> None:
        engine.train(steps)

    @classmethod
    def held(cls, engine: ReferenceEngine) -> Mapping[Any, Any]:
        names = ("tensors", "steps", "learning_rate", "beta_powers", "gradients")
        return {**cls.generators(engine), **{name: getattr(engine, name) for name in names}}

    @classmethod
    def backward(cls, engine: ReferenceEngine) -> None:
        engine.backward()

    @classmethod
    def generators(cls, engine: ReferenceEngine) -> Mapping[str, Any]:
        return {"generator": engine.generator.get_state()}

    @classmethod
    def make_resized(cls, seed: int) -> ReferenceEngine:
        return ReferenceEngine({**SHAPES, "weight": (64, 65), "more": (5, 7)}, seed=seed)

    @classmethod
    def make_unlike(cls, seed: int) -> ReferenceEngine:
        engine = cls.make(seed)
        engine.beta_powers = engine.beta_powers.double()
        return engine


class OnRanks(EngineContract):
    ranks = 2

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, cluster: Cluster) -> Any:
        return cluster.run


class TestReferenceEngine(OnRanks, TestReferenceEngineAlone):
    other_ranks = (1, 3)


class DeepSpeed(OnRanks):
    setup: ClassVar[dict[str, Any]]

    @classmethod
    def make(cls, seed: int) -> Any:
        return make_engine(**cls.setup, scheduler=True, seed=seed)

    @classmethod
    def train(cls, engine: Any, steps: int) -> None:
        train(engine, steps, engine.global_steps)

    @classmethod
    def held(cls, engine: Any) -> Mapping[Any, Any]:
        return {**everything(engine), **cls.generators(engine)}

    @classmethod
    def backward(cls, engine: Any) -> None:
        engine.backward(engine(**batch(engine, 0)))

    @classmethod
    def generators(cls, engine: Any) -> Mapping[str, Any]:
        return {"generator": torch.get_rng_state()}

    @classmethod
    def make_resized(cls, seed: int) -> Any:
        model = f"resized {cls.setup.get('model', 'mlp')}"
        return make_engine(**{**cls.setup, "model": model}, scheduler=True, seed=seed)

    @classmethod
    def make_unlike(cls, seed: int) -> Any:
        return make_engine(**cls.setup, seed=seed)


class TestStage0(DeepSpeed):
    setup: ClassVar = {"stage": 0, "dtype": "fp32"}


class TestStage2(DeepSpeed):
    setup: ClassVar = {"stage": 2, "model": "odd", "frozen": True}


class TestStage3(DeepSpeed):
    setup: ClassVar = {"stage": 3}
    other_ranks = (1,)
