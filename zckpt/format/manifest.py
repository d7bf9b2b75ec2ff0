"""The manifest: the root of a checkpoint. Renaming it to its name is the commit (spec, "Manifest")."""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgpack
import numpy as np

from zckpt.format import names, packed
from zckpt.format.data_file import DataFileId, is_shape
from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.dtypes import DTYPES, ITEM_BYTES_BY_ID
from zckpt.format.fields import Fields, unpack_body
from zckpt.format.grids import divided_sizes, fits, packed_sections, unpacked_sections
from zckpt.format.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    DATA_ALIGNMENT_BYTES,
    INDEX_CHUNK_BYTES_MAX,
    INDEX_CHUNKS_MAX,
    INDEX_PIECES_MAX,
    MANIFEST_BYTES_MAX,
    MANY_CHUNKS_MAX,
    MANY_PIECES_MAX,
    NAMES_MAX,
    PARTS_MAX,
    PIECES_PER_BYTE_MAX,
    TENSOR_BYTES_MAX,
    WORLD_SIZE_MAX,
)
from zckpt.format.names import Tier
from zckpt.format.rules import broken
from zckpt.geometry import Grid, all_of, distinct

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from zckpt.geometry import Ints, Sections

VERSION = (1, 0)
"""The major and the minor version of the format that this module writes."""
SHARED_FILES = "shared-files"
"""The feature of a checkpoint with data files that earlier saves wrote."""
BOX = "box"
"""The feature of a checkpoint with tensors that a grid divides."""
PIECES = "pieces"
"""The feature of a checkpoint whose index has more chunks or pieces than others may have."""
FEATURES = frozenset({SHARED_FILES, BOX, PIECES})
"""The features that this reader knows."""

_MAGIC = "zckpt"
SOUGHT_MAX = 4
"""How many names ``Manifest.name_id`` looks for among all names. This takes up to a third of the time that it takes to
make a dict of all names."""
_VERSION_BYTES_MAX = 5 + 2 * 9
"""The most bytes of an array of two integers, in msgpack's longest form."""
_BIN = {0xC4: (2, 0), 0xC5: (3, 1 << 8), 0xC6: (5, 1 << 16)}
"""The first bytes that a binary may have in msgpack. For each of them, the number of bytes before the content of the
binary, and the shortest content that needs it."""
_FILE_COLUMNS = ("rank", "part", "tier", "bytes", "data_start", "first_block")
"""The columns of ``files`` in the file, in the order of the attributes of ``File``."""
_CHUNK_COLUMNS = ("layout", "first_row", "rows", "pieces", "offset", "bytes", "digest")
"""The columns of ``chunks`` in the file, in the order of the attributes of ``Chunk``."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The tensors of one part. Its columns have one item for each tensor, in ascending order of name ids. They are
    arrays, because to make an object for each tensor would slow down opening."""

    name: str
    """The name of the part, such as ``"master"``."""
    layout_id: int
    """The id of the layout in the index that says where the pieces of these tensors are."""
    name_ids: Ints
    """For each tensor, the position of its name in ``Manifest.names``."""
    shape_ids: Ints
    """For each tensor, the position of its shape in ``Manifest.shapes``."""
    dtype_ids: NDArray[np.uint8]
    """For each tensor, the position of its dtype in ``DTYPES``."""
    grid_ids: Ints
    """For each tensor, the position of its grid in ``Manifest.grids``."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__
        )

    def __hash__(self) -> int:
        return hash((self.name, self.layout_id))

    @property
    def item_bytes(self) -> Ints:
        """For each tensor, the size of one element in bytes."""
        return ITEM_BYTES_BY_ID[self.dtype_ids]


class File(NamedTuple):
    """One data file of a checkpoint, as the manifest lists it."""

    rank: int
    """The rank that wrote the data file."""
    part_id: int
    """The position of the data file's part in ``Manifest.parts``."""
    tier: Tier
    """The tier that the pieces were in when they were saved."""
    nbytes: int
    """The size of the data file in bytes."""
    data_start: int
    """The byte of the data file at which its data begin."""
    first_block: int
    """The position of the data file's first digest in the digest table of its rank."""
    origin: str = ""
    """The save id in the header if an earlier save wrote the data file. It is empty if this save wrote it."""


