"""Data files: other tools can read their headers, and there is a broken header for every way to be wrong."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.apart import edit_field
from tests.support.states import is_tensor_name
from zckpt.errors import FormatError, SizeError
from zckpt.format import data_file as data_file_format
from zckpt.format.data_file import DataFileId, HeaderEntry, decode_header, encode_header, regions
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.names import Tier, piece_name, split_piece_name
from zckpt.geometry import Grid, Span, all_of
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

FILE_ID = DataFileId("0123456789abcdef", 1, 4, "exp_avg", Tier.NVME)

names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=30).filter(is_tensor_name)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def headers(draw: st.DrawFn) -> tuple[list[HeaderEntry], dict[str, tuple[int, ...]]]:
    """Draws entries as a writer makes them, with the largest elements first, and the whole shapes of tensors that have
    only a partial piece."""
    tensors = draw(st.dictionaries(names, st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=6))
    entries, whole_shapes, offset = [], {}, 0
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][1]]):
        numel = math.prod(shape)
        start = draw(st.integers(0, max(numel - 1, 0)))
        stop = draw(st.integers(start + 1, numel)) if numel else 0
        entry = piece_name(name, Span(Grid((numel,)), start, stop))
        if entry != name:
            whole_shapes[name] = shape
            shape = (stop - start,)
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        entries.append(HeaderEntry(entry, dtype, shape, offset, nbytes))
        offset += nbytes
    return entries, whole_shapes


@given(headers())
def test_a_header_comes_back_unchanged(header: tuple[list[HeaderEntry], dict[str, tuple[int, ...]]]) -> None:
    entries, whole_shapes = header
    raw = encode_header(FILE_ID, entries, whole_shapes)
    assert len(raw) % 4096 == 0
    nbytes = len(raw) + sum(entry.nbytes for entry in entries)
    decoded = decode_header(raw, nbytes, FILE_ID)
    key = lambda entry: (entry.offset, entry.nbytes)  # noqa: E731
    assert sorted(decoded.entries, key=key) == sorted(entries, key=key)
    assert (decoded.shapes, decoded.data_file, decoded.data_start) == (whole_shapes, FILE_ID, len(raw))
    assert regions(decoded)[0] == (0, len(raw))
    assert regions(decoded)[-1][1] == nbytes
    assert [stop - start for start, stop in regions(decoded)[1:]] == [entry.nbytes for entry in decoded.entries]


@given(st.data(), headers())
def test_safetensors_reads_what_we_write(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, header: tuple[list[HeaderEntry], dict[str, Any]]
) -> None:
    entries, whole_shapes = header
    content = data.draw(st.binary(min_size=1, max_size=64))
    body = (content * 200)[: sum(entry.nbytes for entry in entries)]
    body = body.ljust(sum(entry.nbytes for entry in entries), b"\1")
    path = tmp_path_factory.getbasetemp() / "data_file.safetensors"
    path.write_bytes(encode_header(FILE_ID, entries, whole_shapes) + body)
    loaded = load_file(path)
    assert loaded.keys() == {entry.name for entry in entries}
    for entry in entries:
        tensor = loaded[entry.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[entry.dtype], entry.shape)
        if entry.nbytes:
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == body[entry.offset : entry.offset + entry.nbytes]
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["zckpt.part"] == "exp_avg"
    assert {name: tuple(shape) for name, shape in json.loads(metadata["zckpt.shapes"]).items()} == whole_shapes


@given(names, st.integers(0, 99), st.integers(1, 99))
def test_piece_names_can_be_told_apart(name: str, start: int, length: int) -> None:
    piece = piece_name(name, Span(Grid((1000,)), start, start + length))
    assert split_piece_name(piece) == (name, start, start + length)
    assert piece_name(name, all_of((length,))) == name
    assert split_piece_name(name) is None


def tree() -> dict[str, Any]:
    """Returns a header as JSON, with half of ``w``, all of ``b``, a filler and an empty tensor. It has 64 bytes of
    data."""
    return {
        "__metadata__": {
            "format": "pt",
            "zckpt.version": "1.0",
            "zckpt.save_id": FILE_ID.save_id,
            "zckpt.part": FILE_ID.part,
            "zckpt.rank": "1",
            "zckpt.world_size": "4",
            "zckpt.tier": "nvme",
            "zckpt.shapes": '{"w":[4,4]}',
        },
        "w@4:12": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        "@pad": {"dtype": "U8", "shape": [16], "data_offsets": [32, 48]},
        "b": {"dtype": "F64", "shape": [1, 2], "data_offsets": [48, 64]},
        "e": {"dtype": "BF16", "shape": [0, 3], "data_offsets": [64, 64]},
    }


TEXT = json.dumps(tree())
DATA_BYTES = 64


def pack(text: str | bytes, length: int | None = None, pad: bytes = b" ") -> bytes:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    size = 4096 - 8 if length is None else length
    return struct.pack("<Q", size) + raw.ljust(size, pad)


def decode(raw: bytes, data_bytes: int = DATA_BYTES) -> data_file_format.Header:
    return decode_header(raw, len(raw) + data_bytes, FILE_ID)


def rule_of(raw: bytes, data_bytes: int = DATA_BYTES) -> str | None:
    with pytest.raises(FormatError) as caught:
        decode(raw, data_bytes)
    assert caught.value.file == FILE_ID.path
    return caught.value.rule


def test_the_unbroken_header_is_sound() -> None:
    header = decode(pack(json.dumps(tree())))
    assert [entry.name for entry in header.entries] == ["w@4:12", "@pad", "b", "e"]
    assert [entry.is_filler for entry in header.entries] == [False, True, False, False]


@pytest.mark.parametrize(
    ("rule", "path", "change"),
    [
        ("S004", "w@4:12.dtype", "F33"),
        ("S004", "w@4:12.dtype", "f32"),
        ("S004", "w@4:12.dtype", ["F32"]),
        ("S004", "w@4:12.dtype", 32),
        ("S004", "w@4:12.shape", [9]),
        ("S004", "w@4:12.shape", [2, 4]),  # partial pieces have one dimension
        ("S004", "w@4:12.shape", [-8]),
        ("S004", "w@4:12.shape", [-2, -4]),
        ("S004", "w@4:12.shape", [8.0]),
        ("S004", "w@4:12.shape", [8, True]),
        ("S004", "w@4:12.shape", "8"),
        ("S004", "w@4:12.shape", [1] * 64 + [8]),
        ("S004", "b.shape", [1 << 32, 1 << 32]),  # 2^64 elements, which are 0 if integers overflow
        ("S004", "b.shape", [(1 << 62) + 2, 1]),
        ("S004", "e.shape", [0, -3]),
        ("S004", "w@4:12.data_offsets", [0, 31]),
        ("S004", "w@4:12.data_offsets", [0.0, 32.0]),
        ("S004", "w@4:12.data_offsets", [False, 32]),
        ("S004", "w@4:12.data_offsets", [-32, 0]),
        ("S004", "w@4:12.data_offsets", [32, 0]),
        ("S004", "w@4:12.data_offsets", [0, 32, 64]),
        ("S004", "w@4:12.data_offsets", [1 << 64, (1 << 64) + 32]),
        ("S004", "w@4:12.data_offsets", None),
        ("S004", "w@4:12.extra", 1),
        ("S004", "b", [1, 2]),
        ("S004", "b.data_offsets", [48, 65]),
        ("S005", "b.data_offsets", [40, 56]),
        ("S005", "b.data_offsets", [56, 72]),
        ("S005", "b", None),
        ("S005", "w@4:12", None),
        ("S005", "e.data_offsets", [63, 63]),
        ("S005", "e.data_offsets", [72, 72]),
        ("S006", "__metadata__", None),
        ("S006", "__metadata__", "pt"),
        ("S006", "__metadata__.zckpt.rank", 1),
        ("S006", "__metadata__.zckpt.shapes", None),
        ("S006", "__metadata__.format", ["pt"]),
        ("S008", "@pad.dtype", "I8"),
        ("S008", "@pad.shape", [4, 4]),
    ],
)
def test_a_broken_entry_is_refused(rule: str, path: str, change: object) -> None:
    broken = tree()
    name, _, field = path.partition(".")
    if not field:
        edit_field(broken, name, change)
    elif change is None:
        del broken[name][field]
    else:
        broken[name][field] = change
    assert rule_of(pack(json.dumps(broken))) == rule


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "2.0"),
        ("version", "10"),
        ("version", ""),
        ("save_id", "0123456789abcdee"),
        ("part", "master"),
        ("rank", "0"),
        ("rank", "01"),
        ("world_size", "3"),
        ("tier", "device"),
        ("tier", None),
        ("shapes", "{}"),
        ("shapes", '{"v":[4,4]}'),
        ("shapes", '{"w":[4,-4]}'),
        ("shapes", '{"w":[4.0,4]}'),
        ("shapes", '{"w":16}'),
        ("shapes", '{"w":[4,4],"x":[1,true]}'),
    ],
)
def test_metadata_of_another_file_is_refused(field: str, value: str | None) -> None:
    """The metadata is that of another file, as if two ranks had swapped their files."""
    broken = tree()
    if value is None:
        del broken["__metadata__"][f"zckpt.{field}"]
    else:
        broken["__metadata__"][f"zckpt.{field}"] = value
    assert rule_of(pack(json.dumps(broken))) == "S006"


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("S004", "w@4:12", "w@4:13"),
        ("S004", "w@4:12", "w@12:20"),  # goes beyond the whole tensor
        ("S004", "w@4:12", "w@12:4"),
        ("S004", "w@4:12", "w@4:4"),
        ("S006", "w@4:12", "v@4:12"),
        ("N001", "w@4:12", "w\\u0000@4:12"),
        ("N001", '"b"', '"a\\nb"'),
        ("N001", '"b"', '"a\\u0085b"'),
        ("N001", '"b"', '"\\ud800"'),
        ("N001", '"b"', '"' + "é" * 513 + '"'),
        ("N001", '"b"', '""'),
        ("N001", '{\\"w\\":', '{\\"v\\\\u0007\\":[1],\\"w\\":'),
        ("N002", '"b"', '"b@99999999999999999999:1"'),
        ("N002", "w@4:12", "w@0:2@4:12"),
        ("N002", "w@4:12", "__metadata__@4:12"),
    ],
)
def test_a_broken_name_is_refused(rule: str, old: str, new: str) -> None:
    assert old in TEXT
    assert rule_of(pack(TEXT.replace(old, new))) == rule


DEEP = 100_000


BROKEN = {
    "duplicate entry": ("S002", pack(TEXT[:-1] + ',"b":{"dtype":"F64","shape":[1,2],"data_offsets":[48,64]}}')),
    "duplicate field": ("S002", pack(TEXT.replace('"dtype": "F64"', '"dtype": "F64", "dtype": "F64"'))),
    "duplicate metadata": ("S002", pack(TEXT.replace('"format": "pt"', '"format": "pt", "format": "pt"'))),
    "duplicate by escape": ("S002", pack(TEXT.replace('"b": {', '"\\u0065": {'))),
    "duplicate in the shapes": ("S002", pack(TEXT.replace('{\\"w\\":', '{\\"w\\":[1],\\"w\\":'))),
    "zeros as padding": ("S002", pack(TEXT, pad=b"\0")),
    "newlines as padding": ("S002", pack(TEXT, pad=b"\n")),
    "trailing garbage": ("S002", pack(TEXT + " x")),
    "a second object": ("S002", pack(TEXT + "{}")),
    "leading space": ("S002", pack(" " + TEXT)),
    "byte order mark": ("S002", pack(b"\xef\xbb\xbf" + TEXT.encode())),
    "an array": ("S002", pack("[1]")),
    "nothing": ("S002", pack("")),
    "cut off": ("S002", pack(TEXT[:-1])),
    "no JSON": ("S002", pack("{'a': 1}")),
    "NaN": ("S002", pack(TEXT.replace("[8]", "[NaN]"))),
    "Infinity": ("S002", pack(TEXT.replace("[8]", "[-Infinity]"))),
    "invalid UTF-8": ("S002", pack(TEXT.encode().replace(b'"b"', b'"\xff"'))),
    "a surrogate": ("S002", pack(TEXT.replace('"b"', '"\ud800"'))),
    "a control character": ("S002", pack(TEXT.replace('"b"', '"\x07"'))),
    "a surrogate in the shapes": ("S002", pack(TEXT.replace('{\\"w\\"', '{\\"\\ud800\\":[1],\\"w\\"'))),
    "the shapes are no object": ("S002", pack(TEXT.replace('{\\"w\\":[4,4]}', "[4]"))),
    "a float that is infinite": ("S004", pack(TEXT.replace("[8]", "[1e999]"))),
    "huge integer": ("S002", pack(TEXT.replace("[8]", f"[{'9' * 5000}]"), 8 * 4096 - 8)),
    "deep": ("S002", pack(TEXT.replace("[8]", "[" * DEEP + "]" * DEEP), 100 * 4096 - 8)),
    "misaligned": ("S003", pack(TEXT, 4096)),
    "misaligned by a little": ("S003", pack(TEXT, 4096 - 9)),
    "no length": ("S001", b""),
    "half a length": ("S001", b"\0" * 7),
    "longer than allowed": ("S001", struct.pack("<Q", 100_003_832) + b" " * 4088),
    "longer than can be": ("S001", struct.pack("<Q", (1 << 64) - 8) + b" " * 4088),
    "longer than the file": ("S001", struct.pack("<Q", 8192 - 8) + TEXT.encode().ljust(4088)),
    "shorter than the file": ("S001", pack(TEXT) + b"\0"),
}


@pytest.mark.parametrize(("rule", "raw"), BROKEN.values(), ids=BROKEN)
def test_a_broken_header_is_refused(rule: str, raw: bytes) -> None:
    assert rule_of(raw) == rule


def test_the_data_ends_with_the_file() -> None:
    assert rule_of(pack(TEXT), DATA_BYTES - 1) == "S005"
    assert rule_of(pack(TEXT), DATA_BYTES + 1) == "S005"
    empty = json.dumps({"__metadata__": tree()["__metadata__"]})
    assert decode(pack(empty), 0).entries == ()
    assert rule_of(pack(empty), 1) == "S005"


def with_filler(nbytes: int) -> bytes:
    broken = tree()
    for name, (start, stop) in {"@pad": (32, 32 + nbytes), "b": (32 + nbytes, 48 + nbytes)}.items():
        broken[name]["data_offsets"] = [start, stop]
    broken["@pad"]["shape"] = [nbytes]
    broken["e"]["data_offsets"] = [48 + nbytes] * 2
    return pack(json.dumps(broken))


def test_fillers_are_short_and_pieces_aligned() -> None:
    assert decode(with_filler(4088), 48 + 4088).entries[1].nbytes == 4088
    assert rule_of(with_filler(4096), 48 + 4096) == "S008"
    assert rule_of(with_filler(12), 48 + 12) == "S004"  # `b`, which is F64, begins at byte 44


def test_more_entries_than_a_header_can_list_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file_format, "HEADER_BYTES_MAX", 4096)
    entries = [HeaderEntry(f"layer.{i}", "F32", (1,), 4 * i, 4) for i in range(100)]
    with pytest.raises(SizeError) as caught:
        encode_header(FILE_ID, entries, {})
    assert caught.value.rule == "S001"


def test_part_of_a_header_is_no_header() -> None:
    with pytest.raises(SizeError) as caught:
        decode_header(pack(TEXT)[:-1], 4096 + DATA_BYTES, FILE_ID)
    assert caught.value.rule == "S001"
