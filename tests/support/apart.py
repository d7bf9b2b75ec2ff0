"""Takes a checkpoint apart into its fields, and puts it together again with lengths and digests that fit.

A test changes the fields in between. The module imports nothing of zckpt and checks nothing, so the caller can write
right and wrong checkpoints.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import xxhash
import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROW = (("name", "<u4"), ("count", "<u4"))
PIECE = (("rank", "<u4"), ("tier", "u1"), ("length", "<u8"), ("offset", "<u8"), ("block", "<u4"))
PREFIXES = ("", "host.", "swap.")
SEALS = frozenset({"bytes", "index", "blocks", "table", "body"})


def edit_field(value: Any, path: str, change: Any) -> None:
    """Sets the entry at ``path``, such as ``parts.0.names``, of nested maps and lists.

    A ``change`` that is a function gets the old entry and returns the new one. None removes the entry.
    """
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in way:
        value = value[step]
    if change is None:
        del value[last]
    else:
        value[last] = change(value[last]) if callable(change) else change


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def frame(content: bytes, *, size: int | None = None) -> bytes:
    """Returns a zstd frame with one uncompressed block, whose bytes are the same with every version of zstd.

    ``size`` is the content size that the frame claims, by default that of ``content``.
    """
    size = len(content) if size is None else size
    assert len(content) < 1 << 17
    return (
        b"\x28\xb5\x2f\xfd\xa0" + size.to_bytes(4, "little") + (len(content) << 3 | 1).to_bytes(3, "little") + content
    )


def columns(chunk: dict[str, list[int]]) -> bytes:
    """Returns the content of one chunk of the index."""
    return b"".join(np.array(chunk[name], dtype).tobytes() for name, dtype in ROW + PIECE)


def get(value: Any, *way: Any) -> Any:
    """Returns the value at the end of ``way`` in nested maps and lists, or None if there is none."""
    for key in way:
        items = dict(enumerate(value)) if isinstance(value, list) else value
        if not isinstance(items, dict) or key not in items:
            return None
        value = items[key]
    return value


def put(value: Any, *way: Any) -> None:
    """Sets an element of a list, if the way leads to a list with such an element. The last of ``way`` is the value."""
    *to_the_list, number, new = way
    column = get(value, *to_the_list)
    if isinstance(column, list) and number < len(column):
        column[number] = new


@dataclass
class DataFile:
    """A data file."""

    name: str
    header: Any
    """The JSON of the header, as encoded bytes or as the value that they stand for."""
    data: bytearray

    @property
    def head(self) -> bytes:
        """The bytes of the file before its data."""
        text = self.header if isinstance(self.header, bytes) else json.dumps(self.header, default=str).encode()
        size = -(-(len(text) + 8) // 4096) * 4096
        return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)

    def blocks(self, block_bytes: int) -> Iterator[bytes]:
        """Yields the blocks of the header, and then those of each entry that is within the data."""
        within = range(len(self.data) + 1)
        header = self.header if isinstance(self.header, dict) else {}
        spans = [get(entry, "data_offsets") for name, entry in header.items() if name != "__metadata__"]
        spans = [s for s in spans if isinstance(s, list) and len(s) == 2 and all(type(at) is int for at in s)]
        for region in (self.head, *(self.data[a:b] for a, b in sorted(spans) if a in within and b in within)):
            for at in range(0, len(region), block_bytes):
                yield bytes(region[at : at + block_bytes])


@dataclass
class Apart:
    """The fields of a checkpoint."""

    body: dict[Any, Any]
    """The body of the manifest."""
    state: Any
    """The tree of state, as a value or packed."""
    index: list[dict[str, list[int]]]
    """The columns of each chunk of the index."""
    files: list[DataFile]
    """The data files, in the order of the manifest, which is also that of their digests."""
    seal: set[str] = field(default_factory=lambda: set(SEALS))
    """The names of the lengths and digests that ``write`` makes fit."""
    frames: dict[int, bytes] = field(default_factory=dict)
    """Frames for those chunks of the index that are not made from ``index``."""
    version: Any = (1, 0)

    @classmethod
    def of(cls, path: Path) -> Apart:
        body = msgpack.unpackb(msgpack.unpackb((path / "manifest.msgpack").read_bytes())[3])
        data = path / f"data-{body['save_id']}"
        raw, chunks = (data / "index.bin").read_bytes(), body["chunks"]
        index = []
        for rows, pieces, offset, size in zip(*(chunks[c] for c in ("rows", "pieces", "offset", "bytes")), strict=True):
            content = zstandard.ZstdDecompressor().decompress(raw[offset : offset + size])
            chunk, at = {}, 0
            for fields, count in ((ROW, rows), (PIECE, pieces)):
                for name, dtype in fields:
                    column = np.frombuffer(content, dtype, count, at)
                    chunk[name], at = column.tolist(), at + column.nbytes
            index.append(chunk)
        files, of = [], body["files"]
        for rank, part, tier in zip(of["rank"], of["part"], of["tier"], strict=True):
            name = f"rank-{rank:05d}/{PREFIXES[tier]}{body['parts'][part]['name']}.safetensors"
            content = (data / name).read_bytes()
            start = 8 + int.from_bytes(content[:8], "little")
            files.append(DataFile(name, json.loads(content[8:start]), bytearray(content[start:])))
        return cls(body, msgpack.unpackb(body["state"], strict_map_key=False), index, files)

    def copy(self) -> Apart:
        return copy.deepcopy(self)

    def write(self, path: Path) -> None:
        """Writes the checkpoint. The files keep the names that they had, even if the manifest names others now."""
        body, data = self.body, path / "data-0123456789abcdef"
        block_bytes = get(body, "block_bytes")
        block_bytes = block_bytes if isinstance(block_bytes, int) and block_bytes > 1000 else 4096
        tables: dict[str, list[bytes]] = {}
        for number, file in enumerate(self.files):
            write(data / file.name, file.head + bytes(file.data))
            table = tables.setdefault(file.name.partition("/")[0], [])
            if "bytes" in self.seal:
                put(body, "files", "bytes", number, len(file.head) + len(file.data))
                put(body, "files", "data_start", number, len(file.head))
                put(body, "files", "first_block", number, len(table))
            table += [digest(block) for block in file.blocks(block_bytes)]
        for rank, table in enumerate(tables.values()):
            if "blocks" in self.seal:
                write(data / f"rank-{rank:05d}" / "digests.bin", b"".join(table))
            if "table" in self.seal:
                put(body, "digests", rank, digest(b"".join(table)))
        frames = [self.frames.get(number) or frame(columns(chunk)) for number, chunk in enumerate(self.index)]
        offset = 0
        for number, content in enumerate(frames if "index" in self.seal else ()):
            for column, value in (("offset", offset), ("bytes", len(content)), ("digest", digest(content))):
                put(body, "chunks", column, number, value)
            offset += len(content)
            body["index_bytes"] = offset
        write(data / "index.bin", b"".join(frames))
        if isinstance(get(body, "state"), bytes):
            body["state"] = self.state if isinstance(self.state, bytes) else msgpack.packb(self.state)
        packed = msgpack.packb(body)
        write(path / "manifest.msgpack", envelope(packed, digest(packed if "body" in self.seal else b""), self.version))


def envelope(body: bytes, hashed: bytes | None = None, version: Any = (1, 0)) -> bytes:
    return msgpack.packb(["zckpt", version, hashed or digest(body), body])


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
