"""Checks a checkpoint against the specification, with the reader's own rules, and reports every finding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from zckpt.errors import FormatError
from zckpt.format import shard as shard_format
from zckpt.format.digest import DIGEST_BYTES, block_count, blocks
from zckpt.format.names import FILLER_PREFIX, digests_path, index_path, piece_name
from zckpt.format.rules import broken
from zckpt.io.read import check_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zckpt.checkpoint import Checkpoint
    from zckpt.format.shard import Header
    from zckpt.io.local import LocalReader


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


def check_checkpoint(checkpoint: Checkpoint, *, data: bool) -> Report:
    """Checks everything behind the manifest. ``data``: whether every byte of the data files is read and compared with
    its digest; without, only sizes, headers, digest tables and the index are."""
    reader = checkpoint.reader
    before = reader.count.bytes_read
    findings = [Finding.of(error) for error in _check(checkpoint, reader, data)]
    manifest = checkpoint.manifest
    files = 2 + len({file.rank for file in manifest.files}) + len(manifest.files)
    return Report(checkpoint.path, findings, files, reader.count.bytes_read - before)


def _failures(*checks: Callable[[], object]) -> Iterator[FormatError]:
    for check in checks:
        try:
            check()
        except FormatError as error:
            yield error


def _check(checkpoint: Checkpoint, reader: LocalReader, data: bool) -> Iterator[FormatError]:
    manifest = checkpoint.manifest
    yield from _failures(lambda: _check_index_size(checkpoint, reader))
    bad_chunks = list(_failures(*(partial(checkpoint.chunk, number) for number in range(len(manifest.chunks)))))
    yield from bad_chunks
    pieces = {} if bad_chunks else _pieces_by_file(checkpoint)
    for rank in range(manifest.world_size):
        numbers = [number for number, file in enumerate(manifest.files) if file.rank == rank]
        headers: dict[int, Header] = {}
        for number in numbers:
            try:
                headers[number] = _read_header(checkpoint, reader, number)
            except FormatError as error:
                yield error
                continue
            if not bad_chunks:
                yield from _failures(partial(_check_pieces, headers[number], pieces.get(number, {})))
        if len(headers) == len(numbers) > 0:
            yield from _check_blocks(checkpoint, reader, rank, headers, data)
    if data and not bad_chunks:
        ranks = range(manifest.world_size)
        yield from _failures(lambda: checkpoint.state, *(partial(checkpoint.rank_state, rank) for rank in ranks))


def _check_index_size(checkpoint: Checkpoint, reader: LocalReader) -> None:
    manifest = checkpoint.manifest
    path = index_path(manifest.save_id)
    nbytes = reader.size(path)
    if nbytes != manifest.index_bytes:
        raise broken("I001", f"the index is {nbytes} bytes long, expected {manifest.index_bytes}", file=path)


def _pieces_by_file(checkpoint: Checkpoint) -> dict[int, dict[str, tuple[int, int]]]:
    """From file number to what the index places there: offset and bytes by entry name."""
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for info in checkpoint.all_tensors():
        numel = math.prod(info.shape)
        item = info.dtype.itemsize
        for piece in checkpoint.pieces(info):
            name = piece_name(info.name, piece.start, piece.stop, numel)
            place = (piece.offset, (piece.stop - piece.start) * item)
            found.setdefault(checkpoint.file_number(info, piece), {})[name] = place
    return found


def _read_header(checkpoint: Checkpoint, reader: LocalReader, number: int) -> Header:
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


def _check_pieces(header: Header, expected: dict[str, tuple[int, int]]) -> None:
    file = header.shard.path
    entries = {entry.name: (entry.offset, entry.nbytes) for entry in header.entries if not entry.is_filler}
    for name in sorted(entries.keys() | expected.keys()):
        if entries.get(name) != expected.get(name):
            raise broken(
                "S007",
                f"{name!r} is at {entries.get(name)} in the file, at {expected.get(name)} in the index",
                file=file,
            )


def _check_blocks(
    checkpoint: Checkpoint, reader: LocalReader, rank: int, headers: dict[int, Header], data: bool
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
                    if filler and any(view):
                        yield broken("S008", f"filler {name!r} is not zero", file=file.path, start=start, stop=stop)
            block += block_count(stop - start, size)
