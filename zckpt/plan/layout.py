"""From the fragments that a rank holds to the files that it writes: names, headers, offsets, block numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from zckpt.format.digest import block_count
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import DATA_ALIGNMENT_BYTES
from zckpt.format.names import FILLER_PREFIX, piece_name
from zckpt.format.shard import ShardId, encode_header
from zckpt.state.inventory import TIERS, FileSpan, Fragment

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER, FILLER = -1, -2
"""Sources of a write that are no pieces."""
SHARED_BYTES_MIN = 64 << 10
"""Of adjacent bytes in a swap file that a filler is worth."""


class PlacedPiece(NamedTuple):
    """A fragment's place in its file. ``offset`` and ``nbytes`` are bytes, ``offset`` counted from the file's data;
    ``block`` is the number of its first digest, counted from the file's first."""

    fragment: Fragment
    offset: int
    nbytes: int
    block: int


@dataclass(frozen=True, slots=True)
class PlacedFiller:
    """Zeros, placed like a piece."""

    offset: int
    nbytes: int
    block: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file to be written: its header, then ``pieces`` in order, with ``fillers`` between them."""

    shard: ShardId
    header: bytes
    pieces: tuple[PlacedPiece, ...]
    fillers: tuple[PlacedFiller, ...]
    nbytes: int
    first_block: int
    blocks: int


def plan_shards(
    fragments: Sequence[Fragment], save_id: str, rank: int, world_size: int, *, block_bytes: int
) -> tuple[ShardPlan, ...]:
    """The files of one rank, in the order of their digests in the rank's table.

    Pieces keep the order of ``fragments``, so that what is adjacent in memory is adjacent in the file; only where one
    file holds elements of several sizes do the larger come first, which keeps every piece aligned to its elements.
    """
    parts = list(dict.fromkeys(fragment.part for fragment in fragments))
    place = {(part, tier): (i, t) for i, part in enumerate(parts) for t, tier in enumerate(TIERS)}
    ordered = sorted(fragments, key=lambda f: (place[f.part, f.tier], -ITEM_BYTES[f.dtype]))
    plans: list[ShardPlan] = []
    first_block = 0
    for (part, tier), group in groupby(ordered, key=lambda f: (f.part, f.tier)):
        plan = _plan_shard(ShardId(save_id, rank, world_size, part, tier), list(group), first_block, block_bytes)
        plans.append(plan)
        first_block += plan.blocks
    return tuple(plans)


def _plan_shard(shard: ShardId, fragments: list[Fragment], first_block: int, block_bytes: int) -> ShardPlan:
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    offset = 0
    shared = shareable(fragments)
    for number, fragment in enumerate(fragments):
        if shared.get(number) == number and isinstance(fragment.data, FileSpan):
            gap = (fragment.data.offset - offset) % DATA_ALIGNMENT_BYTES  # as far behind the start of a page as there
            if gap:
                entries.append((f"{FILLER_PREFIX}{number}", "U8", (gap,), offset, gap))
                offset += gap
        count = fragment.stop - fragment.start
        name = piece_name(fragment.name, fragment.start, fragment.stop, math.prod(fragment.shape))
        whole = name == fragment.name
        if not whole:
            shapes[fragment.name] = fragment.shape
        nbytes = count * ITEM_BYTES[fragment.dtype]
        entries.append((name, fragment.dtype, fragment.shape if whole else (count,), offset, nbytes))
        offset += nbytes
    header = encode_header(shard, entries, shapes)
    block = block_count(len(header), block_bytes)
    pieces: list[PlacedPiece] = []
    fillers: list[PlacedFiller] = []
    for name, *_, start, nbytes in entries:
        if name.startswith(FILLER_PREFIX):
            fillers.append(PlacedFiller(start, nbytes, block))
        else:
            pieces.append(PlacedPiece(fragments[len(pieces)], start, nbytes, block))
        block += block_count(nbytes, block_bytes)
    return ShardPlan(shard, header, tuple(pieces), tuple(fillers), len(header) + offset, first_block, block)


def shareable(fragments: Sequence[Fragment]) -> dict[int, int]:
    """Of the fragments, by position, that are part of a long run of adjacent bytes of a swap file: the first of the
    run. A file system that can share pages between files need not write them."""
    runs: list[tuple[list[int], FileSpan]] = []
    for number, fragment in enumerate(fragments):
        data = fragment.data
        if not isinstance(data, FileSpan):
            continue
        numbers, run = runs[-1] if runs else ([], FileSpan("", 0, 0))
        if (data.path, data.offset) == (run.path, run.offset + run.nbytes):
            numbers.append(number)
            runs[-1] = numbers, FileSpan(run.path, run.offset, run.nbytes + data.nbytes)
        else:
            runs.append(([number], data))
    return {number: numbers[0] for numbers, run in runs if run.nbytes >= SHARED_BYTES_MIN for number in numbers}


class WriteSpan(NamedTuple):
    """``nbytes`` of one source, from its byte ``start``; ``block`` is the number of the first digest in the rank's
    table. ``source`` is the position in ``ShardPlan.pieces``, HEADER or FILLER. Whole blocks, but for the last."""

    source: int
    start: int
    nbytes: int
    block: int


@dataclass(frozen=True, slots=True)
class WriteOp:
    """One contiguous write at byte ``offset`` of the file."""

    offset: int
    nbytes: int
    spans: tuple[WriteSpan, ...]


def plan_writes(plan: ShardPlan, *, batch_bytes: int, block_bytes: int) -> tuple[WriteOp, ...]:
    """Cuts a file into writes of at most ``batch_bytes``, a multiple of ``block_bytes``. A run of ``shareable`` bytes
    has writes of its own."""
    shared = shareable([piece.fragment for piece in plan.pieces])
    placed = [(piece.offset, i, piece.nbytes, piece.block) for i, piece in enumerate(plan.pieces)]
    placed += [(filler.offset, FILLER, filler.nbytes, filler.block) for filler in plan.fillers]
    sources = [(HEADER, len(plan.header), 0)] + [source for _, *source in sorted(placed, key=itemgetter(0, 2))]
    ops: list[WriteOp] = []
    spans: list[WriteSpan] = []
    size = offset = 0
    run = None

    def flush() -> None:
        nonlocal spans, size, offset
        if spans:
            ops.append(WriteOp(offset, size, tuple(spans)))
            offset += size
            spans, size = [], 0

    for source, total, block in sources:
        start = 0
        if total and shared.get(source) != run:
            run = shared.get(source)
            flush()
        while start < total:
            room = batch_bytes - size
            nbytes = total - start if total - start <= room else room // block_bytes * block_bytes
            if nbytes == 0:
                flush()
                continue
            spans.append(WriteSpan(source, start, nbytes, plan.first_block + block + start // block_bytes))
            start += nbytes
            size += nbytes
    flush()
    return tuple(ops)
