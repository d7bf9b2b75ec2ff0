"""Waits for a condition. This file does not import zckpt, because pytest imports it before some tests change what zckpt
finds in the system."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_SECONDS = 300


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until ``condition`` returns true. Fails after ``WAIT_SECONDS``."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{condition} has not returned true for {WAIT_SECONDS} s"
        time.sleep(0.002)
