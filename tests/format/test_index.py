"""The index: layouts come back unchanged from any number of chunks, and every rule has a case that breaks it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.support.index_pieces import Piece, pieces
from tests.support.states import part_of, same_all, write_state
from zckpt.checkpoint.listing import contents
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.errors import DigestError, FormatError
from zckpt.format import index as index_format
from zckpt.format.digest import digest
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.index import PIECE_BYTES, ROW_BYTES, IndexWriter, Rows, chunk_rows, decode, take
from zckpt.format.manifest import Chunk, File, Files, Manifest
from zckpt.format.names import Tier, index_path
from zckpt.geometry import Grid, Span

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAVE_ID = "0123456789abcdef"
WORLD_SIZE = 3
DATA_BYTES = 1 << 20


def manifest_for(shapes: list[tuple[int, ...]], dtypes: dict[str, list[str]], chunks: tuple[Chunk, ...]) -> Manifest:
    """Returns a manifest in which every rank has a file of every part on two of the tiers. All parts have layout 0."""
    files = [
        File(rank, part, tier, 4096 + DATA_BYTES, 4096, 0)
        for rank in range(WORLD_SIZE)
        for part in range(len(dtypes))
        for tier in (Tier.DEVICE, Tier.NVME)
    ]
    ids = tuple(range(len(shapes)))
    return Manifest(
        save_id=SAVE_ID,
        step=0,
        world_size=WORLD_SIZE,
        block_bytes=4096,
        names=tuple(f"t{i}" for i in ids),
        shapes=tuple(shapes),
        parts=tuple(part_of(name, 0, ids, ids, of) for name, of in dtypes.items()),
        files=Files.of(files),
        digests=(b"\0" * 16,) * WORLD_SIZE,
        chunks=chunks,
        index_bytes=sum(chunk.nbytes for chunk in chunks),
    )


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[list[Piece]]]:
    """Draws the shapes and the pieces of some tensors. A tensor has one copy or several, and may have no elements."""
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6))
    pieces_of_rows = []
    for shape in shapes:
        box = Grid(shape)
        numel, row = box.numel, list[Piece]()
        for copy in range(draw(st.integers(1, 3))):
            inner = sorted(draw(st.sets(st.integers(1, numel - 1), max_size=4))) if numel > 1 else []
            for start, stop in zip([0, *inner], [*inner, numel], strict=True):
                place = (draw(st.integers(0, WORLD_SIZE - 1)), draw(st.sampled_from([Tier.DEVICE, Tier.NVME])))
                offset, block = 8 * draw(st.integers(0, 1000)), draw(st.integers(0, (1 << 32) - 1))
                row.append(Piece(*place, copy, Span(box, start, stop), offset, block))
        pieces_of_rows.append(row)
    return shapes, pieces_of_rows


def layout_of(rows: list[list[Piece]]) -> Rows:
    flat = [piece for row in rows for piece in row]
    columns = {
        "name_id": range(len(rows)),
        "count": map(len, rows),
        "rank": (piece.rank for piece in flat),
        "tier": (piece.tier for piece in flat),
        "length": (piece.span.numel for piece in flat),
        "offset": (piece.offset for piece in flat),
        "block": (piece.block for piece in flat),
    }
    return Rows(**{name: np.array([*values], np.int64) for name, values in columns.items()})


@given(st.data(), rows(), st.integers(1, 6))
def test_an_index_comes_back_unchanged(
    data: st.DataObject, written: tuple[list[tuple[int, ...]], list[list[Piece]]], chunk_pieces: int
) -> None:
    shapes, expected = written
    layout, index = layout_of(expected), IndexWriter()
    with mock.patch.object(index_format, "CHUNK_PIECES", chunk_pieces):
        rows = [np.arange(len(shapes))[rows] for rows in chunk_rows(layout.count)]
    other = dataclasses.replace(layout, block=layout.block ^ 1)
    ids = [index.add(take(one, of_chunk) for of_chunk in rows) for one in (layout, other, layout)]
    assert ids == [0, 1, 0]
    raw, chunks = bytes(index.index), tuple(index.chunks)
    dtypes = {part: [data.draw(st.sampled_from(sorted(ITEM_BYTES))) for _ in shapes] for part in ("a", "b")}
    manifest = manifest_for(shapes, dtypes, chunks)
    assert sum(chunk.nbytes for chunk in chunks) == len(raw)
    for number in (0, 1):
        layout_chunks = [chunk for chunk in chunks if chunk.layout_id == number]
        assert sum(chunk.rows for chunk in layout_chunks) == len(shapes)
        assert all(
            chunk.pieces - len(expected[chunk.first_row + chunk.rows - 1]) < chunk_pieces for chunk in layout_chunks
        )
        decoded = []
        for chunk in layout_chunks:
            decoded_layout = decode(raw[chunk.offset : chunk.offset + chunk.nbytes], chunk, manifest)
            boxes = map(Grid, shapes[chunk.first_row : chunk.first_row + chunk.rows])
            decoded += [list(pieces(decoded_layout, row, box)) for row, box in enumerate(boxes)]
        assert decoded == [[piece._replace(block=piece.block ^ number) for piece in row] for row in expected]


def test_one_key_reads_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_format, "CHUNK_PIECES", 4)
    written = write_state(tmp_path / "c", 2, {f"t{i}": (6,) for i in range(20)}, parts=("master",))
    checkpoint = zckpt.open(written.path)
    assert len(loader_of(checkpoint).manifest.chunks) > 10
    before = checkpoint.io.metadata_bytes
    assert [piece.stop for piece in checkpoint["master/t7"].pieces] == [3, 6]
    sizes = {chunk.nbytes for chunk in loader_of(checkpoint).manifest.chunks}
    assert checkpoint.io.metadata_bytes - before in sizes
    assert same_all(checkpoint.load(), written.full)


def test_few_pieces_of_the_index_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is asked for again is read again."""
    monkeypatch.setattr(index_format, "CHUNK_PIECES", 4)
    monkeypatch.setattr(contents, "KEPT_PIECES", 12)
    written = write_state(tmp_path / "c", 2, {f"t{i}": (6,) for i in range(20)}, parts=("master",))
    checkpoint = zckpt.open(written.path)
    opened = loader_of(checkpoint).contents
    for number in range(len(opened.manifest.chunks)):
        opened.chunk(number)
        kept = opened._layouts
        assert number in kept
        assert sum(len(layout.length) for layout in kept.values()) == opened._kept_pieces <= 12
    assert same_all(checkpoint.load(), written.full)


