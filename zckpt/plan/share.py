"""Shares work out to processes, such that each of them has about the same number of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def shared_out(nbytes: Sequence[int], processes: int) -> list[int]:
    """Returns for each item the number of the process, from 0 on, that does it. ``nbytes``: the size of each item.

    All items together, one behind the other, are cut into as many equal parts as there are processes. An item belongs
    to the process in whose part its middle lies, so each process does items that follow one another.
    """
    total, at, found = max(sum(nbytes), 1), 0, []
    for one in nbytes:
        found.append(min((2 * at + one) * processes // (2 * total), processes - 1))
        at += one
    return found
