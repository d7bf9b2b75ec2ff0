"""A collective may end just after the wait for it has run out of time. Gloo may use its tensors even later."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zckpt.ranks.collectives import Ranks

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
    """An operation that has ended, but whose thread still has references to the tensors, as a thread of gloo may."""

    def wait(self, timeout: object) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def test_an_operation_that_ends_just_after_the_wait_is_no_lost_connection() -> None:
    def allgather(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> _EndsLate:
        outputs[0][0].copy_(inputs[0])
        return _EndsLate()

    ranks = object.__new__(Ranks)
    ranks.size = 1
    group: Any = SimpleNamespace(
        group=SimpleNamespace(allgather=allgather),
        lives=SimpleNamespace(period=1, lost=lambda error: error, check=lambda: None),
    )
    assert ranks._gather(group, b"told") == [b"told"]


def test_tensors_of_an_operation_live_on_while_gloo_may_use_them() -> None:
    """Otherwise a thread of gloo might free them while the interpreter ends, and this aborts the process."""
    given: list[weakref.ref[torch.Tensor]] = []

    def allgather(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> _Ended:
        outputs[0][0].copy_(inputs[0])
        given.extend(weakref.ref(tensor) for tensor in (outputs[0][0], inputs[0]))
        return _Ended()

    ranks = object.__new__(Ranks)
    ranks.size = 1
    group: Any = SimpleNamespace(group=SimpleNamespace(allgather=allgather), lives=SimpleNamespace(period=1))
    for _ in range(3):
        assert ranks._gather(group, b"told") == [b"told"]
    gc.collect()
    alive = [reference() is not None for reference in given]
    assert alive == [False] * 8 + [True] * 4
