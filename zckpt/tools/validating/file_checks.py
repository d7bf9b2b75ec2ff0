"""The checks of the data files: their headers, digest tables and data (F001 to F003, S001 to S008, D001 to D003)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zckpt.errors import FormatError
from zckpt.format.data_file import decode_header
from zckpt.format.digest import DIGEST_BYTES, blocks, check_block
from zckpt.format.dtypes import DTYPES, ITEM_BYTES
from zckpt.format.names import digests_path, piece_name, split_piece_name
from zckpt.format.rules import broken
from zckpt.geometry import Span
from zckpt.plan.reads import plan_reads
from zckpt.plan.reshard import entry_ranges
from zckpt.tools.validating.report import failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.format.data_file import Header, HeaderEntry
    from zckpt.format.digest import ReadFile
    from zckpt.format.manifest import Manifest
    from zckpt.geometry import Grid
    from zckpt.plan.reads import ReadOp
    from zckpt.plan.reshard import FilePieces
    from zckpt.storage.buffers import Bytes
    from zckpt.tools.validating.values import ValueChecks
    from zckpt.transfer.staging import StagingPool

_Piece = tuple[str, str, "Grid", int, int]
"""A piece, for the comparison of a header with the index: its name in the file, its dtype, the shape of the whole
tensor, its offset in bytes, and the number of its first block."""


def check_files(
    contents: Contents, rank: int, pieces: FilePieces | None
) -> tuple[list[FormatError], dict[int, Header]]:
    """Checks the headers of a rank's data files, and the rank's digest table.

    Args:
        contents: the contents of the checkpoint.
        rank: the rank.
        pieces: the pieces of the rank that the index lists, in the order of their data files. None if the index is
            damaged.

    Returns:
        The errors, and the header of each data file whose header can be used, by the number of the data file. There are
        no headers if the digest table cannot be used.
    """
    manifest = contents.manifest
    headers: dict[int, Header] = {}
    errors = failures(partial(contents.digest_table, rank))
    has_table = not errors
    numbers = range(bisect_left(manifest.files.rank, rank), bisect_right(manifest.files.rank, rank))
    for number in numbers:
        try:
            raw = contents.header_bytes(number)
        except FormatError as error:
            errors.append(error)
            continue
        # The digests are compared first. A damaged header may break any other rule by chance, which would mislead.
        damage = failures(*_block_checks(contents, number, raw)) if has_table else []
        try:
            headers[number] = decode_header(
                raw, manifest.files[number].nbytes, manifest.data_file_id(manifest.files[number])
            )
            checks = [] if pieces is None else [partial(_check_pieces, headers[number], pieces, number, manifest)]
            broken_rules = failures(*checks)
        except FormatError as error:
            broken_rules = [error]
        errors += damage or broken_rules
    if not has_table:
        return errors, {}
    if len(headers) == len(numbers):
        errors += _check_table(manifest, rank, headers, len(contents.digest_table(rank)))
    return errors, headers


def _block_checks(contents: Contents, number: int, raw: bytes) -> Iterator[Callable[[], None]]:
    """Yields the checks of the digests of a file's header, whose bytes are ``raw`` (D001, D003)."""
    file = contents.read_file(number, verify=True)
    for block, start, stop in blocks(0, len(raw), 0, contents.manifest.block_bytes):
        yield partial(check_block, memoryview(raw)[start:stop], block, file, start, None)


def _check_pieces(header: Header, pieces: FilePieces, number: int, manifest: Manifest) -> None:
    """Raises FormatError (S007) unless a header has the pieces that the index and the manifest list for the data
    file."""
    in_header: list[_Piece] = [
        (entry.name, entry.dtype, header.grid(entry), entry.offset, block)
        for entry, block in zip(header.entries, header.first_blocks(manifest.block_bytes), strict=False)
        if not entry.is_filler
    ]
    in_index, file = pieces.in_file(number), header.data_file.path
    if len(in_header) != len(in_index):  # This saves making an object of each piece in the index.
        raise broken("S007", f"{len(in_header)} pieces in the file, {len(in_index)} in the index", file=file)
    for entry, piece in zip(sorted(in_header), sorted(_listed(in_index, number, manifest)), strict=True):
        if entry != piece:
            raise broken("S007", f"{entry} in the file, {piece} in the index", file=file)


