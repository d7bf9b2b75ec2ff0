"""Plans a copy of some tensors of a checkpoint, which is a checkpoint of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from zckpt.checkpoint.copying.files import Copied, RankFiles, source_of
from zckpt.format import names, tree
from zckpt.format.digest import DIGEST_BYTES, block_count, blocks, digest
from zckpt.format.dtypes import DTYPES
from zckpt.format.index import check_claims
from zckpt.geometry import Span
from zckpt.plan import catalog
from zckpt.plan.data_files import FILLER, HEADER, DataFilePlan, plan_data_files
from zckpt.plan.inventory import MASTER, RESERVED_PARTS, STATE, FileRange, Fragment
from zckpt.plan.lineage import Lineage, Use, use_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.checkpoint.writing.rank_write import RankWrite
    from zckpt.geometry import Ints
    from zckpt.plan.reshard import FilePieces


@dataclass(frozen=True, slots=True)
class SelectedTensors(Copied):
    """Some tensors of a checkpoint, with all of their copies."""

    @classmethod
    def with_keys(cls, contents: Contents, raw: bytes, keys: Iterable[str]) -> SelectedTensors:
        """Selects the tensors with these keys, and all tensors to which the trees of state refer. Raises FormatError
        (I002 to I007, T001 to T004) and StateError (T004)."""
        manifest = contents.manifest
        tensors = contents.named(keys)
        rows = [
            np.arange(len(part.name_ids)) if part.name == STATE else np.unique(tensors.row[tensors.part_id == part_id])
            for part_id, part in enumerate(manifest.parts)
        ]
        numbers: set[int] = set()

        def claims() -> Iterator[tuple[Ints, Ints]]:
            for pieces in contents.pieces_of_parts(rows):
                numbers.update(np.unique(pieces.file).tolist())
                yield pieces.file, pieces.nbytes

        claimed = check_claims(manifest, claims())
        file_bytes = {number: int(claimed[number]) for number in sorted(numbers)}
        return cls(contents, raw, rows, file_bytes, _state(contents, rows), _lineage(contents, rows))

    def records(self, ranks: Iterable[int], save_id: str) -> list[bytes]:
        """Returns the packed record of each rank, which lists the rank's files and their pieces."""
        return [
            catalog.pack(catalog.rank_record(rank, self._plan(self._fragments(pieces), rank, save_id)))
            for rank, pieces in self.contents.pieces_of_ranks(self.rows, [*ranks])
        ]

    def tell(self, first: RankWrite, records: Sequence[bytes]) -> None:
        first.make_manifest(catalog.unpack(records))

    def files(
        self, rank: int, pieces: FilePieces, save_id: str, file_numbers: Collection[int], *, verify: bool
    ) -> RankFiles:
        """Plans the new files of a rank that take the place of these files of the source."""
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
        return RankFiles(tuple(copied.values()), source_of(contents, copied, pieces, table, verify))

    def commit(self, first: RankWrite, digests: Sequence[bytes]) -> None:
        first.commit(digests)

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
            fragments.append(Fragment(part.name, name, DTYPES[part.dtype_ids[row]], span, file.tier, copy, data))
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
    copied = {part.name: {*part.name_ids[of_part].tolist()} for part, of_part in zip(parts, rows, strict=True)}
    weights = copied.get(MASTER, set())
    moments = [part for part in parts if part.name not in RESERVED_PARTS]
    left_out = [part.name for part in moments if weights.intersection(part.name_ids.tolist()) - copied[part.name]]
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
