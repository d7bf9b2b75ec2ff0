"""Plans what one rank's files in a copy are made of: ranges of the source's files, and the digests of these ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.format.digest import DIGEST_BYTES, block_count, blocks, digest
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.index import check_claims
from zckpt.format.manifest import TIERS
from zckpt.plan.layout import FILLER, HEADER, ShardPlan, copied_shard, plan_shards
from zckpt.state.inventory import STATE, FileSpan, Fragment
from zckpt.transfer.write import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from zckpt.format.index import Ints
    from zckpt.listing.contents import Contents


class RankFiles(NamedTuple):
    """The files of one rank in a copy, and what they are copied from."""

    shards: tuple[ShardPlan, ...]
    """The plan of each file that is written."""
    source: Source
    """The files of the source, and the digest table that the written files are to have."""


def whole_files(contents: Contents, rank: int, *, verify: bool) -> RankFiles:
    """Plans to copy all files of a rank as they are. It reads their headers. Raises FormatError (F001 to F003, S001 to
    S006, S008, D001, D002) and StorageError."""
    manifest = contents.manifest
    shards = []
    numbers = range(bisect_left(manifest.files.rank, rank), bisect_right(manifest.files.rank, rank))
    for number in numbers:
        header, raw = contents.header(number)
        file = manifest.files[number]
        shards.append(copied_shard(header, raw, file.nbytes, file.first_block, block_bytes=manifest.block_bytes))
    table = bytes(contents.digest_table(rank))
    return RankFiles(tuple(shards), _source(contents, numbers, table, verify))


def _source(contents: Contents, numbers: Iterable[int], table: bytes, verify: bool) -> Source:
    files = [contents.read_file(number, verify=False) for number in numbers]
    return Source(contents.reader, {file.path: file for file in files}, table, verify)


@dataclass(frozen=True, slots=True)
class Selection:
    """The pieces of some tensors of a checkpoint, in all their copies, as int64 columns in the order of their files and
    offsets. ``part`` and ``row`` are positions in the manifest. The other columns have the meaning that they have in
    ``StoredPieces`` and ``Piece``."""

    contents: Contents
    part: Ints
    row: Ints
    file: Ints
    start: Ints
    stop: Ints
    offset: Ints
    block: Ints
    copy: Ints
    nbytes: Ints
    rank: Ints

    @classmethod
    def of(cls, contents: Contents, keys: Iterable[str]) -> Selection:
        """Returns the pieces of the tensors with these keys, and of all tensors that the trees of state refer to.
        Raises FormatError (I002 to I007)."""
        manifest = contents.manifest
        rows: dict[int, set[int]] = {part: set() for part in range(len(manifest.parts))}
        for info in (contents[key] for key in keys):
            part_id = manifest.part_ids[info.part]
            rows[part_id].add(bisect_left(manifest.parts[part_id].names, manifest.name_ids[info.name]))
        if STATE in manifest.part_ids:
            number = manifest.part_ids[STATE]
            rows[number] = set(range(len(manifest.parts[number].names)))
        found = [np.empty((9, 0), np.int64)]
        for number, part in enumerate(manifest.parts):
            item = np.array([ITEM_BYTES[dtype] for dtype in part.dtypes], np.int64)
            own = np.array(sorted(rows[number]), np.int64)
            for chunk_number, chunk in enumerate(manifest.chunks):
                in_chunk = own[(own >= chunk.first_row) & (own < chunk.first_row + chunk.rows)]
                if chunk.layout == part.layout and len(in_chunk):
                    pieces, copy, _ = contents.pieces_of_rows(number, chunk_number, in_chunk)
                    row, (file, start, stop, offset, block) = in_chunk[pieces[0]], pieces[1:]
                    nbytes = (stop - start) * item[row]
                    own_part = np.full(len(row), number)
                    found.append(np.stack([own_part, row, file, start, stop, offset, block, copy, nbytes]))
        table = np.concatenate(found, axis=1)
        table = table[:, np.lexsort((table[5], table[2]))]
        check_claims(manifest, table[2], table[8])
        return cls(contents, *[*table, np.array(manifest.files.rank, np.int64)[table[2]]])

    def bytes_of(self, rank: int) -> int:
        """Returns the size in bytes of the pieces that this rank has."""
        return int(self.nbytes[self._own(rank)].sum())

    def files(self, rank: int, save_id: str, *, verify: bool) -> RankFiles:
        """Plans the files of a rank that hold these pieces and no others. Raises FormatError (F001 to F003, D001,
        D002)."""
        contents, own = self.contents, self._own(rank)
        manifest = contents.manifest
        fragments = list(self._fragments(own))
        shards = plan_shards(fragments, save_id, rank, manifest.world_size, block_bytes=manifest.block_bytes)
        numbers = sorted(set(self.file[own].tolist()))
        for number in numbers:
            contents.check_length(number)
        firsts = np.array(manifest.files.first_block, np.int64)[self.file[own]] + self.block[own]
        first_block = {id(one): first for one, first in zip(fragments, firsts.tolist(), strict=True)}
        old = contents.digest_table(rank)
        table = b"".join(_digests(shard, old, first_block, manifest.block_bytes) for shard in shards)
        return RankFiles(shards, _source(contents, numbers, table, verify))

    def _own(self, rank: int) -> slice:
        return slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())

    def _fragments(self, own: slice) -> Iterator[Fragment]:
        manifest = self.contents.manifest
        columns = (self.part, self.row, self.file, self.start, self.stop, self.offset, self.copy)
        for part_id, row, number, start, stop, offset, copy in zip(*(c[own].tolist() for c in columns), strict=True):
            part, file = manifest.parts[part_id], manifest.files[number]
            dtype, shape = part.dtypes[row], manifest.shapes[part.shapes[row]]
            nbytes = (stop - start) * ITEM_BYTES[dtype]
            data = FileSpan(manifest.path(file), file.data_start + offset, nbytes)
            name, tier = manifest.names[part.names[row]], TIERS[file.tier]
            yield Fragment(part.name, name, shape, dtype, start, stop, tier, copy, data)


def _digests(shard: ShardPlan, old: memoryview, first_block: Mapping[int, int], block_bytes: int) -> bytes:
    """Returns the digests of a new file. Those of its pieces are taken from the source's table ``old``.
    ``first_block``: for the ``id`` of each fragment the position in ``old`` of the digest of its first block."""
    found = []
    for source, nbytes in zip(shard.regions.source.tolist(), shard.regions.nbytes.tolist(), strict=True):
        if source in (HEADER, FILLER):
            data = shard.header if source == HEADER else bytes(nbytes)
            found += [digest(data[start:stop]) for _, start, stop in blocks(0, nbytes, 0, block_bytes)]
        else:
            first = first_block[id(shard.fragments[source])]
            found.append(bytes(old[first * DIGEST_BYTES : (first + block_count(nbytes, block_bytes)) * DIGEST_BYTES]))
    return b"".join(found)
