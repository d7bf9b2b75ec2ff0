"""Plans the files of a copy: the ranges of the source's files that they are made of, and the digests of these
ranges."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.format import names, tree
from zckpt.format.digest import DIGEST_BYTES, block_count, blocks, digest
from zckpt.format.index import check_claims
from zckpt.geometry import Span
from zckpt.plan.data_files import FILLER, HEADER, DataFilePlan, plan_copied_file, plan_data_files
from zckpt.plan.inventory import MASTER, RESERVED_PARTS, STATE, FileRange, Fragment
from zckpt.plan.lineage import Lineage, Use, use_of
from zckpt.plan.share import shared_out
from zckpt.transfer.write import CopySource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.format.manifest import Manifest
    from zckpt.geometry import Ints
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


def own_files(
    manifest: Manifest, file_bytes: Mapping[int, int], process: int, processes: int
) -> dict[int, frozenset[int]]:
    """Returns the numbers of the files that one of several processes copies, by the ranks of the checkpoint to which
    the files belong. The numbers contain ``TABLE`` if the process writes the rank's digest table. All processes copy
    about the same number of bytes. Each file is copied by one process, because network file systems lose bytes if
    several processes write parts of one page. ``file_bytes``: the number of bytes that are copied of each file.
    ``process`` and ``processes``: the number of the process, and the number of processes."""
    tables = ((rank, TABLE, 1) for rank in range(manifest.world_size))
    files = ((manifest.files.rank[number], number, nbytes) for number, nbytes in file_bytes.items())
    everything = sorted([*tables, *files])
    numbers_of_rank: dict[int, list[int]] = {}
    owners = shared_out([nbytes for *_, nbytes in everything], processes)
    for (rank, number, _), owner in zip(everything, owners, strict=True):
        if owner == process:
            numbers_of_rank.setdefault(rank, []).append(number)
    return {rank: frozenset(numbers) for rank, numbers in numbers_of_rank.items()}


def whole_files(
    contents: Contents, rank: int, file_numbers: Collection[int], pieces: FilePieces, *, verify: bool
) -> RankFiles:
    """Plans a copy of whole files of a rank. ``file_numbers``: the numbers of the files. ``pieces``: all pieces of the
    rank. Raises FormatError (F001 to F003, D001, D002, and the errors of ``Contents.header``) and StorageError."""
    manifest = contents.manifest
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
    return RankFiles(tuple(data_files), _source(contents, numbers, pieces, table, verify))


def _region_bytes(contents: Contents, number: int, pieces: FilePieces) -> Ints:
    """Returns the sizes in bytes of a file's header, pieces and fillers, in their order. ``pieces``: all pieces of the
    file. The header of the file is read only if the index does not tell how many fillers there are between two
    pieces."""
    manifest = contents.manifest
    data_start, data_bytes = manifest.files.data_start[number], manifest.data_bytes[number]
    block_stop = pieces.block + block_count(pieces.nbytes, manifest.block_bytes)
    # The sizes of the gaps before each piece and after the last one, and the numbers of digests of the gaps before each
    # piece.
    gap = np.append(pieces.offset, data_bytes) - np.insert(pieces.offset + pieces.nbytes, 0, 0)
    gap_blocks = pieces.block - np.insert(block_stop, 0, block_count(data_start, manifest.block_bytes))[:-1]
    # Each gap that is not empty is one filler exactly if it has one block.
    if (gap < 0).any() or gap[-1] or (gap_blocks != (gap[:-1] > 0)).any():
        header = contents.header(number)
        return np.array([data_start, *(entry.nbytes for entry in header.entries)], np.int64)
    sizes = np.stack([gap[:-1], pieces.nbytes], 1).ravel()
    return np.insert(sizes[sizes > 0], 0, data_start)


def _source(contents: Contents, numbers: Iterable[int], pieces: FilePieces, table: bytes, verify: bool) -> CopySource:
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


@dataclass(frozen=True, slots=True)
class SelectedTensors:
    """Some tensors of a checkpoint, with all of their copies."""

    contents: Contents
    """The manifest and the index of the checkpoint."""
    rows: Sequence[Ints]
    """The rows of these tensors in each part of the manifest, in ascending order."""
    file_bytes: Mapping[int, int]
    """The size in bytes of the pieces of these tensors in each file that has any, by the number of the file."""
    state: bytes
    """The packed tree of state that all ranks of the copy share, without the lineage."""
    lineage: Lineage | None
    """The lineage of the copy, or None if the tree is not a map, so that none can be added."""

    @classmethod
    def of(cls, contents: Contents, keys: Iterable[str]) -> SelectedTensors:
        """Selects the tensors with these keys, and all tensors to which the trees of state refer. Raises FormatError
        (I002 to I007, T001 to T004) and StateError (T004)."""
        manifest = contents.manifest
        rows_of_part: dict[int, set[int]] = {part: set() for part in range(len(manifest.parts))}
        for info in (contents[key] for key in keys):
            part_id = manifest.part_ids[info.part]
            rows_of_part[part_id].add(bisect_left(manifest.parts[part_id].name_ids, manifest.name_ids[info.name]))
        if STATE in manifest.part_ids:
            part_id = manifest.part_ids[STATE]
            rows_of_part[part_id] = set(range(len(manifest.parts[part_id].name_ids)))
        rows = [np.array(sorted(of_part), np.int64) for of_part in rows_of_part.values()]
        numbers: set[int] = set()

        def claims() -> Iterator[tuple[Ints, Ints]]:
            for pieces in contents.pieces_of_parts(rows):
                numbers.update(np.unique(pieces.file).tolist())
                yield pieces.file, pieces.nbytes

        claimed = check_claims(manifest, claims())
        file_bytes = {number: int(claimed[number]) for number in sorted(numbers)}
        return cls(contents, rows, file_bytes, _state(contents, rows), _lineage(contents, rows))

    def data_files(self, rank: int, pieces: FilePieces, save_id: str) -> tuple[DataFilePlan, ...]:
        """Plans the new files of a rank. ``pieces``: the pieces of the selected tensors in the rank's files."""
        return self._plan(self._fragments(pieces), rank, save_id)

    def files(
        self, rank: int, pieces: FilePieces, save_id: str, file_numbers: Collection[int], *, verify: bool
    ) -> RankFiles:
        """Returns those files of ``data_files`` that take the place of given files of the source, and the ranges from
        which their bytes are copied. ``file_numbers``: the numbers of these files of the source. Raises FormatError
        (F001 to F003, D001, D002)."""
        contents, manifest = self.contents, self.contents.manifest
        fragments = self._fragments(pieces)
        data_files = self._plan(fragments, rank, save_id)
        blocks_of_pieces = np.array(manifest.files.first_block, np.int64)[pieces.file] + pieces.block
        first_block = {
            id(fragment): block for fragment, block in zip(fragments, blocks_of_pieces.tolist(), strict=True)
        }
        old_table = contents.digest_table(rank)
        table = b"".join(_digests(data_file, old_table, first_block, manifest.block_bytes) for data_file in data_files)
        number_of = {id(fragment): number for fragment, number in zip(fragments, pieces.file.tolist(), strict=True)}
        copied = {number_of[id(data_file.fragments[0])]: data_file for data_file in data_files}
        copied = {number: data_file for number, data_file in copied.items() if number in file_numbers}
        for number in copied:
            contents.check_length(number)
        return RankFiles(tuple(copied.values()), _source(contents, copied, pieces, table, verify))

    def _plan(self, fragments: Sequence[Fragment], rank: int, save_id: str) -> tuple[DataFilePlan, ...]:
        manifest = self.contents.manifest
        return plan_data_files(fragments, save_id, rank, manifest.world_size, block_bytes=manifest.block_bytes)

    def _fragments(self, pieces: FilePieces) -> list[Fragment]:
        manifest = self.contents.manifest
        files = {number: manifest.files[number] for number in np.unique(pieces.file).tolist()}
        paths = {number: manifest.path(file) for number, file in files.items()}
        columns = (getattr(pieces, name).tolist() for name in pieces.__dataclass_fields__)
        fragments = []
        for row, start, stop, part_id, number, offset, _, copy, nbytes in zip(*columns, strict=True):
            part, file = manifest.parts[part_id], files[number]
            data = FileRange(paths[number], file.data_start + offset, nbytes)
            name = manifest.names[part.name_ids[row]]
            span = Span(manifest.grid(part_id, row), start, stop)
            fragments.append(Fragment(part.name, name, part.dtypes[row], span, file.tier, copy, data))
        return fragments


