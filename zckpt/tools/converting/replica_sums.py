"""Compares tensors of which several groups of ranks hold all elements, such as those that tensor parallelism does not
cut. Each group may cut them into other partitions. So each rank sums up a hash of each of its elements, which depends
on the place of the element in the tensor. The sums of the ranks of a group add up to that of the whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.errors import StateError
from zckpt.plan.inventory import FileRange
from zckpt.storage.files import read_from
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.stored import with_values
from zckpt.transfer.values_digest import hashed_sum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zckpt.plan.inventory import Fragment

Sums = list[tuple[str, str, int]]
"""The sums of the elements that one rank holds. Each has the name of the local tensor and that of the rank's group
before it."""
PORTION_BYTES = 1 << 20
"""The most bytes that are read at a time. Up to 33 times as many bytes of memory are needed."""


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
    """Returns the sum, modulo 2^64, of the hashes of the elements of a fragment, each of which has 8, 4, 2 or 1 bytes
    (``hashed_sum``). Raises StorageError."""
    total, start = 0, fragment.span.start
    for portion in _portions(fragment):
        words = torch.from_numpy(portion.astype(np.uint64).view(np.int64))
        total += int(hashed_sum(words, start))
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
