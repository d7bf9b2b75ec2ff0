"""Shares work out among processes, so that each of them has about the same number of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def shared_out(nbytes: Sequence[int], processes: int) -> list[int]:
    """Returns, for each item, the number of the process that does it, counted from 0. ``nbytes`` has the size of each
    item.

    The bytes of all items, one item after the other, are cut into as many equal parts as there are processes. An item
    belongs to the process whose part contains the middle of the item. So each process does items that follow one
    another."""
    total, start, processes_of_items = max(sum(nbytes), 1), 0, []
    for item_bytes in nbytes:
        processes_of_items.append(min((2 * start + item_bytes) * processes // (2 * total), processes - 1))
        start += item_bytes
    return processes_of_items