def _listed(pieces: FilePieces, number: int, manifest: Manifest) -> Iterator[_Piece]:
    """Yields the pieces that the index and the manifest list for a data file."""
    part_id = manifest.files[number].part_id
    part = manifest.parts[part_id]
    columns = (pieces.tensor, pieces.start, pieces.stop, pieces.offset, pieces.block)
    for row, start, stop, offset, block in zip(*(column.tolist() for column in columns), strict=True):
        grid, name = manifest.grid(part_id, row), manifest.names[part.name_ids[row]]
        yield piece_name(name, Span(grid, start, stop)), DTYPES[part.dtype_ids[row]], grid, offset, block


def _check_table(
    manifest: Manifest, rank: int, headers: Mapping[int, Header], table_bytes: int
) -> Iterator[FormatError]:
    """Yields the errors (D001) if the data files of a rank do not fill its digest table of ``table_bytes`` bytes, one
    after the other."""
    expected = 0
    for number in sorted(headers, key=lambda n: manifest.files[n].first_block):
        first_block, path = manifest.files[number].first_block, headers[number].data_file.path
        if first_block != expected:
            yield broken("D001", f"its digests begin at {first_block}, expected {expected}", file=path)
        expected += headers[number].first_blocks(manifest.block_bytes)[-1]
    if table_bytes != expected * DIGEST_BYTES:
        path = digests_path(manifest.save_id, rank)
        yield broken("D001", f"the table has {table_bytes} bytes for {expected} blocks", file=path)


@dataclass(frozen=True, slots=True)
class DataChecks:
    """Reads the data of files and checks them. Several threads do this."""

    contents: Contents
    """The contents of the checkpoint."""
    direct: bool
    """Whether to read past the page cache if possible."""
    staging: StagingPool
    """The buffers into which data are read."""
    values: ValueChecks | None
    """Is given all values of tensors. It is None if nobody looks at values."""
    note: Callable[[Iterable[FormatError]], None]
    """Is called with the errors that were found."""
    advance: Callable[[int], None]
    """Is called with the number of bytes of each read."""

    def reads(self, headers: Mapping[int, Header]) -> Iterator[Callable[[], None]]:
        """Yields a task for each read of the data of some files. To be called inside of ``staging.work``."""
        manifest = self.contents.manifest
        files = {number: self.contents.read_file(number, verify=True) for number in headers}
        entries = [(header, entry) for header in headers.values() for entry in header.entries]
        ops = plan_reads(
            entry_ranges(headers, manifest.block_bytes),
            data_starts=manifest.files.data_start,
            block_bytes=manifest.block_bytes,
            verify=True,
            batch_bytes=self.staging.batch_bytes,
        )
        return (partial(self._read, op, files[op.file], entries) for op in ops)

    def _read(self, op: ReadOp, file: ReadFile, entries: Sequence[tuple[Header, HeaderEntry]]) -> None:
        """Reads the bytes of one operation and checks them."""
        from zckpt.transfer.read import read_op  # imported late, because the level "structure" needs no torch

        def look(data: Bytes) -> None:
            self.note(failures(*self._checks(op, file, entries, data)))

        self.note(failures(partial(read_op, self.contents.reader, op, file, self.staging, self.direct, look)))
        self.advance(op.nbytes)

    def _checks(
        self, op: ReadOp, file: ReadFile, entries: Sequence[tuple[Header, HeaderEntry]], data: Bytes
    ) -> Iterator[Callable[[], None]]:
        """Yields the checks of the bytes that one operation has read."""
        segments = op.segments
        start = 0
        columns = (segments.nbytes, segments.block, segments.copies.target, segments.copies.target_offset)
        for nbytes, block, which, target in zip(*(column.tolist() for column in columns), strict=True):
            header, entry = entries[which]
            view = data[start : start + nbytes]
            part, name = header.data_file.part, entry.name
            split = split_piece_name(name)
            first = target // ITEM_BYTES[entry.dtype]
            if split is not None:
                name, first = split[0], first + split[1]
            key = name if entry.is_filler else f"{part}/{name}"
            yield partial(check_block, view, block, file, op.offset + start, key)
            if entry.is_filler:
                yield partial(_check_filler, view, file, op.offset + start, name)
            elif self.values is not None:
                self.values.look(part, name, entry.dtype, first, view)
            start += nbytes


def _check_filler(view: Bytes, file: ReadFile, start: int, name: str) -> None:
    """Raises FormatError (S008) unless all bytes of a filler are 0."""
    if view.any():
        raise broken("S008", f"filler {name!r} is not zero", file=file.path, start=start, stop=start + view.nbytes)
