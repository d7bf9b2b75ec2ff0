"""The data files: headers, digest tables and data (F001 to F003, S001 to S008, D001 to D003)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import FormatError
from zckpt.format.digest import DIGEST_BYTES, blocks, check_block
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.names import digests_path, piece_name, split_piece_name
from zckpt.format.rules import broken
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.reshard import file_extents
from zckpt.transfer.read import read_op
from zckpt.validation.report import failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zckpt.format.digest import ReadFile
    from zckpt.format.manifest import Manifest
    from zckpt.format.shard import Entry, Header
    from zckpt.listing.contents import Contents
    from zckpt.plan.coalesce import ReadOp
    from zckpt.plan.reshard import StoredPieces
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.storage.buffers import Bytes
    from zckpt.transfer.staging import StagingPool
    from zckpt.validation.values import Values

_Piece = tuple[str, str, tuple[int, ...], int, int]
"""Of one piece: its name in the file, dtype, shape of the whole tensor, offset in bytes, number of its first block."""


def check_files(
    contents: Contents, rank: int, pieces: StoredPieces | None
) -> tuple[list[FormatError], dict[int, Header]]:
    """What is wrong with the headers and the digest table of a rank. The headers that are sound, by file; none if the
    table cannot be used. ``pieces``: those that the index lists, in the order of their files; None if it is damaged."""
    manifest = contents.manifest
    errors: list[FormatError] = []
    headers: dict[int, Header] = {}
    raws: dict[int, bytes] = {}
    numbers = range(bisect_left(manifest.files.rank, rank), bisect_right(manifest.files.rank, rank))
    for number in numbers:
        try:
            headers[number], raws[number] = contents.header(number)
        except FormatError as error:
            errors.append(error)
            continue
        if pieces is not None:
            errors += failures(partial(_check_pieces, headers[number], pieces, number, manifest))
    try:
        table = contents.digest_table(rank)
        if len(headers) == len(numbers):
            errors += _check_table(manifest, rank, headers, len(table))
    except FormatError as error:
        return [*errors, error], {}
    for number, raw in raws.items():
        file = contents.read_file(number, verify=True)
        for block, start, stop in blocks(0, len(raw), 0, manifest.block_bytes):
            errors += failures(partial(check_block, memoryview(raw)[start:stop], block, file, start, None))
    return errors, headers


def _check_pieces(header: Header, pieces: StoredPieces, number: int, manifest: Manifest) -> None:
    """Rule S007: the file's own account of its pieces against the index's and the manifest's."""
    found: list[_Piece] = [
        (entry.name, entry.dtype, header.whole_shape(entry), entry.offset, block)
        for entry, block in zip(header.entries, header.first_blocks(manifest.block_bytes), strict=False)
        if not entry.is_filler
    ]
    own = slice(*np.searchsorted(pieces.file, [number, number + 1]).tolist())
    if len(found) != own.stop - own.start:  # before there is an object for each
        what = f"{len(found)} pieces in the file, {own.stop - own.start} in the index"
        raise broken("S007", what, file=header.shard.path)
    for one, other in zip(sorted(found), sorted(_listed(pieces, own, number, manifest)), strict=True):
        if one != other:
            raise broken("S007", f"{one} in the file, {other} in the index", file=header.shard.path)


def _listed(pieces: StoredPieces, own: slice, number: int, manifest: Manifest) -> Iterator[_Piece]:
    """The same of the pieces that the index lists in a file."""
    part = manifest.parts[manifest.files[number].part]
    columns = (pieces.want, pieces.start, pieces.stop, pieces.offset, pieces.block)
    for row, start, stop, offset, block in zip(*(column[own].tolist() for column in columns), strict=True):
        shape = manifest.shapes[part.shapes[row]]
        name = piece_name(manifest.names[part.names[row]], start, stop, math.prod(shape))
        yield name, part.dtypes[row], shape, offset, block


def _check_table(
    manifest: Manifest, rank: int, headers: Mapping[int, Header], table_bytes: int
) -> Iterator[FormatError]:
    """Rule D001: how the digest table of ``table_bytes`` is shared by all of a rank's files."""
    first = 0
    for number in sorted(headers, key=lambda n: manifest.files[n].first_block):
        found, path = manifest.files[number].first_block, headers[number].shard.path
        if found != first:
            yield broken("D001", f"its digests begin at {found}, expected {first}", file=path)
        first += headers[number].first_blocks(manifest.block_bytes)[-1]
    if table_bytes != first * DIGEST_BYTES:
        path = digests_path(manifest.save_id, rank)
        raise broken("D001", f"the table has {table_bytes} bytes for {first} blocks", file=path)


@dataclass(frozen=True, slots=True)
class DataChecks:
    """Reads data, checks it, and lets ``values``, if there are any, look at it. ``note`` is told what is wrong, and
    ``advance`` the bytes of each read, by several threads."""

    checkpoint: Checkpoint
    staging: StagingPool
    values: Values | None
    note: Callable[[Iterable[FormatError]], None]
    advance: Callable[[int], None]

    def reads(self, headers: Mapping[int, Header]) -> Iterator[Callable[[], None]]:
        """One task for each read of the data of these files. To be called inside of ``staging.work``."""
        block_bytes = self.checkpoint.manifest.block_bytes
        files = {number: self.checkpoint.contents.read_file(number, verify=True) for number in headers}
        entries = [(header, entry) for header in headers.values() for entry in header.entries]
        ops = plan_reads(
            file_extents(headers, block_bytes),
            data_starts=self.checkpoint.manifest.files.data_start,
            block_bytes=block_bytes,
            verify=True,
            batch_bytes=self.staging.batch_bytes,
        )
        return (partial(self._read, op, files[op.file], entries) for op in ops)

    def _read(self, op: ReadOp, file: ReadFile, entries: Sequence[tuple[Header, Entry]]) -> None:
        def look(data: Bytes) -> None:
            self.note(failures(*self._checks(op, file, entries, data)))

        reader, direct = self.checkpoint.reader, self.checkpoint.budget.direct
        self.note(failures(partial(read_op, reader, op, file, self.staging, direct, look)))
        self.advance(op.nbytes)

    def _checks(
        self, op: ReadOp, file: ReadFile, entries: Sequence[tuple[Header, Entry]], data: Bytes
    ) -> Iterator[Callable[[], None]]:
        """The checks of the bytes of one read."""
        segments = op.segments
        start = 0
        columns = (segments.nbytes, segments.block, segments.sink, segments.target)
        for nbytes, block, which, target in zip(*(column.tolist() for column in columns), strict=True):
            header, entry = entries[which]
            view = data[start : start + nbytes]
            part, name = header.shard.part, entry.name
            span = split_piece_name(name)
            first = target // ITEM_BYTES[entry.dtype]
            if span is not None:
                name, first = span[0], first + span[1]
            key = name if entry.is_filler else f"{part}/{name}"
            yield partial(check_block, view, block, file, op.offset + start, key)
            if entry.is_filler:
                yield partial(_check_filler, view, file, op.offset + start, name)
            elif self.values is not None:
                self.values.look(part, name, entry.dtype, first, view)
            start += nbytes


def _check_filler(view: Bytes, file: ReadFile, start: int, name: str) -> None:
    if view.any():
        raise broken("S008", f"filler {name!r} is not zero", file=file.path, start=start, stop=start + view.nbytes)
