"""Makes the manifest and the index of the whole checkpoint from what every rank plans to write, before it writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import zstandard

from zckpt.errors import RankError, UnsupportedError
from zckpt.format import index as index_format
from zckpt.format import manifest as manifest_format
from zckpt.format.digest import DIGEST_BYTES
from zckpt.format.index import Layout
from zckpt.format.limits import INDEX_PIECES_MAX
from zckpt.format.manifest import TIERS, File, Files, Manifest, Part
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from zckpt.format.index import Ints
    from zckpt.plan.layout import ShardPlan

Tensor = tuple[str, tuple[int, ...], str]
"""Name, shape, dtype."""
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
    """One file."""

    part: str
    tier: str
    nbytes: int
    data_start: int
    first_block: int
    geometry: int
    origin: str
    """As ``ShardId.origin``."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the files of one rank hold, and the digest of its digest table, which is all zeros until it is known."""

    rank: int
    digest: bytes
    tensors: tuple[Tensor, ...]
    geometries: tuple[Geometry, ...]
    shards: tuple[ShardReceipt, ...]


def receipt(rank: int, plans: Iterable[ShardPlan], digest: bytes = bytes(DIGEST_BYTES)) -> Receipt:
    """The receipt for ``plans``."""
    tensors: dict[Tensor, int] = {}
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
        size = (plan.nbytes, len(plan.header))
        shards.append(ShardReceipt(shard.part, shard.tier, *size, plan.first_block, number, shard.origin))
    return Receipt(rank, digest, tuple(tensors), tuple(geometry for _, geometry in geometries.values()), tuple(shards))


def pack(value: Receipt) -> bytes:
    """A receipt's bytes, to be sent to the rank that commits."""
    geometries = [
        [getattr(geometry, column).astype("<i8").tobytes() for column in _GEOMETRY_COLUMNS]
        for geometry in value.geometries
    ]
    shards = [[s.part, s.tier, s.nbytes, s.data_start, s.first_block, s.geometry, s.origin] for s in value.shards]
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


class _Tensors:
    """What the ranks have said of tensors. A tensor is a name with a shape and a dtype, numbered from 0."""

    def __init__(self) -> None:
        self.ids: dict[Tensor, int] = {}
        self.name_ids: dict[str, int] = {}
        self._known: tuple[tuple[Tensor, ...], Ints] = ((), np.empty(0, np.int64))

    def add(self, tensors: tuple[Tensor, ...]) -> Ints:
        """Their numbers."""
        if tensors != self._known[0]:  # a rank mostly has what the rank before it has
            for name, _, _ in tensors:
                self.name_ids.setdefault(name, len(self.name_ids))
            self._known = tensors, np.array([self.ids.setdefault(one, len(self.ids)) for one in tensors], np.int64)
        return self._known[1]


def _layout(part: str, columns: Sequence[Ints], tensors: Sequence[Tensor], name_of: Ints) -> tuple[Layout, Ints]:
    """The pieces of one part from all ranks, and the tensor of each row. ``columns``: tensor, copy, start, length,
    offset, block, rank, tier. ``name_of``: the name id of each tensor."""
    tensor, copy, start, length, offset, block, rank, tier = columns
    name = name_of[tensor]
    order = np.lexsort((start, copy, name))
    found, first, count = np.unique(name[order], return_index=True, return_counts=True)
    row_tensor = tensor[order][first]
    differs = np.flatnonzero(tensor[order] != np.repeat(row_tensor, count))
    if len(differs):
        pair = (differs[0], first[np.searchsorted(first, differs[0], "right") - 1])
        (label, shape, dtype), (_, other_shape, other_dtype) = (tensors[tensor[order[at]]] for at in pair)
        on, other_on = (int(rank[order[at]]) for at in pair)
        raise RankError(
            f"{part}/{label} is {dtype} {list(shape)} on rank {on}, "
            f"{other_dtype} {list(other_shape)} on rank {other_on}",
            key=f"{part}/{label}",
            rank=on,
        )
    layout = Layout(found, count, rank[order], tier[order], length[order], offset[order], block[order])
    numel = np.array([math.prod(tensors[one][1]) for one in row_tensor.tolist()], np.int64)
    wrong = _wrong_starts(layout, name[order], copy[order], start[order], numel)
    if wrong.any():
        label = tensors[tensor[order][np.argmax(wrong)]][0]
        raise broken("I005", "the pieces of all ranks leave a gap or overlap", key=f"{part}/{label}")
    return layout, row_tensor


