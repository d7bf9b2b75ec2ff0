"""The planned ranges and reads give what indexing with numpy gives, whatever is asked for, and whatever the pieces
are."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.grids import grids, order_of
from tests.support.index_pieces import Piece
from zckpt.errors import MismatchError
from zckpt.format.digest import block_count, blocks
from zckpt.format.names import Tier
from zckpt.geometry import Grid, Span, all_of, slice_of
from zckpt.plan import reads
from zckpt.plan.reads import Ranges, StridedCopy, TargetPlaces, joined_copies, plan_reads
from zckpt.plan.reshard import PieceRanges, RequestedSpan, StoredPieces, choose_copies, piece_ranges

FILES = 3
KIB = 1 << 10


@dataclass(frozen=True)
class Stored:
    """A tensor with ``item`` bytes per element, which are the last axis of ``values``. It is cut into ``pieces`` in the
    order of its ``grid``, and ``files`` has the number of the file of each piece. Without a grid, the order is that of
    the spans that are read."""

    values: np.ndarray
    item: int
    pieces: list[Piece]
    files: list[int]
    grid: Grid | None = None

    @property
    def in_order(self) -> np.ndarray:
        """The elements in the order of the grid, with their bytes in the last axis."""
        flat: np.ndarray = self.values.reshape(-1, self.item)
        return flat if self.grid is None else flat[order_of(self.grid)]


@dataclass(frozen=True)
class Store:
    tensors: list[Stored]
    contents: list[bytes]
    data_starts: list[int]
    block_bytes: int
    block_places: dict[tuple[int, int], tuple[int, int]]
    """Where the bytes of each block begin and end in the file, by file and block number."""


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def stores(draw: st.DrawFn) -> Store:
    """Draws up to four tensors that are cut at random places. Their pieces are in random files, in random order."""
    block_bytes = 8 * draw(st.integers(1, 6))
    tensors = []
    loose: list[tuple[int, int, int]] = []
    for number in range(draw(st.integers(1, 4))):
        shape, item = draw(shapes), draw(st.sampled_from([1, 2, 4, 8]))
        numel = math.prod(shape)
        values = np.random.default_rng(number).integers(0, 256, (*shape, item), np.uint8)
        inner = sorted(draw(st.sets(st.integers(1, numel - 1), max_size=5))) if numel > 1 else []
        for start, stop in zip([0, *inner], [*inner, numel], strict=True):
            loose.append((number, start, stop))
        tensors.append(Stored(values, item, [], [], draw(st.just(Grid(shape)) | grids(shape))))
    contents = [bytearray(draw(st.integers(0, 20))) for _ in range(FILES)]
    data_starts = [len(content) for content in contents]
    next_block = [block_count(start, block_bytes) for start in data_starts]
    block_places: dict[tuple[int, int], tuple[int, int]] = {}
    for number, start, stop in draw(st.permutations(loose)):
        stored, file = tensors[number], draw(st.integers(0, FILES - 1))
        data = stored.in_order[start:stop].tobytes()
        offset = len(contents[file]) - data_starts[file]
        stored.pieces.append(
            Piece(file, Tier.DEVICE, 0, Span(stored.grid or Grid(()), start, stop), offset, next_block[file])
        )
        for block, first, last in blocks(len(contents[file]), len(data), next_block[file], block_bytes):
            block_places[file, block] = first, last
        next_block[file] += block_count(len(data), block_bytes)
        contents[file] += data
    for stored in tensors:
        stored.pieces.sort(key=lambda piece: piece.span.start)
        stored.files.extend(piece.rank for piece in stored.pieces)
    return Store(tensors, [bytes(content) for content in contents], data_starts, block_bytes, block_places)


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    bound = st.none() | st.integers(-9, 9)
    count = draw(st.integers(0, len(shape)))
    return tuple(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1]))) for _ in range(count))


Requests = list[tuple[Stored, list[tuple[Span, int]]]]
"""For each request, the tensor, and the elements of it with the first element of the target to which they go."""


def elements(start: int, stop: int, target_start: int = 0) -> tuple[Span, int]:
    """Returns elements of a tensor of any size for a request."""
    return Span(Grid((1 << 40,)), start, stop), target_start


def found(requests: Requests) -> PieceRanges:
    columns = [
        (number, *piece.span[1:], file, piece.offset, piece.block)
        for number, (stored, _) in enumerate(requests)
        for piece, file in zip(stored.pieces, stored.files, strict=True)
    ]
    pieces = StoredPieces(*np.array(columns, np.int64).reshape(-1, 6).T)
    wanted = [RequestedSpan(number, *part) for number, (_, parts) in enumerate(requests) for part in parts]
    orders = [stored.grid or Grid((1 << 40,)) for stored, _ in requests]
    return piece_ranges(pieces, orders, wanted, [stored.item for stored, _ in requests])


def carry_out(copy: StridedCopy, targets: list[bytearray], data: bytes) -> None:
    """Copies equally spaced runs of bytes."""
    assert 0 <= copy.source < copy.source + copy.source_bytes <= len(data)
    for number in range(copy.runs):
        begin, place = copy.source + number * copy.source_stride, copy.target_offset + number * copy.target_stride
        assert place + copy.run_bytes <= len(targets[copy.target])
        targets[copy.target][place : place + copy.run_bytes] = data[begin : begin + copy.run_bytes]


def run(store: Store, ops: tuple[reads.ReadOp, ...], targets: list[bytearray]) -> Counter[tuple[int, int]]:
    """Carries out reads on bytes in memory. Returns how often each byte of each file was read."""
    read: Counter[tuple[int, int]] = Counter()
    for op in ops:
        segments = op.segments
        assert segments.nbytes.sum() == op.nbytes > 0
        assert segments.copy_count[[0, -1]].min() >= 1
        assert ((segments.block < 0) | (segments.copy_count > 0)).all(), "no digest of a gap is compared"
        assert segments.copy_count.sum() == len(segments.copies.source)
        copies = iter(segments.copies.rows())
        position = op.offset
        for nbytes, block, count in np.stack([segments.nbytes, segments.block, segments.copy_count], 1).tolist():
            data = store.contents[op.file][position : position + nbytes]
            assert len(data) == nbytes
            if block >= 0:
                assert store.block_places[op.file, block] == (position, position + nbytes)
            for copy in islice(copies, count):
                carry_out(copy, targets, data)
            read.update((op.file, at) for at in range(position, position + nbytes))
            position += nbytes
    return read


def wanted_bytes(store: Store, ops: tuple[reads.ReadOp, ...]) -> set[tuple[int, int]]:
    """Returns the bytes of the files of which copies are made, as the numbers of the file and of the byte."""
    wanted = set()
    for op in ops:
        starts = np.repeat(op.offset + np.cumsum(op.segments.nbytes) - op.segments.nbytes, op.segments.copy_count)
        copies = op.segments.copies
        columns = (starts + copies.source, copies.run_bytes, copies.runs, copies.source_stride)
        for start, nbytes, runs, stride in np.stack(columns, 1).tolist():
            wanted |= {(op.file, start + run * stride + at) for run in range(runs) for at in range(nbytes)}
    return wanted


def joined(
    store: Store, ops: tuple[reads.ReadOp, ...], targets: list[bytearray], wanted: list[bool]
) -> list[bytearray]:
    """Returns what the joined copies bring to the targets that are wanted. Checks that no two of these copies could be
    joined further."""
    contents = [bytearray(len(target)) for target in targets]
    for op in ops:
        copies = joined_copies(op.segments, np.array(wanted, bool))
        data = store.contents[op.file][op.offset : op.offset + op.nbytes]
        begins, ends = set(), set()
        for copy in copies:
            carry_out(copy, contents, data)
            if copy.runs == 1:
                begins.add((copy.target, copy.source, copy.target_offset))
                ends.add((copy.target, copy.source + copy.run_bytes, copy.target_offset + copy.run_bytes))
        assert not begins & ends
    return contents


@given(
    st.data(),
    stores(),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([0, 1, 4, 100]),
    st.sampled_from([0, 4, 100]),
)
def test_reads_give_what_indexing_gives(
    data: st.DataObject,
    store: Store,
    verify: bool,
    batch_blocks: int,
    segments_max: int,
    gap_bytes: int,
    spaced_gap_bytes: int,
) -> None:
    """Any slices of tensors are read, and any elements in the order of any grid."""
    batch_bytes = batch_blocks * store.block_bytes
    requests: Requests = []
    targets, expected = [], []
    for stored in store.tensors:
        index = data.draw(slices(stored.values.shape[:-1]))
        shape, span = slice_of(stored.values.shape[:-1], index)
        result = stored.values[index]
        assert shape == result.shape[:-1]
        requests.append((stored, [(span, 0)]))
        targets.append(bytearray(result.nbytes))
        expected.append(result.tobytes())
        grid = data.draw(grids(stored.values.shape[:-1]))
        start = data.draw(st.integers(0, grid.numel))
        span = Span(grid, start, data.draw(st.integers(start, grid.numel)))
        requests.append((stored, [(span, 0)]))
        expected.append(stored.values.reshape(-1, stored.item)[order_of(grid)][start : span.stop].tobytes())
        targets.append(bytearray(len(expected[-1])))
    with mock.patch.multiple(reads, SEGMENTS_MAX=segments_max, SPACED_GAP_BYTES=spaced_gap_bytes):
        ops = plan_reads(
            found(requests),
            data_starts=store.data_starts,
            block_bytes=store.block_bytes,
            verify=verify,
            batch_bytes=batch_bytes,
            gap_bytes=gap_bytes,
        )
    read = run(store, ops, targets)
    assert targets == expected
    wanted = data.draw(st.lists(st.booleans(), min_size=len(targets), max_size=len(targets)))
    expected = [bytes(target) if yes else bytes(len(target)) for target, yes in zip(targets, wanted, strict=True)]
    assert joined(store, ops, targets, wanted) == expected
    assert all(op.nbytes <= batch_bytes and (op.segments.copy_count > 0).sum() <= segments_max for op in ops)
    gaps = [nbytes for op in ops for nbytes in op.segments.nbytes[op.segments.copy_count == 0].tolist()]
    assert all(0 < nbytes <= gap_bytes for nbytes in gaps)
    assert [(op.file, op.offset) for op in ops] == sorted((op.file, op.offset) for op in ops)
    assert all(times == 1 for times in read.values())
    assert all(((op.segments.block >= 0) == (verify & (op.segments.copy_count > 0))).all() for op in ops)
    if not verify:
        unwanted = np.array(sorted(set(read) - wanted_bytes(store, ops)), np.int64).reshape(-1, 2)
        ends = np.append(np.flatnonzero((unwanted[1:] - unwanted[:-1] != [0, 1]).any(1)), len(unwanted) - 1)
        assert np.diff(ends, prepend=-1).max(initial=0) <= max(gap_bytes, spaced_gap_bytes)


@pytest.mark.parametrize("verify", [True, False])
def test_a_tensor_that_is_cut_in_its_columns_is_read_in_whole_boxes(verify: bool) -> None:
    """However short the runs of adjacent elements are, a block takes a few copies, and each byte is read once. A row of
    such a tensor needs only its own bytes, or its own blocks."""
    rows, columns, ranks, block_bytes = 512, 64, 4, 4 * KIB
    grid = Grid((rows, columns), ((), tuple(((16 * rank, 16),) for rank in range(ranks))))
    item, box_bytes = 2, rows * 16 * 2
    values = np.random.default_rng(0).integers(0, 256, (rows, columns, item), np.uint8)
    pieces = [Piece(rank, Tier.DEVICE, 0, grid.box(rank), 0, 0) for rank in range(ranks)]
    stored = Stored(values, item, pieces, list(range(ranks)), grid)
    contents = [stored.in_order[piece.span.start : piece.span.stop].tobytes() for piece in pieces]
    places = {(rank, n): (n * block_bytes, (n + 1) * block_bytes) for rank in range(ranks) for n in range(4)}
    store = Store([stored], contents, [0] * ranks, block_bytes, places)

    def read(index: tuple[slice, ...]) -> tuple[tuple[reads.ReadOp, ...], int]:
        ops = plan_reads(
            found([(stored, [(slice_of((rows, columns), index)[1], 0)])]),
            data_starts=[0] * ranks, block_bytes=block_bytes, verify=verify, batch_bytes=2 * block_bytes,
        )  # fmt: skip
        target = bytearray(values[index].nbytes)
        times = run(store, ops, [target])
        assert bytes(target) == values[index].tobytes()
        assert set(times.values()) == {1}
        return ops, len(times)

    ops, nbytes = read(())
    assert [(op.file, op.nbytes) for op in ops] == [(rank, 2 * block_bytes) for rank in range(ranks) for _ in range(2)]
    assert all(op.segments.copy_count.tolist() == [1, 1] for op in ops)
    assert nbytes == ranks * box_bytes
    assert read((slice(5, 6),))[1] == (ranks * block_bytes if verify else columns * item)
    assert read((slice(128, 256),))[1] == 128 * columns * item
    ops, nbytes = read((slice(None), slice(20, 25)))
    assert sum(len(op.segments.copies.source) for op in ops) <= 3 * box_bytes // block_bytes
    assert box_bytes * 0.95 < nbytes <= box_bytes


@pytest.mark.parametrize(
    ("gap_bytes", "reads"), [(0, [(100, 4), (106, 2), (110, 1)]), (2, [(100, 11)]), (1, [(100, 4), (106, 2), (110, 1)])]
)
def test_ranges_with_a_small_gap_between_them_are_read_together(gap_bytes: int, reads: list[tuple[int, int]]) -> None:
    columns = ([0] * 3, [0, 6, 10], [4, 2, 1], [0, 1, 2], [0] * 3, [4, 2, 1], [0, 1, 2], [0] * 3, *[[1] * 3] * 3)
    wanted = PieceRanges(*(np.array(column, np.int64) for column in columns))
    ops = plan_reads(
        wanted, data_starts=[100], block_bytes=4096, verify=True, batch_bytes=8192, gap_bytes=gap_bytes,
        places=TargetPlaces(np.array([1000, -1, 3000]), 1, 1),
    )  # fmt: skip
    assert [(op.offset, op.nbytes) for op in ops] == reads
    if gap_bytes == 2:
        segments = ops[0].segments
        assert segments.nbytes.tolist() == [4, 2, 2, 2, 1]
        assert segments.block.tolist() == [0, -1, 1, -1, 2]
        assert segments.address.tolist() == [1000, -1, -1, -1, 3000]
        assert segments.copy_count.tolist() == [1, 0, 1, 0, 1]


@given(st.data(), stores(), st.booleans())
def test_files_with_bytes_of_urgent_targets_come_first(data: st.DataObject, store: Store, verify: bool) -> None:
    requests: Requests = [
        (stored, [(slice_of(stored.values.shape[:-1], data.draw(slices(stored.values.shape[:-1])))[1], 0)])
        for stored in store.tensors
    ]
    pieces, urgent = found(requests), data.draw(st.integers(0, len(requests)))

    def planned(first_targets: int) -> tuple[reads.ReadOp, ...]:
        return plan_reads(
            pieces, data_starts=store.data_starts, block_bytes=store.block_bytes, verify=verify, urgent=first_targets,
            batch_bytes=store.block_bytes,
        )  # fmt: skip

    ops = planned(urgent)
    urgent_files = set(pieces.file[pieces.target < urgent].tolist())
    places = [(op.file not in urgent_files, op.file, op.offset) for op in ops]
    assert places == sorted(places)
    assert all(op.is_urgent == (op.file in urgent_files) for op in ops)
    assert sorted((op.file, op.offset, op.nbytes) for op in ops) == [
        (op.file, op.offset, op.nbytes) for op in planned(0)
    ]


def rows(ranges: Ranges) -> list[tuple[int, int, int]]:
    return list(zip(ranges.start.tolist(), ranges.nbytes.tolist(), ranges.address.tolist(), strict=True))


def run_straight(
    store: Store, ops: tuple[reads.ReadOp, ...], targets: list[bytearray], places: TargetPlaces
) -> Counter[tuple[int, int]]:
    """Carries out reads on bytes in memory, as direct I/O does. Returns how often each byte of each target was
    filled."""
    filled: Counter[tuple[int, int]] = Counter()
    bounds = [(at, at + len(target)) for at, target in zip(places.address.tolist(), targets, strict=True)]

    def put(file: int, start: int, nbytes: int, address: int) -> None:
        """Copies bytes of a file into one target, or into several targets that are neighbours in memory."""
        before = filled.total()
        for target, (first, last) in enumerate(bounds):
            begin, end = max(address, first), min(address + nbytes, last)
            if first >= 0 and begin < end:
                targets[target][begin - first : end - first] = store.contents[file][start + begin - address :][
                    : end - begin
                ]
                filled.update((target, byte) for byte in range(begin - first, end - first))
        assert filled.total() == before + nbytes, "never outside of its targets"

    for op in ops:
        segments, step = op.segments, max(places.memory_bytes, places.offset_bytes)
        for start, nbytes, address in rows(op.inner):
            assert nbytes >= reads.STRAIGHT_BYTES_MIN
            assert start % step == nbytes % step == address % places.memory_bytes == 0
            put(op.file, start, nbytes, address)
        for start, nbytes, address in rows(op.edges):
            assert nbytes < step
            put(op.file, start, nbytes, address)
        covered = sorted(rows(op.inner) + rows(op.edges))
        assert all(start + nbytes <= after for (start, nbytes, _), (after, *_) in pairwise(covered))
        starts = op.offset + np.cumsum(segments.nbytes) - segments.nbytes
        assert sum(nbytes for _, nbytes, _ in covered) == segments.nbytes[segments.straight].sum()
        segment = np.repeat(np.arange(len(starts)), segments.copy_count)
        staged = ~segments.straight[segment]
        in_file = segments.copies._replace(source=starts[segment] + segments.copies.source)
        for copy in in_file.take(staged).rows():
            carry_out(copy, targets, store.contents[op.file])
            for run in range(copy.runs):
                place = copy.target_offset + run * copy.target_stride
                filled.update((copy.target, byte) for byte in range(place, place + copy.run_bytes))
        alone = np.flatnonzero(segments.address >= 0)
        first = (np.cumsum(segments.copy_count) - segments.copy_count)[alone]
        assert not segments.straight[segments.address < 0].any()
        assert (segments.copy_count[alone] == 1).all()
        of_alone = segments.copies.take(first)
        assert (of_alone.run_bytes == segments.nbytes[alone]).all()
        assert (segments.address[alone] == places.address[of_alone.target] + of_alone.target_offset).all()
    return filled


@given(
    st.data(),
    stores(),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 40) | st.integers(1, 400),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_each_byte_is_put_into_its_place_once(
    data: st.DataObject,
    store: Store,
    verify: bool,
    batch_blocks: int,
    straight_bytes_min: int,
    memory_power: int,
    offset_power: int,
) -> None:
    """Any part of any tensors is read to any place in memory. Some tensors are not read straight to memory."""
    requests: Requests = []
    targets, expected, address = [], [], []
    end = 1000  # the end of the memory that is in use
    for stored in store.tensors:
        index = data.draw(slices(stored.values.shape[:-1]))
        requests.append((stored, [(slice_of(stored.values.shape[:-1], index)[1], 0)]))
        expected.append(stored.values[index].tobytes())
        targets.append(bytearray(len(expected[-1])))
        begin = end + data.draw(st.just(0) | st.integers(0, 40))
        address.append(begin if data.draw(st.integers(0, 4)) else -1)
        end = begin + len(targets[-1])
    places = TargetPlaces(np.array(address, np.int64), 1 << memory_power, 1 << offset_power)
    page_bytes = max(places.memory_bytes, places.offset_bytes)
    batch_bytes, bytes_max = batch_blocks * store.block_bytes, data.draw(st.integers(1, 400))
    sizes: dict[str, Any] = {
        "STRAIGHT_BYTES_MIN": straight_bytes_min,
        "STRAIGHT_BYTES_MAX": bytes_max,
        "PAGE_BYTES": page_bytes,
    }
    with mock.patch.multiple(reads, **sizes):
        ops = plan_reads(
            found(requests),
            data_starts=store.data_starts,
            block_bytes=store.block_bytes,
            verify=verify,
            batch_bytes=batch_bytes,
            places=places,
        )
        filled = run_straight(store, ops, targets, places)
    assert targets == expected
    assert set(filled) == {(target, byte) for target, content in enumerate(expected) for byte in range(len(content))}
    assert set(filled.values()) <= {1}
    assert all(op.nbytes <= batch_bytes or (op.is_straight and op.nbytes <= bytes_max) for op in ops)


@pytest.mark.parametrize(
    ("kib", "batch_kib", "address", "sizes"),
    [
        (40 * 1024 - 64, 8192, 4096 * 5 + 512, [16384, 16384, 8128]),
        (40 * 1024 - 64, 8192, 4096 * 5 + 516, [8192] * 4 + [8128]),  # not aligned as direct I/O needs it
        (40 * 1024 - 64, 8192, -1, [8192] * 4 + [8128]),
        (256, 64, 4096 * 5 + 512, [64] * 4),  # too little to be straight
    ],
)
def test_a_straight_read_may_be_larger_than_a_buffer(kib: int, batch_kib: int, address: int, sizes: list[int]) -> None:
    stored = Stored(np.empty(0), 1, [Piece(0, Tier.DEVICE, 0, Span(Grid((kib * KIB,)), 0, kib * KIB), 0, 0)], [0])
    wanted, places = found([(stored, [elements(0, kib * KIB)])]), TargetPlaces(np.array([address]), 512, 512)
    ops = plan_reads(
        wanted, data_starts=[0], block_bytes=64 * KIB, verify=True, batch_bytes=batch_kib * KIB, places=places
    )
    assert [op.nbytes // KIB for op in ops] == sizes


@pytest.mark.parametrize(
    ("places", "inner", "edges"),
    [
        (TargetPlaces(np.array([5003, 5103]), 1, 8), [(104, 192, 5004)], [(103, 1, 5003), (296, 7, 5196)]),
        (TargetPlaces(np.array([5003, 5103]), 4, 8), [(104, 192, 5004)], [(103, 1, 5003), (296, 7, 5196)]),
        (TargetPlaces(np.array([5003, 5103]), 8, 8), [], []),  # the places differ by 4 bytes
        (TargetPlaces(np.array([5007, 5107]), 8, 1), [(104, 192, 5008)], [(103, 1, 5007), (296, 7, 5200)]),
        (TargetPlaces(np.array([5003, -1]), 4, 4), [(104, 96, 5004)], [(103, 1, 5003), (200, 3, 5100)]),
        (
            TargetPlaces(np.array([5003, 5503]), 4, 4),
            [(104, 96, 5004), (204, 96, 5504)],
            [(103, 1, 5003), (200, 3, 5100), (203, 1, 5503), (300, 3, 5600)],
        ),
    ],
)
def test_bytes_with_the_same_alignment_in_memory_and_file_are_read_straight_to_memory(
    places: TargetPlaces, inner: list[tuple[int, int, int]], edges: list[tuple[int, int, int]]
) -> None:
    """The file has two tensors of 100 bytes, one after the other, from its byte 103 on."""
    stored = [Stored(np.empty(0), 1, [Piece(0, Tier.DEVICE, 0, all_of((100,)), offset, 0)], [0]) for offset in (3, 103)]
    wanted = found([(tensor, [elements(0, 100)]) for tensor in stored])
    with mock.patch.object(reads, "STRAIGHT_BYTES_MIN", 90):
        (op,) = plan_reads(wanted, data_starts=[100], block_bytes=64, verify=True, batch_bytes=4096, places=places)
        assert (rows(op.inner), rows(op.edges)) == (inner, edges)
    (op,) = plan_reads(wanted, data_starts=[100], block_bytes=64, verify=True, batch_bytes=4096, places=places)
    assert not op.segments.straight.any(), "it is too little"


@pytest.mark.parametrize("verify", [True, False])
def test_a_block_that_is_wanted_only_in_part_goes_through_a_buffer(verify: bool) -> None:
    """What is wanted twice also goes through a buffer, because each byte is read once."""
    stored = Stored(np.empty(0), 1, [Piece(0, Tier.DEVICE, 0, all_of((256,)), 0, 0)], [0])
    wanted = found([(stored, [elements(10, 200, 10)]), (stored, [elements(130, 140)])])
    places = TargetPlaces(np.array([5000, 9000]), 1, 1)
    with mock.patch.object(reads, "STRAIGHT_BYTES_MIN", 1):
        ops = plan_reads(wanted, data_starts=[0], block_bytes=64, verify=verify, batch_bytes=4096, places=places)
    straight = np.concatenate([op.segments.straight for op in ops]).tolist()
    assert straight == ([False, True, False, False] if verify else [True, True, False, True])


@given(stores(), st.lists(st.booleans(), min_size=4, max_size=4), st.booleans())
def test_reads_of_whole_tensors_read_only_their_bytes(store: Store, wanted: list[bool], verify: bool) -> None:
    chosen = {number for number, _ in enumerate(store.tensors) if wanted[number]}
    requests: Requests = [
        (stored, [((stored.grid or Grid(())).all, 0)] if target in chosen else [])
        for target, stored in enumerate(store.tensors)
    ]
    ops = plan_reads(
        found(requests),
        data_starts=store.data_starts,
        block_bytes=store.block_bytes,
        verify=verify,
        batch_bytes=1 << 20,
    )
    targets = [bytearray(stored.values.nbytes if i in chosen else 0) for i, stored in enumerate(store.tensors)]
    read = run(store, ops, targets)
    assert sum(read.values()) == sum(store.tensors[i].values.nbytes for i in chosen)
    assert all(targets[i] == store.tensors[i].in_order.tobytes() for i in chosen)
    for before, after in pairwise(ops):  # neighbours are one read, unless it has too many segments
        if len(before.segments.nbytes) < reads.SEGMENTS_MAX:
            assert (before.file, before.offset + before.nbytes) != (after.file, after.offset)


@given(stores(), st.integers(1, 50), st.integers(0, 30))
def test_overlapping_ranges_read_each_block_once(store: Store, length: int, shift: int) -> None:
    requests: Requests = []
    targets, expected = [], []
    for stored in store.tensors:
        numel = stored.values.size // stored.item
        for start in (0, shift):
            stop = min(start + length, numel)
            if start < stop:
                requests.append((stored, [(Grid(stored.values.shape[:-1]).all.clip(start, stop), 0)]))
                expected.append(stored.values.reshape(-1, stored.item)[start:stop].tobytes())
                targets.append(bytearray(len(expected[-1])))
    ops = plan_reads(
        found(requests), data_starts=store.data_starts, block_bytes=store.block_bytes, verify=True, batch_bytes=1 << 20
    )
    read = run(store, ops, targets)
    assert targets == expected
    assert all(times == 1 for times in read.values())


@given(st.data(), stores())
def test_a_range_may_begin_anywhere_in_its_target(data: st.DataObject, store: Store) -> None:
    """The target is larger than the range, like the flat buffer of an engine."""
    stored = store.tensors[0]
    numel = stored.values.size // stored.item
    start = data.draw(st.integers(0, numel))
    stop, at = data.draw(st.integers(start, numel)), data.draw(st.integers(0, 9))
    requests: Requests = [(stored, [(Grid(stored.values.shape[:-1]).all.clip(start, stop), at)])]
    ops = plan_reads(
        found(requests), data_starts=store.data_starts, block_bytes=store.block_bytes, verify=True, batch_bytes=1 << 20
    )
    target = bytearray((at + numel) * stored.item)
    run(store, ops, [target])
    flat = stored.values.reshape(-1, stored.item)[start:stop].tobytes()
    assert target[at * stored.item :].startswith(flat)
    assert not any(target[: at * stored.item])
    assert not any(target[at * stored.item + len(flat) :])


@pytest.mark.parametrize(("start", "reads"), [(3, [(103, 5)]), (4, [(103, 3), (107, 2)])])
def test_gaps_between_ranges_are_not_read(start: int, reads: list[tuple[int, int]]) -> None:
    """Ranges that are next to each other are one read."""
    ranges = [elements(0, 3), elements(start, start + 2, 3)]
    stored = Stored(np.empty(0), 1, [Piece(0, Tier.DEVICE, 0, all_of((8,)), 3, 0)], [0])
    ops = plan_reads(found([(stored, ranges)]), data_starts=[100], block_bytes=4096, verify=False, batch_bytes=4096)
    assert [(op.offset, op.nbytes) for op in ops] == reads


@pytest.mark.parametrize("index", [(slice(None),) * 3, (slice(0, 4, 2),), (slice(None, None, -1),)])
def test_slices_that_cannot_be_read_are_refused(index: tuple[slice, ...]) -> None:
    with pytest.raises(MismatchError):
        slice_of((4, 4), index)


def test_a_rank_gets_its_own_copy_if_it_holds_one() -> None:
    row = np.array([0, 0, 0, 0, 0, 1, 2, 2])
    copy = np.array([0, 0, 1, 2, 3, 0, 0, 1])
    holder = np.array([0, 1, 2, 2, 0, 2, 0, 1])
    for rank, chosen in ((2, [1, 0, 0]), (1, [0, 0, 1]), (0, [3, 0, 0]), (7, [0, 0, 0]), (None, [0, 0, 0])):
        assert choose_copies(row, copy, holder, rank).tolist() == chosen
    assert choose_copies(row[:0], copy[:0], holder[:0], 0).tolist() == []
