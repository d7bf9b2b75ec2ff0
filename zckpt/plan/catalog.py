"""From what every rank has written to the manifest and the index of the whole checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import zstandard

from zckpt.errors import RankError
from zckpt.format import index as index_format
from zckpt.format import manifest as manifest_format
from zckpt.format.index import Layout
from zckpt.format.manifest import TIERS, File, Files, Manifest, Part
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zckpt.format.index import Ints
    from zckpt.plan.layout import ShardPlan

_GEOMETRY_COLUMNS = ("tensor", "copy", "start", "length", "offset", "block")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Pieces in a file as int64 columns of one length. ``tensor`` is a position in ``Receipt.tensors``, the rest as in
    ``Fragment`` and ``ShardPlan.pieces``. Files of equal geometry, such as weights and moments, share one."""

    tensor: Ints
    copy: Ints
    start: Ints
    length: Ints
    offset: Ints
    block: Ints


@dataclass(frozen=True, slots=True)
class ShardReceipt:
    """One file that was written."""

    part: str
    tier: str
    nbytes: int
    data_start: int
    first_block: int
    geometry: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one rank has written, and the digest of its digest table. ``tensors`` are (name, shape, dtype)."""

    rank: int
    digest: bytes
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    geometries: tuple[Geometry, ...]
    shards: tuple[ShardReceipt, ...]


def receipt(rank: int, digest: bytes, plans: Iterable[ShardPlan]) -> Receipt:
    """The receipt for ``plans``, once their files are durable."""
    tensors: dict[tuple[str, tuple[int, ...], str], int] = {}
    geometries: dict[bytes, tuple[int, Geometry]] = {}
    shards: list[ShardReceipt] = []
    for plan in plans:
        fragments, pieces = plan.fragments, plan.pieces
        table = np.array(
            [
                [tensors.setdefault((f.name, f.shape, f.dtype), len(tensors)) for f in fragments],
                [f.copy for f in fragments],
                [f.start for f in fragments],
                [f.stop - f.start for f in fragments],
                pieces.start,
                pieces.block,
            ],
            np.int64,
        )
        number, _ = geometries.setdefault(table.tobytes(), (len(geometries), Geometry(*table)))
        shard = plan.shard
        shards.append(ShardReceipt(shard.part, shard.tier, plan.nbytes, len(plan.header), plan.first_block, number))
    return Receipt(rank, digest, tuple(tensors), tuple(geometry for _, geometry in geometries.values()), tuple(shards))


def pack(value: Receipt) -> bytes:
    """A receipt's bytes, to be sent to the rank that commits."""
    geometries = [
        [getattr(geometry, column).astype("<i8").tobytes() for column in _GEOMETRY_COLUMNS]
        for geometry in value.geometries
    ]
    shards = [[s.part, s.tier, s.nbytes, s.data_start, s.first_block, s.geometry] for s in value.shards]
    raw = msgpack.packb([value.rank, value.digest, value.tensors, geometries, shards])
    return zstandard.ZstdCompressor(level=1).compress(raw)


def unpack(raw: bytes) -> Receipt:
    """The inverse of ``pack``."""
    packed = zstandard.ZstdDecompressor().decompress(raw)
    rank, digest, tensors, geometries, shards = msgpack.unpackb(packed, use_list=False)
    return Receipt(
        rank,
        digest,
        tensors,
        tuple(Geometry(*(np.frombuffer(column, "<i8") for column in columns)) for columns in geometries),
        tuple(ShardReceipt(*shard) for shard in shards),
    )