@dataclass(frozen=True, slots=True)
class _Reference:
    """A reference to a tensor or an array, which takes its place in an unpacked tree of state."""

    extension: int
    """The number of the msgpack extension type."""
    name: str
    """The name of the tensor in the part of state tensors."""


def _state(contents: Contents, rows: Sequence[Ints]) -> bytes:
    """Returns the packed tree that all ranks of a copy share, without the lineage. ``rows``: the rows of the copied
    tensors in each part. The tree lists an optimizer state as left out if the copy has the weight of a parameter but
    lacks this state of it, and the source has it."""
    parts = contents.manifest.parts
    copied = {part.name: {part.name_ids[row] for row in of_part} for part, of_part in zip(parts, rows, strict=True)}
    weights = copied.get(MASTER, set())
    moments = [part for part in parts if part.name not in RESERVED_PARTS]
    left_out = [part.name for part in moments if weights.intersection(part.name_ids) - copied[part.name]]
    if not contents.plain_state:
        return contents.manifest.state
    root = tree.unpack(contents.manifest.state, _Reference, names.MANIFEST)
    root.pop(names.LINEAGE, None)
    root.pop(names.MACHINES, None)
    if left_out:
        root[names.LEFT_OUT] = sorted({*left_out, *contents.left_out})

    def put(path: str, leaf: object) -> tuple[int, str]:
        assert isinstance(leaf, _Reference), "everything else in a tree is a plain value"
        return leaf.extension, leaf.name

    return tree.pack(root, "", put)


