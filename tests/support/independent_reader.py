"""A second reader, written from spec/format.md alone, without code of zckpt.

Opening a checkpoint checks everything except for the trees.
"""

import json
import math
import re
import struct
from itertools import accumulate, chain, groupby, islice, pairwise, product
from pathlib import Path

import msgpack
import xxhash
import zstandard

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
SIZES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
TIERS = [("device", ""), ("host", "host."), ("nvme", "swap.")]
MIB, UINT, TEXT = 2**20, range(2**62), "[^\0-\x1f\x7f-\x9f\ud800-\udfff]+"
NAME = rf"(?!@|__metadata__\Z|.*@[0-9]+:[0-9]+\Z){TEXT}"
PART = {"name": str, "layout": range(2**22 + 1), "names": [UINT], "shapes": [UINT], "dtypes": [str]}
FILES = {name: [UINT] for name in ("rank", "part", "tier", "bytes", "data_start", "first_block")}
CHUNKS = {name: [UINT] for name in ("layout", "first_row", "rows", "pieces", "offset", "bytes")} | {"digest": [bytes]}
BODY = {"save_id": str, "step": UINT, "world_size": range(1, 2**20 + 1), "block_bytes": range(4096, 2**26 + 1, 4096)}
BODY |= {"names": [str], "aliases": dict, "shapes": list, "parts": [PART], "files": FILES, "chunks": CHUNKS}
BODY |= {"digests": [bytes], "index_bytes": UINT, "state": bytes, "writer": dict}
LIMITS = {"names": 2**22, "aliases": 2**22, "parts": 256}
ENTRY = {"dtype": str, "shape": [UINT], "data_offsets": [UINT]}


def need(holds, rule, what):
    if not holds:
        raise ValueError(f"{rule}: {what!r}")


def parse(rule, function, *args, **options):
    try:
        return function(*args, **options)
    except (ValueError, TypeError, RecursionError, struct.error, zstandard.ZstdError) as error:
        raise ValueError(f"{rule}: {error!r}") from error


def distinct(pairs):
    need(len(dict(pairs)) == len(pairs), "duplicate key", pairs)
    return dict(pairs)


def unpack(rule, data, too_deep=None):
    try:
        return parse(rule, msgpack.unpackb, data, strict_map_key=False, object_pairs_hook=distinct)
    except ValueError as error:
        need(not isinstance(error.__cause__, msgpack.StackError | RecursionError), too_deep or rule, "depth")
        raise


