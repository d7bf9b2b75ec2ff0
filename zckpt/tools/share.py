"""Shares work out among processes, so that each of them has about the same number of bytes, and puts small items of
work together."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")


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


def batches(items: Iterable[T], nbytes: Callable[[T], int], bytes_max: int, items_max: int) -> Iterator[list[T]]:
    """Yields the items in their order, in lists of at most ``items_max`` items and ``bytes_max`` bytes. An item that
    has more bytes is in a list of its own. ``nbytes`` returns the size of an item."""
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        item_bytes = nbytes(item)
        if batch and (batch_bytes + item_bytes > bytes_max or len(batch) == items_max):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += item_bytes
    if batch:
        yield batch
