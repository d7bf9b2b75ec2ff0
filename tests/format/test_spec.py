"""The specification says what the code does: rules, limits, dtypes, and the bytes of its examples."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard

import zckpt
from zckpt.format import data_file, index, limits
from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.names import Tier
from zckpt.format.rules import RULES

SPEC = Path(__file__).parents[2] / "spec"
TEXT = (SPEC / "format.md").read_text()
EXAMPLES = SPEC / "example"
RUN = EXAMPLES / "run"
ROOT = SPEC.parent
CHECKPOINTS = sorted(
    path.parent
    for place in (EXAMPLES, ROOT / "tests" / "golden", *(ROOT / "tests" / "broken").glob("sound*"))
    for path in place.rglob("manifest.msgpack")
)
"""The checkpoints of this repository that conform to the specification."""
SECTIONS = dict(re.findall(r"^###? (?:\d+\. )?(.+)\n((?:(?!##).*\n)*)", TEXT, re.MULTILINE))
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
LIMITS: dict[str, int | tuple[int, int]] = {
    "manifest": limits.MANIFEST_BYTES_MAX,
    "header text of a data file (N)": limits.HEADER_BYTES_MAX,
    "index chunk, compressed": limits.INDEX_CHUNK_BYTES_MAX,
    "index chunk, decompressed (8 R + 25 P)": limits.INDEX_CHUNK_RAW_BYTES_MAX,
    "zstd window": limits.INDEX_CHUNK_RAW_BYTES_MAX,
    "chunks, counted once for each part": limits.INDEX_CHUNKS_MAX,
    "pieces in all chunks, counted once for each part": limits.INDEX_PIECES_MAX,
    "chunks, counted once for each part, with the feature `pieces`": limits.MANY_CHUNKS_MAX,
    "pieces in all chunks, counted once for each part, with the feature `pieces`": limits.MANY_PIECES_MAX,
    "the same for each byte of the index, with the feature `pieces`": limits.PIECES_PER_BYTE_MAX,
    "digest table": limits.DIGEST_TABLE_BYTES_MAX,
    "boxes of a grid": limits.BOXES_MAX,
    "`latest`": limits.LATEST_BYTES_MAX,
    "name of a tensor": limits.NAME_BYTES_MAX,
    "name of a part": 64,
    "names": limits.NAMES_MAX,
    "aliases": limits.NAMES_MAX,
    "parts": limits.PARTS_MAX,
    "arrays and maps in a body or tree": limits.CONTAINERS_MAX,
    "id of a layout": limits.NAMES_MAX,
    "dimensions": limits.NDIM_MAX,
    "tensor; each size or offset": limits.TENSOR_BYTES_MAX,
    "world size": limits.WORLD_SIZE_MAX,
    "tree, with all payloads that are packed inside it": limits.TREE_BYTES_MAX,
    "depth of a tree": limits.TREE_DEPTH_MAX,
    "digits of a big integer": limits.TREE_INTEGER_DIGITS_MAX,
    "`block_bytes`": (limits.BLOCK_BYTES_MIN, limits.BLOCK_BYTES_MAX),
    "filler": data_file.FILLER_BYTES_MAX,
    "lengths of the pieces of a row, added up": limits.TENSOR_BYTES_MAX,
}
DUMPS = re.findall(r"^```(hex|header) (.+)\n((?:(?!```).*\n)*)```$", TEXT, re.MULTILINE)


def table(section: str) -> list[list[str]]:
    """Returns the rows of the first table of a section, without its head."""
    rows = re.findall(r"^\| (.*) \|$", SECTIONS[section], re.MULTILINE)
    return [row.split(" | ") for row in rows[2:]]


def number(text: str) -> int:
    """Returns the number at the start of a text such as ``2^62 - 1``, ``64 MiB, so at most ...`` or ``100,000,000
    bytes``."""
    match = re.match(r"([\d,]*\d)(?:\^(\d+))?(?: ([KMG]iB))?(?: - (\d+))?", text)
    assert match, text
    value = int(match[1].replace(",", "")) ** int(match[2] or 1)
    return value * UNITS.get(match[3], 1) - int(match[4] or 0)


CLAUSES = re.findall(r"^\*\*([A-Z]\d{3})\*\* (.*)$", TEXT, re.MULTILINE)
"""The id of each rule, and the first line of its clause."""


def test_every_rule_has_one_clause() -> None:
    assert sorted(rule for rule, _ in CLAUSES) == sorted(RULES)
    assert {*re.findall(r"\b[A-Z]\d{3}\b", TEXT)} == {*RULES}


def test_every_clause_says_when_it_is_checked() -> None:
    clauses = re.split(r"^\*\*([A-Z]\d{3})\*\* ", TEXT, flags=re.MULTILINE)[1:]
    for rule, text in zip(clauses[::2], clauses[1::2], strict=True):
        clause = text.partition("\n\n")[0].replace("\n", " ")
        assert re.search("[Cc]hecked: (open|load|validate|like T001)|is checked when N001 is", clause), rule


def test_the_limits_are_those_of_the_code() -> None:
    rows = {row[0]: row[1] for row in table("Limits")}
    assert rows.keys() == LIMITS.keys()
    for name_of_limit, limit in LIMITS.items():
        numbers = tuple(number(text) for text in rows[name_of_limit].split(" to "))
        assert numbers == (limit if isinstance(limit, tuple) else (limit,)), name_of_limit
    constants = {name for name in vars(limits) if name.isupper()}
    named = {name for name in constants if f"limits.{name}" in Path(__file__).read_text()}
    assert constants == named, "each limit of the code is in the table"
    pieces = re.search(r"at most ([\d,]+) pieces", rows["index chunk, decompressed (8 R + 25 P)"])
    assert pieces
    assert number(pieces[1]) == (limits.INDEX_CHUNK_RAW_BYTES_MAX - 8) // 25
    assert f"multiple of {limits.DATA_ALIGNMENT_BYTES}" in SECTIONS["Data files"]


def test_the_dtypes_are_those_of_the_code() -> None:
    assert {row[0].strip("`"): int(row[1]) for row in table("Dtypes")} == ITEM_BYTES


def body_of(checkpoint: Path) -> dict[str, Any]:
    """Returns the body of the manifest of a checkpoint."""
    body: dict[str, Any] = msgpack.unpackb(
        msgpack.unpackb((checkpoint / "manifest.msgpack").read_bytes())[3], strict_map_key=False
    )
    return body


def content(dump: str) -> bytes:
    """Returns the bytes that a dump shows: a file of an example, the packed root tree, or a decompressed chunk of the
    index."""
    for run in (RUN, EXAMPLES):
        if (run / dump).is_file():
            return (run / dump).read_bytes()
    named = next((name for name in ("second", "third") if dump.startswith(f"{name} ")), "")
    (checkpoint,) = (EXAMPLES / (named or "run")).glob("global_step*")
    body, dump = body_of(checkpoint), dump.removeprefix(f"{named} ")
    if dump == "state":
        return bytes(body["state"])
    (index,) = checkpoint.glob("data-*/index.bin")
    number, chunks = int(dump.removeprefix("chunk ")), body["chunks"]
    frame = index.read_bytes()[chunks["offset"][number] :][: chunks["bytes"][number]]
    return zstandard.ZstdDecompressor().decompress(frame)


@pytest.mark.parametrize(("kind", "dump", "text"), DUMPS, ids=[f"{dump} {i}" for i, (_, dump, _) in enumerate(DUMPS)])
def test_the_dumps_are_the_bytes_of_the_example(kind: str, dump: str, text: str) -> None:
    data = content(dump)
    if kind == "header":
        length = int.from_bytes(data[:8], "little")
        assert data[8 : 8 + length].rstrip(b" ") == text.rstrip("\n").encode()
        return
    at = None
    for line in text.splitlines():
        match = re.fullmatch(r"([0-9a-f]{4})  ([0-9a-f]{2}(?: [0-9a-f]{2})*)(?:  +\S.*)?", line)
        assert match, line
        start, shown = int(match[1], 16), bytes.fromhex(match[2])
        assert at in (None, start), line
        assert data[start : start + len(shown)] == shown, line
        at = start + len(shown)
    assert at == len(data) or dump.endswith(".safetensors")


def test_every_kind_of_file_is_dumped() -> None:
    dumped = {Path(dump).name for _, dump, _ in DUMPS}
    assert dumped >= {"latest", "manifest.msgpack", "state", "index.bin", "digests.bin", "master.safetensors"}
    assert len(DUMPS) == len(re.findall("^```[^`\n]", TEXT, re.MULTILINE))


@pytest.mark.parametrize("name", ["run", "second", "third"])
def test_the_examples_conform(name: str) -> None:
    report = zckpt.validate(EXAMPLES / name)
    assert report.ok, str(report)


def test_the_examples_are_those_that_are_made(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "make.py"), str(tmp_path)], check=True, cwd=ROOT)
    for path in tmp_path.rglob("*"):
        # Another version of zstd may compress the index to other bytes. The manifest contains their digest.
        if path.is_file() and path.name not in ("index.bin", "manifest.msgpack"):
            assert path.read_bytes() == (EXAMPLES / path.relative_to(tmp_path)).read_bytes(), path


def test_the_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (SPEC / link).exists(), link


def when_checked(rule: str) -> str:
    """Returns when a rule is checked, as its clause says it: one or more of ``open``, ``load`` and ``validate``."""
    clauses = dict(re.findall(r"^\*\*([A-Z]\d{3})\*\* ((?:.+\n)+)", TEXT, re.MULTILINE))
    clause = clauses[rule].replace("\n", " ")
    other = re.search("[Cc]hecked: like (T001)|is checked when (N001) is", clause)
    if other:
        return when_checked(other[1] or other[2])
    times = " ".join(re.findall(r"[Cc]hecked: ([^.]*)", clause))
    return ", ".join(word for word in ("open", "load", "validate") if re.search(rf"\b{word}\b", times))


def test_the_table_of_all_rules() -> None:
    assert table("All rules") == [[rule, dict(CLAUSES)[rule], when_checked(rule)] for rule in RULES]


def test_the_vectors_of_the_digest() -> None:
    vectors = json.loads((SPEC / "vectors" / "xxh3-128.json").read_text())["vectors"]
    assert {0, 5, 16, 17, 128, 129, 240, 241, 1024, 1025, 4096, 2**20 + 1} <= {vector["bytes"] for vector in vectors}
    for vector in vectors:
        assert digest(bytes(i % 251 for i in range(vector["bytes"]))).hex() == vector["digest"]
    for text, digest_hex in ((b"", vectors[0]["digest"]), (b"zckpt", digest(b"zckpt").hex())):
        assert digest(text).hex() == digest_hex
        assert f"`{digest_hex}`" in TEXT


def test_the_columns_are_those_of_the_code() -> None:
    columns = json.loads((SPEC / "schema" / "columns.json").read_text())
    in_spec = [(column["name"], column["bytes"], column["count"]) for column in columns["index_chunk"]["columns"]]
    expected = [(name, np.dtype(dtype).itemsize, "rows") for name, dtype in index.ROW_COLUMNS]
    assert in_spec == expected + [(name, np.dtype(dtype).itemsize, "pieces") for name, dtype in index.PIECE_COLUMNS]
    assert [row[:3] for row in table("Index")] == [
        [f"`{name}`", f"{size} byte" + "s" * (size > 1), count[0].upper()] for name, size, count in in_spec
    ]
    assert columns["dtypes"] == ITEM_BYTES
    assert [(column["name"], column["prefix"]) for column in columns["tiers"]] == [
        (tier.label, tier.prefix) for tier in Tier
    ]
    assert columns["digest_table"]["columns"][0]["bytes"] == DIGEST_BYTES


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: "-".join(path.parts[-3:]))
def test_the_columns_describe_files(checkpoint: Path) -> None:
    columns, body = json.loads((SPEC / "schema" / "columns.json").read_text()), body_of(checkpoint)
    (path,) = checkpoint.glob("data-*/index.bin")
    raw, chunks = path.read_bytes(), body["chunks"]
    for number, (offset, nbytes) in enumerate(zip(chunks["offset"], chunks["bytes"], strict=True)):
        frame = zstandard.ZstdDecompressor().decompress(raw[offset : offset + nbytes])
        counts = {name: chunks[name][number] for name in ("rows", "pieces")}
        assert len(frame) == sum(
            column["bytes"] * counts[column["count"]] for column in columns["index_chunk"]["columns"]
        )
        assert int.from_bytes(frame[:4], "little") in range(len(body["names"]))
    for path in checkpoint.glob("data-*/rank-*/*.safetensors"):
        data, values = path.read_bytes(), dict[str, int]()
        for column in columns["data_file"]["columns"]:
            values[column["name"]] = int.from_bytes(data[: column["bytes"]], columns["byte_order"])
            data = data[column["bytes"] * values.get(column["count"], 1) :] if column["count"] != "data_bytes" else data
        assert len(data) == path.stat().st_size - 8 - values["header_bytes"]


def as_json(value: Any) -> Any:
    """Returns a value of msgpack in the form that the schemas describe. Bytes become hex, and keys become strings."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list) else value


