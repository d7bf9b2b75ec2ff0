"""Plans what the files of a copy are made of: ranges of the source's files, and the digests of these ranges."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.format.digest import DIGEST_BYTES, block_count, blocks, digest
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.index import check_claims
from zckpt.format.manifest import TIERS
from zckpt.plan.layout import FILLER, HEADER, ShardPlan, copied_shard, plan_shards
from zckpt.plan.share import shared_out
from zckpt.state.inventory import STATE, FileSpan, Fragment
from zckpt.transfer.write import Source

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from zckpt.format.index import Ints
    from zckpt.format.manifest import Manifest
    from zckpt.listing.contents import Contents

TABLE = -1
"""Stands for the digest table of a rank among the numbers of its files."""


class RankFiles(NamedTuple):
    """Files of one rank in a copy, and what they are copied from."""

    shards: tuple[ShardPlan, ...]
    """The plan of each file that is written."""
    source: Source
    """The files of the source, and the digest table that the written files are to have."""

    def digests(self, shard: ShardPlan) -> bytes:
        """Those of the blocks of one of ``shards``."""
        first = shard.first_block * DIGEST_BYTES
        return self.source.table[first : first + shard.blocks * DIGEST_BYTES]


def shared_files(
    manifest: Manifest, file_bytes: Mapping[int, int], process: int, processes: int
) -> dict[int, frozenset[int]]:
    """Returns what one of several processes copies. For each rank of the checkpoint of which it copies anything, these
    are the numbers of files, and TABLE if it writes the rank's digest table. ``file_bytes``: how many bytes are copied
    of each file. All processes copy about the same number of bytes. Each file is copied by one process, since ranks
    that write parts of one page lose bytes on network file systems."""
    tables = ((rank, TABLE, 1) for rank in range(manifest.world_size))
    files = ((manifest.files.rank[number], number, nbytes) for number, nbytes in file_bytes.items())
    everything = sorted([*tables, *files])
    own: dict[int, list[int]] = {}
    owners = shared_out([nbytes for *_, nbytes in everything], processes)
    for (rank, number, _), owner in zip(everything, owners, strict=True):
        if owner == process:
            own.setdefault(rank, []).append(number)
    return {rank: frozenset(numbers) for rank, numbers in own.items()}


def whole_files(contents: Contents, rank: int, own: Collection[int], *, verify: bool) -> RankFiles:
    """Plans to copy those files of a rank whose numbers are in ``own``, as they are. It reads their headers. Raises
    FormatError (F001 to F003, S001 to S006, S008, D001, D002) and StorageError."""
    manifest = contents.manifest
    shards = []
    numbers = sorted({*own} - {TABLE})
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

    @property
    def file_bytes(self) -> dict[int, int]:
        """The size in bytes of the pieces in each file that holds any of them, by the number of the file."""
        numbers, pieces = np.unique(self.file, return_inverse=True)
        nbytes = np.zeros(len(numbers), np.int64)
        np.add.at(nbytes, pieces, self.nbytes)
        return dict(zip(numbers.tolist(), nbytes.tolist(), strict=True))

    def shards(self, rank: int, save_id: str) -> tuple[ShardPlan, ...]:
        """Plans the files of a rank that hold these pieces and no others."""
        return self._plan(list(self._fragments(self._of(rank))), rank, save_id)

    def files(self, rank: int, save_id: str, own: Collection[int], *, verify: bool) -> RankFiles:
        """Plans to copy those of ``shards`` that take the place of the source's files with the numbers ``own``. Raises
        FormatError (F001 to F003, D001, D002)."""
        contents, of_rank = self.contents, self._of(rank)
        manifest, numbers = contents.manifest, self.file[of_rank]
        fragments = list(self._fragments(of_rank))
        shards = self._plan(fragments, rank, save_id)
        firsts = np.array(manifest.files.first_block, np.int64)[numbers] + self.block[of_rank]
        first_block = {id(one): first for one, first in zip(fragments, firsts.tolist(), strict=True)}
        old = contents.digest_table(rank)
        table = b"".join(_digests(shard, old, first_block, manifest.block_bytes) for shard in shards)
        number = {id(one): number for one, number in zip(fragments, numbers.tolist(), strict=True)}
        copied = {number[id(shard.fragments[0])]: shard for shard in shards}
        copied = {number: shard for number, shard in copied.items() if number in own}
        for one in copied:
            contents.check_length(one)
        return RankFiles(tuple(copied.values()), _source(contents, copied, table, verify))

    def _of(self, rank: int) -> slice:
        return slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())

    def _plan(self, fragments: Sequence[Fragment], rank: int, save_id: str) -> tuple[ShardPlan, ...]:
        manifest = self.contents.manifest
        return plan_shards(fragments, save_id, rank, manifest.world_size, block_bytes=manifest.block_bytes)

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