@dataclass(frozen=True, slots=True)
class Files:
    """All data files of a checkpoint, as columns: each has one attribute of every ``File``. A thousand ranks have
    thousands of data files, and to make an object for each of them would slow down opening."""

    rank: tuple[int, ...]
    """For each data file, the rank that wrote it."""
    part_id: tuple[int, ...]
    """For each data file, the position of its part in ``Manifest.parts``."""
    tier: tuple[int, ...]
    """For each data file, the number of its tier."""
    nbytes: tuple[int, ...]
    data_start: tuple[int, ...]
    """For each data file, the byte at which its data begin."""
    first_block: tuple[int, ...]
    """For each data file, the position of its first digest in the digest table of its rank."""
    origin: tuple[str, ...]
    """For each data file, the save id in its header if an earlier save wrote it, or an empty string."""

    @classmethod
    def of(cls, files: Iterable[File]) -> Files:
        """Returns the columns of ``files``, in the order of the format: by rank, part and tier."""
        rows = sorted(files)
        return cls(*zip(*rows, strict=True)) if rows else cls((), (), (), (), (), (), ())

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[File]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: int) -> File:
        place, size = (self.rank[i], self.part_id[i], Tier(self.tier[i])), (self.nbytes[i], self.data_start[i])
        return File(*place, *size, self.first_block[i], self.origin[i])

    @property
    def shared(self) -> dict[str, list[int]]:
        """The numbers of the data files that earlier saves wrote, by the ids of these saves."""
        numbers: dict[str, list[int]] = {}
        for number, origin in enumerate(self.origin):
            if origin:
                numbers.setdefault(origin, []).append(number)
        return numbers