def _wrong_starts(layout: Layout, name: Ints, copy: Ints, start: Ints, numel: Ints) -> NDArray[np.bool]:
    """The index does not store where pieces start; so what it will say must be what the ranks said (I005)."""
    found_start, found_copy = index_format.spans(layout, numel)
    wrong: NDArray[np.bool] = start != found_start
    wrong[1:] |= (name[1:] == name[:-1]) & ((copy[1:] == copy[:-1]) != (found_copy[1:] == found_copy[:-1]))
    wrong &= np.repeat(numel, layout.count) > 0
    return wrong


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

    An alias whose tensor no part holds is left out. Raises RankError if ranks disagree about a tensor, UnsupportedError
    if there are more pieces than a checkpoint can have, FormatError if the pieces of all ranks do not make up whole
    tensors, or for anything else that a reader would refuse.
    """
    _check_pieces(receipts)
    known = _Tensors()
    parts: dict[str, list[tuple[Ints, ...]]] = {}
    part_ids: dict[str, int] = {}
    files: list[File] = []
    digests: dict[int, bytes] = {}
    for one in receipts:
        digests[one.rank] = one.digest
        ids = known.add(one.tensors)
        for shard in one.shards:
            part_id = part_ids.setdefault(shard.part, len(part_ids))
            tier = TIERS.index(shard.tier)
            geometry = one.geometries[shard.geometry]
            tensor, *columns = (getattr(geometry, column) for column in _GEOMETRY_COLUMNS)
            place = (np.full(len(tensor), one.rank), np.full(len(tensor), tier))
            parts.setdefault(shard.part, []).append((ids[tensor], *columns, *place))
            size = (shard.nbytes, shard.data_start)
            files.append(File(one.rank, part_id, tier, *size, shard.first_block, shard.origin))
    tensors, names = list(known.ids), tuple(known.name_ids)
    name_of = np.array([known.name_ids[name] for name, _, _ in tensors], np.int64)
    layouts: list[Layout] = []
    shapes: dict[tuple[int, ...], int] = {}
    records: list[Part] = []
    for part, rows in parts.items():
        columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
        layout, row_tensor = _layout(part, columns, tensors, name_of)
        number = next((i for i, other in enumerate(layouts) if layout.same_as(other)), len(layouts))
        if number == len(layouts):
            layouts.append(layout)
        facts = [tensors[one] for one in row_tensor.tolist()]
        shape_ids = tuple(shapes.setdefault(shape, len(shapes)) for _, shape, _ in facts)
        dtypes = tuple(dtype for _, _, dtype in facts)
        records.append(Part(part, number, tuple(layout.name.tolist()), shape_ids, dtypes))
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
        aliases={alias: name for alias, name in about.aliases.items() if name in known.name_ids},
        state=about.state,
        writer=about.writer,
    )
    raw = manifest_format.encode(manifest)
    _check(raw, index)
    return raw, index


def with_digests(manifest: bytes, digests: Sequence[bytes]) -> bytes:
    """The same manifest, with the digests of all ranks' digest tables."""
    return manifest_format.encode(replace(manifest_format.decode(manifest), digests=tuple(digests)))


def _check_pieces(receipts: Sequence[Receipt]) -> None:
    """Raises UnsupportedError if there are too many pieces. To be called before tables are made of them, which would
    take much memory."""
    pieces = sum(len(one.geometries[shard.geometry].tensor) for one in receipts for shard in one.shards)
    if pieces > INDEX_PIECES_MAX:
        parts = {shard.part for one in receipts for shard in one.shards}
        raise UnsupportedError(
            f"the checkpoint would have {pieces:,} pieces of tensors ({len(receipts):,} ranks, {len(parts)} parts); "
            f"the format can hold {INDEX_PIECES_MAX:,}",
            rule="M013",
            hint="leave parts out with `exclude`, and write them as a checkpoint of their own with `parts`",
        )


def _check(raw: bytes, index: bytes) -> None:
    """Reads back what is about to be committed, while the state that it describes is still alive."""
    manifest = manifest_format.decode(raw)
    for chunk in manifest.chunks:
        index_format.decode(index[chunk.offset : chunk.offset + chunk.nbytes], chunk, manifest)