def schema(name: str) -> Any:
    """Returns a validator for a schema of the specification."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, which the extra `dev` has")
    content = json.loads((SPEC / "schema" / name).read_text())
    jsonschema.Draft202012Validator.check_schema(content)
    return jsonschema.Draft202012Validator(content)


def header_text(path: Path) -> Any:
    """Returns the JSON object in the header of a data file."""
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: "-".join(path.parts[-3:]))
def test_the_schemas_accept_what_conforms(checkpoint: Path) -> None:
    manifest, header = schema("manifest.json"), schema("header.json")
    manifest.validate(as_json(body_of(checkpoint)))
    shapes = header.evolve(schema={"$ref": "#/$defs/shapes", "$defs": header.schema["$defs"]})
    for path in checkpoint.glob("data-*/rank-*/*.safetensors"):
        text = header_text(path)
        header.validate(text)
        shapes.validate(json.loads(text["__metadata__"]["zckpt.shapes"]))


BY_SCHEMA = """
N001-alias N001-control-character N001-empty N001-long N002-filler N002-metadata N002-span N003-long N003-path
N004-path N004-shared N004-upper-case M005-boolean M005-large-blocks M005-large-number M005-layout M005-missing
M005-odd-blocks M005-parts M005-ranks M005-save-id M005-shared M005-shared-files M005-small-blocks M007-name
M008-boolean M008-dimensions M008-negative M008-no-array M009-dtype M013-large M014-no-file M014-nothing M014-twice
S003-odd
"""
HEADERS_BY_SCHEMA = """
S004-dimensions S004-dtype S004-more S004-wrapped S006-no-text S006-none S006-version S008-dtype S008-long
"""


@pytest.mark.parametrize("name", f"{BY_SCHEMA} {HEADERS_BY_SCHEMA}".split())
def test_the_schemas_refuse_what_is_broken(name: str) -> None:
    place, header = ROOT / "tests" / "broken" / name, schema("header.json")
    if name in BY_SCHEMA.split():
        assert not schema("manifest.json").is_valid(as_json(body_of(place)))
    else:
        assert not all(header.is_valid(header_text(path)) for path in place.glob("data-*/rank-*/*.safetensors"))


def test_the_schemas_name_every_field() -> None:
    manifest = json.loads((SPEC / "schema" / "manifest.json").read_text())
    rows = re.findall(r"^\| `(\w+)` \|", SECTIONS["Manifest"], re.MULTILINE)
    part = manifest["$defs"]["part"]["properties"]
    fields = [
        *manifest["properties"],
        "shared",
        "grids",
        *part,
        "grids",
        *manifest["properties"]["files"]["properties"],
    ]
    assert rows == [*fields, *manifest["properties"]["chunks"]["properties"]]


def test_the_magic_is_that_of_every_manifest() -> None:
    for checkpoint in CHECKPOINTS:
        raw = (checkpoint / "manifest.msgpack").read_bytes()
        assert raw[:1] >= b"\x90"
        assert raw[:1] <= b"\x9f"
        assert raw[1:7] == bytes.fromhex("a57a636b7074")
        assert raw[:12] == bytes.fromhex("94a57a636b7074920100c410")
