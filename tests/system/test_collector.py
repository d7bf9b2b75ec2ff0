"""Pauses of Python's collector."""

from __future__ import annotations

import gc

import pytest

from zckpt.system.collector import paused_collector


@pytest.mark.parametrize("enabled", [True, False])
def test_after_a_pause_the_collector_is_as_it_was_before(enabled: bool) -> None:
    def fail() -> None:
        with paused_collector(), paused_collector():
            assert not gc.isenabled()
            raise KeyError

    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
