"""The catalog: manifest and index from what each rank has told of its files, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fragments import BLOCK_BYTES, SAVE_ID, fragments_of, pieces_of
from zckpt.errors import FormatError, RankError, UnsupportedError
from zckpt.format import index as index_format
from zckpt.format import manifest as manifest_format
from zckpt.plan import catalog
from zckpt.plan.layout import plan_shards
from zckpt.state.inventory import TIERS, Fragment

ABOUT = catalog.About(1, BLOCK_BYTES, {}, b"\xc0", {})


def receipts_of(all_fragments: list[list[Fragment]]) -> list[catalog.Receipt]:
    world_size = len(all_fragments)
    return [
        catalog.receipt(
            rank, plan_shards(fragments, SAVE_ID, rank, world_size, block_bytes=BLOCK_BYTES), bytes([rank]) * 16
        )
        for rank, fragments in enumerate(all_fragments)
    ]


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_the_catalog_finds_every_piece_where_its_rank_put_it(seed: int, world_size: int) -> None:
    ranks = [fragments_of(rank, world_size, seed) for rank in range(world_size)]
    receipts = [catalog.unpack(catalog.pack(receipt)) for receipt in receipts_of(ranks)]
    raw, index = catalog.catalog(receipts, SAVE_ID, ABOUT)
    manifest = manifest_format.decode(raw)
    assert manifest.digests == tuple(bytes([rank]) * 16 for rank in range(world_size))
    expected = set()
    for rank, fragments in enumerate(ranks):
        for plan in plan_shards(fragments, SAVE_ID, rank, world_size, block_bytes=BLOCK_BYTES):
            (file,) = (file for file in manifest.files if manifest.path(file) == plan.shard.path)
            assert (file.nbytes, file.data_start, file.first_block) == (plan.nbytes, len(plan.header), plan.first_block)
            for f, offset, _, block in pieces_of(plan):
                place = (rank, TIERS.index(f.tier), f.start, f.stop, offset, block)
                expected.add((f.part, f.name, f.dtype, f.shape, *place))
    found = set()
    for part in manifest.parts:
        for chunk in manifest.chunks:
            if chunk.layout == part.layout:
                raw_chunk = index[chunk.offset : chunk.offset + chunk.nbytes]
                layout = index_format.decode(raw_chunk, chunk, manifest)
                for row in range(chunk.rows):
                    at = chunk.first_row + row
                    shape = manifest.shapes[part.shapes[at]]
                    for p in index_format.pieces(layout, row, math.prod(shape)):
                        place = (p.rank, p.tier, p.start, p.stop, p.offset, p.block)
                        found.add((part.name, manifest.names[part.names[at]], part.dtypes[at], shape, *place))
    assert found == expected
    assert len({part.layout for part in manifest.parts}) == 1  # weights and moments alike are stored once


def whole(part: str = "master", shape: tuple[int, ...] = (4,), dtype: str = "F32", copy: int = 0) -> Fragment:
    return Fragment(part, "w", shape, dtype, 0, math.prod(shape), copy=copy)


def test_copies_are_kept_apart_in_the_order_of_their_numbers() -> None:
    """A buffer of three ranks that rank 1 holds as rank 0 does, and so does not write."""
    raw, index = catalog.catalog(receipts_of([[whole()], [], [whole(copy=2)]]), SAVE_ID, ABOUT)
    manifest = manifest_format.decode(raw)
    (chunk,) = manifest.chunks
    pieces = index_format.pieces(index_format.decode(index, chunk, manifest), 0, 4)
    assert [(piece.rank, piece.copy, piece.start, piece.stop) for piece in pieces] == [(0, 0, 0, 4), (2, 1, 0, 4)]


@pytest.mark.parametrize("other", [whole(shape=(2, 2), copy=1), whole(dtype="I32", copy=1)], ids=["shape", "dtype"])
def test_ranks_that_disagree_about_a_tensor_are_refused(other: Fragment) -> None:
    with pytest.raises(RankError, match=r"master/w is .* on rank 1, F32 \[4\] on rank 0") as caught:
        catalog.catalog(receipts_of([[whole()], [other]]), SAVE_ID, ABOUT)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 2, 0), (2, 3, 0)],
        [(0, 2, 0), (1, 4, 0)],
        [(0, 2, 0), (3, 4, 0)],
        [(1, 4, 0)],
        [(0, 2, 0), (1, 3, 0)],  # as long as the tensor, all together
        [(0, 2, 0), (2, 4, 1)],
        [(0, 4, 0), (0, 4, 0)],
        [(0, 4, 0), (0, 2, 1)],
    ],
    ids=["end", "overlap", "gap", "begin", "shifted", "half-copies", "twice", "half-copy"],
)
def test_pieces_that_make_no_whole_tensor_are_never_committed(spans: list[tuple[int, int, int]]) -> None:
    """Even though the index does not say where a piece starts: it follows from the lengths."""
    ranks = [[Fragment("master", "w", (4,), "F32", start, stop, copy=copy)] for start, stop, copy in spans]
    with pytest.raises(FormatError) as caught:
        catalog.catalog(receipts_of(ranks), SAVE_ID, ABOUT)
    assert caught.value.rule == "I005"
    assert caught.value.key == "master/w"


def test_layouts_of_different_geometry_are_kept_apart() -> None:
    ranks = [[whole(), Fragment("exp_avg", "w", (4,), "F32", 0, 2)], [Fragment("exp_avg", "w", (4,), "F32", 2, 4)]]
    raw, _ = catalog.catalog(receipts_of(ranks), SAVE_ID, ABOUT)
    assert [part.layout for part in manifest_format.decode(raw).parts] == [0, 1]


def test_a_receipt_survives_its_journey() -> None:
    for seed in range(20):
        (receipt,) = receipts_of([fragments_of(0, 1, seed)])
        back = catalog.unpack(catalog.pack(receipt))
        assert (back.rank, back.digest, back.tensors, back.shards) == (0, b"\0" * 16, receipt.tensors, receipt.shards)
        for one, other in zip(back.geometries, receipt.geometries, strict=True):
            assert all(np.array_equal(getattr(one, c), getattr(other, c)) for c in catalog._GEOMETRY_COLUMNS)
        assert len(back.geometries) < len(back.shards)  # one for weights and moments alike


def synthetic(ranks: int, tensors: int, parts: int) -> list[catalog.Receipt]:
    """Of ranks that each hold an equal share of every tensor; all share one geometry, for there is much of it."""
    names = tuple((f"layer.{number}", (4 * ranks,), "F32") for number in range(tensors))
    number = np.arange(tensors)
    zeros = np.zeros(tensors, np.int64)
    found = []
    for rank in range(ranks):
        geometry = catalog.Geometry(number, zeros, zeros + 4 * rank, zeros + 4, 16 * number, 1 + number)
        shards = tuple(
            catalog.ShardReceipt(f"part{part}", "device", 4096 + 16 * tensors, 4096, part * (tensors + 1), 0, "")
            for part in range(parts)
        )
        found.append(catalog.Receipt(rank, bytes(16), names, (geometry,), shards))
    return found


def test_more_pieces_than_the_format_can_hold_are_refused_by_their_number() -> None:
    """Before tables of them are made: 22 k tensors in three parts on 1024 ranks."""
    with pytest.raises(UnsupportedError) as caught:
        catalog.catalog(synthetic(1024, 22_000, 3), SAVE_ID, ABOUT)
    message = str(caught.value)
    for text in ("67,584,000 pieces", "1,024 ranks", "3 parts", "67,108,864", "`exclude`"):
        assert text in message
    raw, _ = catalog.catalog(synthetic(1024, 20, 3), SAVE_ID, ABOUT)
    assert manifest_format.decode(raw).world_size == 1024


def test_digests_come_into_a_manifest_that_was_checked_before() -> None:
    digests = [bytes([rank]) * 16 for rank in range(2)]
    receipts = receipts_of([fragments_of(rank, 2, 1) for rank in range(2)])
    raw, index = catalog.catalog(receipts, SAVE_ID, ABOUT)
    unknown = [replace(receipt, digest=bytes(16)) for receipt in receipts]
    planned, same_index = catalog.catalog(unknown, SAVE_ID, ABOUT)
    assert (catalog.with_digests(planned, digests), same_index) == (raw, index)


def test_an_alias_of_what_is_left_out_is_left_out() -> None:
    about = replace(ABOUT, aliases={"head": "w", "other": "gone"})
    fragments = [[Fragment("master", "w", (3,), "F32", 0, 3)]]
    raw, _ = catalog.catalog(receipts_of(fragments), SAVE_ID, about)
    assert manifest_format.decode(raw).aliases == {"head": "w"}
