"""Pauses of Python's collector."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from zckpt.system.collector import without_collector


@pytest.mark.parametrize("enabled", [True, False])
def test_after_a_pause_the_collector_is_as_it_was_before(enabled: bool) -> None:
    @without_collector
    def inner() -> None:
        assert not gc.isenabled()
        raise KeyError

    @without_collector
    def outer() -> None:
        assert not gc.isenabled()
        inner()

    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(KeyError):
            outer()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_the_last_of_several_pauses_ends_them() -> None:
    second_has_begun, first_has_ended = threading.Event(), threading.Event()
    seen: list[bool] = []

    @without_collector
    def second() -> None:
        second_has_begun.set()
        assert first_has_ended.wait(30)
        seen.append(gc.isenabled())

    @without_collector
    def first() -> None:
        other.start()
        assert second_has_begun.wait(30)

    other = threading.Thread(target=second)
    first()
    first_has_ended.set()
    other.join()
    assert seen == [False]
    assert gc.isenabled()


def test_a_forked_process_collects() -> None:
    @without_collector
    def status() -> int:
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert status() == 0