class Chunk(NamedTuple):
    """One chunk of the index: a zstd frame with consecutive rows of one layout."""

    layout_id: int
    """The id of the layout that the chunk belongs to."""
    first_row: int
    """The number of the chunk's first row in its layout."""
    rows: int
    """The number of rows. Each row is one tensor."""
    pieces: int
    """The number of pieces in all rows."""
    offset: int
    """The byte of the index file at which the frame begins."""
    nbytes: int
    """The size of the frame in bytes."""
    digest: bytes
    """The digest of the frame."""


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest. Its rules have been checked."""

    save_id: str
    """The id of the save that wrote the manifest. It is in the name of the data directory."""
    step: int
    """The number of steps that the optimizer has taken."""
    world_size: int
    """The number of ranks that wrote the checkpoint."""
    block_bytes: int
    """The size of a full block in bytes."""
    names: tuple[str, ...]
    """The distinct names of all tensors. The ids of names are positions in it."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of tensors. The ids of shapes are positions in it."""
    parts: tuple[Part, ...]
    """The parts. The ids of parts are positions in it."""
    files: Files
    """The data files. The numbers of data files are positions in it."""
    digests: tuple[bytes, ...]
    """For each rank, the digest of its digest table."""
    chunks: tuple[Chunk, ...]
    """The chunks of the index, in the order of the index file."""
    index_bytes: int
    """The size of the index file in bytes."""
    grids: tuple[Sections, ...] = ((),)
    """The sections of the grids of tensors. The ids of grids are positions in it. The first one divides nothing."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The name in ``names`` that each further name of a tensor stands for."""
    state: bytes = b"\xc0"
    """The packed tree of state that all ranks share."""
    writer: Mapping[str, str] = field(default_factory=dict)
    """The program, versions and time of the save, for people."""
    _sought: dict[str, int | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What ``name_id`` has returned for the names that it has looked for among all names."""
    _grids: dict[tuple[int, int], Grid] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The grids that ``grid_of`` has made, by the ids of the shape and of the sections."""

    @cached_property
    def name_ids(self) -> dict[str, int]:
        """The position in ``names`` of each name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def name_id(self, name: str) -> int | None:
        """Returns the position of a name in ``names``, or None if it is not there. It looks through all names for the
        first few that it is asked for, which takes less time than making ``name_ids``."""
        if name not in self._sought:
            if len(self._sought) == SOUGHT_MAX:
                return self.name_ids.get(name)
            self._sought[name] = None
            with suppress(ValueError):
                self._sought[name] = self.names.index(name)
        return self._sought[name]

    def grid(self, part_id: int, row: int) -> Grid:
        """Returns the grid of the tensor in a row of a part."""
        part = self.parts[part_id]
        return self.grid_of(int(part.shape_ids[row]), int(part.grid_ids[row]))

    def grid_of(self, shape_id: int, grid_id: int) -> Grid:
        """Returns the grid of the tensors with these ids. They share one object."""
        grid = self._grids.get((shape_id, grid_id))
        if grid is None:
            shape, sections = self.shapes[shape_id], self.grids[grid_id]
            grid = self._grids[shape_id, grid_id] = Grid(shape, sections) if sections else all_of(shape).grid
        return grid

    @cached_property
    def numel(self) -> Ints:
        """For each shape, the number of elements of a tensor."""
        return np.array([*map(math.prod, self.shapes)], np.int64)

    @cached_property
    def part_ids(self) -> dict[str, int]:
        """For the name of each part, the position of the part in ``parts``."""
        return {part.name: i for i, part in enumerate(self.parts)}

    def file_numbers(self, rank: Ints, part_id: int, tier: Ints) -> Ints:
        """Returns the numbers of the data files of some pieces of a part, and -1 for each piece that no data file is
        listed for. ``rank`` and ``tier`` have one item for each piece."""
        if not self.files:
            return np.full_like(rank, -1)
        place = (rank * len(self.parts) + part_id) * len(Tier) + tier
        number = np.minimum(np.searchsorted(self.file_places, place), len(self.files) - 1)
        return np.where((tier < len(Tier)) & (self.file_places[number] == place), number, -1)

    @cached_property
    def file_places(self) -> Ints:
        """For each data file one number, which grows with rank, part and tier, in this order."""
        files = self.files
        rank, part, tier = (np.array(column, np.int64) for column in (files.rank, files.part_id, files.tier))
        return (rank * len(self.parts) + part) * len(Tier) + tier

    @cached_property
    def data_bytes(self) -> Ints:
        """For each data file, the size of its data in bytes."""
        return np.array(self.files.nbytes, np.int64) - np.array(self.files.data_start, np.int64)

    def data_file_id(self, file: File) -> DataFileId:
        """Returns what identifies a data file."""
        part = self.parts[file.part_id].name
        return DataFileId(self.save_id, file.rank, self.world_size, part, file.tier, file.origin)

    def path(self, file: File) -> str:
        """Returns the path of a data file, relative to the checkpoint's directory."""
        return self.data_file_id(file).path


def encode(manifest: Manifest) -> bytes:
    """Returns the bytes of ``manifest.msgpack``. Raises FormatError (M004) if there are too many."""
    shared, has_grids = manifest.files.shared, len(manifest.grids) > 1
    uses = {SHARED_FILES: bool(shared), BOX: has_grids, PIECES: _has_many_pieces(*_index_size(manifest))}
    features = [feature for feature, used in uses.items() if used]
    body = msgpack.packb(
        {
            "version": VERSION,
            "requires": features,
            "save_id": manifest.save_id,
            "step": manifest.step,
            "world_size": manifest.world_size,
            "block_bytes": manifest.block_bytes,
            "writer": dict(manifest.writer),
            "names": manifest.names,
            "shapes": manifest.shapes,
            "parts": [
                {"name": p.name, "layout": p.layout_id}
                | {"names": p.name_ids.tolist(), "shapes": p.shape_ids.tolist()}
                | {"dtypes": [*map(DTYPES.__getitem__, p.dtype_ids.tolist())]}
                | ({"grids": p.grid_ids.tolist()} if p.grid_ids.any() else {})
                for p in manifest.parts
            ],
            "aliases": dict(manifest.aliases),
            "files": {
                column: getattr(manifest.files, attribute)
                for column, attribute in zip(_FILE_COLUMNS, File._fields, strict=False)
            },
            "digests": manifest.digests,
            "index_bytes": manifest.index_bytes,
            "chunks": {
                column: [chunk[number] for chunk in manifest.chunks] for number, column in enumerate(_CHUNK_COLUMNS)
            },
            "state": manifest.state,
            **({"shared": shared} if shared else {}),
            **({"grids": list(map(packed_sections, manifest.grids))} if has_grids else {}),
        }
    )
    raw: bytes = msgpack.packb([_MAGIC, VERSION, digest(body), body])
    if len(raw) > MANIFEST_BYTES_MAX:
        raise broken("M004", f"the manifest would be {len(raw)} bytes long", file=names.MANIFEST)
    return raw


def decode(raw: bytes) -> Manifest:
    """Parses the bytes of ``manifest.msgpack`` and checks them. Raises FormatError (M001 to M015, N001 to N004,
    S003)."""
    if len(raw) > MANIFEST_BYTES_MAX:
        # Readers read only one byte more than a manifest may have, so its length is not known here.
        raise broken("M004", f"it is longer than {MANIFEST_BYTES_MAX} bytes", file=names.MANIFEST)
    version, packed_body = _open_envelope(raw)
    body = unpack_body(packed_body)
    fields = Fields(body, "body")
    if _version(body.get("version")) != version:
        raise broken("M001", "envelope and body differ in their version", file=names.MANIFEST)
    requires = fields.strings("requires")
    unknown = [feature for feature in requires if feature not in FEATURES]
    if unknown:
        raise broken(
            "M006", f"needs {', '.join(unknown)}", file=names.MANIFEST, hint="upgrade zckpt to read this checkpoint"
        )
    save_id = fields.get("save_id", str)
    names.check_save_id(save_id, file=names.MANIFEST)
    block_bytes = fields.integer("block_bytes", BLOCK_BYTES_MIN, BLOCK_BYTES_MAX)
    if block_bytes % BLOCK_BYTES_MIN:  # Then an element could be in two blocks.
        raise broken("M005", f"blocks of {block_bytes} bytes", file=names.MANIFEST)
    manifest = Manifest(
        save_id=save_id,
        step=fields.integer("step", 0, TENSOR_BYTES_MAX),
        world_size=fields.integer("world_size", 1, WORLD_SIZE_MAX),
        block_bytes=block_bytes,
        names=tuple(fields.strings("names")),
        shapes=tuple(tuple(shape) if is_shape(shape) else _bad_shape(shape) for shape in fields.get("shapes", list)),
        grids=tuple(map(_grid, fields.get("grids", list))) if BOX in requires else ((),),
        parts=tuple(_part(value, has_grids=BOX in requires) for value in fields.get("parts", list)),
        files=_files(fields.map("files"), fields.map("shared") if SHARED_FILES in requires else None, save_id),
        digests=tuple(_digest(value) for value in fields.get("digests", list)),
        chunks=_chunks(fields.map("chunks")),
        index_bytes=fields.integer("index_bytes", 0, TENSOR_BYTES_MAX),
        aliases=fields.string_map("aliases"),
        state=fields.get("state", bytes),
        writer=fields.string_map("writer"),
    )
    _check(manifest, many_pieces=PIECES in requires)
    if BOX in requires and not any(part.grid_ids.any() for part in manifest.parts):
        raise broken("M015", f"needs {BOX}, and no grid divides a tensor", file=names.MANIFEST)
    return manifest


def _open_envelope(raw: bytes) -> tuple[tuple[int, int], memoryview]:
    """Returns the version and the packed body, whose digest has been checked. It looks at the bytes behind the version
    only if it knows the major version. Raises FormatError (M001 to M003)."""
    view = memoryview(raw)
    items = packed.items(view)
    first = _next(items, 2)
    if len(first) < 2 or first[0] != msgpack.packb(_MAGIC):
        raise broken("M001", "not a zckpt manifest", file=names.MANIFEST)
    version = None
    if len(first[1]) <= _VERSION_BYTES_MAX:
        with suppress(*packed.ERRORS):
            version = _version(msgpack.unpackb(first[1]))
    if version is None or version[0] != VERSION[0]:
        raise broken(
            "M002",
            f"format version {version}, this reader knows {VERSION[0]}.x",
            file=names.MANIFEST,
            hint="upgrade zckpt to read this checkpoint",
        )
    # The body may be long, so it is neither unpacked nor copied.
    third = _next(items, 1)
    count, start = packed.array_header(view)
    start += sum(map(len, first + third))
    header_bytes, body_bytes_min = _BIN.get(raw[start], (0, 0)) if start < len(raw) else (0, 0)
    length, body = view[start + 1 : start + header_bytes], view[start + header_bytes :]
    if count != 4 or third[0][0] not in _BIN or not length or int.from_bytes(length) != len(body):
        raise broken("M001", "the manifest is not its version, a digest and a body", file=names.MANIFEST)
    expected = msgpack.unpackb(third[0])
    if digest(body) != expected:
        raise broken("M003", "the manifest is damaged", file=names.MANIFEST, start=0, stop=len(raw))
    if raw[:start] != msgpack.packb([_MAGIC, version, expected, b""])[:-2] or len(body) < body_bytes_min:
        raise broken("M001", "the envelope is not in its shortest form", file=names.MANIFEST)
    return version, body


def _next(items: Iterator[memoryview], count_max: int) -> list[memoryview]:
    """Returns the next items of the envelope, at most ``count_max`` of them. Raises FormatError (M001)."""
    try:
        return list(islice(items, count_max))
    except packed.ERRORS as error:
        raise broken("M001", f"not a manifest: {error or type(error).__name__}", file=names.MANIFEST) from error


def _version(value: object) -> tuple[int, int] | None:
    """Returns ``value`` as a version, or None if it is not a version."""
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n >= 0 for n in value):
        return value[0], value[1]
    return None


