"""Which store a path stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.storage.local_store import LocalStore

if TYPE_CHECKING:
    from zckpt.storage.contract import Store


def open_store(root: str) -> Store:
    """The store that a path stands for."""
    return LocalStore(root)
