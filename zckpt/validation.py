"""Checks a checkpoint against the specification, with the reader's own rules, and reports every finding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import FormatError
from zckpt.format import shard as shard_format
from zckpt.format.digest import DIGEST_BYTES, block_count, blocks
from zckpt.format.index import spans
from zckpt.format.names import FILLER_PREFIX, digests_path, index_path, piece_name
from zckpt.format.rules import broken
from zckpt.io.read import check_block
from zckpt.progress import Progress, reported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zckpt.checkpoint import Checkpoint
    from zckpt.format.index import Ints, Layout
    from zckpt.format.manifest import Manifest
    from zckpt.format.shard import Header
    from zckpt.io.store import Reader


Facts = tuple[str, str, tuple[int, ...], int, int]
"""Of one piece: its name in the file, dtype, shape of the whole tensor, offset in bytes, number of its first block."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that is broken. ``start`` and ``stop`` are bytes of ``file``; what is unknown is None."""

    rule: str
    message: str
    file: str | None = None
    key: str | None = None
    start: int | None = None
    stop: int | None = None

    @classmethod
    def of(cls, error: FormatError) -> Finding:
        return cls(error.rule or "?", error.message, error.file, error.key, error.start, error.stop)

    def __str__(self) -> str:
        span = f" bytes [{self.start}, {self.stop})" if self.start is not None else ""
        key = f" ({self.key})" if self.key else ""
        return f"{self.rule}  {self.file or ''}{span}{key}: {self.message}"


@dataclass(frozen=True)
class Report:
    """What ``zckpt.validate`` found. ``ok`` if nothing is broken."""

    path: str
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    """Files checked."""
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        verdict = "valid" if self.ok else f"{len(self.findings)} findings"
        summary = f"{self.path}: {verdict} ({self.files} files, {self.bytes_read:,} bytes read)"
        return "\n".join([*map(str, self.findings), summary])


def check_checkpoint(checkpoint: Checkpoint, *, data: bool, progress: Progress | None = None) -> Report:
    """Checks everything behind the manifest. ``data``: whether every byte of the data files is read and compared with
    its digest; without, only sizes, headers, digest tables and the index are."""
    reader = checkpoint.reader
    before = reader.count.bytes_read
    manifest = checkpoint.manifest
    with reported(progress, "validate", checkpoint.nbytes if data else 0) as advance:
        findings = [Finding.of(error) for error in _check(checkpoint, reader, data, advance)]
    files = 2 + manifest.world_size + len(manifest.files)  # manifest, index, a digest table for each rank
    return Report(checkpoint.path, findings, files, reader.count.bytes_read - before)


def _failures(*checks: Callable[[], object]) -> Iterator[FormatError]:
    for check in checks:
        try:
            check()
        except FormatError as error:
            yield error


def _check(checkpoint: Checkpoint, reader: Reader, data: bool, advance: Callable[[int], None]) -> Iterator[FormatError]:
    manifest = checkpoint.manifest
    yield from _failures(lambda: _check_index_size(checkpoint, reader))
    bad_chunks = list(_failures(*(partial(checkpoint.chunk, number) for number in range(len(manifest.chunks)))))
    yield from bad_chunks
    rows = [] if bad_chunks else list(_index_rows(checkpoint))
    for rank in range(manifest.world_size):
        numbers = [number for number, file in enumerate(manifest.files) if file.rank == rank]
        headers: dict[int, Header] = {}
        pieces: dict[int, list[Facts]] = {}
        for number, facts in chain.from_iterable(one.facts(manifest, rank) for one in rows):
            pieces.setdefault(number, []).append(facts)
        for number in numbers:
            try:
                headers[number] = _read_header(checkpoint, reader, number)
            except FormatError as error:
                yield error
                continue
            if not bad_chunks:
                expected = pieces.get(number, [])
                yield from _failures(partial(_check_pieces, headers[number], expected, manifest.block_bytes))
        if len(headers) == len(numbers):
            yield from _check_blocks(checkpoint, reader, rank, headers, data, advance)
    if data and not bad_chunks:
        ranks = range(manifest.world_size)
        yield from _failures(lambda: checkpoint.state, *(partial(checkpoint.rank_state, rank) for rank in ranks))


