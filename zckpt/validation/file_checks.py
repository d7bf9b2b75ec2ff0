"""The data files of a rank but for their data: headers and digest table (F001 to F003, S001 to S008, D001 to D003)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import FormatError
from zckpt.format.digest import DIGEST_BYTES, blocks
from zckpt.format.names import digests_path, piece_name
from zckpt.format.rules import broken
from zckpt.transfer.read import check_block
from zckpt.validation.report import failures

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zckpt.format.manifest import Manifest
    from zckpt.format.shard import Header
    from zckpt.plan.reshard import StoredPieces
    from zckpt.reading.contents import Contents

Facts = tuple[str, str, tuple[int, ...], int, int]
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
    found: list[Facts] = [
        (entry.name, entry.dtype, header.whole_shape(entry), entry.offset, block)
        for entry, block in zip(header.entries, header.first_blocks(manifest.block_bytes), strict=False)
        if not entry.is_filler
    ]
    own = slice(*np.searchsorted(pieces.file, [number, number + 1]).tolist())
    if len(found) != own.stop - own.start:  # before there is an object for each
        what = f"{len(found)} pieces in the file, {own.stop - own.start} in the index"
        raise broken("S007", what, file=header.shard.path)
    for one, other in zip(sorted(found), sorted(_facts(pieces, own, number, manifest)), strict=True):
        if one != other:
            raise broken("S007", f"{one} in the file, {other} in the index", file=header.shard.path)


def _facts(pieces: StoredPieces, own: slice, number: int, manifest: Manifest) -> Iterator[Facts]:
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