# The tests below break this index of two tensors. The first tensor has two pieces, and the second has two copies.

SHAPES: list[tuple[int, ...]] = [(3, 2), (4,)]
SOUND = {
    "name_id": [0, 1],
    "count": [2, 2],
    "rank": [0, 1, 0, 2],
    "tier": [0, 0, 2, 2],
    "length": [4, 2, 4, 4],
    "offset": [0, 16, 8, DATA_BYTES - 32],
    "block": [1, 2, 3, 4],
}
RAW = b"".join(
    np.array(SOUND[column], dtype).tobytes() for column, dtype in index_format.ROW_COLUMNS + index_format.PIECE_COLUMNS
)


def frame(raw: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(raw)


def packed(**columns: list[int]) -> bytes:
    fields = index_format.ROW_COLUMNS + index_format.PIECE_COLUMNS
    return frame(b"".join(np.array((SOUND | columns)[column], dtype).tobytes() for column, dtype in fields))


def decode_frame(raw: bytes, **changes: Any) -> Rows:
    chunk = Chunk(0, 0, 2, 4, 0, len(raw), digest(raw))._replace(**changes)
    return decode(raw, chunk, manifest_for(SHAPES, {"a": ["F32", "F32"], "b": ["F32", "F64"]}, (chunk,)))


def test_the_unbroken_index_is_sound() -> None:
    layout = decode_frame(packed())
    assert [(p.rank, p.copy, *p.span[1:]) for p in pieces(layout, 1, Grid((4,)))] == [(0, 0, 0, 4), (2, 1, 0, 4)]


@pytest.mark.parametrize(
    ("rule", "key", "columns"),
    [
        ("I004", None, {"name_id": [0, 2]}),
        ("I004", None, {"name_id": [1, 0]}),
        ("I004", None, {"count": [4, 0]}),
        ("I004", None, {"count": [2, 1]}),
        ("I004", None, {"count": [2, 3]}),
        ("I004", None, {"count": [(1 << 32) - 1, 5]}),
        ("I005", "a/t0", {"length": [4, 1, 4, 4]}),
        ("I005", "a/t0", {"length": [4, 3, 4, 4]}),
        ("I005", "a/t0", {"length": [6, 0, 4, 4]}),
        ("I005", "a/t0", {"length": [5, 7, 4, 4]}),  # as long as two copies, but the second piece belongs to both
        ("I005", "a/t1", {"length": [4, 2, 2, 4]}),
        ("I005", "a/t1", {"count": [1, 3], "length": [6, 3, 3, 2]}),  # the second piece of t1 belongs to two copies
        ("I005", "a/t1", {"length": [4, 2, 4, 8]}),
        ("I005", "a/t1", {"length": [4, 2, 4, (1 << 64) - 4]}),
        ("I005", "a/t1", {"length": [4, 2, (1 << 63) + 4, (1 << 63) + 4]}),
        ("I006", "a/t0", {"rank": [0, 3, 0, 2]}),
        ("I006", "a/t0", {"rank": [(1 << 32) - 1, 1, 0, 2]}),
        ("I006", "a/t0", {"tier": [0, 1, 2, 2]}),  # there is no file of that tier
        ("I006", "a/t0", {"tier": [0, 3, 2, 2]}),
        ("I006", "a/t0", {"tier": [255, 0, 2, 2]}),
        ("I006", "a/t0", {"offset": [0, 18, 8, 0]}),
        ("I006", "a/t0", {"offset": [0, DATA_BYTES - 4, 8, 0]}),
        ("I006", "a/t0", {"offset": [0, (1 << 64) - 8, 8, 0]}),
        ("I006", "a/t0", {"offset": [(1 << 63) - 8, 16, 8, 0]}),
        ("I006", "b/t1", {"offset": [0, 16, 4, 0]}),  # in part b, the tensor is F64
        ("I006", "b/t1", {"offset": [0, 16, 8, DATA_BYTES - 16]}),
    ],
)
def test_a_broken_column_is_refused(rule: str, key: str | None, columns: dict[str, list[int]]) -> None:
    with pytest.raises(FormatError) as caught:
        decode_frame(packed(**columns))
    assert (caught.value.rule, caught.value.key) == (rule, key)
    assert caught.value.file == index_path(SAVE_ID)
    assert (caught.value.start, caught.value.stop) == (0, len(packed(**columns)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        RAW,
        frame(RAW)[:-1],
        frame(RAW) + b"\0",
        frame(RAW) + frame(b""),
        frame(RAW) + b"\x50\x2a\x4d\x18\0\0\0\0",  # a skippable frame follows
        b"\x50\x2a\x4d\x18\0\0\0\0" + frame(RAW),
        frame(RAW[:-1]),
        frame(RAW + b"\0"),
        frame(RAW, write_content_size=False),
        frame(bytes(1 << 30)),  # decompresses to 1 GiB
        frame(RAW)[:5] + b"\xff" + frame(RAW)[6:],
    ],
    ids=range(12),
)
def test_a_broken_frame_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        decode_frame(raw)
    assert caught.value.rule == "I003"


@pytest.mark.parametrize(("rows_", "pieces_"), [(2, 5), (3, 4), (1, 4), (2, (64 << 20) // PIECE_BYTES)])
def test_the_size_is_known_before_anything_is_allocated(rows_: int, pieces_: int) -> None:
    with pytest.raises(FormatError) as caught:
        decode_frame(packed(), rows=rows_, pieces=pieces_)
    assert caught.value.rule == "I003"
    assert len(RAW) == 2 * ROW_BYTES + 4 * PIECE_BYTES


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b"\0" + raw[1:]])
def test_a_damaged_chunk_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(DigestError) as caught:
        decode_frame(spoil(packed()), digest=digest(packed()))
    assert caught.value.rule == "I002"


def test_no_bit_of_an_index_may_flip(tmp_path: Path) -> None:
    written = write_state(tmp_path / "c", 2, {"a": (3, 2), "b": (5,), "c": (0,)})
    path = tmp_path / "c" / index_path(written.save_id)
    raw = path.read_bytes()
    manifest = open_loader(tmp_path / "c").manifest
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        chunk = next(c for c in manifest.chunks if c.offset <= bit // 8 < c.offset + c.nbytes)
        with pytest.raises(DigestError):
            decode(bytes(flipped[chunk.offset : chunk.offset + chunk.nbytes]), chunk, manifest)
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    with pytest.raises(DigestError):
        zckpt.open(tmp_path / "c").load()
