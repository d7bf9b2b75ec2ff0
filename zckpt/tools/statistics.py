"""Computes statistics of the values of tensors. Only a few MiB of the values are in memory at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from zckpt.checkpoint.reading.loader import ReadRequest
from zckpt.tools.blocks import cut_at_blocks
from zckpt.tools.share import batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zckpt.checkpoint.listing.tensors import TensorInfo
    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.geometry import Span

STRETCH_BYTES = 32 << 20
"""The largest number of bytes of a tensor that are in memory at a time, besides the buffers of the budget."""
BATCH_STRETCHES_MAX = 64
"""The largest number of stretches that are read together. The limit is needed for many small tensors, each of which has
a piece on every rank: the plan of their reads takes more memory than their values."""
AT_ONCE = 1 << 18
"""The number of elements that are converted at a time. It is so small that they stay in the processor's cache."""


class Statistics(NamedTuple):
    """Statistics of the elements of a tensor. The real and the imaginary part of a complex number count as two
    elements."""

    numel: int = 0
    """The number of elements."""
    nan: int = 0
    """The number of elements that are NaN."""
    inf: int = 0
    """The number of elements that are infinite."""
    zeros: int = 0
    """The number of elements that are zero."""
    min: float = math.inf
    """The smallest finite element, or infinity if no element is finite."""
    max: float = -math.inf
    """The largest finite element, or minus infinity if no element is finite."""
    sum: float = 0.0
    """The sum of the finite elements."""
    sum_of_squares: float = 0.0
    """The sum of the squares of the finite elements."""

    @property
    def mean(self) -> float | None:
        """The mean of the finite elements, or None if no element is finite."""
        finite = self.numel - self.nan - self.inf
        return self.sum / finite if finite else None

    @property
    def norm(self) -> float:
        """The square root of the sum of the squares of the finite elements."""
        return math.sqrt(self.sum_of_squares)

    def plus(self, other: Statistics) -> Statistics:
        """Returns the statistics of the elements of both."""
        return Statistics(
            self.numel + other.numel,
            self.nan + other.nan,
            self.inf + other.inf,
            self.zeros + other.zeros,
            min(self.min, other.min),
            max(self.max, other.max),
            self.sum + other.sum,
            self.sum_of_squares + other.sum_of_squares,
        )


class Stretch(NamedTuple):
    """Consecutive elements of one of several tensors. ``number`` is the position of this tensor among the tensors."""

    number: int
    info: TensorInfo
    span: Span

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements."""
        return self.span.numel * self.info.item_bytes


def stretches(checkpoint: Loader, infos: Sequence[TensorInfo]) -> Iterator[Stretch]:
    """Yields the first copy of each tensor in stretches of at most ``STRETCH_BYTES`` bytes. A stretch ends at the end
    of a piece or of a block, so that no byte is read twice for its digest."""
    blocks_max = max(STRETCH_BYTES // checkpoint.manifest.block_bytes, 1)
    stored = checkpoint.contents.stored_each(infos, [0] * len(infos))
    for number, (info, pieces) in enumerate(zip(infos, stored, strict=True)):
        block_items = checkpoint.manifest.block_bytes // info.item_bytes
        for span in cut_at_blocks(
            checkpoint.contents.grid(info).all, pieces.start, block_items, blocks_max * block_items
        ):
            yield Stretch(number, info, span)


def statistics(
    checkpoint: Loader, infos: Sequence[TensorInfo], chosen: Sequence[Stretch], advance: Callable[[int], None]
) -> list[Statistics]:
    """Returns, for each tensor, the statistics of those of its elements that are in the ``chosen`` stretches.
    ``advance`` is called with the number of bytes that have been read. Raises FormatError and StorageError."""
    results = [Statistics() for _ in infos]
    checkpoint.contents.check_sizes(infos)
    for batch in batches(chosen, lambda item: item.nbytes, STRETCH_BYTES, BATCH_STRETCHES_MAX):
        requests = [ReadRequest.fresh(stretch.info, stretch.span) for stretch in batch]
        checkpoint.read(requests, advance=advance)
        for stretch, request in zip(batch, requests, strict=True):
            for first in range(0, len(request.target), AT_ONCE):
                part = request.target[first : first + AT_ONCE]
                results[stretch.number] = results[stretch.number].plus(statistics_of(elements(part)))
    return results


def elements(values: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a 1-D tensor in double precision. A complex number becomes two elements, its real and its
    imaginary part."""
    return (torch.view_as_real(values).flatten() if values.is_complex() else values).double()


def statistics_of(values: torch.Tensor) -> Statistics:
    """Returns the statistics of elements that ``elements`` has returned."""
    numel, nan, inf = len(values), 0, 0
    # The sum of finite numbers may overflow too, so a sum that is not finite only means that counting is needed.
    if not math.isfinite(float(values.sum())):
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        values = values[values.isfinite()]
    if not len(values):
        return Statistics(numel, nan, inf)
    low, high = (float(extreme) for extreme in torch.aminmax(values))
    zeros = numel - nan - inf - int(torch.count_nonzero(values))
    return Statistics(numel, nan, inf, zeros, low, high, float(values.sum()), float(torch.dot(values, values)))