def _lineage(contents: Contents, rows: Sequence[Ints]) -> Lineage | None:
    """Returns the lineage of a copy. ``rows``: the rows of the copied tensors in each part."""
    if not contents.plain_state:
        return None
    source, parts = contents.lineage, contents.manifest.parts
    if source.use is Use.PART:
        return source
    whole = {part.name for part, of_part in zip(parts, rows, strict=True) if len(of_part) == len(part.name_ids)}
    return replace(source, use=use_of(whole, [part.name for part in parts], trains=source.use is Use.RESUME))


def _digests(data_file: DataFilePlan, old_table: memoryview, first_block: Mapping[int, int], block_bytes: int) -> bytes:
    """Returns the digests of a new file. The digests of its pieces are taken from ``old_table``, the digest table of
    the source. ``first_block``: the position in ``old_table`` of the digest of the first block of each fragment, by the
    ``id`` of the fragment."""
    digests = []
    for source, nbytes in zip(data_file.regions.source.tolist(), data_file.regions.nbytes.tolist(), strict=True):
        if source in (HEADER, FILLER):
            data = data_file.header if source == HEADER else bytes(nbytes)
            digests += [digest(data[start:stop]) for _, start, stop in blocks(0, nbytes, 0, block_bytes)]
        else:
            first = first_block[id(data_file.fragments[source])]
            stop = first + block_count(nbytes, block_bytes)
            digests.append(bytes(old_table[first * DIGEST_BYTES : stop * DIGEST_BYTES]))
    return b"".join(digests)
