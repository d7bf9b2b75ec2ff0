"""Checks a checkpoint against the specification, with the reader's own rules, and reports every finding."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from zckpt.errors import FormatError
from zckpt.format import shard as shard_format
from zckpt.format.digest import DIGEST_BYTES, block_count, blocks
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.index import check_claims, spans
from zckpt.format.names import digests_path, index_path, piece_name, split_piece_name
from zckpt.format.rules import broken
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.reshard import file_extents
from zckpt.progress import Progress, reported
from zckpt.state.inventory import MASTER, PARAM
from zckpt.transfer.read import ReadFile, check_block, read_op
from zckpt.transfer.staging import host_pool
from zckpt.validation.report import Finding
from zckpt.validation.values import Values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.format.index import Ints, Layout
    from zckpt.format.manifest import Manifest
    from zckpt.format.shard import Entry, Header
    from zckpt.plan.coalesce import ReadOp
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Reader
    from zckpt.validation.report import Level


Facts = tuple[str, str, tuple[int, ...], int, int]
"""Of one piece: its name in the file, dtype, shape of the whole tensor, offset in bytes, number of its first block."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which of ``size`` processes that validate one checkpoint together this is."""

    number: int = 0
    size: int = 1

    def units(self, world_size: int) -> Iterator[tuple[int, int, int]]:
        """What this process does: of the reads of rank ``rank``'s files, those with the numbers ``k``, ``k + n``, ...

        ``(rank, k, n)``; whoever has ``k`` 0 checks all else of the rank."""
        n = -(-self.size // world_size)
        units = ((rank, k, n) for rank in range(world_size) for k in range(n))
        return islice(units, self.number, None, self.size)


def check_checkpoint(
    checkpoint: Checkpoint, level: Level, share: Share, progress: Progress | None = None
) -> tuple[list[Finding], Values, int]:
    """Checks one share of everything behind the manifest: what it has found, in no order, and the bytes read."""
    before = checkpoint.reader.count.bytes_read
    check = _Check(checkpoint, level, share)
    with reported(progress, "validate", check.nbytes) as advance:
        check.run(advance)
    return check.findings, check.values, checkpoint.reader.count.bytes_read - before


def _failures(*checks: Callable[[], object]) -> Iterator[FormatError]:
    for check in checks:
        try:
            check()
        except FormatError as error:
            yield error


class _Check:
    def __init__(self, checkpoint: Checkpoint, level: Level, share: Share) -> None:
        self.checkpoint, self.reader, self.manifest = checkpoint, checkpoint.reader, checkpoint.manifest
        self.share = share
        self.findings: list[Finding] = []
        self.values = Values({})
        self._data, self._deep = level != "structure", level == "deep"
        self._staging = host_pool(checkpoint.batch_bytes)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """What progress is told: the bytes of this share's files, or of its part of them."""
        if not self._data:
            return 0
        of_rank: dict[int, int] = {}
        for rank, nbytes in zip(self.manifest.files.rank, self.manifest.files.nbytes, strict=True):
            of_rank[rank] = of_rank.get(rank, 0) + nbytes
        return sum(of_rank.get(rank, 0) // n for rank, _, n in self.share.units(self.manifest.world_size))

    def run(self, advance: Callable[[int], None]) -> None:
        world_size = self.manifest.world_size
        rows = self._index()
        if self._deep and rows is not None:
            self.values = Values(_derived(self.manifest, rows))
        # A rank's headers are parsed while another one's data is being read
        units = (self._unit(rows, *unit, advance) for unit in self.share.units(world_size))
        with self._staging.work():
            self.checkpoint.budget.run(chain.from_iterable(units))
        if self._data and rows is not None:
            own = [rank for rank, k, _ in self.share.units(world_size) if k == 0]
            self._note(*_failures(*(partial(self.checkpoint.rank_state, rank) for rank in own)))
            if self.share.number == 0:
                self._note(*_failures(lambda: self.checkpoint.state))

    def _note(self, *errors: FormatError) -> None:
        with self._lock:
            self.findings += map(Finding.of, errors)

    def _index(self) -> list[_Rows] | None:
        """All of its rows, or None if it cannot be used."""
        errors = list(_failures(lambda: _check_index_size(self.checkpoint, self.reader)))
        chunks = range(len(self.manifest.chunks))
        bad_chunks = list(_failures(*(partial(self.checkpoint.contents.chunk, number) for number in chunks)))
        if self.share.number == 0:
            self._note(*errors, *bad_chunks)
        if bad_chunks:
            return None
        rows = list(_index_rows(self.checkpoint))
        self._pieces = pieces = _Pieces.of(rows, self.manifest)
        claims = list(_failures(partial(check_claims, self.manifest, pieces.file, pieces.nbytes)))
        if self.share.number == 0:
            self._note(*claims)
        return None if claims else rows

    def _unit(
        self, rows: list[_Rows] | None, rank: int, k: int, n: int, advance: Callable[[int], None]
    ) -> Iterator[Callable[[], None]]:
        """Checks all of a rank's files but their data, and yields the reads of that."""
        errors, headers, table = self._structure(rows, rank)
        if k == 0:
            self._note(*errors)
        if not self._data or table is None:
            return
        if k == 0:
            advance(sum(header.data_start for header in headers.values()))
        files = {
            number: ReadFile(header.shard.path, file.nbytes, table[file.first_block * DIGEST_BYTES :])
            for number, header in headers.items()
            for file in [self.manifest.files[number]]
        }
        entries = [(header, entry) for header in headers.values() for entry in header.entries]
        ops = plan_reads(
            file_extents(headers, self.manifest.block_bytes),
            data_starts=self.manifest.files.data_start,
            block_bytes=self.manifest.block_bytes,
            verify=True,
            batch_bytes=self.checkpoint.batch_bytes,
        )
        for op in ops[k::n]:
            yield partial(self._read, op, files[op.file], entries, advance)

    def _read(
        self, op: ReadOp, file: ReadFile, entries: Sequence[tuple[Header, Entry]], advance: Callable[[int], None]
    ) -> None:
        def look(data: Bytes) -> None:
            self._note(*_failures(*self._look(op, file, entries, data)))

        self._note(*_failures(lambda: read_op(
            self.reader, op, file, self._staging, self.checkpoint.budget.direct, look
        )))  # fmt: skip
        advance(op.nbytes)

    def _look(
        self, op: ReadOp, file: ReadFile, entries: Sequence[tuple[Header, Entry]], data: Bytes
    ) -> Iterator[Callable[[], None]]:
        """The checks of the bytes of one read; at level "deep", looks at their values too."""
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
            elif self._deep:
                self.values.look(part, name, entry.dtype, first, view)
            start += nbytes

    def _structure(
        self, rows: list[_Rows] | None, rank: int
    ) -> tuple[list[FormatError], dict[int, Header], memoryview | None]:
        """What is wrong with the rank's headers and digest table; the headers that are sound, by file; the table."""
        manifest = self.manifest
        errors: list[FormatError] = []
        headers: dict[int, Header] = {}
        raws: dict[int, bytes] = {}
        numbers = range(bisect_left(manifest.files.rank, rank), bisect_right(manifest.files.rank, rank))
        for number in numbers:
            try:
                headers[number], raws[number] = _read_header(self.checkpoint, self.reader, number)
            except FormatError as error:
                errors.append(error)
                continue
            if rows is not None:
                errors += _failures(partial(_check_pieces, headers[number], self._pieces, number, manifest))
        try:
            table = self.checkpoint.contents.digest_table(rank)
            if len(headers) == len(numbers):
                errors += _check_table(manifest, rank, headers, len(table))
        except FormatError as error:
            return [*errors, error], headers, None
        for number, raw in raws.items():
            file = self.manifest.files[number]
            view = memoryview(raw)
            for block, start, stop in blocks(0, len(raw), 0, manifest.block_bytes):
                known = ReadFile(headers[number].shard.path, file.nbytes, table[file.first_block * DIGEST_BYTES :])
                errors += _failures(partial(check_block, view[start:stop], block, known, start, None))
        return errors, headers, table


def _derived(manifest: Manifest, rows: Sequence[_Rows]) -> dict[str, str]:
    """Names of which there is one copy of a floating point master and one of 16-bit weights; the dtype of those."""
    found: dict[str, dict[str, str]] = {MASTER: {}, PARAM: {}}
    for one in rows:
        part = manifest.parts[one.part_id]
        if part.name in found:
            sizes = np.bincount(one.row, one.layout.length, len(part.names))
            for row in np.unique(one.row).tolist():
                if sizes[row] == math.prod(manifest.shapes[part.shapes[row]]):
                    found[part.name][manifest.names[part.names[row]]] = part.dtypes[row]
    return {
        name: dtype
        for name, dtype in found[PARAM].items()
        if dtype in ("F16", "BF16") and found[MASTER].get(name) in ("F32", "F64")
    }


def _check_filler(view: Bytes, file: ReadFile, start: int, name: str) -> None:
    if view.any():
        raise broken("S008", f"filler {name!r} is not zero", file=file.path, start=start, stop=start + view.nbytes)


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


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The same of all parts and chunks, in the order of their files. ``nbytes`` are the pieces', ``offset`` those from
    the beginning of the data."""

    file: Ints
    row: Ints
    start: Ints
    length: Ints
    offset: Ints
    block: Ints
    nbytes: Ints

    @classmethod
    def of(cls, rows: Sequence[_Rows], manifest: Manifest) -> _Pieces:
        found = [np.empty((7, 0), np.int64)]
        for one in rows:
            layout, dtypes = one.layout, manifest.parts[one.part_id].dtypes
            file = manifest.file_numbers(layout.rank, one.part_id, layout.tier)
            item = np.array([ITEM_BYTES[dtypes[row]] for row in one.row.tolist()], np.int64)
            place = (layout.length, layout.offset, layout.block, layout.length * item)
            found.append(np.stack([file, one.row, one.start, *place]))
        table = np.concatenate(found, axis=1)
        return cls(*table[:, np.argsort(table[0], kind="stable")])

    def of_file(self, number: int) -> slice:
        start, stop = np.searchsorted(self.file, [number, number + 1]).tolist()
        return slice(start, stop)

    def facts(self, number: int, manifest: Manifest) -> list[Facts]:
        """Of the pieces in one file."""
        part = manifest.parts[manifest.files[number].part]
        columns = (self.row, self.start, self.length, self.offset, self.block)
        own = (column[self.of_file(number)].tolist() for column in columns)
        found = []
        for row, start, length, offset, block in zip(*own, strict=True):
            shape = manifest.shapes[part.shapes[row]]
            name = piece_name(manifest.names[part.names[row]], start, start + length, math.prod(shape))
            found.append((name, part.dtypes[row], shape, offset, block))
        return found


def _index_rows(checkpoint: Checkpoint) -> Iterator[_Rows]:
    manifest = checkpoint.manifest
    for part_id, part in enumerate(manifest.parts):
        for number, chunk in enumerate(manifest.chunks):
            if chunk.layout == part.layout:
                layout = checkpoint.contents.chunk(number)
                rows = np.arange(chunk.first_row, chunk.first_row + chunk.rows)
                numel = np.array([math.prod(manifest.shapes[part.shapes[row]]) for row in rows.tolist()], np.int64)
                yield _Rows(part_id, layout, np.repeat(rows, layout.count), spans(layout, numel)[0])


def _read_header(checkpoint: Checkpoint, reader: Reader, number: int) -> tuple[Header, bytes]:
    """A file's header, checked, and its bytes."""
    manifest = checkpoint.manifest
    file = manifest.files[number]
    shard = manifest.shard(file)
    nbytes = reader.size(shard.path)
    if nbytes != file.nbytes:
        raise broken("F003", f"the file is {nbytes} bytes long, expected {file.nbytes}", file=shard.path)
    data_start = shard_format.header_bytes(reader.read(shard.path, 0, shard_format.LENGTH_BYTES), shard.path)
    if data_start != file.data_start:
        raise broken("S003", f"the data begins at {data_start}, expected {file.data_start}", file=shard.path)
    raw = reader.read(shard.path, 0, data_start)
    return shard_format.decode_header(raw, nbytes, shard), raw


def _check_pieces(header: Header, pieces: _Pieces, number: int, manifest: Manifest) -> None:
    """Rule S007: the file's own account of its pieces against the index's and the manifest's."""
    found: list[Facts] = []
    block = 0
    for (start, stop), entry in zip(shard_format.regions(header), (None, *header.entries), strict=True):
        if entry is not None and not entry.is_filler:
            shape = header.whole_shape(entry)
            found.append((entry.name, entry.dtype, shape, entry.offset, block))
        block += block_count(stop - start, manifest.block_bytes)
    own = pieces.of_file(number)
    if len(found) != own.stop - own.start:  # before there is an object for each
        what = f"{len(found)} pieces in the file, {own.stop - own.start} in the index"
        raise broken("S007", what, file=header.shard.path)
    for one, other in zip(sorted(found), sorted(pieces.facts(number, manifest)), strict=True):
        if one != other:
            raise broken("S007", f"{one} in the file, {other} in the index", file=header.shard.path)


def _check_table(
    manifest: Manifest, rank: int, headers: Mapping[int, Header], table_bytes: int
) -> Iterator[FormatError]:
    """Rule D001: how the digest table of ``table_bytes`` is shared by all of a rank's files."""
    first = 0
    for number in sorted(headers, key=lambda n: manifest.files[n].first_block):
        found, path = manifest.files[number].first_block, headers[number].shard.path
        if found != first:
            yield broken("D001", f"its digests begin at {found}, expected {first}", file=path)
        first += sum(block_count(b - a, manifest.block_bytes) for a, b in shard_format.regions(headers[number]))
    if table_bytes != first * DIGEST_BYTES:
        path = digests_path(manifest.save_id, rank)
        raise broken("D001", f"the table has {table_bytes} bytes for {first} blocks", file=path)
