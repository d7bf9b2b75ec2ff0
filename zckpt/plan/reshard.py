"""Interval arithmetic: wanted spans of tensors against stored pieces gives extents of files."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.format.index import Piece


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[start, stop)`` of a tensor, in row-major order, that go to element ``sink_start`` of a sink."""

    start: int
    stop: int
    sink_start: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Part of one stored piece, and the sink that it goes to. All numbers are bytes, but for ``file``, ``sink`` and
    ``block``: the piece occupies ``piece_bytes`` of the file's data from ``piece_offset`` on, its first digest has the
    number ``block`` in the file, and the bytes ``[start, stop)`` of the piece go to byte ``sink_offset`` of it."""

    file: int
    piece_offset: int
    piece_bytes: int
    block: int
    start: int
    stop: int
    sink: int
    sink_offset: int


def choose_copy(pieces: Sequence[Piece], rank: int | None) -> list[Piece]:
    """The pieces of one whole copy of a tensor: the copy that ``rank`` alone holds if there is one, else the first."""
    copies = [list(group) for _, group in itertools.groupby(pieces, key=lambda piece: piece.copy)]
    own = [copy for copy in copies if all(piece.rank == rank for piece in copy)]
    return (own or copies)[0]


def extents(
    pieces: Sequence[Piece], files: Sequence[int], spans: Sequence[Span], *, item_bytes: int, sink: int
) -> Iterator[Extent]:
    """Where the bytes of ``spans`` lie. ``pieces`` are one copy of the tensor in order, ``files`` their files."""
    starts = [piece.start for piece in pieces]
    for span in spans:
        i = max(bisect_right(starts, span.start) - 1, 0)
        while i < len(pieces) and pieces[i].start < span.stop:
            piece = pieces[i]
            start, stop = max(span.start, piece.start), min(span.stop, piece.stop)
            if start < stop:
                yield Extent(
                    file=files[i],
                    piece_offset=piece.offset,
                    piece_bytes=(piece.stop - piece.start) * item_bytes,
                    block=piece.block,
                    start=(start - piece.start) * item_bytes,
                    stop=(stop - piece.start) * item_bytes,
                    sink=sink,
                    sink_offset=(span.sink_start + start - span.start) * item_bytes,
                )
            i += 1


def slice_spans(shape: Sequence[int], index: Sequence[slice]) -> tuple[tuple[int, ...], list[Span]]:
    """Shape and row-major spans of ``tensor[index]``. ``index`` has at most one slice per dimension, of step 1.

    Raises MismatchError for more slices than dimensions, another step, or what is no slice.
    """
    if len(index) > len(shape):
        raise MismatchError(f"{len(index)} slices for a tensor of shape {list(shape)}")
    bounds = []
    for dim, part in zip(shape, (*index, *[slice(None)] * (len(shape) - len(index))), strict=True):
        if not isinstance(part, slice):
            raise MismatchError(f"{part!r} is not a slice")
        start, stop, step = part.indices(dim)
        if step != 1:
            raise MismatchError(f"a slice of step {step}; only step 1 can be read")
        bounds.append((start, max(start, stop)))
    out = tuple(stop - start for start, stop in bounds)
    numel = math.prod(out)
    if numel == 0:
        return out, []
    # All dimensions behind the last one that is cut short form one contiguous run
    last = max((d for d, (dim, size) in enumerate(zip(shape, out, strict=True)) if dim != size), default=0)
    inner = math.prod(shape[last + 1 :])
    run = out[last] * inner if shape else 1
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    base = bounds[last][0] * inner if shape else 0
    spans = []
    for number, outer in enumerate(itertools.product(*(range(*bound) for bound in bounds[:last]))):
        start = base + sum(position * stride for position, stride in zip(outer, strides, strict=False))
        spans.append(Span(start, start + run, number * run))
    return out, spans
