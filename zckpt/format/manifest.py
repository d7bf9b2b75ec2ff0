"""The manifest: the root of a checkpoint and its commit (spec, "Manifest")."""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, overload

import msgpack
import numpy as np

from zckpt.format import names, packed
from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.fields import Fields, unpack_map
from zckpt.format.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    DATA_ALIGNMENT_BYTES,
    INDEX_CHUNK_BYTES_MAX,
    INDEX_CHUNKS_MAX,
    INDEX_PIECES_MAX,
    MANIFEST_BYTES_MAX,
    NAMES_MAX,
    PARTS_MAX,
    TENSOR_BYTES_MAX,
    WORLD_SIZE_MAX,
)
from zckpt.format.rules import broken
from zckpt.format.shard import ShardId, is_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

VERSION = (1, 0)
SHARED_FILES = "shared-files"
FEATURES = frozenset({SHARED_FILES})
"""Names that may stand in ``requires`` and that this reader knows."""
TIERS = tuple(names.TIER_PREFIX)

_MAGIC = "zckpt"
_VERSION_BYTES_MAX = 5 + 2 * 9
"""Of an array of two integers, in msgpack's longest form."""
_BIN = {0xC4, 0xC5, 0xC6}
"""What a binary begins with in msgpack."""
_CHUNK_COLUMNS = {
    "layout": "layout",
    "first_row": "first_row",
    "rows": "rows",
    "pieces": "pieces",
    "offset": "offset",
    "bytes": "nbytes",
    "digest": "digest",
}
"""From the field in the file to the attribute of ``Chunk``, in the order of its fields."""


@dataclass(frozen=True, slots=True)
class Part:
    """The tensors of one part, as columns in ascending order of ``name`` (an id into ``Manifest.names``)."""

    name: str
    layout: int
    names: tuple[int, ...]
    shapes: tuple[int, ...]
    """Ids into ``Manifest.shapes``."""
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class File:
    """One data file. ``part`` and ``tier`` are ids into ``Manifest.parts`` and ``TIERS``."""

    rank: int
    part: int
    tier: int
    nbytes: int
    data_start: int
    first_block: int
    """Number of the file's first digest in its rank's digest table."""
    origin: str = ""
    """The save id in the file's header, where an earlier save has written the file; empty where this one has."""


@dataclass(frozen=True, slots=True)
class Files(Sequence[File]):
    """All data files, as columns: a thousand ranks have thousands, and opening must not make an object of each."""

    rank: tuple[int, ...]
    part: tuple[int, ...]
    tier: tuple[int, ...]
    nbytes: tuple[int, ...]
    data_start: tuple[int, ...]
    first_block: tuple[int, ...]
    origin: tuple[str, ...]

    @classmethod
    def of(cls, files: Iterable[File]) -> Files:
        """In the order of the format: by rank, part and tier."""
        rows = sorted((f.rank, f.part, f.tier, f.nbytes, f.data_start, f.first_block, f.origin) for f in files)
        return cls(*zip(*rows, strict=True)) if rows else cls((), (), (), (), (), (), ())

    def __len__(self) -> int:
        return len(self.rank)

    @overload
    def __getitem__(self, i: int) -> File: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[File, ...]: ...
    def __getitem__(self, i: int | slice) -> File | tuple[File, ...]:
        if isinstance(i, slice):
            return tuple(self[j] for j in range(*i.indices(len(self))))
        place, size = (self.rank[i], self.part[i], self.tier[i]), (self.nbytes[i], self.data_start[i])
        return File(*place, *size, self.first_block[i], self.origin[i])

    @property
    def shared(self) -> dict[str, list[int]]:
        """The positions of the files that earlier saves have written, by the id of that save."""
        found: dict[str, list[int]] = {}
        for number, origin in enumerate(self.origin):
            if origin:
                found.setdefault(origin, []).append(number)
        return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """One zstd frame of the index: ``rows`` tensors of one layout, from ``first_row`` on, with ``pieces`` pieces."""

    layout: int
    first_row: int
    rows: int
    pieces: int
    offset: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True)
