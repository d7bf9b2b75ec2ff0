"""A tensor whose slices in the first dimension are in several files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import FormatError
from zckpt.transfer.stored import in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from zckpt.geometry import Span
    from zckpt.plan.inventory import Fragment


@dataclass(frozen=True, slots=True)
class Stacked:
    """Slices of equal shape and dtype, one after another. Raises FormatError for other slices."""

    slices: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        if len({(part.shape, part.dtype) for part in self.slices}) != 1:
            raise FormatError("the slices of a tensor have different shapes or dtypes")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return len(self.slices), *self.slices[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all slices."""
        return self.slices[0].dtype

    def numel(self) -> int:
        """Returns the number of elements of the whole tensor."""
        return sum(part.numel() for part in self.slices)

    def fill(self, fragments: Iterable[Fragment], held: Span) -> Iterator[Fragment]:
        """Yields the same fragments with their data, each cut where a slice ends. ``held``: the elements of the
        parameter that this tensor has."""
        for fragment in fragments:
            start = fragment.span.start - held.start
            for number, part in enumerate(self.slices):
                begin = number * part.numel()
                span = fragment.span.clip(begin - start, begin + part.numel() - start)
                if span.numel:
                    first = span.start - held.start - begin
                    data = in_order(part.detach()).view(-1)[first : first + span.numel]
                    yield fragment._replace(span=span, data=data)
