"""The data file: a safetensors file with the pieces of one part that one rank wrote from one tier (spec, "Data
files")."""

from __future__ import annotations

import json
import math
import reprlib
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice, pairwise
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.errors import FormatError
from zckpt.format import names
from zckpt.format.digest import block_count
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.grids import divided_sizes, fits, packed_sections, unpacked_sections
from zckpt.format.limits import DATA_ALIGNMENT_BYTES, HEADER_BYTES_MAX, NDIM_MAX, TENSOR_BYTES_MAX
from zckpt.format.rules import broken
from zckpt.geometry import Grid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zckpt.format.names import Tier
    from zckpt.geometry import Sections

    EntryFields = tuple[str, str, tuple[int, ...], int, int]
    """The fields of a ``HeaderEntry``. A file may have very many entries, so no object of a class is made for each."""

LENGTH_BYTES = 8
"""The size of the first field of a data file, which has the length of the header text."""
BEGINNING_BYTES = DATA_ALIGNMENT_BYTES
"""The number of bytes by which ``begins_like_data_file`` recognises a data file. No header is shorter."""
ENTRIES_ENCODED = 1 << 12
"""How many entries of a header are encoded at a time."""
SECTOR_BYTES = 512
"""The smallest number of bytes that a disk writes as a whole."""
FILLER_BYTES_MAX = DATA_ALIGNMENT_BYTES - 1
"""The most bytes of a filler."""


@dataclass(frozen=True, slots=True)
class DataFileId:
    """Identifies a data file of a checkpoint. The metadata in its header repeat what these attributes say."""

    save_id: str
    """The save id of the checkpoint's manifest. It is in the path of the data file."""
    rank: int
    """The rank that wrote the data file."""
    world_size: int
    """The number of ranks that wrote the checkpoint."""
    part: str
    """The name of the part that the data file contains."""
    tier: Tier
    """The tier that the pieces were in when they were saved."""
    origin: str = ""
    """The save id in the header if an earlier save wrote the data file. It is empty if this save wrote it."""

    @property
    def path(self) -> str:
        """The path of the data file, relative to the checkpoint's directory."""
        return names.data_file_path(self.save_id, self.rank, self.part, self.tier)


