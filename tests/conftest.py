from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile("tests", deadline=None)  # machines are shared: a slow example is no failure
settings.load_profile("tests")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Real ranks, with torch.distributed and DeepSpeed on the CPU: ``cluster.run(function, world_size, ...)``."""
    cluster = Cluster()
    yield cluster
    cluster.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
