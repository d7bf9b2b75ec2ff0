"""Compares tensors of which several groups of ranks hold all elements, such as those that tensor parallelism does not
cut. Each group may cut them into other partitions. So each rank sums up its elements. Before, each element is
multiplied by a number that depends on its place in the tensor. The sums of the ranks of a group add up to that of the
whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import StateError
from zckpt.plan.inventory import FileRange
from zckpt.storage.files import read_from
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.stored import with_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zckpt.plan.inventory import Fragment

Sums = list[tuple[str, str, int]]
"""The sums of the elements that one rank holds. Each has the name of the local tensor and that of the rank's group
before it."""
PORTION_BYTES = 1 << 20
"""The most bytes that are read at a time. Up to nine times as many bytes of memory are needed."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, rounded to an odd number."""


def check_sums(sums: Iterable[tuple[str, str, int]]) -> None:
    """Raises StateError if two groups have other values of the same tensor. ``sums``: those of all ranks."""
    whole: dict[str, dict[str, int]] = {}
    for key, group, value in sums:
        of_groups = whole.setdefault(key, {})
        of_groups[group] = (of_groups.get(group, 0) + value) % 2**64
    for key, of_groups in whole.items():
        first = next(iter(of_groups))
        for group, value in of_groups.items():
            if value != of_groups[first]:
                raise StateError(f"{group} has other values than {first}, and both have to have the same", key=key)


def sum_of(fragment: Fragment) -> int:
    """Returns the sum of the elements of a fragment. In it, each 8, 4, 2 or 1 bytes of an element are a number, which
    is multiplied by an odd number that depends on the place of the element. So a single other bit changes the sum, and
    several ones leave it as it is only by chance, once in 2^64 times. Raises StorageError."""
    total, start = 0, fragment.span.start
    for portion in _portions(fragment):
        terms = np.arange(start, start + len(portion), dtype=np.uint64)
        with np.errstate(over="ignore"):
            terms *= _FACTOR
            terms |= np.uint64(1)
            terms *= portion
            total += int(terms.sum())
        start += len(portion)
    return total % 2**64


def _portions(fragment: Fragment) -> Iterator[np.ndarray]:
    """Yields the elements of a fragment as unsigned numbers, portion by portion."""
    data, count = fragment.data, fragment.span.numel
    assert data is not None
    item = (data.nbytes if isinstance(data, FileRange) else data.numel() * data.itemsize) // max(count, 1)
    items = PORTION_BYTES // max(item, 1)
    for first in range(0, count, items):
        here = min(items, count - first)
        if isinstance(data, FileRange):
            room = np.empty(here * item, np.uint8)
            read_from(data.path, data.offset + first * item, room)
        else:
            room = np.frombuffer(host_bytes(with_values(data.view(-1)[first : first + here]).cpu()), np.uint8)
        yield room.view(f"u{item}")