class Manifest:
    """A manifest's records, checked. Columns of the file are rows here."""

    save_id: str
    step: int
    world_size: int
    block_bytes: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]
    files: Files
    digests: tuple[bytes, ...]
    """The digest of each rank's digest table."""
    chunks: tuple[Chunk, ...]
    index_bytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: bytes = b"\xc0"
    """The tree of non-tensor state, packed."""
    writer: Mapping[str, str] = field(default_factory=dict)
    """Program, versions and time, for people."""

    @cached_property
    def name_ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def part_ids(self) -> dict[str, int]:
        return {part.name: i for i, part in enumerate(self.parts)}

    def file_numbers(self, rank: Ints, part: int, tier: Ints) -> Ints:
        """Positions in ``files``; -1 where there is none."""
        if not self.files:
            return np.full_like(rank, -1)
        place = (rank * len(self.parts) + part) * len(TIERS) + tier
        number = np.minimum(np.searchsorted(self.file_places, place), len(self.files) - 1)
        return np.where((tier < len(TIERS)) & (self.file_places[number] == place), number, -1)

    @cached_property
    def file_places(self) -> Ints:
        """One number for each file that orders by rank, part and tier: ascending."""
        files = self.files
        rank, part, tier = (np.array(column, np.int64) for column in (files.rank, files.part, files.tier))
        return (rank * len(self.parts) + part) * len(TIERS) + tier

    @cached_property
    def data_bytes(self) -> Ints:
        """Of each file, without its header."""
        return np.array(self.files.nbytes, np.int64) - np.array(self.files.data_start, np.int64)

    def shard(self, file: File) -> ShardId:
        part, tier = self.parts[file.part].name, TIERS[file.tier]
        return ShardId(self.save_id, file.rank, self.world_size, part, tier, file.origin)

    def path(self, file: File) -> str:
        return self.shard(file).path


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.msgpack``."""
    shared = manifest.files.shared
    body = msgpack.packb(
        {
            "version": VERSION,
            "requires": [SHARED_FILES] if shared else [],
            "save_id": manifest.save_id,
            "step": manifest.step,
            "world_size": manifest.world_size,
            "block_bytes": manifest.block_bytes,
            "writer": dict(manifest.writer),
            "names": manifest.names,
            "shapes": manifest.shapes,
            "parts": [
                {"name": p.name, "layout": p.layout, "names": p.names, "shapes": p.shapes, "dtypes": p.dtypes}
                for p in manifest.parts
            ],
            "aliases": dict(manifest.aliases),
            "files": {
                "rank": manifest.files.rank,
                "part": manifest.files.part,
                "tier": manifest.files.tier,
                "bytes": manifest.files.nbytes,
                "data_start": manifest.files.data_start,
                "first_block": manifest.files.first_block,
            },
            "digests": manifest.digests,
            "index_bytes": manifest.index_bytes,
            "chunks": {
                column: [getattr(chunk, attribute) for chunk in manifest.chunks]
                for column, attribute in _CHUNK_COLUMNS.items()
            },
            "state": manifest.state,
            **({"shared": shared} if shared else {}),
        }
    )
    raw: bytes = msgpack.packb([_MAGIC, VERSION, digest(body), body])
    if len(raw) > MANIFEST_BYTES_MAX:
        raise broken("M004", f"the manifest would be {len(raw)} bytes long", file=names.MANIFEST)
    return raw


def decode(raw: bytes) -> Manifest:
    """Parses and checks ``manifest.msgpack``. Raises FormatError (M001 to M014, N001 to N004)."""
    if len(raw) > MANIFEST_BYTES_MAX:
        raise broken("M004", f"it is {len(raw)} bytes long", file=names.MANIFEST)
    version, packed_body = _open_envelope(raw)
    body = unpack_map(packed_body)
    get = Fields(body, "body")
    if _version(body.get("version")) != version:
        raise broken("M001", "envelope and body differ in their version", file=names.MANIFEST)
    requires = get.strings("requires")
    unknown = [feature for feature in requires if feature not in FEATURES]
    if unknown:
        raise broken(
            "M006", f"needs {', '.join(unknown)}", file=names.MANIFEST, hint="upgrade zckpt to read this checkpoint"
        )
    names.check_save_id(body.get("save_id"), file=names.MANIFEST)
    block_bytes = get.integer("block_bytes", BLOCK_BYTES_MIN, BLOCK_BYTES_MAX)
    if block_bytes % BLOCK_BYTES_MIN:  # so that no element lies in two blocks
        raise broken("M005", f"blocks of {block_bytes} bytes", file=names.MANIFEST)
    manifest = Manifest(
        save_id=str(body["save_id"]),
        step=get.integer("step", 0, TENSOR_BYTES_MAX),
        world_size=get.integer("world_size", 1, WORLD_SIZE_MAX),
        block_bytes=block_bytes,
        names=tuple(get.strings("names")),
        shapes=tuple(tuple(shape) if is_shape(shape) else _bad_shape(shape) for shape in get.array("shapes")),
        parts=tuple(_part(value) for value in get.array("parts")),
        files=_files(get.map("files"), get.map("shared") if SHARED_FILES in requires else None, str(body["save_id"])),
        digests=tuple(_digest(value) for value in get.array("digests")),
        chunks=_chunks(get.map("chunks")),
        index_bytes=get.integer("index_bytes", 0, TENSOR_BYTES_MAX),
        aliases=get.string_map("aliases"),
        state=get.binary("state"),
        writer=get.string_map("writer"),
    )
    _check(manifest)
    return manifest


def _open_envelope(raw: bytes) -> tuple[tuple[int, int], bytes]:
    """Version and body, the digest checked."""
    try:
        count, elements = packed.elements(raw, 4)
    except packed.ERRORS as error:
        raise broken("M001", f"not a manifest: {error or type(error).__name__}", file=names.MANIFEST) from error
    if len(elements) < 2 or elements[0] != msgpack.packb(_MAGIC):
        raise broken("M001", "not a zckpt manifest", file=names.MANIFEST)
    version = _unpack_version(elements[1])
    if version is None or version[0] != VERSION[0]:
        raise broken(
            "M002",
            f"format version {version}, this reader knows {VERSION[0]}.x",
            file=names.MANIFEST,
            hint="upgrade zckpt to read this checkpoint",
        )
    if count != 4 or any(element[0] not in _BIN for element in elements[2:]):
        raise broken("M001", "the manifest lacks its digest and body", file=names.MANIFEST)
    expected, body = map(msgpack.unpackb, elements[2:])
    if digest(body) != expected:
        raise broken("M003", "the manifest is damaged", file=names.MANIFEST, start=0, stop=len(raw))
    if raw != msgpack.packb([_MAGIC, version, expected, body]):
        raise broken("M001", "the envelope is not in its shortest form", file=names.MANIFEST)
    return version, body


def _unpack_version(raw: bytes) -> tuple[int, int] | None:
    """None if it is no version."""
    if len(raw) > _VERSION_BYTES_MAX:
        return None
    try:
        return _version(msgpack.unpackb(raw))
    except packed.ERRORS:
        return None


def _version(value: object) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n >= 0 for n in value):
        return value[0], value[1]
    return None


def _bad_shape(shape: object) -> tuple[int, ...]:
    raise broken("M008", f"shape {reprlib.repr(shape)}", file=names.MANIFEST)


def _digest(value: object) -> bytes:
    if not (isinstance(value, bytes) and len(value) == DIGEST_BYTES):
        raise broken("M005", "a digest that is not 16 bytes", file=names.MANIFEST)
    return value


def _part(value: object) -> Part:
    if not isinstance(value, dict):
        raise broken("M005", "a part that is not a map", file=names.MANIFEST)
    get = Fields(value, "parts")
    name = get.string("name")
    names.check_part_name(name, file=names.MANIFEST)
    part = Part(
        name,
        get.integer("layout", 0, NAMES_MAX),
        tuple(get.integers("names")),
        tuple(get.integers("shapes")),
        tuple(get.strings("dtypes")),
    )
    if not len(part.names) == len(part.shapes) == len(part.dtypes):
        raise broken("M010", f"the columns of part {name} differ in length", file=names.MANIFEST)
    if any(a >= b for a, b in pairwise(part.names)):
        raise broken("M010", f"the name ids of part {name} are not ascending", file=names.MANIFEST)
    for dtype in set(part.dtypes):
        if dtype not in ITEM_BYTES:
            raise broken("M009", f"part {name} has the dtype {dtype!r}", file=names.MANIFEST)
    return part


def _files(get: Fields, shared: Fields | None, save_id: str) -> Files:
    """``shared``: the field of this name; None where no file is shared."""
    columns = [tuple(column) for column in get.columns("rank", "part", "tier", "bytes", "data_start", "first_block")]
    rank, part, tier, nbytes, data_start, first_block = columns
    origin = [""] * len(rank)
    if shared is not None and not shared.values:
        raise broken("M014", f"needs {SHARED_FILES}, and lists no file that is shared", file=names.MANIFEST)
    for other, numbers in [] if shared is None else [(key, shared.integers(key)) for key in shared.values]:
        names.check_save_id(other, file=names.MANIFEST)
        if (
            other == save_id
            or not numbers
            or any(a >= b for a, b in pairwise(numbers))
            or numbers[-1] >= len(origin)
            or any(origin[number] for number in numbers)
        ):
            what = f"the files {reprlib.repr(numbers)} of {len(origin)} as those of the save {other}"
            raise broken("M014", what, file=names.MANIFEST)
        for number in numbers:
            origin[number] = other
    return Files(rank, part, tier, nbytes, data_start, first_block, tuple(origin))


def _chunks(get: Fields) -> tuple[Chunk, ...]:
    columns = get.columns(*list(_CHUNK_COLUMNS)[:-1])
    digests = [_digest(value) for value in get.array("digest")]
    if len(digests) != len(columns[0]):
        raise broken("M005", "the columns of 'chunks' differ in length", file=names.MANIFEST)
    return tuple(Chunk(*row) for row in zip(*columns, digests, strict=True))


def _check(m: Manifest) -> None:
    """What concerns several fields together."""
    where = names.MANIFEST
    if max(len(m.names), len(m.aliases)) > NAMES_MAX or len(m.parts) > PARTS_MAX:
        raise broken("M005", f"{len(m.names)} names, {len(m.aliases)} aliases, {len(m.parts)} parts", file=where)
    for name in m.names:
        names.check_tensor_name(name, file=where)
    for values in (m.names, [part.name for part in m.parts]):
        if len(set(values)) != len(values):
            raise broken("M007", f"{Counter(values).most_common(1)[0][0]!r} is listed twice", file=where)
    for part in m.parts:
        if part.names and part.names[-1] >= len(m.names):
            raise broken("M010", f"part {part.name} has name id {part.names[-1]} of {len(m.names)}", file=where)
        for shape_id, dtype in set(zip(part.shapes, part.dtypes, strict=True)):
            if shape_id >= len(m.shapes):
                raise broken("M010", f"part {part.name} has shape id {shape_id} of {len(m.shapes)}", file=where)
            if math.prod(m.shapes[shape_id]) * ITEM_BYTES[dtype] > TENSOR_BYTES_MAX:
                raise broken("M008", f"shape {m.shapes[shape_id]} of {dtype}", file=where)
    files = m.files
    if files and not (
        max(files.rank) < m.world_size and max(files.part) < len(m.parts) and max(files.tier) < len(TIERS)
    ):
        raise broken("M011", "a file of a rank, part or tier that does not exist", file=where)
    for start, nbytes in zip(files.data_start, files.nbytes, strict=True):
        if start == 0 or start % DATA_ALIGNMENT_BYTES or start > nbytes:
            raise broken("S003", f"a file of {nbytes} bytes whose data begins at byte {start}", file=where)
    if (np.diff(m.file_places) <= 0).any():
        raise broken("M011", "the files are not in ascending order", file=where)
    if len(m.digests) != m.world_size:
        raise broken("M005", f"{len(m.digests)} digests for {m.world_size} ranks", file=where)
    for alias, name in m.aliases.items():
        names.check_tensor_name(alias, file=where)
        if alias in m.name_ids or name not in m.name_ids:
            raise broken("M012", f"alias {alias!r} of {name!r}", file=where)
    _check_chunks(m)


def _check_chunks(m: Manifest) -> None:
    where = names.MANIFEST
    parts = Counter(part.layout for part in m.parts)
    chunks = sum(parts[chunk.layout] for chunk in m.chunks)
    if chunks > INDEX_CHUNKS_MAX:
        raise broken("M013", f"{chunks} chunks", file=where)
    stop = 0
    rows: Counter[int] = Counter()
    for chunk in m.chunks:
        if chunk.offset != stop or not 0 < chunk.nbytes <= INDEX_CHUNK_BYTES_MAX:
            raise broken("M013", f"a chunk of {chunk.nbytes} bytes at {chunk.offset}, expected at {stop}", file=where)
        if chunk.first_row != rows[chunk.layout] or chunk.rows == 0:
            raise broken("M013", f"a chunk of layout {chunk.layout} begins at row {chunk.first_row}", file=where)
        stop += chunk.nbytes
        rows[chunk.layout] += chunk.rows
    if stop != m.index_bytes:
        raise broken("M013", f"the chunks end at {stop} of {m.index_bytes} bytes", file=where)
    pieces = sum(chunk.pieces * parts[chunk.layout] for chunk in m.chunks)
    if pieces > INDEX_PIECES_MAX:
        raise broken("M013", f"the chunks hold {pieces} pieces", file=where)
    layouts: dict[int, Part] = {}
    for part in m.parts:
        first = layouts.setdefault(part.layout, part)
        if part.names != first.names or len(part.names) != rows[part.layout]:
            raise broken("M013", f"part {part.name} does not fit layout {part.layout}", file=where)
    if rows.keys() - layouts.keys():
        raise broken("M013", "a chunk of a layout that no part has", file=where)
