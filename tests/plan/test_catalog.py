"""The catalog makes manifest and index from the records of all ranks, and refuses records that do not fit together."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from unittest import mock

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fragments import BLOCK_BYTES, SAVE_ID, fragments_of, pieces_of
from tests.support.index_pieces import pieces as pieces_of_row
from zckpt.errors import FormatError, RankError, UnsupportedError
from zckpt.format import index as index_format
from zckpt.format import manifest as manifest_format
from zckpt.format.dtypes import DTYPES
from zckpt.format.names import Tier
from zckpt.geometry import Grid, Span
from zckpt.plan import catalog
from zckpt.plan.data_files import plan_data_files
from zckpt.plan.inventory import Fragment

METADATA = catalog.SaveMetadata(1, BLOCK_BYTES, {}, b"\xc0", {})


def rank_records_of(all_fragments: list[list[Fragment]]) -> list[catalog.RankRecord]:
    world_size = len(all_fragments)
    return [
        catalog.rank_record(
            rank, plan_data_files(fragments, SAVE_ID, rank, world_size, block_bytes=BLOCK_BYTES), bytes([rank]) * 16
        )
        for rank, fragments in enumerate(all_fragments)
    ]


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 30))
def test_the_catalog_finds_every_piece_where_its_rank_put_it(seed: int, world_size: int, chunk_pieces: int) -> None:
    ranks = [fragments_of(rank, world_size, seed) for rank in range(world_size)]
    ranks[-1] = ranks[-1][::-1]  # the tensors have another order than on the other ranks
    rank_records = catalog.unpack(catalog.pack(rank_record) for rank_record in rank_records_of(ranks))
    with mock.patch.object(index_format, "CHUNK_PIECES", chunk_pieces):
        raw, index = catalog.catalog(rank_records, SAVE_ID, METADATA)
    manifest = manifest_format.decode(raw)
    assert manifest.digests == tuple(bytes([rank]) * 16 for rank in range(world_size))
    expected = set()
    for rank, fragments in enumerate(ranks):
        for plan in plan_data_files(fragments, SAVE_ID, rank, world_size, block_bytes=BLOCK_BYTES):
            (file,) = (file for file in manifest.files if manifest.path(file) == plan.id.path)
            assert (file.nbytes, file.data_start, file.first_block) == (plan.nbytes, len(plan.header), plan.first_block)
            for f, offset, _, block in pieces_of(plan):
                place = (rank, f.tier, *f.span[1:], offset, block)
                expected.add((f.part, f.name, f.dtype, f.shape, *place))
    pieces = set()
    for part in manifest.parts:
        for chunk in manifest.chunks:
            if chunk.layout_id == part.layout_id:
                raw_chunk = index[chunk.offset : chunk.offset + chunk.nbytes]
                layout = index_format.decode(raw_chunk, chunk, manifest)
                for row in range(chunk.rows):
                    at = chunk.first_row + row
                    shape = manifest.shapes[part.shape_ids[at]]
                    for p in pieces_of_row(layout, row, Grid(shape)):
                        place = (p.rank, p.tier, *p.span[1:], p.offset, p.block)
                        pieces.add(
                            (part.name, manifest.names[part.name_ids[at]], DTYPES[part.dtype_ids[at]], shape, *place)
                        )
    assert pieces == expected
    assert len({part.layout_id for part in manifest.parts}) == 1  # weights and moments share one layout


def whole(part: str = "master", shape: tuple[int, ...] = (4,), dtype: str = "F32", copy: int = 0) -> Fragment:
    return Fragment(part, "w", dtype, Span(Grid(shape), 0, math.prod(shape)), copy=copy)


def test_copies_are_kept_apart_in_the_order_of_their_numbers() -> None:
    """Each of three ranks has a buffer. Rank 1 has the same values as rank 0, and therefore does not write them."""
    raw, index = catalog.catalog(rank_records_of([[whole()], [], [whole(copy=2)]]), SAVE_ID, METADATA)
    manifest = manifest_format.decode(raw)
    (chunk,) = manifest.chunks
    pieces = pieces_of_row(index_format.decode(index, chunk, manifest), 0, Grid((4,)))
    assert [(piece.rank, piece.copy, *piece.span[1:]) for piece in pieces] == [(0, 0, 0, 4), (2, 1, 0, 4)]


@pytest.mark.parametrize("other", [whole(shape=(2, 2), copy=1), whole(dtype="I32", copy=1)], ids=["shape", "dtype"])
def test_ranks_that_disagree_about_a_tensor_are_refused(other: Fragment) -> None:
    with pytest.raises(RankError, match=r"master/w is .* on rank 1, F32 \[4\] on rank 0") as caught:
        catalog.catalog(rank_records_of([[whole()], [other]]), SAVE_ID, METADATA)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 2, 0), (2, 3, 0)],
        [(0, 2, 0), (1, 4, 0)],
        [(0, 2, 0), (3, 4, 0)],
        [(1, 4, 0)],
        [(0, 2, 0), (1, 3, 0)],  # the sum of the lengths is right
        [(0, 2, 0), (2, 4, 1)],
        [(0, 4, 0), (0, 4, 0)],
        [(0, 4, 0), (0, 2, 1)],
    ],
    ids=["end", "overlap", "gap", "begin", "shifted", "half-copies", "twice", "half-copy"],
)
def test_pieces_that_do_not_make_up_the_tensor_are_refused(spans: list[tuple[int, int, int]]) -> None:
    """A reader could not notice this, because the index has only the lengths of pieces. So the catalog checks where
    they start."""
    ranks = [[Fragment("master", "w", "F32", Span(Grid((4,)), start, stop), copy=copy)] for start, stop, copy in spans]
    with pytest.raises(FormatError) as caught:
        catalog.catalog(rank_records_of(ranks), SAVE_ID, METADATA)
    assert caught.value.rule == "I005"
    assert caught.value.key == "master/w"


def test_parts_with_different_pieces_have_different_layouts() -> None:
    ranks = [
        [whole(), Fragment("exp_avg", "w", "F32", Span(Grid((4,)), 0, 2))],
        [Fragment("exp_avg", "w", "F32", Span(Grid((4,)), 2, 4))],
    ]
    raw, _ = catalog.catalog(rank_records_of(ranks), SAVE_ID, METADATA)
    assert [part.layout_id for part in manifest_format.decode(raw).parts] == [0, 1]


def test_a_rank_record_is_the_same_after_packing_and_unpacking() -> None:
    for seed in range(20):
        (rank_record,) = rank_records_of([fragments_of(0, 1, seed)])
        (back,) = catalog.unpack([catalog.pack(rank_record)])
        assert (back.rank, back.digest, back.tensors, back.files) == (
            0,
            b"\0" * 16,
            rank_record.tensors,
            rank_record.files,
        )
        for columns, expected in zip(back.piece_columns, rank_record.piece_columns, strict=True):
            assert all(
                np.array_equal(getattr(columns, column), getattr(expected, column))
                for column in catalog.PieceColumns.__dataclass_fields__
            )
        assert len(back.piece_columns) < len(back.files)  # weights and moments share their piece columns


def test_rank_records_of_several_ranks_share_their_tensors() -> None:
    rank_records = rank_records_of(
        [[Fragment("master", "w", "F32", Span(Grid((4,)), rank, rank + 1))] for rank in range(4)]
    )
    first, *others = catalog.unpack(map(catalog.pack, reversed(rank_records)))
    assert [record.rank for record in (first, *others)] == [0, 1, 2, 3]
    assert all(record.tensors[0] is first.tensors[0] for record in others)


def synthetic(ranks: int, tensors: int, parts: int) -> list[catalog.RankRecord]:
    """Makes the records of ranks that each hold an equal share of every tensor. All parts share one set of columns,
    because it is large."""
    kind: catalog.Kind = ((4 * ranks,), "F32", ())
    columns_of_tensors = catalog.Tensors.of([(f"layer.{number}", kind) for number in range(tensors)])
    number = np.arange(tensors)
    zeros = np.zeros(tensors, np.int64)
    rank_records = []
    for rank in range(ranks):
        columns = catalog.PieceColumns(number, zeros + 4 * rank, zeros + 4, zeros, 16 * number, 1 + number)
        data_files = tuple(
            catalog.FileRecord(f"part{part}", Tier.DEVICE, 4096 + 16 * tensors, 4096, part * (tensors + 1), 0, "")
            for part in range(parts)
        )
        rank_records.append(catalog.RankRecord(rank, bytes(16), columns_of_tensors, (columns,), data_files))
    return rank_records


def test_rank_0_takes_less_than_twice_the_memory_of_the_index() -> None:
    """This is about what it takes beside the records as they were received. The pieces of each layout count once."""
    received = [catalog.pack(record) for record in synthetic(256, 1000, 3)]
    tracemalloc.start()
    try:
        with mock.patch.object(index_format, "CHUNK_PIECES", 1 << 12):
            raw, _ = catalog.catalog(catalog.unpack(received), SAVE_ID, METADATA)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    chunks = manifest_format.decode(raw).chunks
    assert sum(chunk.pieces for chunk in chunks) == 256_000
    assert peak_bytes < 2 * 25 * 256_000


def test_more_pieces_than_the_format_can_hold_are_refused_by_their_number() -> None:
    """They are refused before tables of them are made."""
    rank_records = synthetic(1024, 20, 3)
    with mock.patch.object(catalog, "MANY_PIECES_MAX", 61_439), pytest.raises(UnsupportedError) as caught:
        catalog.catalog(rank_records, SAVE_ID, METADATA)
    message = str(caught.value)
    for text in ("61,440 pieces", "1,024 ranks", "3 parts", "61,439", "`exclude`"):
        assert text in message
    raw, _ = catalog.catalog(rank_records, SAVE_ID, METADATA)
    assert manifest_format.decode(raw).world_size == 1024


def test_a_checkpoint_with_very_many_pieces_has_the_feature_for_them() -> None:
    def requires(raw: bytes) -> list[str]:
        return msgpack.unpackb(msgpack.unpackb(raw)[3])["requires"]

    rank_records = synthetic(64, 20, 3)
    assert requires(catalog.catalog(rank_records, SAVE_ID, METADATA)[0]) == []
    for limit, value in (("INDEX_PIECES_MAX", 3839), ("INDEX_CHUNKS_MAX", 2)):
        with mock.patch.object(manifest_format, limit, value):
            raw, _ = catalog.catalog(rank_records, SAVE_ID, METADATA)
            assert sum(chunk.pieces for chunk in manifest_format.decode(raw).chunks) == 1280
        assert requires(raw) == ["pieces"]


def test_digests_are_added_to_a_manifest_that_was_planned_before() -> None:
    digests = [bytes([rank]) * 16 for rank in range(2)]
    rank_records = rank_records_of([fragments_of(rank, 2, 1) for rank in range(2)])
    raw, index = catalog.catalog(rank_records, SAVE_ID, METADATA)
    unknown = [replace(rank_record, digest=bytes(16)) for rank_record in rank_records]
    planned, same_index = catalog.catalog(unknown, SAVE_ID, METADATA)
    assert (catalog.with_digests(planned, digests), same_index) == (raw, index)


def test_an_alias_of_a_missing_tensor_is_left_out() -> None:
    metadata = replace(METADATA, aliases={"head": "w", "other": "gone"})
    fragments = [[Fragment("master", "w", "F32", Span(Grid((3,)), 0, 3))]]
    raw, _ = catalog.catalog(rank_records_of(fragments), SAVE_ID, metadata)
    assert manifest_format.decode(raw).aliases == {"head": "w"}
