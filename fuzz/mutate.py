"""Changes to a checkpoint at the level of its fields: taken apart, changed, and put together with digests that fit."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
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
EDGES = (0, 1, 2, 3, 4, 7, 8, 16, 4095, 4096, 4097, 8192, 1 << 20, 1 << 31, 1 << 32)
EDGES += ((1 << 62) - 1, 1 << 62, (1 << 64) - 1)
TEXTS = ("", "w", "b", "head", "master", "exp_avg", "state", "F32", "I64", "U8", "F64", "BOOL", "@pad", "w@0:2")
TEXTS += ("w@0:3", "..", "a/b", "rank/0", "rank/1", "tree/0/0", "__metadata__", "0123456789abcdef", "{}")
TEXTS += ('{"w":[3]}', "\0", "1.0")


class Draw:
    """Choices made by bytes; when they are used up, the first of everything."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, below: int) -> int:
        if below <= 1 or self.at >= len(self.data):
            return 0
        size = 1 if below <= 256 else 2
        value = int.from_bytes(self.data[self.at : self.at + size], "little")
        self.at += size
        return value % below

    def choice(self, of: Any) -> Any:
        return of[self.number(len(of))]

    def value(self, old: Any, depth: int = 0) -> Any:
        """Something in the place of ``old``, mostly of its kind."""
        kind = self.number(16)
        if isinstance(old, int) and kind < 12:
            return max(old + self.choice((1, -1, 2, -2, 4, -4, 8, 4096, -4096)), 0) if kind < 7 else self.choice(EDGES)
        if isinstance(old, str) and kind < 12:
            return self.choice(TEXTS)
        if isinstance(old, bytes) and kind < 12:
            changed = bytearray(old or b"\0")
            changed[self.number(len(changed))] ^= 1 << self.number(8)
            return bytes(changed)
        if isinstance(old, list) and kind < 12 and old:
            place, other = self.number(len(old)), self.number(len(old))
            if kind < 3:
                return [*old[:place], *old[place + 1 :]]
            if kind < 6:
                return [*old[:place], old[other], *old[place:]]
            changed = [*old]
            changed[place], changed[other] = old[other], old[place]
            return changed
        plain = (None, True, -1, 1.5, "", b"", [], {}, self.choice(EDGES), self.choice(TEXTS))
        made = self.choice(plain)
        return [made] * (1 + self.number(3)) if depth == 0 and kind == 15 else made


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in nested maps and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*way, key)
        yield from places(item, (*way, key))


def change(value: Any, draw: Draw) -> None:
    """One thing in nested maps and lists: another value, none, or one more key."""
    ways = list(places(value))
    if not ways:
        return
    *way, last = draw.choice(ways)
    for key in way:
        value = value[key]
    what = draw.number(16)
    if what == 15 and isinstance(value, dict):
        del value[last]
    elif what == 14 and isinstance(value, dict):
        value[draw.choice(TEXTS)] = value[last]
    else:
        value[last] = draw.value(value[last])


@dataclass
class DataFile:
    """One data file: its header as JSON has it, and its data."""

    header: Any
    data: bytearray

    def head(self, data_start: int) -> bytes:
        text = json.dumps(self.header, default=str).encode("utf-8", "surrogatepass")
        size = -(-max(len(text) + 8, data_start) // 4096) * 4096
        return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)

    def blocks(self, head: bytes, block_bytes: int) -> Iterator[bytes]:
        within = range(len(self.data) + 1)
        try:
            spans = sorted(e["data_offsets"] for name, e in self.header.items() if name != "__metadata__")
            spans = [(start, stop) for start, stop in spans if start in within and stop in within and start <= stop]
        except (AttributeError, KeyError, TypeError, ValueError):
            spans = [(0, len(self.data))]
        for region in (head, *(self.data[start:stop] for start, stop in spans)):
            for at in range(0, len(region), block_bytes):
                yield bytes(region[at : at + block_bytes])