def _bad_shape(shape: object) -> tuple[int, ...]:
    """Raises FormatError (M008) for a value that is not a shape. It never returns."""
    raise broken("M008", f"shape {reprlib.repr(shape)}", file=names.MANIFEST)


def _grid(value: object) -> Sections:
    """Returns the sections of a grid. Raises FormatError (M015)."""
    sections = unpacked_sections(value)
    if sections is None:
        raise broken("M015", f"grid {reprlib.repr(value)}", file=names.MANIFEST)
    return sections


def _digest(value: object) -> bytes:
    """Returns ``value`` if it is a digest. Raises FormatError (M005) if it is not."""
    if not (isinstance(value, bytes) and len(value) == DIGEST_BYTES):
        raise broken("M005", "a digest that is not 16 bytes", file=names.MANIFEST)
    return value


def _part(value: object, *, has_grids: bool) -> Part:
    """Returns a part from its map in the manifest. Raises FormatError (M005, M009, M010, N003)."""
    if not isinstance(value, dict):
        raise broken("M005", "a part that is not a map", file=names.MANIFEST)
    fields = Fields(value, "parts")
    name = fields.get("name", str)
    names.check_part_name(name, file=names.MANIFEST)
    name_ids = fields.column("names")
    grid_ids = fields.column("grids") if has_grids and "grids" in fields.values else np.zeros(len(name_ids), np.int64)
    columns = (name_ids, fields.column("shapes"), fields.dtype_ids("dtypes"), grid_ids)
    part = Part(name, fields.integer("layout", 0, NAMES_MAX), *columns)
    if len({len(column) for column in columns}) > 1:
        raise broken("M010", f"the columns of part {name} differ in length", file=names.MANIFEST)
    if (np.diff(name_ids) <= 0).any():
        raise broken("M010", f"the name ids of part {name} are not ascending", file=names.MANIFEST)
    return part


