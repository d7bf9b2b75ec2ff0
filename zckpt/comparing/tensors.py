"""Reads, slice by slice, the values in which two checkpoints may differ, and compares them."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.comparing.report import TensorDifference
from zckpt.comparing.values import Tally, compare
from zckpt.errors import FormatError
from zckpt.format.digest import DIGEST_BYTES, block_count
from zckpt.format.index import ragged
from zckpt.plan.compare import cut_at_blocks, differing
from zckpt.plan.reshard import Span
from zckpt.progress import Progress, reported
from zckpt.reading.checkpoint import Want
from zckpt.state.inventory import BUFFER
from zckpt.storage.location import Location
from zckpt.transfer.budget import MIB, Budget
from zckpt.transfer.memory import fresh_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from zckpt.listing.contents import TensorInfo
    from zckpt.plan.reshard import StoredPieces
    from zckpt.reading.checkpoint import Checkpoint

SLICES_IN_MEMORY = 5
"""The memory that each thread takes, in slices: a slice of each checkpoint, the buffer through which it is read, and
what is computed from both."""


BATCH_SLICES_MAX = 32
"""The most slices that a thread reads at once. To plan the reads of many small tensors, each of which is cut into as
many pieces as there are ranks, takes more memory than their values."""


def slice_bytes(budget: Budget, block_bytes: int) -> int:
    """Returns the size of a slice in bytes: ``SLICES_IN_MEMORY`` of them fit into the memory of a thread, unless a
    slice would be smaller than a block."""
    return max(min(8 * MIB, budget.nbytes // budget.threads // SLICES_IN_MEMORY), block_bytes)


def budget_of_a_read(budget: Budget) -> Budget:
    """Returns the budget of a single read. The comparison runs as many threads as ``budget`` has, and each of them
    reads on its own, through buffers of about the size of a slice."""
    return Budget(max(budget.nbytes // budget.threads // SLICES_IN_MEMORY + MIB, 2 * MIB), 1, budget.direct)


class Pair(NamedTuple):
    """A tensor of each checkpoint, which are compared, and a key that both checkpoints have for them."""

    key: str
    a: TensorInfo
    b: TensorInfo

    @property
    def difference(self) -> TensorDifference:
        """The dtypes and shapes of both, with no values compared."""
        return TensorDifference(self.key, self.a.torch_name, self.b.torch_name, self.a.shape, self.b.shape)

    @property
    def is_comparable(self) -> bool:
        """Whether both have the same dtype and shape, so that their values can be compared."""
        return (self.a.dtype_name, self.a.shape) == (self.b.dtype_name, self.b.shape)


def paired(
    a: Mapping[str, TensorInfo], b: Mapping[str, TensorInfo], keys_of_a: Iterable[str], keys_of_b: Iterable[str]
) -> tuple[list[Pair], list[str], list[str]]:
    """Returns the tensors with these keys that both checkpoints have, the keys that only a has, and the keys that only
    b has. A tied weight is paired once, even if the checkpoints store it under different ones of its names. Where only
    one checkpoint ties two weights, its tensor is paired with each of the two tensors of the other checkpoint."""
    keys = dict.fromkeys((*keys_of_a, *keys_of_b))
    in_a, in_b = ({key: one[key] for key in keys if key in one} for one in (a, b))
    pairs: dict[tuple[str, str], Pair] = {}
    for key, info in in_a.items():
        if key in in_b:
            pairs.setdefault((info.key, in_b[key].key), Pair(key, info, in_b[key]))
    only_in_a, only_in_b = [key for key in keys_of_a if key not in in_b], [key for key in keys_of_b if key not in in_a]
    return list(pairs.values()), only_in_a, only_in_b


def compared_copies(a: Checkpoint, b: Checkpoint, pair: Pair) -> list[tuple[int, int]]:
    """Returns the pairs of copies of a tensor that are compared. The copy that every load reads is always compared. If
    the tensor is a buffer and both checkpoints have the same number of ranks, the copy of each rank is compared too."""
    if pair.a.part != BUFFER or a.world_size != b.world_size:
        return [(0, 0)]
    of_a, of_b = (
        {piece.rank: piece.copy for piece in one.contents.pieces(info)} for one, info in ((a, pair.a), (b, pair.b))
    )
    own = ((of_a.get(rank, 0), of_b.get(rank, 0)) for rank in sorted({*of_a, *of_b}))
    return list(dict.fromkeys([(0, 0), *own]))


class PairSlice(NamedTuple):
    """The elements ``[start, stop)`` of one copy of a tensor in each of the two checkpoints."""

    pair: Pair
    copy_a: int
    copy_b: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.pair.a.item_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The comparison of two checkpoints, shared by ``size`` processes."""

    a: Checkpoint
    b: Checkpoint
    budget: Budget
    """The memory and the threads of this process."""
    rtol: float
    atol: float
    number: int
    """The number of this process, from 0 to ``size - 1``."""
    size: int
    """The number of processes that share the work."""

    def run(self, pairs: Sequence[Pair], progress: Progress | None) -> dict[str, Tally]:
        """Compares this process's share of the values of these tensors. Returns for the key of each tensor that differs
        what was found. Raises FormatError and StorageError."""
        tallies: dict[str, Tally] = {}
        lock = threading.Lock()
        batches = [batch for number, batch in enumerate(self._batches(pairs)) if number % self.size == self.number]
        total = 2 * sum(one.nbytes for batch in batches for one in batch)

        def work(batch: Sequence[PairSlice]) -> None:
            read_a = self._read(self.a, [(one.pair.a, one.copy_a, one) for one in batch])
            read_b = self._read(self.b, [(one.pair.b, one.copy_b, one) for one in batch])
            for one, value_a, value_b in zip(batch, read_a, read_b, strict=True):
                found = compare(value_a, value_b, self.rtol, self.atol)
                if found.changed:
                    with lock:
                        tallies.setdefault(one.pair.key, Tally()).add(found.row)
            advance(2 * sum(one.nbytes for one in batch))

        with reported(progress, "compare", total) as advance:
            self.budget.run([partial(work, batch) for batch in batches])
        return tallies

    @staticmethod
    def _read(checkpoint: Checkpoint, wanted: Sequence[tuple[TensorInfo, int, PairSlice]]) -> list[torch.Tensor]:
        wants = [
            Want(info, [Span(one.start, one.stop, 0)], fresh_tensor((one.stop - one.start,), info.dtype, "cpu"), copy)
            for info, copy, one in wanted
        ]
        try:
            checkpoint.read(wants, verify=True)
        except FormatError as error:
            if error.file is not None:  # the whole path says which of the two checkpoints it is
                error.file = str(Location.of(checkpoint.path).child(error.file))
            raise
        return [want.target for want in wants]

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[PairSlice]]:
        """Yields everything that is to be read, in the same order in each process. A batch has slices of one tensor or
        of several that fit into the memory of a thread together."""
        limit = slice_bytes(self.budget, max(self.a.manifest.block_bytes, self.b.manifest.block_bytes))
        batch: list[PairSlice] = []
        nbytes = 0
        for one in self._slices(pairs, limit):
            if batch and (nbytes + one.nbytes > limit or len(batch) == BATCH_SLICES_MAX):
                yield batch
                batch, nbytes = [], 0
            batch.append(one)
            nbytes += one.nbytes
        if batch:
            yield batch

    def _slices(self, pairs: Sequence[Pair], limit: int) -> Iterator[PairSlice]:
        compared = [(pair, *copies) for pair in pairs for copies in compared_copies(self.a, self.b, pair)]
        for (pair, copy_a, copy_b), (pieces, ranges) in zip(compared, unequal(self.a, self.b, compared), strict=True):
            item = pair.a.item_bytes
            for begin, end in ranges:
                for start, stop in cut_at_blocks(
                    begin, end, pieces, self.a.manifest.block_bytes // item, limit // item
                ):
                    yield PairSlice(pair, copy_a, copy_b, start, stop)