class _PartRows:
    """The pieces of one part from all ranks, collected."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.tensors: dict[int, tuple[tuple[int, ...], str, int]] = {}
        """From name id to shape, dtype and the rank that said so."""
        self.columns: list[tuple[Ints, ...]] = []

    def add(self, name_id: int, name: str, shape: tuple[int, ...], dtype: str, rank: int) -> None:
        known = self.tensors.setdefault(name_id, (shape, dtype, rank))
        if known[0] != shape or known[1] != dtype:
            key = f"{self.part}/{name}"
            raise RankError(
                f"{key} is {dtype} {list(shape)} on rank {rank}, {known[1]} {list(known[0])} on rank {known[2]}",
                key=key,
                rank=rank,
            )

    def layout(self, names: Sequence[str]) -> Layout:
        """``names`` by their ids."""
        name, copy, start, length, offset, block, rank, tier = (
            np.concatenate(columns) for columns in zip(*self.columns, strict=True)
        )
        order = np.lexsort((start, copy, name))
        found, count = np.unique(name, return_counts=True)
        layout = Layout(found, count, rank[order], tier[order], length[order], offset[order], block[order])
        self._check_starts(layout, name[order], copy[order], start[order], names)
        return layout

    def _check_starts(self, layout: Layout, name: Ints, copy: Ints, start: Ints, names: Sequence[str]) -> None:
        """The index does not store where pieces start; so what it will say must be what the ranks said (I005)."""
        numel = np.array([math.prod(self.tensors[name_id][0]) for name_id in layout.name.tolist()], np.int64)
        found_start, found_copy = index_format.spans(layout, numel)
        wrong = start != found_start
        wrong[1:] |= (name[1:] == name[:-1]) & ((copy[1:] == copy[:-1]) != (found_copy[1:] == found_copy[:-1]))
        wrong &= np.repeat(numel, layout.count) > 0
        if wrong.any():
            key = f"{self.part}/{names[int(name[np.argmax(wrong)])]}"
            raise broken("I005", "the pieces of all ranks leave a gap or overlap", key=key)


@dataclass(frozen=True, slots=True)
class About:
    """What the manifest says beside tensors and files; see ``Manifest``."""

    step: int
    block_bytes: int
    aliases: Mapping[str, str]
    state: bytes
    writer: Mapping[str, str]


def catalog(receipts: Sequence[Receipt], save_id: str, about: About) -> tuple[bytes, bytes]:
    """``(manifest, index)``, the bytes of both files, checked by the reader's own rules. One receipt for every rank.

    Raises RankError if ranks disagree about a tensor, FormatError if the pieces of all ranks do not make up whole
    tensors.
    """
    name_ids: dict[str, int] = {}
    parts: dict[str, _PartRows] = {}
    part_ids: dict[str, int] = {}
    files: list[File] = []
    digests: dict[int, bytes] = {}
    for one in receipts:
        digests[one.rank] = one.digest
        id_of = [name_ids.setdefault(name, len(name_ids)) for name, _, _ in one.tensors]
        ids = np.array(id_of, np.int64)
        for shard in one.shards:
            geometry = one.geometries[shard.geometry]
            part_id = part_ids.setdefault(shard.part, len(part_ids))
            rows = parts.setdefault(shard.part, _PartRows(shard.part))
            for i in np.unique(geometry.tensor).tolist():
                name, shape, dtype = one.tensors[i]
                rows.add(id_of[i], name, shape, dtype, one.rank)
            tier = TIERS.index(shard.tier)
            size = len(geometry.tensor)
            rows.columns.append(
                (
                    ids[geometry.tensor],
                    geometry.copy,
                    geometry.start,
                    geometry.length,
                    geometry.offset,
                    geometry.block,
                    np.full(size, one.rank),
                    np.full(size, tier),
                )
            )
            files.append(File(one.rank, part_id, tier, shard.nbytes, shard.data_start, shard.first_block))
    layouts: list[Layout] = []
    shapes: dict[tuple[int, ...], int] = {}
    records: list[Part] = []
    names = tuple(name_ids)
    for part, rows in parts.items():
        layout = rows.layout(names)
        number = next((i for i, other in enumerate(layouts) if layout.same_as(other)), len(layouts))
        if number == len(layouts):
            layouts.append(layout)
        tensors = [rows.tensors[name] for name in layout.name.tolist()]
        shape_ids = tuple(shapes.setdefault(shape, len(shapes)) for shape, _, _ in tensors)
        records.append(Part(part, number, tuple(layout.name.tolist()), shape_ids, tuple(t[1] for t in tensors)))
    index, chunks = index_format.encode(layouts)
    manifest = Manifest(
        save_id=save_id,
        step=about.step,
        world_size=len(receipts),
        block_bytes=about.block_bytes,
        names=names,
        shapes=tuple(shapes),
        parts=tuple(records),
        files=Files.of(files),
        digests=tuple(digests[rank] for rank in range(len(receipts))),
        chunks=chunks,
        index_bytes=len(index),
        aliases=about.aliases,
        state=about.state,
        writer=about.writer,
    )
    raw = manifest_format.encode(manifest)
    _check(raw, index)
    return raw, index


def _check(raw: bytes, index: bytes) -> None:
    """Reads back what is about to be committed, while the state that it describes is still alive."""
    manifest = manifest_format.decode(raw)
    for chunk in manifest.chunks:
        index_format.decode(index[chunk.offset : chunk.offset + chunk.nbytes], chunk, manifest)