def _files(fields: Fields, shared: Fields | None, save_id: str) -> Files:
    """Returns the data files. ``shared`` is the field of that name, or None if the checkpoint has no shared files.
    Raises FormatError (M005, M014, N004)."""
    rank, part, tier, nbytes, data_start, first_block = map(tuple, fields.columns(*_FILE_COLUMNS))
    origin = [""] * len(rank)
    if shared is not None and not shared.values:
        raise broken("M014", f"needs {SHARED_FILES}, and lists no file that is shared", file=names.MANIFEST)
    for earlier_id, numbers in [] if shared is None else [(key, shared.integers(key)) for key in shared.values]:
        if type(earlier_id) is not str:
            raise broken("M005", f"the field 'shared' has the key {reprlib.repr(earlier_id)}", file=names.MANIFEST)
        names.check_save_id(earlier_id, file=names.MANIFEST)
        if (
            earlier_id == save_id
            or not numbers
            or any(a >= b for a, b in pairwise(numbers))
            or numbers[-1] >= len(origin)
            or any(origin[number] for number in numbers)
        ):
            what = f"the files {reprlib.repr(numbers)} of {len(origin)} as those of the save {earlier_id}"
            raise broken("M014", what, file=names.MANIFEST)
        for number in numbers:
            origin[number] = earlier_id
    return Files(rank, part, tier, nbytes, data_start, first_block, tuple(origin))


