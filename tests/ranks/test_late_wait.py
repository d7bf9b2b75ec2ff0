"""A collective operation may end just after the wait for it has run out of time."""

from __future__ import annotations

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
