"""Grids in manifests and headers (spec, "Manifest": "A grid is an order of the elements of a tensor")."""

from __future__ import annotations

import math
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from zckpt.format.limits import BOXES_MAX, NDIM_MAX, TENSOR_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.geometry import Sections


def packed_sections(sections: Sections) -> list[list[list[int]]]:
    """Returns sections as a manifest and a header have them: for each dimension an array of sections, and for each
    section the first index and the number of indices of each of its intervals, one after the other."""
    return [[list(chain.from_iterable(section)) for section in of_dim] for of_dim in sections]


def unpacked_sections(value: object) -> Sections | None:
    """Returns the sections of a grid that ``packed_sections`` has packed, or None if the value is no grid. The empty
    array is the grid that divides nothing. In any other grid, at least one dimension is divided into several intervals,
    which together have the indices from 0 on once each."""
    if not (isinstance(value, list) and len(value) <= NDIM_MAX):
        return None
    sections = []
    for of_dim in value:
        if not isinstance(of_dim, list) or not all(isinstance(section, list) for section in of_dim):
            return None
        numbers = list(chain.from_iterable(of_dim))
        if not all(type(number) is int and 0 <= number <= TENSOR_BYTES_MAX for number in numbers):
            return None
        if any(len(section) % 2 or not section for section in of_dim):
            return None
        intervals = sorted(zip(numbers[::2], numbers[1::2], strict=True))
        ends = list(accumulate((count for _, count in intervals), initial=0))
        if [first for first, _ in intervals] != ends[:-1] or any(count < 1 for _, count in intervals):
            return None
        if (of_dim and len(intervals) < 2) or ends[-1] > TENSOR_BYTES_MAX:
            return None
        sections.append(tuple(tuple(zip(section[::2], section[1::2], strict=True)) for section in of_dim))
    if math.prod(len(of_dim) or 1 for of_dim in sections) > BOXES_MAX:
        return None
    return tuple(sections) if any(sections) or not value else None


def divided_sizes(sections: Sections) -> tuple[int, ...]:
    """Returns the size of each dimension that a grid divides, and 0 for the others."""
    return tuple(sum(count for section in of_dim for _, count in section) for of_dim in sections)


def fits(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns whether a grid with these ``divided_sizes`` may be that of a tensor of this shape."""
    if not sizes:
        return True
    return (
        len(sizes) == len(shape)
        and math.prod(shape) > 0
        and all(divided in (0, size) for divided, size in zip(sizes, shape, strict=True))
    )