@dataclass
class Spoilt:
    """A checkpoint taken apart. ``files`` are in the order of the manifest."""

    body: dict[Any, Any]
    state: Any
    index: list[dict[str, list[int]]]
    files: list[DataFile]
    seal: set[str]
    """What is made to fit when it is put together: bytes, index, blocks, table, body."""
    cut: dict[str, int]
    """Bytes by which files become shorter or longer in the end."""

    @classmethod
    def of(cls, path: Path) -> Spoilt:
        body = msgpack.unpackb(msgpack.unpackb((path / "manifest.msgpack").read_bytes())[3])
        data = path / f"data-{body['save_id']}"
        raw, chunks = (data / "index.bin").read_bytes(), body["chunks"]
        index = []
        for rows, pieces, offset, size in zip(*(chunks[c] for c in ("rows", "pieces", "offset", "bytes")), strict=True):
            columns = zstandard.ZstdDecompressor().decompress(raw[offset : offset + size])
            found, at = {}, 0
            for fields, count in ((ROW, rows), (PIECE, pieces)):
                for name, dtype in fields:
                    column = np.frombuffer(columns, dtype, count, at)
                    found[name], at = column.tolist(), at + column.nbytes
            index.append(found)
        files = []
        for name in _paths(body):
            content = (data / name).read_bytes()
            start = 8 + int.from_bytes(content[:8], "little")
            files.append(DataFile(json.loads(content[8:start]), bytearray(content[start:])))
        state = msgpack.unpackb(body["state"], strict_map_key=False)
        return cls(body, state, index, files, {"bytes", "index", "blocks", "table", "body"}, {})

    def copy(self) -> Spoilt:
        return copy.deepcopy(self)

    def change(self, draw: Draw) -> Spoilt:
        while draw.at < len(draw.data):
            what = draw.number(12)
            if what < 4:
                change(self.body, draw)
            elif what < 6:
                change(self.index, draw)
            elif what < 8:
                change(draw.choice(self.files).header, draw)
            elif what == 8:
                change(self.state, draw)
            elif what == 9:
                data = draw.choice(self.files).data
                if data:
                    data[draw.number(len(data))] ^= 1 << draw.number(8)
                elif draw.number(2):
                    data += b"\0" * draw.number(9)
            elif what == 10:
                self.seal.discard(draw.choice(("bytes", "index", "blocks", "table", "body")))
            else:
                self.cut[draw.choice(("index.bin", "rank-00001/digests.bin", "rank-00000/master.safetensors"))] = (
                    draw.choice((-1, 1, -16, 16, -4096))
                )
        return self

    def write(self, path: Path) -> None:
        body = self.body
        try:
            names, block_bytes = _paths(body), max(int(body["block_bytes"]), 1024)
            data = path / f"data-{body['save_id']:.20}"
            list(map(str.encode, [*names, str(data)]))
            if any(".." in name or "\0" in name for name in [*names, str(data)]):
                raise ValueError
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            names, block_bytes = [f"rank-00000/{i}" for i in range(len(self.files))], 4096
            data = path / "data-0123456789abcdef"
        tables: dict[str, list[bytes]] = {}
        for number, (name, file) in enumerate(zip(names, self.files, strict=False)):
            start = _get(body, "files", "data_start", number)
            head = file.head(start if isinstance(start, int) and start <= 1 << 20 else 4096)
            _put(data / name, head + bytes(file.data))
            if "bytes" in self.seal:
                _set(body, "files", "bytes", number, len(head) + len(file.data))
                _set(body, "files", "data_start", number, len(head))
            hashes = [xxhash.xxh3_128_digest(block) for block in file.blocks(head, block_bytes)]
            tables.setdefault(name.partition("/")[0], []).extend(hashes)
        if "blocks" in self.seal:
            for number, (rank, table) in enumerate(tables.items()):
                _put(data / rank / "digests.bin", b"".join(table))
                if "table" in self.seal:
                    _set(body, "digests", number, xxhash.xxh3_128_digest(b"".join(table)))
        self._write_index(data / "index.bin")
        for name, delta in self.cut.items():
            if (data / name).is_file():
                raw = (data / name).read_bytes()
                (data / name).write_bytes(raw[:delta] if delta < 0 else raw + b"\0" * delta)
        if isinstance(body.get("state"), bytes):
            body["state"] = msgpack.packb(self.state, strict_types=False)
        packed = msgpack.packb(body)
        hashed = xxhash.xxh3_128_digest(packed if "body" in self.seal else b"")
        _put(path / "manifest.msgpack", msgpack.packb(["zckpt", body.get("version"), hashed, packed]))

    def _write_index(self, path: Path) -> None:
        frames, offset = [], 0
        for number, columns in enumerate(self.index):
            raw = b""
            try:
                for name, dtype in ROW + PIECE:
                    most = (1 << 8 * np.dtype(dtype).itemsize) - 1
                    raw += np.array([int(value) & most for value in columns[name]], dtype).tobytes()
            except (KeyError, TypeError, ValueError, OverflowError):
                pass
            frames.append(zstandard.ZstdCompressor(level=1).compress(raw))
            if "index" in self.seal:
                _set(self.body, "chunks", "offset", number, offset)
                _set(self.body, "chunks", "bytes", number, len(frames[-1]))
                _set(self.body, "chunks", "digest", number, xxhash.xxh3_128_digest(frames[-1]))
            offset += len(frames[-1])
        if "index" in self.seal:
            self.body["index_bytes"] = offset
        _put(path, b"".join(frames))


def _paths(body: dict[Any, Any]) -> list[str]:
    files, prefix = body["files"], ("", "host.", "swap.")
    return [
        f"rank-{rank:05d}/{prefix[tier]}{body['parts'][part]['name']}.safetensors"
        for rank, part, tier in zip(files["rank"], files["part"], files["tier"], strict=True)
    ]


def _get(value: Any, *way: Any) -> Any:
    try:
        for key in way:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _set(value: Any, *way: Any) -> None:
    *way, last, new = way
    holder = _get(value, *way)
    if isinstance(holder, list) and isinstance(last, int) and last < len(holder):
        holder[last] = new


def _put(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError:
        pass  # a name that no file system takes: then the file is missing
