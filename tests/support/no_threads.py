"""Lets the system start no further thread."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_further_threads() -> Iterator[None]:
    """Inside this block, the system starts no thread of this process, because none can have a stack of 64 TiB."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)
