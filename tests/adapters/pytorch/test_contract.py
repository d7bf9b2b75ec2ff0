"""Training with PyTorch alone keeps the contract of engine adapters in each layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from tests.support import torch_models
from zckpt.testing import EngineContract

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.cluster import Cluster


class TestAlone(EngineContract):
    setup: ClassVar[dict[str, Any]] = {"layout": "alone"}

    @classmethod
    def make(cls, seed: int) -> Any:
        return torch_models.make_state(**{"scheduler": True, **cls.setup}, seed=seed)

    @classmethod
    def train(cls, engine: Any, steps: int) -> None:
        torch_models.train(engine, steps)

    @classmethod
    def held(cls, engine: Any) -> Mapping[Any, Any]:
        return {**torch_models.held(engine), **cls.generators(engine)}

    @classmethod
    def backward(cls, engine: Any) -> None:
        torch_models.backward(engine, 0)

    @classmethod
    def generators(cls, engine: Any) -> Mapping[str, Any]:
        return {"generator": torch.get_rng_state()}

    @classmethod
    def make_resized(cls, seed: int) -> Any:
        return torch_models.make_state(**{"scheduler": True, **cls.setup}, seed=seed, hidden=10, more=True)

    @classmethod
    def make_unlike(cls, seed: int) -> Any:
        return torch_models.make_state(**cls.setup, seed=seed)


class TestFsdp2(TestAlone):
    ranks = 2
    other_ranks: tuple[int, ...] = (1, 3)
    setup: ClassVar = {"layout": "fsdp"}

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, cluster: Cluster) -> Any:
        return cluster.run


@pytest.mark.matrix
class TestDdp(TestFsdp2):
    other_ranks = (3,)
    setup: ClassVar = {"layout": "ddp"}


@pytest.mark.matrix
class TestHsdp(TestFsdp2):
    ranks = 4
    other_ranks = (2,)
    setup: ClassVar = {"layout": "hsdp"}


@pytest.mark.matrix
class TestFsdp2WithTensorParallelism(TestFsdp2):
    ranks = 4
    other_ranks = ()
    setup: ClassVar = {"layout": "tp"}


@pytest.mark.matrix
class TestFsdp2WithRowWiseParallelism(TestFsdp2WithTensorParallelism):
    setup: ClassVar = {"layout": "rows"}


@pytest.mark.matrix
class TestFsdp2Wrapped(TestFsdp2):
    other_ranks = ()
    setup: ClassVar = {"layout": "fsdp", "mixed": True, "wrapped": True, "optimizer": "amsgrad"}