class HeaderEntry(NamedTuple):
    """One entry of a safetensors header: a piece of a tensor, or a filler."""

    name: str
    """The name of the entry: that of the tensor, ``<name>@<start>:<stop>`` for a partial piece, or ``@...`` for a
    filler."""
    dtype: str
    """The name of the dtype in the format, such as ``"F32"``."""
    shape: tuple[int, ...]
    """The shape of the entry. A partial piece has one dimension."""
    offset: int
    """The first byte of the entry, counted from the first byte of the data."""
    nbytes: int
    """The size of the entry in bytes."""

    @property
    def is_filler(self) -> bool:
        """Whether the entry is a filler and not a piece."""
        return self.name.startswith(names.FILLER_PREFIX)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a data file. Its rules have been checked."""

    data_file: DataFileId
    """The data file that the header belongs to."""
    entries: tuple[HeaderEntry, ...]
    """The entries of the data file, in the order of their bytes."""
    shapes: Mapping[str, tuple[int, ...]]
    """The whole shape of each tensor of which the data file has a partial piece, by the name of the tensor."""
    sections: Mapping[str, Sections]
    """The sections of grids, by the names of the tensors that they divide. The data file has a piece of each of these
    tensors."""
    data_start: int
    """The byte of the file at which the data begin."""

    def whole_shape(self, entry: HeaderEntry) -> tuple[int, ...]:
        """Returns the shape of the whole tensor that ``entry`` is a piece of."""
        split = names.split_piece_name(entry.name)
        return entry.shape if split is None else self.shapes[split[0]]

    def grid(self, entry: HeaderEntry) -> Grid:
        """Returns the grid of the tensor that ``entry`` is a piece of."""
        split = names.split_piece_name(entry.name)
        return Grid(self.whole_shape(entry), self.sections.get(entry.name if split is None else split[0], ()))

    def first_blocks(self, block_bytes: int) -> list[int]:
        """Returns for each entry the number of its first block, counted from the first block of the data file. The last
        item is the number of blocks of the data file."""
        sizes = (self.data_start, *(entry.nbytes for entry in self.entries))
        return list(accumulate(block_count(nbytes, block_bytes) for nbytes in sizes))


def _identity(data_file: DataFileId) -> dict[str, str]:
    """Returns the metadata that identify a data file, by the keys that they have in its header."""
    return {
        "zckpt.save_id": data_file.origin or data_file.save_id,
        "zckpt.part": data_file.part,
        "zckpt.rank": str(data_file.rank),
        "zckpt.world_size": str(data_file.world_size),
        "zckpt.tier": data_file.tier.label,
    }


def encode_header(
    data_file: DataFileId,
    entries: Iterable[EntryFields],
    shapes: Mapping[str, tuple[int, ...]],
    sections: Mapping[str, Sections] | None = None,
) -> bytes:
    """Returns the header of a data file, padded so that the data begin at a multiple of 4096 bytes.

    Args:
        data_file: the data file that the metadata name.
        entries: the entries, in the order of their bytes.
        shapes: the whole shape of each tensor of which there is a partial piece, by the name of the tensor.
        sections: the sections of the grid of each tensor that a grid divides, by the name of the tensor.

    Returns:
        All bytes before the data, beginning with the length of the header text.

    Raises:
        FormatError: the header text would be longer than the format allows (S001).
    """
    metadata = {
        "format": "pt",  # transformers refuses to load a file without it.
        "zckpt.version": "1.0",
        **_identity(data_file),
        "zckpt.shapes": json.dumps(shapes, separators=(",", ":"), ensure_ascii=False),
    }
    if sections:
        grids = {name: packed_sections(of_tensor) for name, of_tensor in sections.items()}
        metadata["zckpt.grids"] = json.dumps(grids, separators=(",", ":"), ensure_ascii=False)
    text = bytearray(LENGTH_BYTES)
    text += f'{{"{names.METADATA}":{json.dumps(metadata, separators=(",", ":"), ensure_ascii=False)}'.encode()

    @cache
    def described(dtype: str, shape: tuple[int, ...]) -> str:
        return f'"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]'

    # If there are many small tensors, json.dumps of a dict for each of them would take longer than to write their data,
    # and the text of all entries as a list of strings would take several times the memory of the header.
    number, some = 0, iter(entries)
    while members := [
        f',{encode_basestring(name)}:{{{described(dtype, shape)},"data_offsets":[{offset},{offset + nbytes}]}}'
        for name, dtype, shape, offset, nbytes in islice(some, ENTRIES_ENCODED)
    ]:
        number += len(members)
        text += "".join(members).encode()
    text += b"}"
    padded = -(-len(text) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES
    if padded - LENGTH_BYTES > HEADER_BYTES_MAX:
        raise broken("S001", f"{number} entries need a header of {padded - LENGTH_BYTES} bytes", file=data_file.path)
    text += b" " * (padded - len(text))
    text[:LENGTH_BYTES] = struct.pack("<Q", padded - LENGTH_BYTES)
    return bytes(text)


def with_origin(header: bytes, data_file: DataFileId) -> bytes:
    """Returns a header with ``data_file.origin`` in the place of the save id. The length stays the same.

    ``header`` is what ``encode_header`` has returned for the same data file without an origin.
    """
    old, new = (f'"zckpt.save_id":"{save_id}"'.encode() for save_id in (data_file.save_id, data_file.origin))
    return header.replace(old, new, 1)


def header_bytes(prefix: bytes, file: str) -> int:
    """Returns the number of bytes before the data of a file. ``prefix`` is the first 8 bytes of the file. Raises
    FormatError (S001, S003)."""
    if len(prefix) != LENGTH_BYTES:
        raise broken("S001", f"the file is only {len(prefix)} bytes long", file=file, start=0, stop=len(prefix))
    (length,) = struct.unpack("<Q", prefix)
    if length > HEADER_BYTES_MAX:
        raise broken("S001", f"header length {length}", file=file, start=0, stop=LENGTH_BYTES)
    data_start = LENGTH_BYTES + int(length)
    if data_start % DATA_ALIGNMENT_BYTES:
        raise broken("S003", f"the data begins at byte {data_start}", file=file, start=0, stop=LENGTH_BYTES)
    return data_start


def begins_like_data_file(beginning: bytes) -> bool:
    """Returns whether a file is a data file that a writer has written, or has begun to write.

    ``beginning`` has the first BEGINNING_BYTES bytes of the file, or all of them if there are fewer. If the writer has
    died, any bytes of the header may be missing: then the file ends before them, or they are zeros. There are no zeros
    in the text of a whole header.
    """
    text = beginning[LENGTH_BYTES:]
    if not any(beginning[:SECTOR_BYTES]):
        return True
    try:
        header_bytes(beginning[:LENGTH_BYTES].ljust(LENGTH_BYTES, b"\0"), "")
    except FormatError:
        return False
    return len(beginning) < BEGINNING_BYTES or 0 in text or b'"zckpt.' in text


def decode_header(raw: bytes, file_bytes: int, data_file: DataFileId) -> Header:
    """Parses a header and checks it.

    Args:
        raw: all bytes of the file before its data.
        file_bytes: the size of the file.
        data_file: the data file that the header has to belong to.

    Returns:
        The header.

    Raises:
        FormatError: the header breaks one of the rules S001 to S006, or S008 because of the dtype, shape or length of a
            filler, or a name in it breaks N001 or N002.
    """
    file = data_file.path
    data_start = header_bytes(raw[:LENGTH_BYTES], file)
    if len(raw) != data_start:
        raise broken("S001", f"{len(raw)} bytes of a header of {data_start}", file=file, start=0, stop=len(raw))
    tree = _parse_json(raw[LENGTH_BYTES:], file)
    metadata = tree.pop(names.METADATA, None)
    shapes, sections = _check_metadata(metadata, data_file)
    entries = sorted((_entry(name, value, file) for name, value in tree.items()), key=lambda e: (e.offset, e.nbytes))
    _check_tiling(entries, file_bytes - data_start, file)
    for entry in entries:
        _check_piece(entry, shapes, file)
    return Header(data_file, tuple(entries), shapes, sections, data_start)


def save_of(raw: bytes, file: str) -> tuple[str, str]:
    """Returns the save id and the world size that a header names. They are not checked. Raises FormatError (S002,
    S006)."""
    metadata = _parse_json(raw[LENGTH_BYTES:], file).get(names.METADATA)
    values = metadata if isinstance(metadata, dict) else {}
    save_id, world_size = values.get("zckpt.save_id"), values.get("zckpt.world_size")
    if not (isinstance(save_id, str) and isinstance(world_size, str)):
        raise broken("S006", "the metadata does not say the save and the world size", file=file)
    return save_id, world_size


def _parse_json(raw: bytes, file: str) -> dict[str, Any]:
    """Returns the JSON object that a header text consists of. Raises FormatError (S002)."""
    text = raw.rstrip(b" ")
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise broken("S002", "the header is not a JSON object padded with spaces", file=file)

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise broken("S002", f"duplicate key {twice!r}", file=file)
        return members

    def constant(name: str) -> Any:
        raise broken("S002", f"{name} is not JSON", file=file)

    def integer(digits: str) -> int:
        if digits == "-0":
            raise broken("S002", "safetensors takes -0 for no integer", file=file)
        return int(digits)

    try:
        tree = json.loads(text.decode("utf-8"), object_pairs_hook=distinct, parse_constant=constant, parse_int=integer)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise broken("S002", f"the header cannot be parsed: {error}", file=file) from error
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        # An integer has more digits than Python converts.
        raise broken("S002", f"the header cannot be parsed: {error}", file=file) from error
    assert isinstance(tree, dict)
    return tree


def _check_metadata(metadata: object, data_file: DataFileId) -> tuple[dict[str, tuple[int, ...]], dict[str, Sections]]:
    """Checks the metadata of a header and returns the shapes and the sections of grids in them. Raises FormatError
    (S002, S006, N001, N002)."""
    file = data_file.path
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise broken("S006", "there is no metadata of strings", file=file)
    version = metadata.get("zckpt.version", "")
    if version.partition(".")[0] != "1":
        raise broken("S006", f"format version {reprlib.repr(version)}", file=file)
    for field, value in _identity(data_file).items():
        if metadata.get(field) != value:
            raise broken(
                "S006",
                f"{field} is {reprlib.repr(metadata.get(field))}, expected {value!r}",
                file=file,
                hint="the file belongs to another rank, part or save; restore the original",
            )
    if "zckpt.shapes" not in metadata:
        raise broken("S006", "the metadata lacks zckpt.shapes", file=file)
    shapes = _parse_json(metadata["zckpt.shapes"].encode("utf-8", "surrogatepass"), file)
    for name, shape in shapes.items():
        names.check_tensor_name(name, file=file)
        if not is_shape(shape):
            raise broken("S006", f"shape {reprlib.repr(shape)} of {name!r}", file=file)
    sections: dict[str, Sections] = {}
    for name, value in _parse_json(metadata.get("zckpt.grids", "{}").encode("utf-8", "surrogatepass"), file).items():
        of_tensor = unpacked_sections(value)
        if name not in shapes or not of_tensor or not fits(divided_sizes(of_tensor), shapes[name]):
            raise broken("S006", f"grid {reprlib.repr(value)} of {name!r}", file=file)
        sections[name] = of_tensor
    return {name: tuple(shape) for name, shape in shapes.items()}, sections


def is_shape(shape: object) -> bool:
    """Whether ``shape`` is a sequence of at most 64 integers of 0 or more whose product is within the limit."""
    if not (isinstance(shape, (list, tuple)) and len(shape) <= NDIM_MAX):
        return False
    product = 1
    for dim in shape:
        if not (type(dim) is int and 0 <= dim <= TENSOR_BYTES_MAX):
            return False
        product *= dim or 1  # torch computes the strides of tensors without elements, too.
    return product <= TENSOR_BYTES_MAX


def _entry(name: str, value: object, file: str) -> HeaderEntry:
    """Returns an entry of a header from its JSON. Raises FormatError (S004)."""
    if not (isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}):
        raise broken("S004", f"entry {name!r} does not have exactly dtype, shape and data_offsets", file=file)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (isinstance(dtype, str) and dtype in ITEM_BYTES):
        raise broken("S004", f"entry {name!r} has the unknown dtype {reprlib.repr(dtype)}", file=file)
    if not is_shape(shape):
        raise broken("S004", f"entry {name!r} has the shape {reprlib.repr(shape)}", file=file)
    if not (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(offset) is int and 0 <= offset <= TENSOR_BYTES_MAX for offset in offsets)
        and offsets[1] - offsets[0] == math.prod(shape) * ITEM_BYTES[dtype]
    ):
        raise broken("S004", f"entry {name!r}: {dtype} {shape} does not fill {reprlib.repr(offsets)}", file=file)
    return HeaderEntry(name, dtype, tuple(shape), offsets[0], offsets[1] - offsets[0])


def _check_tiling(entries: list[HeaderEntry], data_bytes: int, file: str) -> None:
    """Raises FormatError (S005) unless the entries, in the order of their offsets, tile the data."""
    stop = 0
    for entry in entries:
        if entry.offset != stop:
            raise broken("S005", f"entry {entry.name!r} begins at {entry.offset}, expected {stop}", file=file)
        stop += entry.nbytes
    if stop != data_bytes:
        raise broken("S005", f"the entries end at {stop} of {data_bytes} data bytes", file=file)


def _check_piece(entry: HeaderEntry, shapes: Mapping[str, tuple[int, ...]], file: str) -> None:
    """Raises FormatError (S004, S006, S008, N001, N002) if the name of an entry does not suit its offset, dtype or
    shape."""
    if entry.is_filler:
        if entry.dtype != "U8" or len(entry.shape) != 1 or entry.nbytes > FILLER_BYTES_MAX:
            raise broken("S008", f"filler {entry.name!r} is {entry.dtype} {entry.shape}", file=file)
        return
    if entry.offset % ITEM_BYTES[entry.dtype]:
        raise broken(
            "S004", f"entry {entry.name!r} of {entry.dtype} begins at the odd offset {entry.offset}", file=file
        )
    split = names.split_piece_name(entry.name)
    if split is None:
        names.check_tensor_name(entry.name, file=file)
        return
    name, start, stop = split
    if name not in shapes:
        names.check_tensor_name(name, file=file)  # The names in ``shapes`` have been checked already.
        raise broken("S006", f"the metadata lacks the whole shape of {name!r}", file=file)
    if not (start < stop <= math.prod(shapes[name]) and entry.shape == (stop - start,)):
        raise broken("S004", f"entry {entry.name!r} has the shape {entry.shape} in a tensor {shapes[name]}", file=file)


def regions(header: Header) -> list[tuple[int, int]]:
    """Returns ``(start, stop)``, in bytes of the file, of each region that blocks are cut from: of the header, then of
    each entry."""
    bounds = [0, header.data_start]
    bounds += [header.data_start + entry.offset + entry.nbytes for entry in header.entries]
    return list(pairwise(bounds))