def _check_index_size(checkpoint: Checkpoint, reader: Reader) -> None:
    manifest = checkpoint.manifest
    path = index_path(manifest.save_id)
    nbytes = reader.size(path)
    if nbytes != manifest.index_bytes:
        raise broken("I001", f"the index is {nbytes} bytes long, expected {manifest.index_bytes}", file=path)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The pieces of one part in one chunk of the index, a column each: their tensor (a row of the part) and start."""

    part_id: int
    layout: Layout
    row: Ints
    start: Ints

    def facts(self, manifest: Manifest, rank: int) -> Iterator[tuple[int, Facts]]:
        """File number and facts of every piece that ``rank`` holds."""
        part = manifest.parts[self.part_id]
        for i in np.flatnonzero(self.layout.rank == rank).tolist():
            row, start = int(self.row[i]), int(self.start[i])
            shape = manifest.shapes[part.shapes[row]]
            name = piece_name(
                manifest.names[part.names[row]], start, start + int(self.layout.length[i]), math.prod(shape)
            )
            place = (int(self.layout.offset[i]), int(self.layout.block[i]))
            yield (
                manifest.file_number(rank, self.part_id, int(self.layout.tier[i])),
                (name, part.dtypes[row], shape, *place),
            )


def _index_rows(checkpoint: Checkpoint) -> Iterator[_Rows]:
    manifest = checkpoint.manifest
    for part_id, part in enumerate(manifest.parts):
        for number, chunk in enumerate(manifest.chunks):
            if chunk.layout == part.layout:
                layout = checkpoint.chunk(number)
                rows = np.arange(chunk.first_row, chunk.first_row + chunk.rows)
                numel = np.array([math.prod(manifest.shapes[part.shapes[row]]) for row in rows.tolist()], np.int64)
                yield _Rows(part_id, layout, np.repeat(rows, layout.count), spans(layout, numel)[0])


def _read_header(checkpoint: Checkpoint, reader: Reader, number: int) -> Header:
    manifest = checkpoint.manifest
    file = manifest.files[number]
    shard = manifest.shard(file)
    nbytes = reader.size(shard.path)
    if nbytes != file.nbytes:
        raise broken("F003", f"the file is {nbytes} bytes long, expected {file.nbytes}", file=shard.path)
    data_start = shard_format.header_bytes(reader.read(shard.path, 0, shard_format.LENGTH_BYTES), shard.path)
    if data_start != file.data_start:
        raise broken("S003", f"the data begins at {data_start}, expected {file.data_start}", file=shard.path)
    return shard_format.decode_header(reader.read(shard.path, 0, data_start), nbytes, shard)


def _check_pieces(header: Header, expected: list[Facts], block_bytes: int) -> None:
    """Rule S007: the file's own account of its pieces against the index's and the manifest's."""
    found: list[Facts] = []
    block = 0
    for (start, stop), entry in zip(shard_format.regions(header), (None, *header.entries), strict=True):
        if entry is not None and not entry.is_filler:
            shape = header.whole_shape(entry)
            found.append((entry.name, entry.dtype, shape, entry.offset, block))
        block += block_count(stop - start, block_bytes)
    for one, other in zip_longest(sorted(found), sorted(expected)):
        if one != other:
            raise broken("S007", f"{one} in the file, {other} in the index", file=header.shard.path)


def _check_blocks(
    checkpoint: Checkpoint,
    reader: Reader,
    rank: int,
    headers: dict[int, Header],
    data: bool,
    advance: Callable[[int], None],
) -> Iterator[FormatError]:
    """The rank's digest table and the blocks that it covers: the headers', and with ``data`` all others."""
    manifest = checkpoint.manifest
    size = manifest.block_bytes
    counts = {n: sum(block_count(b - a, size) for a, b in shard_format.regions(h)) for n, h in headers.items()}
    first = 0
    for number in sorted(headers, key=lambda n: manifest.files[n].first_block):
        if manifest.files[number].first_block != first:
            yield broken("D001", f"its digests begin at {manifest.files[number].first_block}, expected {first}",
                         file=headers[number].shard.path)  # fmt: skip
        first += counts[number]
    try:
        table = checkpoint.digest_table(rank)
    except FormatError as error:
        yield error
        return
    if len(table) != first * DIGEST_BYTES:
        yield broken(
            "D001", f"the table has {len(table)} bytes for {first} blocks", file=digests_path(manifest.save_id, rank)
        )
        return
    for number, header in headers.items():
        file = checkpoint.read_file(number, verify=True)
        regions = shard_format.regions(header)
        names: list[str | None] = [None, *(entry.name for entry in header.entries)]
        block = 0
        for (start, stop), name in zip(regions, names, strict=True):
            filler = name is not None and name.startswith(FILLER_PREFIX)
            if data or name is None:
                for at, block_start, block_stop in blocks(start, stop - start, block, size):
                    view = memoryview(reader.read(file.path, block_start, block_stop - block_start))
                    yield from _failures(partial(check_block, view, at, file, block_start, name))
                    advance(len(view) if data else 0)
                    if filler and any(view):
                        yield broken("S008", f"filler {name!r} is not zero", file=file.path, start=start, stop=stop)
            block += block_count(stop - start, size)
