"""The specification says what the code does: rules, limits, dtypes, and the bytes of its example."""

from __future__ import annotations

import re
from pathlib import Path

import msgpack
import pytest
import zstandard

import zckpt
from zckpt.format import limits, shard
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.rules import RULES

SPEC = Path(__file__).parents[2] / "spec"
TEXT = (SPEC / "format.md").read_text()
RUN = SPEC / "example" / "run"
SECTIONS = dict(re.findall(r"^###? (?:\d+\. )?(.+)\n((?:(?!##).*\n)*)", TEXT, re.MULTILINE))
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
LIMITS: dict[str, int | tuple[int, int]] = {
    "manifest": limits.MANIFEST_BYTES_MAX,
    "header text of a data file (N)": limits.HEADER_BYTES_MAX,
    "index chunk, compressed": limits.INDEX_CHUNK_BYTES_MAX,
    "index chunk, decompressed (8 R + 25 P)": limits.INDEX_CHUNK_RAW_BYTES_MAX,
    "zstd window": limits.INDEX_CHUNK_RAW_BYTES_MAX,
    "chunks, once for each part": limits.INDEX_CHUNKS_MAX,
    "pieces in all chunks, once for each part": limits.INDEX_PIECES_MAX,
    "digest table": limits.DIGEST_TABLE_BYTES_MAX,
    "`latest`": limits.LATEST_BYTES_MAX,
    "name of a tensor": limits.NAME_BYTES_MAX,
    "name of a part": 64,
    "names": limits.NAMES_MAX,
    "aliases": limits.NAMES_MAX,
    "parts": limits.PARTS_MAX,
    "arrays and maps in a body or tree": limits.CONTAINERS_MAX,
    "layout id": limits.NAMES_MAX,
    "dimensions": limits.NDIM_MAX,
    "tensor; each size or offset": limits.TENSOR_BYTES_MAX,
    "world size": limits.WORLD_SIZE_MAX,
    "tree, with what is packed again in it": limits.TREE_BYTES_MAX,
    "depth of a tree": limits.TREE_DEPTH_MAX,
    "digits of a big integer": limits.TREE_INTEGER_DIGITS_MAX,
    "`block_bytes`": (limits.BLOCK_BYTES_MIN, limits.BLOCK_BYTES_MAX),
    "filler": shard.FILLER_BYTES_MAX,
}
DUMPS = re.findall(r"^```(hex|header) (.+)\n((?:(?!```).*\n)*)```$", TEXT, re.MULTILINE)


def table(section: str) -> list[list[str]]:
    """The rows of a section's first table, without its head."""
    rows = re.findall(r"^\| (.*) \|$", SECTIONS[section], re.MULTILINE)
    return [row.split(" | ") for row in rows[2:]]


def number(text: str) -> int:
    """``2^62 - 1``, ``64 MiB, so at most ...``, ``100,000,000 bytes``"""
    found = re.match(r"([\d,]*\d)(?:\^(\d+))?(?: ([KMG]iB))?(?: - (\d+))?", text)
    assert found, text
    value = int(found[1].replace(",", "")) ** int(found[2] or 1)
    return value * UNITS.get(found[3], 1) - int(found[4] or 0)


def test_every_rule_has_one_clause_with_its_words() -> None:
    clauses = re.findall(r"^\*\*([A-Z]\d{3})\*\* (.*)$", TEXT, re.MULTILINE)
    assert dict(clauses) == {key: rule.clause for key, rule in RULES.items()}
    assert len(clauses) == len(RULES)
    assert [key for key, rule in RULES.items() if key != rule.id] == []
    assert {*re.findall(r"\b[A-Z]\d{3}\b", TEXT)} == {*RULES}


def test_every_clause_says_when_it_is_checked() -> None:
    clauses = re.split(r"^\*\*([A-Z]\d{3})\*\* ", TEXT, flags=re.MULTILINE)[1:]
    for rule, text in zip(clauses[::2], clauses[1::2], strict=True):
        clause = text.partition("\n\n")[0].replace("\n", " ")
        assert re.search("[Cc]hecked: (open|load|validate|like T001)|is checked when N001 is", clause), rule


def test_the_limits_are_those_of_the_code() -> None:
    rows = {row[0]: row[1] for row in table("Limits")}
    assert rows.keys() == LIMITS.keys()
    for what, limit in LIMITS.items():
        found = tuple(number(text) for text in rows[what].split(" to "))
        assert found == (limit if isinstance(limit, tuple) else (limit,)), what
    constants = {name for name in vars(limits) if name.isupper()}
    named = {name for name in constants if f"limits.{name}" in Path(__file__).read_text()}
    assert constants == named, "each limit of the code is in the table"
    pieces = re.search(r"at most ([\d,]+) pieces", rows["index chunk, decompressed (8 R + 25 P)"])
    assert pieces
    assert number(pieces[1]) == (limits.INDEX_CHUNK_RAW_BYTES_MAX - 8) // 25
    assert f"multiple of {limits.DATA_ALIGNMENT_BYTES}" in SECTIONS["Data files"]


def test_the_dtypes_are_those_of_the_code() -> None:
    assert {row[0].strip("`"): int(row[1]) for row in table("Dtypes")} == ITEM_BYTES


def content(dump: str) -> bytes:
    """The bytes that a dump is of: a file of the example, the packed root tree or a decompressed chunk of the index."""
    if (RUN / dump).is_file():
        return (RUN / dump).read_bytes()
    checkpoint = RUN / "global_step7"
    body = msgpack.unpackb(msgpack.unpackb((checkpoint / "manifest.msgpack").read_bytes())[3])
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
        found = re.fullmatch(r"([0-9a-f]{4})  ([0-9a-f]{2}(?: [0-9a-f]{2})*)(?:  +\S.*)?", line)
        assert found, line
        start, shown = int(found[1], 16), bytes.fromhex(found[2])
        assert at in (None, start), line
        assert data[start : start + len(shown)] == shown, line
        at = start + len(shown)
    assert at == len(data) or dump.endswith(".safetensors")


def test_every_kind_of_file_is_dumped() -> None:
    dumped = {Path(dump).name for _, dump, _ in DUMPS}
    assert dumped >= {"latest", "manifest.msgpack", "state", "index.bin", "digests.bin", "master.safetensors"}
    assert len(DUMPS) == len(re.findall("^```[^`\n]", TEXT, re.MULTILINE))


def test_the_example_conforms() -> None:
    report = zckpt.validate(RUN)
    assert report.ok, str(report)


def test_the_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (SPEC / link).exists(), link
