"""Random grids of tensors, for tests."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from zckpt.geometry import Grid

if TYPE_CHECKING:
    import random


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> Grid:
    """Draws a grid. Sections may have several intervals, in any order."""
    sections: list[tuple[tuple[tuple[int, int], ...], ...]] = []
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))}) if size else [0]
        intervals = draw(st.permutations([(first, stop - first) for first, stop in pairwise(cuts)]))
        if len(intervals) < 2:
            sections.append(())
            continue
        ends = sorted({len(intervals), *draw(st.lists(st.integers(1, len(intervals)), max_size=3))})
        sections.append(tuple(tuple(intervals[a:b]) for a, b in pairwise([0, *ends])))
    return Grid(shape, tuple(sections) if any(sections) else ())


def random_grid(shape: tuple[int, ...], choice: random.Random) -> Grid:
    """Returns a grid that divides the tensor if it has more than one element. Sections may have several intervals."""
    sections: list[tuple[tuple[tuple[int, int], ...], ...]] = []
    for size in shape:
        cuts = sorted(choice.sample(range(1, size), min(choice.randrange(4), size - 1))) if size > 1 else []
        intervals = [(first, stop - first) for first, stop in pairwise([0, *cuts, size])]
        choice.shuffle(intervals)
        middle = choice.randrange(len(intervals)) if intervals else 0
        several = [tuple(intervals[:middle]), tuple(intervals[middle:])] if middle else [tuple(intervals)]
        sections.append(tuple(several) if cuts and 0 not in shape else ())
    return Grid(shape, tuple(sections) if any(sections) else ())


def order_of(grid: Grid) -> np.ndarray:
    """Returns the numbers that the elements have in the row-major order of the tensor, in the order of the grid."""
    whole = np.arange(grid.numel).reshape(grid.shape)
    of_dims = []
    for dim, size in enumerate(grid.shape):
        sections = (grid.sections and grid.sections[dim]) or [[(0, size)]]
        ranges = ([np.arange(first, first + count) for first, count in section] for section in sections)
        of_dims.append([np.concatenate(of_section) for of_section in ranges])
    boxes = (whole[np.ix_(*indices)] if indices else whole for indices in product(*of_dims))
    return np.concatenate([box.ravel() for box in boxes])
