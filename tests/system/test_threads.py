"""``beside`` runs a thread beside a context, and waits for the end of the thread."""

from __future__ import annotations

import threading

import pytest

from zckpt.system.threads import beside


def test_the_thread_runs_beside_the_context_and_has_ended_after_it() -> None:
    inside, seen = threading.Event(), list[str]()

    def act() -> None:
        assert inside.wait(60)
        seen.append(threading.current_thread().name)

    with beside(act, "helper"):
        assert not seen
        inside.set()
    assert seen == ["helper"]


def test_an_error_of_the_thread_is_raised_at_the_end() -> None:
    def act() -> None:
        raise MemoryError("in the thread")

    reached = False
    with pytest.raises(MemoryError, match="in the thread"), beside(act, "helper"):
        reached = True
    assert reached


def test_an_error_of_the_context_comes_first_and_waits_for_the_thread() -> None:
    begun, inside, ended = threading.Event(), threading.Event(), list[bool]()

    def act() -> None:
        begun.set()
        assert inside.wait(60)
        ended.append(True)
        raise MemoryError("in the thread")

    def fail() -> None:
        with beside(act, "helper"):
            assert begun.wait(60)
            threading.Timer(0.05, inside.set).start()
            raise ValueError("of the context")

    with pytest.raises(ValueError, match="of the context"):
        fail()
    assert ended == [True]
