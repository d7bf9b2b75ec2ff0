"""Object stores: real servers pass the contract of stores, and everything that zckpt does works on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zckpt.storage.schemes import open_store
from zckpt.testing import StoreContract

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.object_servers import ObjectServer
    from zckpt.storage.contract import Store


def use(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None) -> None:
    for name, value in server.environment(endpoint).items():
        monkeypatch.setenv(name, value)


class TestSeaweedFS(StoreContract):
    @pytest.fixture
    def store(self, seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
        use(seaweedfs, monkeypatch)
        return open_store(f"s3://{seaweedfs.bucket}{tmp_path}/run/c")


class TestMoto(StoreContract):
    @pytest.fixture
    def store(self, moto: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
        use(moto, monkeypatch)
        return open_store(f"s3://{moto.bucket}{tmp_path}/run/c")
