"""If the planned messages between ranks are carried out, every file gets the right elements, and each byte is written
once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from zckpt.geometry import Grid, Span
from zckpt.plan.exchange import Messages, SlicedFiles, plan_messages
from zckpt.plan.reshard import StoredPieces, Wanted

SLICE_BYTES = 64


def test_slices_of_files_and_their_rounds() -> None:
    slices = SlicedFiles(SLICE_BYTES, (130, 0, 64, 10), (2, 0, 0, 2))
    assert slices.starts == [0, 192, 192, 256]
    assert slices.rounds == 4
    assert slices.own(0) == [(2, 0, 64)]
    assert slices.own(1) == []
    assert slices.own(2) == [(0, 0, 64), (0, 64, 64), (0, 128, 2), (3, 0, 10)]


@pytest.mark.parametrize("seed", range(8))
def test_every_file_gets_its_elements(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks = int(random.integers(1, 5))
    dtypes = [np.dtype(random.choice(["u8", "u4", "u2", "u1"])) for _ in range(6)]
    tensors = [random.integers(256, size=random.integers(0, 90)).astype(dtype) for dtype in dtypes]
    pieces, data = _held(random, tensors, ranks)
    files, wanted, slices = _files(random, tensors, ranks)
    expected_files = [file.copy() for file in files]
    for file in files:
        file[:] = 0
    grids, item_bytes = [Grid(tensor.shape) for tensor in tensors], [dtype.itemsize for dtype in dtypes]
    planned = [plan_messages(pieces, grids, wanted, item_bytes, slices, rank) for rank in range(ranks)]
    for turn in range(slices.rounds):
        for source in range(ranks):
            for target in range(ranks):
                sent = _between(planned[source].of_turn(turn), source, target)
                received = _between(planned[target].of_turn(turn), source, target)
                assert all(
                    np.array_equal(getattr(sent, column), getattr(received, column)) for column in Messages.__slots__
                )
                for fragment, start, numel, position, nbytes in zip(
                    sent.fragment, sent.start, sent.numel, received.position, received.nbytes, strict=True
                ):
                    number, first, slice_bytes = slices.own(target)[turn]
                    values = data[source][fragment][start : start + numel].view(np.uint8)
                    assert len(values) == nbytes
                    assert position + nbytes <= slice_bytes
                    place = files[number][first + position : first + position + nbytes]
                    assert not place.any(), "each byte is written once"
                    place[:] = values
    for file, expected in zip(files, expected_files, strict=True):
        assert np.array_equal(file, expected)


def _between(messages: Messages, source: int, target: int) -> Messages:
    return messages.take(np.flatnonzero((messages.source == source) & (messages.target == target)))


def _held(
    random: np.random.Generator, tensors: list[np.ndarray], ranks: int
) -> tuple[StoredPieces, list[list[np.ndarray]]]:
    """Cuts each tensor into pieces on random ranks. Returns the pieces, and their values by rank."""
    data: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    rows = []
    for number, tensor in enumerate(tensors):
        tensor[:] = (tensor.view(np.uint8) | 1).view(tensor.dtype)  # so no byte of a value is zero
        cuts = sorted({0, len(tensor), *random.integers(0, len(tensor) + 1, 3).tolist()})
        for start, stop in itertools.pairwise(cuts):
            rank = int(random.integers(ranks))
            rows.append((number, start, stop, rank, len(data[rank]), 0))
            data[rank].append(tensor[start:stop])
    return StoredPieces(*np.array(rows, np.int64).reshape(-1, 6).T), data


def _files(
    random: np.random.Generator, tensors: list[np.ndarray], ranks: int
) -> tuple[list[np.ndarray], list[Wanted], SlicedFiles]:
    """Makes files of runs of elements with gaps between them. Some elements are in several files, others in none.
    Returns the files, the elements that they are made of, and the slices of the files."""
    runs = []
    nbytes = []
    for number in range(3):
        at = 0
        for tensor in random.permutation(len(tensors)).tolist():
            start, stop = sorted(random.integers(0, len(tensors[tensor]) + 1, 2).tolist())
            at += -at % 8 + 8 * int(random.integers(3))
            runs.append((number, at, tensor, start, stop))
            at += (stop - start) * tensors[tensor].itemsize
        nbytes.append(at)
    slices = SlicedFiles(SLICE_BYTES, tuple(nbytes), tuple(random.integers(ranks, size=len(nbytes)).tolist()))
    files = [np.zeros(file_bytes, np.uint8) for file_bytes in nbytes]
    wanted = []
    for number, at, tensor, start, stop in runs:
        values = tensors[tensor][start:stop]
        files[number][at : at + values.nbytes] = values.view(np.uint8)
        span = Span(Grid(tensors[tensor].shape), start, stop)
        wanted.append(Wanted(tensor, span, (slices.starts[number] + at) // values.itemsize))
    return files, wanted, slices