def unequal(
    a: Checkpoint, b: Checkpoint, compared: Sequence[tuple[Pair, int, int]]
) -> Iterator[tuple[StoredPieces, list[tuple[int, int]]]]:
    """Yields for each pair of copies ``(pair, copy_a, copy_b)`` its pieces in a, and the ranges ``[begin, end)`` of
    elements, in ascending order, that may differ. The digests of all other elements are equal. No values are read."""
    stored_a = a.contents.stored_each([pair.a for pair, *_ in compared], [copy for _, copy, _ in compared])
    stored_b = b.contents.stored_each([pair.b for pair, *_ in compared], [copy for *_, copy in compared])
    digests_a, digests_b = _Digests(a), _Digests(b)
    for (pair, *_), pieces_a, pieces_b in zip(compared, stored_a, stored_b, strict=True):
        numel, item = math.prod(pair.a.shape), pair.a.item_bytes
        ranges = [(0, numel)] if numel else []
        alike = np.array_equal(pieces_a.start, pieces_b.start) and np.array_equal(pieces_a.stop, pieces_b.stop)
        if alike and a.manifest.block_bytes == b.manifest.block_bytes:
            digests = digests_a.of(pieces_a, item), digests_b.of(pieces_b, item)
            ranges = differing(pieces_a.start, pieces_a.stop, *digests, a.manifest.block_bytes // item)
        yield pieces_a, ranges


class _Digests:
    """Holds the digest tables of a checkpoint, one behind the other. Each table is read when it is first needed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        manifest = checkpoint.manifest
        self._contents, self._block_bytes = checkpoint.contents, manifest.block_bytes
        self._rank = np.array(manifest.files.rank, np.int64)
        self._first_block = np.array(manifest.files.first_block, np.int64)
        self._start = np.full(manifest.world_size, -1)
        """The row of ``_all`` with which the table of each rank begins."""
        self._all = np.empty((0, DIGEST_BYTES), np.uint8)

    def of(self, pieces: StoredPieces, item_bytes: int) -> NDArray[np.uint8]:
        """Returns an array with a row for the digest of each block of the pieces, in their order."""
        rank = self._rank[pieces.file]
        new = np.unique(rank[self._start[rank] < 0]).tolist()
        if new:
            tables = [np.frombuffer(self._contents.digest_table(one), np.uint8) for one in new]
            rows = [len(table) // DIGEST_BYTES for table in tables]
            self._start[new] = len(self._all) + np.cumsum([0, *rows[:-1]])
            self._all = np.concatenate([self._all, *(table.reshape(-1, DIGEST_BYTES) for table in tables)])
        first = self._start[rank] + self._first_block[pieces.file] + pieces.block
        piece, number = ragged(block_count((pieces.stop - pieces.start) * item_bytes, self._block_bytes))
        found: NDArray[np.uint8] = self._all[first[piece] + number]
        return found
