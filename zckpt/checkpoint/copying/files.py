"""What a copy of a whole checkpoint is made of: the ranges of the source's files, and the digests of these ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.format import names
from zckpt.format.data_file import decode_header
from zckpt.format.digest import DIGEST_BYTES, block_count, digest
from zckpt.format.rules import broken
from zckpt.plan.data_files import DataFilePlan, plan_copied_file
from zckpt.transfer.write import CopySource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.checkpoint.writing.rank_write import RankWrite
    from zckpt.geometry import Ints
    from zckpt.plan.lineage import Lineage
    from zckpt.plan.reshard import FilePieces

TABLE = -1
"""The number that stands for the digest table of a rank among the numbers of its files."""


class RankFiles(NamedTuple):
    """Files of one rank in a copy, and the data from which they are copied."""

    data_files: tuple[DataFilePlan, ...]
    """The plan of each file that is written."""
    source: CopySource
    """The files of the source, and the digest table of the new files."""

    def digests(self, data_file: DataFilePlan) -> bytes:
        """Returns the digests of the blocks of ``data_file``, which is one of ``data_files``."""
        first = data_file.first_block * DIGEST_BYTES
        return self.source.table[first : first + data_file.blocks * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class Copied:
    """What is copied: a whole checkpoint, whose copy has the same bytes. A class that derives from this one copies a
    part of it."""

    contents: Contents
    """The manifest and the index of the checkpoint."""
    raw: bytes
    """The bytes of the manifest."""

    rows: Sequence[Ints]
    """The rows of the tensors that are copied in each part of the manifest, in ascending order."""
    file_bytes: Mapping[int, int]
    """The size in bytes of these tensors in each file that has any, by the number of the file."""
    state: bytes
    """The packed tree of state that all ranks of the copy share, without ``lineage``."""
    lineage: Lineage | None = None
    """The lineage that is added to the tree, or None if none is added."""

    @staticmethod
    def of(contents: Contents, raw: bytes) -> Copied:
        """Returns all of a checkpoint. The arguments are the attributes of the same names."""
        manifest = contents.manifest
        file_bytes = dict(enumerate(manifest.data_bytes.tolist()))
        return Copied(contents, raw, contents.all_rows, file_bytes, manifest.state)

    def records(self, ranks: Iterable[int], save_id: str) -> list[bytes]:
        """Returns what ``tell`` needs of the process that writes the digest tables of these ranks."""
        return []

    def tell(self, first: RankWrite, records: Sequence[bytes]) -> None:
        """Tells the process that commits what all processes write. ``records``: the results of ``records`` of all."""
        first.data_bytes = sum(self.contents.manifest.files.nbytes) + self.contents.manifest.index_bytes

    def files(
        self, rank: int, pieces: FilePieces, save_id: str, file_numbers: Collection[int], *, verify: bool
    ) -> RankFiles:
        """Plans the copies of files of a rank. ``pieces``: the pieces of ``rows`` in the rank's files. ``save_id``:
        that of the copy. ``file_numbers``: the numbers of the files in the manifest of the source. Raises FormatError
        (F001 to F003, D001, D002, and those of ``Contents.header_bytes`` and ``decode_header``) and StorageError."""
        contents, manifest = self.contents, self.contents.manifest
        data_files = []
        numbers = sorted({*file_numbers} - {TABLE})
        for number in numbers:
            contents.check_length(number)
            file, sizes = manifest.files[number], _region_bytes(contents, number, pieces.in_file(number))
            data_file = plan_copied_file(
                manifest.data_file_id(file), sizes, file.first_block, block_bytes=manifest.block_bytes
            )
            data_files.append(data_file)
        table = bytes(contents.digest_table(rank))
        return RankFiles(tuple(data_files), source_of(contents, numbers, pieces, table, verify))

    def commit(self, first: RankWrite, digests: Sequence[bytes]) -> None:
        """Commits the copy. ``digests``: the digest of each rank's digest table. Raises FormatError (F001, F002, I001,
        I002) and StorageError."""
        contents = self.contents
        contents.check_index_length()
        manifest, path = contents.manifest, names.index_path(contents.manifest.save_id)
        index = contents.reader.read(path, 0, manifest.index_bytes)
        for chunk in manifest.chunks:
            start, stop = chunk.offset, chunk.offset + chunk.nbytes
            if digest(index[start:stop]) != chunk.digest:
                raise broken("I002", "the chunk is damaged", file=path, start=start, stop=stop)
        first.put_in_place(self.raw, index)


def _region_bytes(contents: Contents, number: int, pieces: FilePieces) -> Ints:
    """Returns the sizes in bytes of a file's header, pieces and fillers, in their order. ``pieces``: all pieces of the
    file. The file's header is read only if the index does not tell how many fillers are between two pieces."""
    manifest = contents.manifest
    data_start, data_bytes = manifest.files.data_start[number], manifest.data_bytes[number]
    block_stop = pieces.block + block_count(pieces.nbytes, manifest.block_bytes)
    # The sizes of the gaps before each piece and after the last one, and how many digests each gap before a piece has.
    gap = np.append(pieces.offset, data_bytes) - np.insert(pieces.offset + pieces.nbytes, 0, 0)
    gap_blocks = pieces.block - np.insert(block_stop, 0, block_count(data_start, manifest.block_bytes))[:-1]
    # A gap with one block is one filler. How many fillers a longer gap has, only the header tells.
    if (gap < 0).any() or gap[-1] or (gap_blocks != (gap[:-1] > 0)).any():
        file, raw = manifest.files[number], contents.header_bytes(number)
        header = decode_header(raw, file.nbytes, manifest.data_file_id(file))
        return np.array([data_start, *(entry.nbytes for entry in header.entries)], np.int64)
    sizes = np.stack([gap[:-1], pieces.nbytes], 1).ravel()
    return np.insert(sizes[sizes > 0], 0, data_start)


def source_of(contents: Contents, numbers: Iterable[int], pieces: FilePieces, table: bytes, verify: bool) -> CopySource:
    """Returns the source of the bytes of files. ``numbers``: the numbers of these files. ``pieces``: the pieces in
    them. ``table``: the digest table of the new files."""
    files = {number: contents.read_file(number, verify=False) for number in numbers}
    number_of = {file.path: number for number, file in files.items()}

    def key_at(path: str, byte: int) -> str | None:
        """Returns the key of the tensor that has this byte of a file, or None if no tensor has it."""
        number = number_of[path]
        offset = byte - contents.manifest.files.data_start[number]
        contains = (pieces.file == number) & (pieces.offset <= offset) & (offset < pieces.offset + pieces.nbytes)
        for part_id, row in zip(pieces.part_id[contains].tolist(), pieces.tensor[contains].tolist(), strict=True):
            part = contents.manifest.parts[part_id]
            return f"{part.name}/{contents.manifest.names[part.name_ids[row]]}"
        return None

    by_path = {file.path: file for file in files.values()}
    return CopySource(contents.store, contents.reader, by_path, table, verify, key_at)
