"""The manifest and ``latest``: they come back unchanged, every rule has a case that breaks it, and every flipped bit is
found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.support.apart import edit_field
from tests.support.states import is_tensor_name, part_of, write_state
from zckpt.errors import DigestError, FeatureError, FormatError, SizeError, VersionError
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.digest import digest
from zckpt.format.dtypes import DTYPES
from zckpt.format.manifest import Chunk, File, Files, Manifest, Part, decode, encode
from zckpt.format.names import Tier

if TYPE_CHECKING:
    from pathlib import Path

sizes = st.integers(0, (1 << 62) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
tensor_names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12).filter(is_tensor_name)
part_names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", fullmatch=True)
digests = st.binary(min_size=16, max_size=16)
save_ids = st.from_regex("[0-9a-f]{16}", fullmatch=True)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    listed = draw(st.lists(tensor_names, min_size=1, max_size=8, unique=True))
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=4))
    world_size, save_id = draw(st.integers(1, 4)), draw(save_ids)
    origins = st.sampled_from(["", *draw(st.lists(save_ids.filter(lambda other: other != save_id), max_size=2))])
    parts: list[Part] = []
    chunks: list[Chunk] = []
    layouts: dict[tuple[int, ...], int] = {}
    for name in draw(st.lists(part_names, max_size=4, unique=True)):
        ids = tuple(sorted(draw(st.sets(st.integers(0, len(listed) - 1), min_size=1))))
        shape_ids = [draw(st.integers(0, len(shapes) - 1)) for _ in ids]
        dtypes = [draw(st.sampled_from(DTYPES)) for _ in ids]
        parts.append(part_of(name, layouts.setdefault(ids, 7 * len(layouts)), ids, shape_ids, dtypes))
    offset = 0
    for ids, layout in layouts.items():
        cut = draw(st.integers(1, len(ids)))
        for first, rows in ((0, cut), (cut, len(ids) - cut)):
            if rows:
                nbytes = draw(st.integers(1, 99))
                chunks.append(Chunk(layout, first, rows, draw(st.integers(rows, 99)), offset, nbytes, draw(digests)))
                offset += nbytes
    places = st.tuples(st.integers(0, world_size - 1), st.integers(0, len(parts) - 1), st.sampled_from(Tier))
    files = [
        File(*place, 4096 * pages + draw(st.integers(0, 99)), 4096 * pages, draw(sizes), draw(origins))
        for place in draw(st.sets(places, max_size=6) if parts else st.just(()))
        for pages in [draw(st.integers(1, 1000))]
    ]
    aliases = draw(st.dictionaries(tensor_names.filter(lambda name: name not in listed), st.sampled_from(listed)))
    return Manifest(
        save_id=save_id,
        step=draw(sizes),
        world_size=world_size,
        block_bytes=4096 * draw(st.integers(1, 1 << 14)),
        names=tuple(listed),
        shapes=tuple(shapes),
        parts=tuple(parts),
        files=Files.of(files),
        digests=tuple(draw(digests) for _ in range(world_size)),
        chunks=tuple(chunks),
        index_bytes=offset,
        aliases=aliases,
        state=draw(st.binary(max_size=600)),
        writer=draw(st.dictionaries(texts, texts, max_size=3)),
    )


@given(manifests())
def test_a_manifest_comes_back_unchanged(manifest: Manifest) -> None:
    decoded = decode(encode(manifest))
    assert decoded == manifest
    assert [decoded.path(file) for file in decoded.files] == [manifest.path(file) for file in manifest.files]
    for number, file in enumerate(decoded.files):
        assert decoded.file_numbers(np.array([file.rank]), file.part_id, np.array([file.tier])) == [number]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("run") / "global_step5"
    shapes = {"a": (3, 2), "b": (5,), "c": (0,)}
    write_state(path, 2, shapes, parts=("master", "exp_avg"), aliases={"tied": "a"}, engine_state={"steps": 5})
    return (path / names.MANIFEST).read_bytes()


def envelope(body: Any, version: Any = (1, 0)) -> bytes:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    return msgpack.packb(["zckpt", version, digest(packed), packed])


def body_of(raw: bytes) -> dict[str, Any]:
    return msgpack.unpackb(msgpack.unpackb(raw)[3])


def rule_of(raw: bytes) -> str | None:
    with pytest.raises(FormatError) as caught:
        decode(raw)
    assert caught.value.file == names.MANIFEST
    return caught.value.rule


def test_no_bit_of_a_manifest_may_flip(raw: bytes) -> None:
    decode(raw)
    assert len(raw) < 2000
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            decode(bytes(flipped))


def test_no_byte_of_a_manifest_may_be_missing_or_added(raw: bytes) -> None:
    for length in range(len(raw)):
        with pytest.raises(FormatError):
            decode(raw[:length])
    assert rule_of(raw + b"\0") == "M001"


BIG = (1 << 62) - 1


@pytest.mark.parametrize(
    ("rule", "path", "change"),
    [
        ("M001", "version", [1, 1]),
        ("M001", "version", None),
        ("M001", "version", [True, 0]),
        *[("M005", field, None) for field in ("step", "names", "parts", "files", "chunks", "state", "writer")],
        ("M005", "requires", None),
        ("M005", "requires", ""),
        ("M005", "step", -1),
        ("M005", "step", True),
        ("M005", "step", 1.0),
        ("M005", "step", BIG + 1),
        ("M005", "world_size", 0),
        ("M005", "world_size", (1 << 20) + 1),
        ("M005", "world_size", 3),  # there are two digests
        ("M005", "block_bytes", 4095),
        ("M005", "block_bytes", 0),
        ("M005", "block_bytes", 4104),
        ("M005", "block_bytes", (1 << 26) + 1),
        ("M005", "names", "abc"),
        ("M005", "names.0", b"a"),
        ("M005", "writer.zckpt", 1),
        ("M005", "aliases.tied", 0),
        ("M005", "state", "tree"),
        ("M005", "digests.1", b"\0" * 15),
        ("M005", "digests.1", "0123456789abcdef"),
        ("M005", "digests.1", None),
        ("M005", "files", []),
        ("M005", "files.rank.0", -1),
        ("M005", "files.rank.0", 0.0),
        ("M005", "files.bytes.0", BIG + 1),
        ("M005", "files.tier", lambda column: column[:-1]),
        ("M005", "chunks.rows", lambda column: [*column, 1]),
        ("M005", "chunks.digest", lambda column: column[:-1]),
        ("M005", "parts.0", "master"),
        ("M005", "parts.0.layout", -1),
        ("M005", "parts.0.layout", (1 << 22) + 1),
        ("M006", "requires", ["zstd", "telepathy"]),
        ("M007", "names.1", "a"),
        ("M007", "parts.1.name", "master"),
        ("M008", "shapes.0", [3, -2]),
        ("M008", "shapes.0", [3.0, 2]),
        ("M008", "shapes.0", [True, 2]),
        ("M008", "shapes.0", "32"),
        ("M008", "shapes.0", [1] * 65),
        ("M008", "shapes.0", [1 << 61, 2]),
        ("M008", "shapes.0", [1 << 32, 1 << 32]),  # 2^64 elements
        ("M008", "shapes.0", [1 << 60]),  # 2^62 bytes as F32
        ("M008", "shapes", lambda shapes: [*shapes, [1 << 61, 2]]),  # although no tensor has this shape
        ("M009", "parts.0.dtypes.0", "F128"),
        ("M009", "parts.0.dtypes.0", "f32"),
        ("M010", "parts.0.names", [0, 2, 1]),
        ("M010", "parts.0.names", [0, 0, 1]),
        ("M010", "parts.0.names", [0, 1]),
        ("M010", "parts.0.names.2", 99),
        ("M010", "parts.0.shapes.0", 99),
        ("M011", "files.rank.0", 2),
        ("M011", "files.part.0", 3),
        ("M011", "files.tier.0", 3),
        ("M011", "files.rank", lambda column: column[::-1]),
        ("M011", "files", lambda files: {name: column[:1] + column for name, column in files.items()}),
        ("S003", "files.data_start.0", 0),
        ("S003", "files.data_start.0", 4097),
        ("S003", "files.data_start.0", 1 << 20),  # beyond the end of the file
        ("M012", "aliases", {"b": "a"}),
        ("M012", "aliases", {"x": "y"}),
        ("M012", "aliases", {"x": "z", "z": "a"}),
        ("M013", "chunks.offset.0", 1),
        ("M013", "chunks.offset.1", 0),
        ("M013", "chunks.bytes.0", 0),
        ("M013", "chunks.bytes.1", (64 << 20) + 1),
        ("M013", "chunks.first_row.0", 1),
        ("M013", "chunks.rows.0", 0),
        ("M013", "chunks.rows.0", 4),
        ("M013", "chunks.layout.0", 9),
        ("M013", "chunks.pieces.0", 1 << 26),
        ("M013", "index_bytes", lambda value: value + 1),
        ("M013", "parts.1.names", [0, 1, 4]),  # this part shares its layout with the first part
        ("M013", "parts.0.layout", 1),
        ("N001", "names.0", ""),
        ("N001", "names.0", "a\nb"),
        ("N001", "names.0", "é" * 513),
        ("N001", "aliases", {"a\x7f": "a"}),
        ("N002", "names.0", "@a"),
        ("N002", "names.0", "a@0:1"),
        ("N002", "names.0", "__metadata__"),
        ("N002", "aliases", {"a@12:3": "a"}),
        ("N003", "parts.0.name", "exp.avg"),
        ("N003", "parts.0.name", "../exp"),
        ("N003", "parts.0.name", ""),
        ("N003", "parts.0.name", "a" * 65),
        ("N003", "parts.0.name", "exp_avg\n"),
        ("N003", "parts.0.name", "éxp"),
        ("N004", "save_id", "../../0123456789"),
        ("N004", "save_id", "0123456789ABCDEF"),
        ("N004", "save_id", "0123456789abcdef\n"),
        ("M005", "save_id", 7),
        ("M005", "save_id", None),
    ],
)
def test_a_broken_field_is_refused(raw: bytes, rule: str, path: str, change: object) -> None:
    body = body_of(raw)
    edit_field(body, path, change)
    assert rule_of(envelope(body)) == rule


@pytest.mark.parametrize(
    ("rule", "error", "spoil"),
    [
        ("M001", FormatError, lambda raw: b""),
        ("M001", FormatError, lambda raw: b"PK\3\4 something else"),
        ("M001", FormatError, lambda raw: msgpack.packb({"zckpt": 1})),
        ("M001", FormatError, lambda raw: b"\x81\x90\xc0"),  # a map whose key is a list
        ("M001", FormatError, lambda raw: b"\x91" * 5000),
        ("M001", FormatError, lambda raw: msgpack.packb(["other", *msgpack.unpackb(raw)[1:]])),
        ("M001", FormatError, lambda raw: msgpack.packb(msgpack.unpackb(raw)[:3])),
        ("M001", FormatError, lambda raw: msgpack.packb([*msgpack.unpackb(raw), 0])),
        ("M001", FormatError, lambda raw: msgpack.packb([*msgpack.unpackb(raw)[:3], {}])),
        ("M001", FormatError, lambda raw: b"\xdc\0\4" + raw[1:]),  # the same array with a longer head
        ("M001", FormatError, lambda raw: raw.replace(b"\xc4\x10", b"\xc5\0\x10", 1)),  # the digest too
        ("M001", FormatError, lambda raw: raw.replace(b"\xc5", b"\xc6\0\0", 1)),  # and the body
        ("M001", FormatError, lambda raw: envelope(body_of(raw), [1, 1])),
        ("M002", VersionError, lambda raw: envelope(body_of(raw), [2, 0])),
        ("M002", VersionError, lambda raw: envelope(body_of(raw), [0, 9])),
        ("M002", VersionError, lambda raw: envelope(body_of(raw), "1.0")),
        ("M002", VersionError, lambda raw: envelope(body_of(raw), [1])),
        ("M002", VersionError, lambda raw: envelope(body_of(raw), [True, 0])),
        ("M002", VersionError, lambda raw: msgpack.packb(["zckpt", [3, 1], "all else may have changed"])),
        ("M003", DigestError, lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])),
        ("M003", DigestError, lambda raw: raw[:12] + b"\0" * 16 + raw[28:]),
        ("M005", FormatError, lambda raw: envelope(b"\x90")),
        ("M005", FormatError, lambda raw: envelope(b"")),
        ("M005", FormatError, lambda raw: envelope(msgpack.packb(body_of(raw)) + b"\0")),
        ("M005", FormatError, lambda raw: envelope(b"\x82\xa1a\0\xa1a\0")),
        ("M005", FormatError, lambda raw: envelope(b"\x81\xa1a\x82\xa1b\0\xa1b\0")),
        ("M005", FormatError, lambda raw: envelope(b"\x81\xa1a\xa1\xff")),  # not UTF-8
        ("M005", FormatError, lambda raw: envelope(b"\x81\x90\0")),
        ("M005", FormatError, lambda raw: envelope(b"\x81\xa1a" + b"\x91" * 5000)),
    ],
)
def test_a_broken_manifest_is_refused(raw: bytes, rule: str, error: type[FormatError], spoil: Any) -> None:
    with pytest.raises(error) as caught:
        decode(spoil(raw))
    assert (caught.value.rule, caught.value.file) == (rule, names.MANIFEST)


def test_the_feature_pieces_raises_the_limits_and_bounds_the_pieces_by_the_length_of_the_index(raw: bytes) -> None:
    """The index itself is not read."""

    def with_chunk(pieces: int, index_bytes: int, features: list[str]) -> bytes:
        body = body_of(raw) | {"requires": features, "index_bytes": index_bytes}
        *_, last = range(len(body["chunks"]["pieces"]))
        body["chunks"]["pieces"] = [0] * last + [pieces]
        body["chunks"]["bytes"][last] = index_bytes - body["chunks"]["offset"][last]
        return envelope(body)

    parts = sum(part.layout_id == decode(raw).chunks[-1].layout_id for part in decode(raw).parts)
    most = (1 << 26) // parts
    decode(with_chunk(most, 1 << 20, []))
    assert rule_of(with_chunk(most, 1 << 20, ["pieces"])) == "M013"  # it does not need the feature
    for pieces in (most + 1, 1 << 28, (1 << 32) // parts):
        fewest_bytes = -(-pieces * parts // 1024)
        assert rule_of(with_chunk(pieces, fewest_bytes, [])) == "M013"
        sound = with_chunk(pieces, fewest_bytes, ["pieces"])
        assert body_of(manifest_format.encode(decode(sound)))["requires"] == ["pieces"]
        assert rule_of(with_chunk(pieces, fewest_bytes - 1, ["pieces"])) == "M013"
    assert rule_of(with_chunk((1 << 32) // parts + 1, 1 << 25, ["pieces"])) == "M013"


def test_unknown_features_are_refused_before_other_fields_are_checked(raw: bytes) -> None:
    body = body_of(raw) | {"requires": ["zstd", "telepathy"], "save_id": {"new": "meaning"}}
    with pytest.raises(FeatureError, match="zstd, telepathy"):
        decode(envelope(body))


def test_what_a_minor_version_adds_is_ignored(raw: bytes) -> None:
    body = body_of(raw) | {"version": [1, 9], "news": {"a": [1, 2.5, None]}}
    body["parts"][0]["colour"] = "red"
    body["files"]["mtime"] = [1]
    body["chunks"]["level"] = 9
    assert decode(envelope(body, [1, 9])) == decode(raw)


def test_a_manifest_that_is_too_long_is_neither_written_nor_read(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = decode(raw)
    monkeypatch.setattr(manifest_format, "MANIFEST_BYTES_MAX", len(raw) - 1)
    for action in (lambda: encode(manifest), lambda: decode(raw)):
        with pytest.raises(SizeError) as caught:
            action()
        assert caught.value.rule == "M004"


def test_too_many_names_are_refused(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_format, "NAMES_MAX", len(decode(raw).names) - 1)
    assert rule_of(raw) == "M005"


@pytest.mark.parametrize(
    "content",
    [b"global_step5", b"global_step5\n", b"a b\n", "schritt-ö\n".encode(), b"...\n", b"a/b\n", b"a/.b/..c/ d/e"],
)
def test_latest_names_one_directory(content: bytes) -> None:
    name = content.decode().removesuffix("\n")
    assert names.decode_latest(content, "latest") == name
    assert names.encode_latest(name) == content.removesuffix(b"\n") + b"\n"


def test_latest_leads_into_directories_of_the_run(tmp_path: Path) -> None:
    write_state(tmp_path / "epoch0" / "step1", 1, {"w": (2,)}, step=7, latest=False)
    (tmp_path / "latest").write_bytes(names.encode_latest("epoch0/step1"))
    assert zckpt.open(tmp_path).path == str(tmp_path / "epoch0" / "step1")
    for gone in ("epoch0/step2", "x" * 255, "a/" + "x" * 253, "epoch0/step1/step1"):
        (tmp_path / "latest").write_bytes(names.encode_latest(gone))
        with pytest.raises(zckpt.CheckpointNotFoundError, match="L001"):
            zckpt.open(tmp_path)
    (tmp_path / "latest").write_bytes(b"x" * 256)  # no file can have this name
    with pytest.raises(zckpt.CheckpointNotFoundError, match="L001"):
        zckpt.open(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "epoch0")
    for name, rule in (("link/step1", "F002"), ("epoch0/link", "F002"), ("epoch0/file/step1", "F002")):
        (tmp_path / "epoch0" / "link").unlink(missing_ok=True)
        (tmp_path / "epoch0" / "link").symlink_to("step1")
        (tmp_path / "epoch0" / "file").write_text("no directory")
        (tmp_path / "latest").write_bytes(names.encode_latest(name))
        with pytest.raises(FormatError) as caught:
            zckpt.open(tmp_path)
        assert caught.value.rule == rule
    (tmp_path / "single").symlink_to("epoch0/step1")  # the directory of a checkpoint may be a link
    (tmp_path / "latest").write_bytes(names.encode_latest("single"))
    assert zckpt.open(tmp_path).step == 7


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n", b".", b"..\n", b"/etc\n", b"../other\n", b"a\n\n", b"a\0b", b"\xff", b"a\x7f", b"a" * 257),
        *(b"/", b"a/", b"a//b", b"a/./b", b"a/../b", b"a/b/..", b"a/\n", b"a\n/b", b"\xc2\x9f/b", b"a/" * 128 + b"a"),
    ],
)
def test_a_broken_latest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(FormatError) as caught:
        zckpt.open(tmp_path)
    assert (caught.value.rule, caught.value.file) == ("L001", str(tmp_path / "latest"))
