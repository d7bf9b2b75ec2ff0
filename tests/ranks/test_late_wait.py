"""A collective may end just after the wait for it has run out of time. Gloo may use its tensors even later."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from zckpt.ranks.groups import Group


class _EndsLate:
    ended = False

    def wait(self, timeout: object) -> None:
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.ended


class _Ended:
    """An operation that has ended, but to which a thread may still refer, as a thread of gloo does for a while."""

    def wait(self, timeout: object) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def group_of(alltoall_base: Any) -> Group:
    """Returns a group of one rank whose exchanges are those of the function ``alltoall_base``."""
    lives: Any = SimpleNamespace(period=1, lost=lambda error: error, check=lambda: None)
    gloo: Any = SimpleNamespace(alltoall_base=alltoall_base)
    return Group(0, 1, lambda _: gloo, lives)


NOTHING = torch.zeros(0, dtype=torch.uint8)


def test_an_operation_that_ends_just_after_the_wait_is_no_lost_connection() -> None:
    group_of(lambda *_: _EndsLate()).exchange(NOTHING, [0], NOTHING, [0])


def test_an_operation_lives_on_while_a_thread_of_gloo_may_use_it() -> None:
    """Otherwise that thread would free its tensors, perhaps while the interpreter ends, and this aborts the process."""
    given: list[weakref.ref[_Ended]] = []

    def exchange(*_: object) -> _Ended:
        operation = _Ended()
        given.append(weakref.ref(operation))
        return operation

    group = group_of(exchange)
    for _ in range(6):
        group.exchange(NOTHING, [0], NOTHING, [0])
    gc.collect()
    alive = [reference() is not None for reference in given]
    assert alive == [False] * 4 + [True] * 2