def version(raw):
    """Returns the version in the envelope, without looking at the bytes after it."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(raw), 1))
    unpacker.feed(raw)
    try:
        need(unpacker.read_array_header() >= 2, "M001", raw[:12])
        start = unpacker.tell()
        unpacker.skip()
        middle = unpacker.tell()
        unpacker.skip()
    except (ValueError, msgpack.OutOfData) as error:
        raise ValueError(f"M001: {error!r}") from error
    need(raw[start:middle] == b"\xa5zckpt", "M001", raw[:12])
    return parse("M002", msgpack.unpackb, raw[middle : unpacker.tell()])


def integer(digits):
    need(digits != "-0", "no integer", digits)
    return int(digits)


def parse_object(rule, text):
    value = parse(rule, json.loads, text, object_pairs_hook=distinct, parse_constant=integer, parse_int=integer)
    need(type(value) is dict, rule, value)
    return value


def containers(value):
    """Returns the number of arrays and maps in a value."""
    level, count = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        count += len(level)
        level = [*chain(*(item.values() if isinstance(item, dict) else item for item in level))]
    return count


def sound(name, shape):
    """Returns whether a tensor may have this name and this shape."""
    short = fits(shape, [UINT]) and len(shape) <= 64 and math.prod(dim or 1 for dim in shape) in UINT
    return short and fits(name, str) and re.fullmatch(NAME, name) and len(name.encode()) <= 1024


def fits(value, kind):
    """Returns whether a value is of a kind.

    A range stands for the integers in it, a list of one kind for an array of it, a dict of kinds for a map that has
    these fields, and a class for its instances.
    """
    if isinstance(kind, list):
        return type(value) is list and all(fits(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        return type(value) is dict and all(fits(value.get(field), kind[field]) for field in kind)
    return type(value) is int and value in kind if isinstance(kind, range) else type(value) is kind


def cut(lengths, elements, world_size, name):
    """Yields the copy and the first element of each piece of a row."""
    copy, start, remaining = 0, 0, 2**62 - 1
    for length in lengths:
        need(copy < world_size and length <= remaining, "I005", name)
        need(1 <= length <= elements - start or length == elements == 0, "I005", name)
        yield copy, start
        start, remaining = start + length, remaining - length
        if start == elements:
            copy, start = copy + 1, 0
    need(start == 0, "I005", name)


def intervals(sections):
    """Returns the intervals of all sections of one dimension, each as its first index and its number of indices."""
    return [*chain(*(zip(section[::2], section[1::2], strict=True) for section in sections))]


def valid_grid(grid, shape):
    """Returns whether a grid is sound, and whether it may be that of a tensor of this shape. None stands for any."""
    sound = fits(grid, [[[UINT]]]) and len(grid) <= 64 and not any(len(s) % 2 or not s for dim in grid for s in dim)
    if not sound or (shape is not None and ((grid and len(grid) != len(shape)) or 0 in shape)):
        return sound and grid == []
    for number, dim in enumerate(grid):
        ends = [*accumulate((count for _, count in sorted(intervals(dim))), initial=0)]
        whole = (
            all(count for _, count in intervals(dim)) and [first for first, _ in sorted(intervals(dim))] == ends[:-1]
        )
        if dim and not (whole and len(ends) > 2 and ends[-1] in UINT and (shape is None or ends[-1] == shape[number])):
            return False
    return (any(grid) and math.prod(len(dim) or 1 for dim in grid) <= 2**20) or grid == []


def order(grid, shape):
    """Yields the numbers that the elements have in row-major order, in the order of a grid."""
    dims = []
    for size, sections in zip(shape, grid or [[]] * len(shape), strict=True):
        runs = [[range(f, f + count) for f, count in intervals([section])] for section in sections] or [[range(size)]]
        dims.append([[*chain(*section)] for section in runs])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for box in product(*dims):
        for index in product(*box):
            yield sum(i * stride for i, stride in zip(index, strides, strict=True))


def read(root, path, begin, count, size=None):
    place = root.resolve() / path
    need(place.is_file() and place.resolve() == place, "F001 or F002", place)
    need(size in (None, place.stat().st_size), "F003 or I001", place)
    with place.open("rb") as file:
        file.seek(begin)
        return file.read(count)


class Reader:
    def __init__(self, path):
        if not (path := Path(path)).joinpath("manifest.msgpack").exists():
            name = read(path, "latest", 0, 257)
            need(len(name) <= 256 and re.fullmatch(rf"{TEXT}\n?", name.decode(errors="surrogateescape")), "L001", name)
            names = name.decode().removesuffix("\n").split("/")
            need(not {"", ".", ".."} & {*names}, "L001", name)
            if len(names) > 1:  # fails if a component is a link
                read(path, "/".join([*names, "manifest.msgpack"]), 0, 0)
            path = path.joinpath(*names)
        raw = read(path, "manifest.msgpack", 0, 256 * MIB + 1)
        need(len(raw) <= 256 * MIB, "M004", path)
        known = version(raw)
        need(fits(known, [UINT]) and len(known) == 2 and known[0] == 1, "M002", known)
        envelope = unpack("M001", raw)
        need(len(envelope) == 4 and fits(envelope[2:], [bytes]), "M001", raw[:32])
        need(xxhash.xxh3_128_digest(envelope[3]) == envelope[2], "M003", envelope[2])
        need(msgpack.packb(envelope) == raw, "M001", raw[:32])
        body = self.body = unpack("M005", envelope[3])
        need(type(body) is dict and containers(body) <= 2**22, "M005", "arrays and maps")
        need(fits(body, {"version": [UINT]}) and body["version"] == envelope[1], "M001", body.get("version"))
        need(fits(body, {"requires": [str]}), "M005", body.get("requires"))
        need({*body["requires"]} <= {"shared-files", "box", "pieces"}, "M006", body["requires"])
        need(fits(body, BODY) and len(body["digests"]) == body["world_size"], "M005", [*body])
        need(all(len(body[field]) <= most for field, most in LIMITS.items()), "M005", "limits")
        need({*map(len, [envelope[2], *body["digests"], *body["chunks"]["digest"]])} == {16}, "M005", "digests")
        shared = body.get("shared") if "shared-files" in body["requires"] else {}
        self.grids = body.get("grids") if "box" in body["requires"] else [[]]
        need(type(self.grids) is list, "M005", self.grids)
        columns = [part.get("grids", []) for part in body["parts"]] if "box" in body["requires"] else []
        need(fits(columns, [[UINT]]), "M005", columns)
        need(type(shared) is dict and fits([*shared.values()], [[UINT]]) and fits([*shared], [str]), "M005", shared)
        need(all(re.fullmatch("[0-9a-f]{16}", save) for save in [body["save_id"], *shared]), "N004", shared)
        files, chunks = ([*map(body[field].get, kind)] for field, kind in (("files", FILES), ("chunks", CHUNKS)))
        need(len({*map(len, files)}) == len({*map(len, chunks)}) == 1, "M005", "columns")
        places = [*zip(*files[:3], strict=True)]  # of data files: (rank, part id, tier)
        self.files = {place: (*file, {}) for place, *file in zip(places, *files[3:5], strict=True)}
        need(places == sorted(self.files), "M011", "order of files")
        listed, numbers = all(of and of == sorted({*of}) for of in shared.values()), [*chain(*shared.values())]
        need(bool(shared) == ("shared-files" in body["requires"]), "M014", shared)
        need(listed and body["save_id"] not in shared, "M014", shared)
        need(self.grids[:1] == [[]] and all(self.grids[1:]), "M015", self.grids)
        need(all(valid_grid(grid, None) for grid in self.grids), "M015", self.grids)
        need(len({*numbers}) == len(numbers) and max(numbers, default=-1) < len(places), "M014", numbers)
        self.origins = {places[number]: save for save, of in shared.items() for number in of}
        self.step, self.world_size, self.aliases = body["step"], body["world_size"], body["aliases"]
        for (rank, p, tier), (size, start, _) in self.files.items():
            need(rank < self.world_size and p < len(body["parts"]) and tier < len(TIERS), "M011", (rank, p, tier))
            need(start in range(4096, size + 1, 4096), "S003", start)
        self.root, self.data, self.tensors = path, f"data-{body['save_id']}", {}  # by key: dtype, shape, pieces
        self.claimed = {}  # the bytes of the pieces in each file
        self._read_parts(set(body["names"]), self._read_index(chunks))
        first_blocks = sorted(zip(files[5], places, strict=True))
        for rank in range(self.world_size):
            self._check_digests(rank, [(block, place) for block, place in first_blocks if place[0] == rank])

    def _read_index(self, chunks):
        """Returns the rows of each layout. A row is a name id and a list of (rank, tier, length, offset, block)."""
        at, layouts = 0, [part["layout"] for part in self.body["parts"]]
        index: dict[int, list[tuple[int, list[tuple[int, ...]]]]] = {layout: [] for layout in layouts}
        parts = [layouts.count(layout) for layout in chunks[0]]
        pieces = sum(count * times for count, times in zip(chunks[3], parts, strict=True))
        many = sum(parts) > 4096 or pieces > 2**26
        need(many == ("pieces" in self.body["requires"]), "M013", pieces)
        need(sum(parts) <= 2**16 and pieces <= 2**32, "M013", pieces)
        need(not many or pieces <= 1024 * self.body["index_bytes"], "M013", pieces)
        for layout, first_row, rows, pieces, offset, size, digest in zip(*chunks, strict=True):
            need(layout in index and (at, len(index[layout])) == (offset, first_row), "M013", offset)
            need(rows >= 1 and 1 <= size <= 64 * MIB, "M013", offset)
            data, at = read(self.root, f"{self.data}/index.bin", offset, size, self.body["index_bytes"]), at + size
            need(xxhash.xxh3_128_digest(data) == digest, "I002", offset)
            frame = parse("I003", zstandard.get_frame_parameters, data)
            need(frame.content_size == 8 * rows + 25 * pieces <= 64 * MIB >= frame.window_size, "I003", offset)
            data = parse("I003", zstandard.ZstdDecompressor().decompress, data, allow_extra_data=False)
            values = iter(parse("I003", struct.unpack, f"<{2 * rows + pieces}I{pieces}B{2 * pieces}Q{pieces}I", data))
            names, counts, *columns = ([*islice(values, count)] for count in (rows, rows, *[pieces] * 5))
            need(0 not in counts and sum(counts) == pieces, "I004", offset)
            pieces = zip(*columns, strict=True)
            index[layout] += [(name, [*islice(pieces, count)]) for name, count in zip(names, counts, strict=True)]
        need(at == self.body["index_bytes"], "M013", at)
        return index

    def _read_parts(self, known, index):
        names, shapes, parts, alias = (self.body[field] for field in ("names", "shapes", "parts", "aliases"))
        need(len({part["name"] for part in parts}) == len(parts) and len(known) == len(names) <= 2**22, "M007", "names")
        need(fits([*alias.values()], [str]) and known >= {*alias.values()} and not known & {*alias}, "M012", alias)
        for name in [*names, *alias]:
            need(sound(name, []), "N001 or N002", name)
        need(all(sound("any", shape) for shape in shapes), "M008", "shapes")
        for p, part in enumerate(parts):
            part, layout, ids, shape_ids, dtypes = map(part.get, PART)
            need(re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", part), "N003", part)
            need(len(ids) == len(shape_ids) == len(dtypes) and ids == sorted({*ids}), "M010", part)
            need(max(ids, default=-1) < len(names) and max(shape_ids, default=-1) < len(shapes), "M010", part)
            grids = parts[p].get("grids", [0] * len(ids)) if "box" in self.body["requires"] else [0] * len(ids)
            need(len(grids) == len(ids), "M010", part)
            for shape, grid in zip(shape_ids, grids, strict=True):
                need(grid < len(self.grids) and valid_grid(self.grids[grid], shapes[shape]), "M015", part)
            need(ids == [name for name, _ in index[layout]], "M013 or I004", part)
            for (name, row), shape, dtype, grid in zip(index[layout], shape_ids, dtypes, grids, strict=True):
                pieces = [*self._place(p, names[name], dtype, shapes[shape], self.grids[grid], row)]
                self.tensors[f"{part}/{names[name]}"] = dtype, shapes[shape], pieces, self.grids[grid]
        divided = any(grid for *_, grid in self.tensors.values())
        need(divided or "box" not in self.body["requires"], "M015", "no grid is used")

    def _place(self, p, name, dtype, shape, grid, row):
        """Yields the pieces of a tensor, each as (copy, file, first byte, end)."""
        elements, width = math.prod(shape), SIZES.get(dtype)
        need(width and elements * width in UINT, "M008 or M009", name)
        spans = [*cut([piece[2] for piece in row], elements, self.world_size, name)]
        for (rank, tier, length, offset, block), (copy, start) in zip(row, spans, strict=True):
            end, place = offset + length * width, (rank, p, tier)
            # A missing file has no room, not even for 0 bytes.
            size, data_start, entries = self.files.get(place, (0, 1, {}))
            need(offset % width == 0 and end <= size - data_start, "I006", name)
            whole = length == elements and not grid
            entry, entry_shape = (name, shape) if whole else (f"{name}@{start}:{start + length}", [length])
            need(entry not in entries, "S007", entry)
            fields = {"dtype": dtype, "shape": entry_shape, "data_offsets": [offset, end]}
            entries[entry] = fields, block, name, shape, grid
            self.claimed[place] = self.claimed.get(place, 0) + end - offset
            need(self.claimed[place] <= size - data_start, "I007", place)
            yield copy, place, offset, end

    def _read(self, place, begin, end):
        (rank, p, tier), (size, start, _) = place, self.files[place]
        path = f"{self.data}/rank-{rank:05}/{TIERS[tier][1]}{self.body['parts'][p]['name']}.safetensors"
        return read(self.root, path, start + begin, end - begin, size)

    def _check_digests(self, rank, first_blocks):
        """Checks the rank's digest table and its files, which are pairs of first block and place, in order."""
        path, block = f"{self.data}/rank-{rank:05}/digests.bin", 0
        table = read(self.root, path, 0, 2**30)
        need(len(table) == (self.root / path).stat().st_size and len(table) % 16 == 0, "D001", rank)
        need(xxhash.xxh3_128_digest(table) == self.body["digests"][rank], "D002", rank)
        for first_block, place in first_blocks:
            need(first_block == block, "D001", place)
            block += self._check_file(place, table[16 * block :])
        need(len(table) == 16 * block, "D001", rank)

    def _check_file(self, place, digests):
        """Checks the header, the fillers and the digests of a file, and returns the number of its blocks."""
        (rank, p, tier), (size, start, entries), block = place, self.files[place], 0
        facts = {"rank": str(rank), "tier": TIERS[tier][0], "part": self.body["parts"][p]["name"]}
        facts |= {"save_id": self.origins.get(place, self.body["save_id"]), "world_size": str(self.world_size)}
        raw = self._read(place, -start, 0)
        need(int.from_bytes(raw[:8], "little") == start - 8 <= 100_000_000, "S001 or S003", place)
        self._check_blocks(place, -start, 0, digests)
        need(re.fullmatch(rb"\{.*\} *", raw[8:], re.DOTALL), "S002", place)
        header = parse_object("S002", raw[8:].decode(errors="surrogateescape"))
        meta = header.pop("__metadata__", None)
        need(fits(meta, {"zckpt.version": str, "zckpt.shapes": str}) and fits([*meta.values()], [str]), "S006", meta)
        need(meta["zckpt.version"].split(".")[0] == "1", "S006", meta)
        need(all(meta.get(f"zckpt.{name}") == fact for name, fact in facts.items()), "S006", meta)
        need(re.fullmatch(r"\{.*\} *", meta["zckpt.shapes"], re.DOTALL), "S002", meta)
        shapes = parse_object("S002", meta["zckpt.shapes"])
        need(all(fits(shape, list) and sound(name, shape) for name, shape in shapes.items()), "S006, N001", shapes)
        need(all(fits(e, ENTRY) and len(e) == 3 == len(e["data_offsets"]) + 1 for e in header.values()), "S004", place)
        regions = [(None, [-start, 0])]
        regions += sorted(((name, e["data_offsets"]) for name, e in header.items()), key=lambda region: region[1])
        need(all(a[1] == b[0] for (_, a), (_, b) in pairwise(regions)), "S005", place)
        need(regions[-1][1][1] == size - start, "S005", place)
        for name in [name for name in header if name.startswith("@")]:
            dtype, shape, (begin, end) = map(header.pop(name).get, ENTRY)
            need(dtype == "U8" and shape == [end - begin] and end - begin < 4096, "S008", name)
            need(not any(self._read(place, begin, end)), "S008", name)
        need(header == {name: entry for name, (entry, *_) in entries.items()}, "S007", place)
        need(re.fullmatch(r"\{.*\} *", meta.get("zckpt.grids", "{}"), re.DOTALL), "S002", meta)
        grids = parse_object("S002", meta.get("zckpt.grids", "{}"))
        need(
            all(name in shapes and grid and valid_grid(grid, shapes[name]) for name, grid in grids.items()),
            "S006",
            grids,
        )
        need(all(grids.get(name, []) == grid for *_, name, _, grid in entries.values()), "S007", grids)
        partial = [(name, shape) for entry, (_, _, name, shape, _) in entries.items() if entry != name]
        need(all(shapes.get(name) == shape for name, shape in partial), "S006 or S007", place)
        for name, (begin, end) in regions:
            need(name not in entries or entries[name][1] == block, "S007", name)
            block += self._check_blocks(place, begin, end, digests[16 * block :])
        return block

    def _check_blocks(self, place, begin, end, digests):
        """Compares the digests of a region of a file, and returns the number of its blocks.

        The region begins and ends at these offsets from the start of the data.
        """
        starts = range(begin, end, self.body["block_bytes"])
        for block, at in enumerate(starts):
            data = self._read(place, at, min(at + self.body["block_bytes"], end))
            need(xxhash.xxh3_128_digest(data) == digests[16 * block : 16 * block + 16], "D003", (place, at))
        return len(starts)

    def copies(self, key):
        """Yields the copies of a tensor, each as its row-major bytes."""
        part, _, name = key.partition("/")
        dtype, shape, pieces, grid = self.tensors[f"{part}/{self.aliases.get(name, name)}"]
        for _, copy in groupby(pieces, key=lambda piece: piece[0]):
            data, width = b"".join(self._read(*place) for _, *place in copy), SIZES[dtype]
            if grid:
                items = sorted(
                    zip(order(grid, shape), (data[i : i + width] for i in range(0, len(data), width)), strict=True)
                )
                data = b"".join(item for _, item in items)
            yield data

    def load(self, key):
        return next(self.copies(key))

    def tree(self, rank=None):
        if rank is not None and f"state/rank/{rank}" not in self.tensors:
            return None
        dtype, shape, *_ = ("U8", [0]) if rank is None else self.tensors[f"state/rank/{rank}"]
        need(dtype == "U8" and len(shape) == 1, "T001", rank)
        need(shape[0] <= 2**28, "T004", rank)
        self.spent, self.referenced = [0, 0], []  # this tree's bytes and its number of arrays and maps; its keys
        return self._tree(self._unpack(self.body["state"] if rank is None else self.load(f"state/rank/{rank}")))

    def _unpack(self, data):
        value = unpack("T001", data, too_deep="T002")
        self.spent = [self.spent[0] + len(data), self.spent[1] + containers(value)]
        need(self.spent[0] <= 2**28 and self.spent[1] <= 2**22, "T004", self.spent)
        return value

    def _tree(self, value, level=0):
        need(level <= 64, "T002", level)
        match value:
            case None | bool() | int() | float() | str() | bytes():
                return value
            case list():
                return [self._tree(item, level + 1) for item in value]
            case dict() if all(type(key) in (str, int) for key in value):
                return {key: self._tree(item, level + 1) for key, item in value.items()}
            case msgpack.ExtType(code=1 | 2):
                key = f"state/{parse('T001', value.data.decode)}"
                need(key in self.tensors and key not in self.referenced, "T003", key)
                self.referenced.append(key)
                return *self.tensors[key][:2], self.load(key)
            case msgpack.ExtType(code=4) if re.fullmatch(rb"-?[1-9][0-9]{0,3999}", value.data):
                need(not -(2**63) <= int(value.data) < 2**64, "T001", value)
                return int(value.data)
            case msgpack.ExtType(code=3 | 5):
                match value.code, self._unpack(value.data):
                    case (3, list(inner)):
                        return tuple(self._tree(inner, level))
                    case (5, ["OrderedDict" | "Counter", dict(inner)]):
                        return self._tree(inner, level)
        raise ValueError(f"T001: {value!r}")
