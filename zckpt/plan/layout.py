"""From the fragments that a rank holds to the files that it writes: names, headers, offsets, block numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from zckpt.format.digest import block_count
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.names import piece_name
from zckpt.format.shard import ShardId, encode_header
from zckpt.state.inventory import TIERS, Fragment

if TYPE_CHECKING:
    from collections.abc import Sequence


class PlacedPiece(NamedTuple):
    """A fragment's place in its file. ``offset`` and ``nbytes`` are bytes, ``offset`` counted from the file's data;
    ``block`` is the number of its first digest, counted from the file's first."""

    fragment: Fragment
    offset: int
    nbytes: int
    block: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file to be written: its header, then ``pieces`` in order."""

    shard: ShardId
    header: bytes
    pieces: tuple[PlacedPiece, ...]
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
    for fragment in fragments:
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
    for fragment, (*_, start, nbytes) in zip(fragments, entries, strict=True):
        pieces.append(PlacedPiece(fragment, start, nbytes, block))
        block += block_count(nbytes, block_bytes)
    return ShardPlan(shard, header, tuple(pieces), len(header) + offset, first_block, block)


class WriteSpan(NamedTuple):
    """``nbytes`` of one source, from its byte ``start``; ``block`` is the number of the first digest in the rank's
    table. ``source`` is the position in ``ShardPlan.pieces``, or -1 for the header. Whole blocks, but for the last."""

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
    """Cuts a file into writes of at most ``batch_bytes``, a multiple of ``block_bytes``."""
    sources = [(-1, len(plan.header), 0)] + [(i, piece.nbytes, piece.block) for i, piece in enumerate(plan.pieces)]
    ops: list[WriteOp] = []
    spans: list[WriteSpan] = []
    size = offset = 0

    def flush() -> None:
        nonlocal spans, size, offset
        if spans:
            ops.append(WriteOp(offset, size, tuple(spans)))
            offset += size
            spans, size = [], 0

    for source, total, block in sources:
        start = 0
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
