"""The data file: a plain safetensors file of one rank, one part and one tier (spec, "Data files")."""

from __future__ import annotations

import json
import math
import reprlib
import struct
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.format import names
from zckpt.format.digest import block_count
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import DATA_ALIGNMENT_BYTES, HEADER_BYTES_MAX, NDIM_MAX, TENSOR_BYTES_MAX
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LENGTH_BYTES = 8
FILLER_BYTES_MAX = DATA_ALIGNMENT_BYTES - 1


@dataclass(frozen=True, slots=True)
class ShardId:
    """Which file of which save: what the metadata of a data file repeats."""

    save_id: str
    rank: int
    world_size: int
    part: str
    tier: str
    origin: str = ""
    """The save id in the header, where it is that of an earlier save, which has written the file; else empty."""

    @property
    def path(self) -> str:
        return names.shard_path(self.save_id, self.rank, self.part, self.tier)


class Entry(NamedTuple):
    """One tensor of the safetensors header. ``offset`` and ``nbytes`` are bytes, ``offset`` counted from the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def is_filler(self) -> bool:
        return self.name.startswith(names.FILLER_PREFIX)


@dataclass(frozen=True, slots=True)
class Header:
    """A header, checked. ``entries`` are in the order of their offset; ``data_start`` is a byte of the file."""

    shard: ShardId
    entries: tuple[Entry, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Whole shapes of the tensors that have partial pieces here."""
    data_start: int

    def whole_shape(self, entry: Entry) -> tuple[int, ...]:
        """Of the tensor that ``entry`` is a piece of."""
        span = names.split_piece_name(entry.name)
        return entry.shape if span is None else self.shapes[span[0]]

    def first_blocks(self, block_bytes: int) -> list[int]:
        """The number of each entry's first digest, counted from the file's first; and last, how many the file has."""
        sizes = (self.data_start, *(entry.nbytes for entry in self.entries))
        return list(accumulate(block_count(nbytes, block_bytes) for nbytes in sizes))


def _identity(shard: ShardId) -> dict[str, str]:
    return {
        "zckpt.save_id": shard.origin or shard.save_id,
        "zckpt.part": shard.part,
        "zckpt.rank": str(shard.rank),
        "zckpt.world_size": str(shard.world_size),
        "zckpt.tier": shard.tier,
    }


