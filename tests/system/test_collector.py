"""Pauses of Python's collector."""

from __future__ import annotations

import gc
import os
import threading

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


def test_the_last_of_several_pauses_ends_them() -> None:
    first_has_ended = threading.Event()

    def pause() -> None:
        with paused_collector():
            assert first_has_ended.wait(30)
            assert not gc.isenabled()

    with paused_collector():
        other = threading.Thread(target=pause)
        other.start()
    first_has_ended.set()
    other.join()
    assert gc.isenabled()


def test_a_forked_process_collects() -> None:
    with paused_collector():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
