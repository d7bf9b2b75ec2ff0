"""If the planned messages between ranks are carried out, every file gets the right elements, and each byte is written
once."""

from __future__ import annotations

import itertools
import tracemalloc
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.grids import order_of, random_grid
from zckpt.geometry import Grid, Span, all_of
from zckpt.plan.reshard import RequestedSpan, StoredPieces
from zckpt.tools.exporting.exchange import Messages, SlicedFiles, plan_exchange

SLICE_BYTES = 64
SHAPES = [(), (90,), (7, 12), (3, 4, 10), (0, 3), (13, 6), (5, 8, 2)]


def test_slices_of_files_and_their_rounds() -> None:
    slices = SlicedFiles(SLICE_BYTES, (130, 0, 64, 10), (2, 0, 0, 2))
    assert slices.starts == [0, 192, 192, 256]
    assert slices.rounds == 4
    assert slices.own(0) == [(2, 0, 64)]
    assert slices.own(1) == []
    assert slices.own(2) == [(0, 0, 64), (0, 64, 64), (0, 128, 2), (3, 0, 10)]


@pytest.mark.parametrize("seed", range(8))
def test_every_file_gets_its_elements(seed: int) -> None:
    random, choice = np.random.default_rng(seed), Random(seed)
    ranks = int(random.integers(1, 5))
    tensors = [_tensor(random, random_grid(shape, choice)) for shape in SHAPES]
    pieces, data = _held(random, tensors, ranks)
    files, wanted, slices = _files(random, tensors, ranks)
    expected_files = [file.copy() for file in files]
    for file in files:
        file[:] = 0
    exchange = plan_exchange(
        pieces, [tensor.grid for tensor in tensors], wanted, [tensor.values.itemsize for tensor in tensors], slices
    )
    for turn in range(slices.rounds):
        planned = [exchange.messages(turn, rank) for rank in range(ranks)]
        for rank, messages in enumerate(planned):
            assert ((messages.source == rank) | (messages.target == rank)).all()
        for source, target in itertools.product(range(ranks), repeat=2):
            sent, received = (_between(planned[rank], source, target) for rank in (source, target))
            assert all(np.array_equal(getattr(sent, name), getattr(received, name)) for name in Messages.__slots__)
            columns = (sent.fragment, sent.start, sent.source_stride, received.position, received.target_stride)
            for fragment, start, source_stride, position, target_stride, numel, runs, nbytes in zip(
                *columns, sent.run_numel, sent.runs, sent.nbytes, strict=True
            ):
                number, first, slice_bytes = slices.own(target)[turn]
                sent_bytes = 0
                for run in range(runs):
                    begin, place = start + run * source_stride, first + position + run * target_stride
                    values = data[source][fragment][begin : begin + numel].view(np.uint8)
                    assert len(values) == numel * data[source][fragment].itemsize
                    assert place + len(values) <= first + slice_bytes
                    assert not files[number][place : place + len(values)].any(), "each byte is written once"
                    files[number][place : place + len(values)] = values
                    sent_bytes += len(values)
                assert sent_bytes == nbytes
    for file, expected in zip(files, expected_files, strict=True):
        assert np.array_equal(file, expected)


def test_a_large_model_that_is_cut_in_its_columns_is_planned_in_bounded_memory() -> None:
    """The matrices have ten million rows of boxes, which are as many runs of adjacent elements."""
    shape, ranks, count, item_bytes = (8192, 28672), 8, 160, 2
    width = shape[1] // ranks
    grid = Grid(shape, ((), tuple(((rank * width, width),) for rank in range(ranks))))
    rows = [(w, *grid.box(rank)[1:], rank, w, 0) for w in range(count) for rank in range(ranks)]
    slices = SlicedFiles(16 << 20, (grid.numel * item_bytes,) * count, tuple(w % ranks for w in range(count)))
    wanted = [RequestedSpan(w, all_of(shape), start // item_bytes) for w, start in enumerate(slices.starts)]
    tracemalloc.start()
    try:
        exchange = plan_exchange(
            StoredPieces(*np.array(rows, np.int64).T), [grid] * count, wanted, [item_bytes] * count, slices
        )
        turns = [0, slices.rounds // 2, slices.rounds - 1]
        planned = [[exchange.messages(turn, rank) for rank in range(ranks)] for turn in turns]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20
    for turn, of_ranks in zip(turns, planned, strict=True):
        for rank, messages in enumerate(of_ranks):
            assert len(messages.runs) <= 3 * (2 * ranks - 1)
            received = int(messages.nbytes[messages.target == rank].sum())
            assert received == slices.own(rank)[turn][2]


def _between(messages: Messages, source: int, target: int) -> Messages:
    return messages.take(np.flatnonzero((messages.source == source) & (messages.target == target)))


class _Tensor(NamedTuple):
    grid: Grid
    values: np.ndarray
    """The elements in the order of the grid. No byte of them is 0."""


def _tensor(random: np.random.Generator, grid: Grid) -> _Tensor:
    dtype = np.dtype(random.choice(["u8", "u4", "u2", "u1"]))
    values = random.integers(1 << 62, size=grid.numel).astype(dtype)
    return _Tensor(grid, (values.view(np.uint8) | 1).view(dtype))


def _held(
    random: np.random.Generator, tensors: list[_Tensor], ranks: int
) -> tuple[StoredPieces, list[list[np.ndarray]]]:
    """Cuts each tensor into pieces on random ranks. Returns the pieces, and their values by rank."""
    data: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    rows = []
    for number, (_, values) in enumerate(tensors):
        cuts = sorted({0, len(values), *random.integers(0, len(values) + 1, 3).tolist()})
        for start, stop in itertools.pairwise(cuts):
            rank = int(random.integers(ranks))
            rows.append((number, start, stop, rank, len(data[rank]), 0))
            data[rank].append(values[start:stop])
    return StoredPieces(*np.array(rows, np.int64).reshape(-1, 6).T), data


def _files(
    random: np.random.Generator, tensors: list[_Tensor], ranks: int
) -> tuple[list[np.ndarray], list[RequestedSpan], SlicedFiles]:
    """Makes files of runs of elements in row-major order, with gaps between them. Some elements are in several files,
    others in none. Returns the files, the elements that they are made of, and the slices of the files."""
    runs = []
    nbytes = []
    for number in range(3):
        at = 0
        for tensor in random.permutation(len(tensors)).tolist():
            values = tensors[tensor].values
            start, stop = sorted(random.integers(0, len(values) + 1, 2).tolist())
            at += -at % 8 + 8 * int(random.integers(3))
            runs.append((number, at, tensor, start, stop))
            at += (stop - start) * values.itemsize
        nbytes.append(at)
    slices = SlicedFiles(SLICE_BYTES, tuple(nbytes), tuple(random.integers(ranks, size=len(nbytes)).tolist()))
    files = [np.zeros(file_bytes, np.uint8) for file_bytes in nbytes]
    wanted = []
    for number, at, tensor, start, stop in runs:
        grid, in_order = tensors[tensor]
        values = np.empty_like(in_order)
        values[order_of(grid)] = in_order
        files[number][at : at + values[start:stop].nbytes] = values[start:stop].view(np.uint8)
        wanted.append(
            RequestedSpan(tensor, Span(Grid(grid.shape), start, stop), (slices.starts[number] + at) // values.itemsize)
        )
    return files, wanted, slices