def encode_header(
    shard: ShardId,
    entries: Sequence[tuple[str, str, tuple[int, ...], int, int]],
    shapes: Mapping[str, tuple[int, ...]],
) -> bytes:
    """The header's bytes, length prefix included, padded so that the data begins at a multiple of 4096.

    ``entries`` are as ``Entry``.
    """
    metadata = {
        "format": "pt",  # transformers refuses to load a file that does not say so
        "zckpt.version": "1.0",
        **_identity(shard),
        "zckpt.shapes": json.dumps(shapes, separators=(",", ":"), ensure_ascii=False),
    }
    members = [f'"{names.METADATA}":{json.dumps(metadata, separators=(",", ":"), ensure_ascii=False)}']
    members += [  # by hand: json.dumps of a dict for each of many small tensors would take longer than their data
        f'{encode_basestring(name)}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],'
        f'"data_offsets":[{offset},{offset + nbytes}]}}'
        for name, dtype, shape, offset, nbytes in entries
    ]
    text = f"{{{','.join(members)}}}".encode()
    padded = -(-(LENGTH_BYTES + len(text)) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES - LENGTH_BYTES
    if padded > HEADER_BYTES_MAX:
        raise broken("S001", f"{len(entries)} entries need a header of {padded} bytes", file=shard.path)
    return struct.pack("<Q", padded) + text.ljust(padded)


def with_origin(header: bytes, shard: ShardId) -> bytes:
    """The header that ``encode_header`` has made for ``shard``, with its ``origin`` as the save id. It is as long as
    before."""
    own, other = (f'"zckpt.save_id":"{save_id}"'.encode() for save_id in (shard.save_id, shard.origin))
    return header.replace(own, other, 1)


def header_bytes(prefix: bytes, file: str) -> int:
    """Bytes from the file's start to its data, from the file's first 8 bytes. Raises FormatError (S001, S003)."""
    if len(prefix) != LENGTH_BYTES:
        raise broken("S001", f"the file is only {len(prefix)} bytes long", file=file, start=0, stop=len(prefix))
    (length,) = struct.unpack("<Q", prefix)
    if length > HEADER_BYTES_MAX:
        raise broken("S001", f"header length {length}", file=file, start=0, stop=LENGTH_BYTES)
    data_start = LENGTH_BYTES + int(length)
    if data_start % DATA_ALIGNMENT_BYTES:
        raise broken("S003", f"the data begins at byte {data_start}", file=file, start=0, stop=LENGTH_BYTES)
    return data_start


def decode_header(raw: bytes, file_bytes: int, shard: ShardId) -> Header:
    """Parses and checks the header of ``shard``'s file: all bytes before the data, of a file ``file_bytes`` long.

    Raises FormatError (S001 to S006, and what concerns a filler's length in S008).
    """
    file = shard.path
    data_start = header_bytes(raw[:LENGTH_BYTES], file)
    if len(raw) != data_start:
        raise broken("S001", f"{len(raw)} bytes of a header of {data_start}", file=file, start=0, stop=len(raw))
    tree = _parse_json(raw[LENGTH_BYTES:], file)
    metadata = tree.pop(names.METADATA, None)
    shapes = _check_metadata(metadata, shard)
    entries = sorted((_entry(name, value, file) for name, value in tree.items()), key=lambda e: (e.offset, e.nbytes))
    _check_tiling(entries, file_bytes - data_start, file)
    for entry in entries:
        _check_piece(entry, shapes, file)
    return Header(shard, tuple(entries), shapes, data_start)


def save_of(raw: bytes, file: str) -> tuple[str, str]:
    """What a header says of the save id and the world size; nothing of it is checked. Raises FormatError (S002,
    S006)."""
    metadata = _parse_json(raw[LENGTH_BYTES:], file).get(names.METADATA)
    found = metadata if isinstance(metadata, dict) else {}
    save_id, world_size = found.get("zckpt.save_id"), found.get("zckpt.world_size")
    if not (isinstance(save_id, str) and isinstance(world_size, str)):
        raise broken("S006", "the metadata does not say the save and the world size", file=file)
    return save_id, world_size


def _parse_json(raw: bytes, file: str) -> dict[str, Any]:
    text = raw.rstrip(b" ")
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise broken("S002", "the header is not a JSON object padded with spaces", file=file)

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise broken("S002", f"duplicate key {twice!r}", file=file)
        return found

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
        raise broken("S002", f"the header cannot be parsed: {error}", file=file) from error  # an integer of 5000 digits
    assert isinstance(tree, dict)
    return tree


def _check_metadata(metadata: object, shard: ShardId) -> dict[str, tuple[int, ...]]:
    file = shard.path
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise broken("S006", "there is no metadata of strings", file=file)
    version = metadata.get("zckpt.version", "")
    if version.partition(".")[0] != "1":
        raise broken("S006", f"format version {reprlib.repr(version)}", file=file)
    for field, value in _identity(shard).items():
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
    return {name: tuple(shape) for name, shape in shapes.items()}


def is_shape(shape: object) -> bool:
    """Whether this is a list of at most 64 non-negative integers whose product is in bounds."""
    if not (isinstance(shape, (list, tuple)) and len(shape) <= NDIM_MAX):
        return False
    if not all(type(dim) is int and 0 <= dim <= TENSOR_BYTES_MAX for dim in shape):
        return False
    return math.prod(dim or 1 for dim in shape) <= TENSOR_BYTES_MAX  # torch computes strides of empty tensors too


def _entry(name: str, value: object, file: str) -> Entry:
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
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1] - offsets[0])


def _check_tiling(entries: list[Entry], data_bytes: int, file: str) -> None:
    stop = 0
    for entry in entries:
        if entry.offset != stop:
            raise broken("S005", f"entry {entry.name!r} begins at {entry.offset}, expected {stop}", file=file)
        stop += entry.nbytes
    if stop != data_bytes:
        raise broken("S005", f"the entries end at {stop} of {data_bytes} data bytes", file=file)


def _check_piece(entry: Entry, shapes: Mapping[str, tuple[int, ...]], file: str) -> None:
    if entry.is_filler:
        if entry.dtype != "U8" or len(entry.shape) != 1 or entry.nbytes > FILLER_BYTES_MAX:
            raise broken("S008", f"filler {entry.name!r} is {entry.dtype} {entry.shape}", file=file)
        return
    if entry.offset % ITEM_BYTES[entry.dtype]:
        raise broken(
            "S004", f"entry {entry.name!r} of {entry.dtype} begins at the odd offset {entry.offset}", file=file
        )
    span = names.split_piece_name(entry.name)
    if span is None:
        names.check_tensor_name(entry.name, file=file)
        return
    name, start, stop = span
    names.check_tensor_name(name, file=file)
    if name not in shapes:
        raise broken("S006", f"the metadata lacks the whole shape of {name!r}", file=file)
    if not (start < stop <= math.prod(shapes[name]) and entry.shape == (stop - start,)):
        raise broken("S004", f"entry {entry.name!r} has the shape {entry.shape} in a tensor {shapes[name]}", file=file)


def regions(header: Header) -> list[tuple[int, int]]:
    """``(start, stop)`` in bytes of the file: the header, then each entry; what blocks are cut from."""
    bounds = [0, header.data_start]
    bounds += [header.data_start + entry.offset + entry.nbytes for entry in header.entries]
    return list(pairwise(bounds))
