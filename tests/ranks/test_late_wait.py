"""A collective may end just after the wait for it has run out of time. Gloo may use its tensors even later."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zckpt.ranks.collectives import Ranks
from zckpt.ranks.groups import Group

if TYPE_CHECKING:
    import torch


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


def group_of(allgather: Any) -> Any:
    """Returns a group of one rank whose exchanges are those of the function ``allgather``."""
    lives: Any = SimpleNamespace(period=1, lost=lambda error: error, check=lambda: None)
    gloo: Any = SimpleNamespace(allgather=allgather)
    return Group(gloo, None, lives)  # type: ignore[arg-type]


def test_an_operation_that_ends_just_after_the_wait_is_no_lost_connection() -> None:
    def allgather(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> _EndsLate:
        outputs[0][0].copy_(inputs[0])
        return _EndsLate()

    ranks = object.__new__(Ranks)
    ranks.size = 1
    assert ranks._gather(group_of(allgather), b"told") == [b"told"]


def test_an_operation_lives_on_while_a_thread_of_gloo_may_use_it() -> None:
    """Otherwise that thread would free its tensors, perhaps while the interpreter ends, and this aborts the process."""
    given: list[weakref.ref[_Ended]] = []

    def allgather(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> _Ended:
        outputs[0][0].copy_(inputs[0])
        operation = _Ended()
        given.append(weakref.ref(operation))
        return operation

    ranks = object.__new__(Ranks)
    ranks.size = 1
    group = group_of(allgather)
    for _ in range(3):
        assert ranks._gather(group, b"told") == [b"told"]
    gc.collect()
    alive = [reference() is not None for reference in given]
    assert alive == [False] * 4 + [True] * 2
