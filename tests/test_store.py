"""The contract of stores, over each that there is."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from faults import faulty
from store_contract import StoreContract
from zckpt.io.local_store import LocalStore
from zckpt.io.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zckpt.io.store import Store


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(str(tmp_path / "run" / "c"))


class TestLocalStoreInMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield LocalStore(str(Path(directory) / "run" / "c"))


class TestLocalStoreWithoutLinks(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with mock.patch("os.link", side_effect=PermissionError(errno.EPERM, "no links here")):
            yield LocalStore(str(tmp_path / "run" / "c"))


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with faulty() as operations:
            yield open_store(str(tmp_path / "run" / "c"))
        assert operations.done