def _chunks(fields: Fields) -> tuple[Chunk, ...]:
    """Returns the chunks of the index. Raises FormatError (M005)."""
    columns = fields.columns(*_CHUNK_COLUMNS[:-1])
    digests = [_digest(value) for value in fields.get("digest", list)]
    if len(digests) != len(columns[0]):
        raise broken("M005", "the columns of 'chunks' differ in length", file=names.MANIFEST)
    return tuple(Chunk(*row) for row in zip(*columns, digests, strict=True))


def _check(m: Manifest, *, many_pieces: bool) -> None:
    """Checks the rules that are about several fields."""
    where = names.MANIFEST
    if max(len(m.names), len(m.aliases)) > NAMES_MAX or len(m.parts) > PARTS_MAX:
        raise broken("M005", f"{len(m.names)} names, {len(m.aliases)} aliases, {len(m.parts)} parts", file=where)
    names.check_tensor_names(m.names, file=where)
    for values in (m.names, [part.name for part in m.parts]):
        if len(set(values)) != len(values):
            raise broken("M007", f"{Counter(values).most_common(1)[0][0]!r} is listed twice", file=where)
    sizes = list(map(divided_sizes, m.grids))
    for part in m.parts:
        for what, ids, count, rule in (
            ("name", part.name_ids, len(m.names), "M010"),
            ("shape", part.shape_ids, len(m.shapes), "M010"),
            ("grid", part.grid_ids, len(m.grids), "M015"),
        ):
            if (highest := ids.max(initial=-1)) >= count:
                raise broken(rule, f"part {part.name} has {what} id {highest} of {count}", file=where)
        for shape_id, dtype_id in _pairs(part.shape_ids, part.dtype_ids, len(DTYPES)):
            if math.prod(m.shapes[shape_id]) * int(ITEM_BYTES_BY_ID[dtype_id]) > TENSOR_BYTES_MAX:
                raise broken("M008", f"shape {m.shapes[shape_id]} of {DTYPES[dtype_id]}", file=where)
        for shape_id, grid_id in _pairs(part.shape_ids, part.grid_ids, len(m.grids)):
            if not fits(sizes[grid_id], m.shapes[shape_id]):
                raise broken("M015", f"part {part.name}: grid {grid_id} of shape {m.shapes[shape_id]}", file=where)
    if m.grids[:1] != ((),) or not all(m.grids[1:]):
        raise broken("M015", "the first grid, and only this one, has to divide nothing", file=where)
    files = m.files
    if files and not (
        max(files.rank) < m.world_size and max(files.part_id) < len(m.parts) and max(files.tier) < len(Tier)
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
    _check_index_size(m, many_pieces=many_pieces)


def _index_size(m: Manifest) -> tuple[int, int]:
    """Returns the number of chunks and the number of pieces of the index. Both count once for each part."""
    parts = Counter(part.layout_id for part in m.parts)
    chunks = sum(parts[chunk.layout_id] for chunk in m.chunks)
    return chunks, sum(chunk.pieces * parts[chunk.layout_id] for chunk in m.chunks)


def _has_many_pieces(chunks: int, pieces: int) -> bool:
    """Returns whether an index of this size needs the feature ``pieces``."""
    return chunks > INDEX_CHUNKS_MAX or pieces > INDEX_PIECES_MAX


def _check_index_size(m: Manifest, *, many_pieces: bool) -> None:
    """Raises FormatError (M013) if the index is too large, or if the feature ``pieces`` is missing or not needed. So
    the memory that the index takes is bounded before anything of it is read."""
    chunks, pieces = _index_size(m)
    if many_pieces != _has_many_pieces(chunks, pieces):
        problem = f"do not need the feature {PIECES}" if many_pieces else f"need the feature {PIECES}"
        raise broken("M013", f"{chunks} chunks and {pieces} pieces {problem}", file=names.MANIFEST)
    if chunks > MANY_CHUNKS_MAX or pieces > MANY_PIECES_MAX:
        raise broken("M013", f"{chunks} chunks, {pieces} pieces", file=names.MANIFEST)
    if many_pieces and pieces > PIECES_PER_BYTE_MAX * m.index_bytes:
        raise broken("M013", f"{pieces} pieces in an index of {m.index_bytes} bytes", file=names.MANIFEST)


def _pairs(one: Ints, other: Ints | NDArray[np.uint8], count: int) -> Iterator[tuple[int, int]]:
    """Yields the distinct pairs of the items of two columns. ``other`` has numbers below ``count``."""
    pairs = one * count + other
    pairs = pairs[np.diff(pairs, prepend=-1) != 0]  # Neighbours are mostly equal.
    return (divmod(pair, count) for pair in distinct(pairs)[0].tolist())


def _check_chunks(m: Manifest) -> None:
    """Raises FormatError (M013) unless the chunks tile the index file and the rows of each layout."""
    where = names.MANIFEST
    stop = 0
    rows: Counter[int] = Counter()
    for chunk in m.chunks:
        if chunk.offset != stop or not 0 < chunk.nbytes <= INDEX_CHUNK_BYTES_MAX:
            raise broken("M013", f"a chunk of {chunk.nbytes} bytes at {chunk.offset}, expected at {stop}", file=where)
        if chunk.first_row != rows[chunk.layout_id] or chunk.rows == 0:
            raise broken("M013", f"a chunk of layout {chunk.layout_id} begins at row {chunk.first_row}", file=where)
        stop += chunk.nbytes
        rows[chunk.layout_id] += chunk.rows
    if stop != m.index_bytes:
        raise broken("M013", f"the chunks end at {stop} of {m.index_bytes} bytes", file=where)
    layouts: dict[int, Part] = {}
    for part in m.parts:
        first = layouts.setdefault(part.layout_id, part)
        if not np.array_equal(part.name_ids, first.name_ids) or len(part.name_ids) != rows[part.layout_id]:
            raise broken("M013", f"part {part.name} does not fit layout {part.layout_id}", file=where)
    if rows.keys() - layouts.keys():
        raise broken("M013", "a chunk of a layout that no part has", file=where)
