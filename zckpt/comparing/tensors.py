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
from zckpt.plan.compare import differing, slices
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

    from zckpt.listing.contents import TensorInfo
    from zckpt.plan.reshard import StoredPieces
    from zckpt.reading.checkpoint import Checkpoint

SLICES_IN_MEMORY = 5
"""The memory that each thread takes, in slices: a slice of each checkpoint, the buffer through which it is read, and
what is computed from both."""


def slice_bytes(budget: Budget, block_bytes: int) -> int:
    """Returns the size of a slice in bytes: ``SLICES_IN_MEMORY`` of them fit into the memory of a thread, unless a
    slice would be smaller than a block."""
    return max(min(8 * MIB, budget.nbytes // budget.threads // SLICES_IN_MEMORY), block_bytes)


def budget_of_a_read(budget: Budget) -> Budget:
    """Returns the budget of a single read. The comparison runs as many threads as ``budget`` has, and each of them
    reads on its own, through buffers of about the size of a slice."""
    return Budget(max(budget.nbytes // budget.threads // SLICES_IN_MEMORY + MIB, 2 * MIB), 1, budget.direct)


class Pair(NamedTuple):
    """A tensor that both checkpoints have, under the key that it has in a."""

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
        return (self.a.dtype, self.a.shape) == (self.b.dtype, self.b.shape)


def paired(
    a: Mapping[str, TensorInfo], b: Mapping[str, TensorInfo], keys_of_a: Iterable[str], keys_of_b: Iterable[str]
) -> tuple[list[Pair], list[str], list[str]]:
    """Returns the tensors with these keys that both checkpoints have, the keys that only a has, and the keys that only
    b has. A tied weight is paired once, even if the checkpoints store it under different ones of its names."""
    pairs: dict[str, Pair] = {}
    for key in (*keys_of_a, *keys_of_b):
        if key in a and key in b:
            pairs.setdefault(a[key].key, Pair(a[key].key, a[key], b[key]))
    return list(pairs.values()), [key for key in keys_of_a if key not in b], [key for key in keys_of_b if key not in a]


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


class Slice(NamedTuple):
    """The elements ``[start, stop)`` of one copy of a tensor in each of the two checkpoints."""

    pair: Pair
    copy_a: int
    copy_b: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.pair.a.item_bytes


@dataclass(frozen=True, slots=True)
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

        def work(batch: Sequence[Slice]) -> None:
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
    def _read(checkpoint: Checkpoint, wanted: Sequence[tuple[TensorInfo, int, Slice]]) -> list[torch.Tensor]:
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

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[Slice]]:
        """Yields everything that is to be read, in the same order in each process. A batch has slices of one tensor or
        of several that fit into the memory of a thread together."""
        limit = slice_bytes(self.budget, max(self.a.manifest.block_bytes, self.b.manifest.block_bytes))
        batch: list[Slice] = []
        nbytes = 0
        for one in (one for pair in pairs for one in self._slices(pair, limit)):
            if batch and nbytes + one.nbytes > limit:
                yield batch
                batch, nbytes = [], 0
            batch.append(one)
            nbytes += one.nbytes
        if batch:
            yield batch

    def _slices(self, pair: Pair, limit: int) -> Iterator[Slice]:
        numel, item = math.prod(pair.a.shape), pair.a.item_bytes
        block_items = self.a.manifest.block_bytes // item
        for copy_a, copy_b in compared_copies(self.a, self.b, pair):
            pieces_a = self.a.contents.stored([pair.a], [copy_a], None)
            pieces_b = self.b.contents.stored([pair.b], [copy_b], None)
            ranges = [(0, numel)] if numel else []
            alike = np.array_equal(pieces_a.start, pieces_b.start) and np.array_equal(pieces_a.stop, pieces_b.stop)
            if alike and self.a.manifest.block_bytes == self.b.manifest.block_bytes:
                digests = zip(self._digests(self.a, pieces_a, item), self._digests(self.b, pieces_b, item), strict=True)
                ranges = differing(pieces_a.start.tolist(), pieces_a.stop.tolist(), list(digests), block_items)
            for begin, end in ranges:
                for start, stop in slices(begin, end, pieces_a, block_items, limit // item):
                    yield Slice(pair, copy_a, copy_b, start, stop)

    @staticmethod
    def _digests(checkpoint: Checkpoint, pieces: StoredPieces, item_bytes: int) -> Iterator[memoryview]:
        """Yields the digests of each piece."""
        manifest = checkpoint.manifest
        columns = (pieces.file, pieces.block, (pieces.stop - pieces.start) * item_bytes)
        for number, block, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            first = manifest.files.first_block[number] + block
            stop = first + block_count(nbytes, manifest.block_bytes)
            table = checkpoint.contents.digest_table(manifest.files.rank[number])
            yield table[first * DIGEST_BYTES : stop * DIGEST_BYTES]
