"""Reads the values in which two checkpoints may differ, in slices, and compares them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.checkpoint.reading.loader import ReadRequest
from zckpt.errors import FormatError
from zckpt.format.digest import DIGEST_BYTES, block_count
from zckpt.geometry import Span, all_of, ragged
from zckpt.plan.inventory import BUFFER
from zckpt.progress import Progress, reported
from zckpt.storage.location import Location
from zckpt.tools.blocks import cut_at_blocks, differing
from zckpt.tools.comparing.report import TensorDifference
from zckpt.tools.comparing.values import Tally, compare
from zckpt.tools.share import batches
from zckpt.transfer.budget import MIB, Budget
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from zckpt.checkpoint.listing.tensors import TensorInfo
    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.geometry import Ints
    from zckpt.plan.reshard import StoredPieces

SLICES_IN_MEMORY = 5
"""The memory that each thread takes, in slices: a slice of each checkpoint, the buffer through which it is read, and
the tensors that are computed from both."""


BATCH_SLICES_MAX = 32
"""The largest number of slices that a thread reads at once. A small tensor may be cut into as many pieces as there are
ranks, so planning the reads of many small tensors takes more memory than their values."""


def slice_bytes(budget: Budget, block_bytes: int) -> int:
    """Returns the size of a slice in bytes. ``SLICES_IN_MEMORY`` slices fit into the memory of a thread, but a slice is
    never smaller than a block."""
    return max(min(8 * MIB, budget.nbytes // budget.threads // SLICES_IN_MEMORY), block_bytes)


def budget_of_a_read(budget: Budget) -> Budget:
    """Returns the budget of a single read. The comparison runs as many threads as ``budget`` has, and each of them
    reads on its own through buffers of about the size of a slice."""
    return Budget(max(budget.nbytes // budget.threads // SLICES_IN_MEMORY + MIB, 2 * MIB), 1, budget.direct)


class Pair(NamedTuple):
    """A tensor of a and a tensor of b that are compared."""

    key: str
    """A key that both checkpoints have for their tensor."""
    a: TensorInfo
    """The tensor of a."""
    b: TensorInfo
    """The tensor of b."""

    @property
    def difference(self) -> TensorDifference:
        """The dtypes and shapes of both tensors. The values are not compared."""
        return TensorDifference(self.key, self.a.torch_name, self.b.torch_name, self.a.shape, self.b.shape)

    @property
    def is_comparable(self) -> bool:
        """Whether both tensors have the same dtype and shape, so that their values can be compared."""
        return (self.a.dtype_name, self.a.shape) == (self.b.dtype_name, self.b.shape)


def paired(
    a: Mapping[str, TensorInfo], b: Mapping[str, TensorInfo], keys_of_a: Iterable[str], keys_of_b: Iterable[str]
) -> tuple[list[Pair], list[str], list[str]]:
    """Returns the pairs of tensors that both checkpoints have, the keys that only a has, and the keys that only b has.
    A tied weight is paired once, even if the checkpoints store it under different names. If two weights are tied in
    only one checkpoint, its tensor is paired with each of the two tensors of the other checkpoint. ``keys_of_a`` and
    ``keys_of_b``: the keys of the tensors that are compared."""
    keys = dict.fromkeys((*keys_of_a, *keys_of_b))
    in_a, in_b = ({key: infos[key] for key in keys if key in infos} for infos in (a, b))
    pairs: dict[tuple[str, str], Pair] = {}
    for key, info in in_a.items():
        if key in in_b:
            pairs.setdefault((info.key, in_b[key].key), Pair(key, info, in_b[key]))
    only_in_a, only_in_b = [key for key in keys_of_a if key not in in_b], [key for key in keys_of_b if key not in in_a]
    return list(pairs.values()), only_in_a, only_in_b


def compared_copies(a: Loader, b: Loader, pair: Pair) -> list[tuple[int, int]]:
    """Returns the numbers of the copies of a tensor in a and in b that are compared with each other. The copies that
    every load reads are always compared. If the tensor is a buffer and both checkpoints have the same number of ranks,
    the copies of each rank are compared too."""
    if pair.a.part != BUFFER or a.manifest.world_size != b.manifest.world_size:
        return [(0, 0)]
    copy_in_a, copy_in_b = (
        dict(zip(ranks.tolist(), copies.tolist(), strict=True))
        for _, copies, ranks in (a.contents.pieces(pair.a), b.contents.pieces(pair.b))
    )
    of_ranks = ((copy_in_a.get(rank, 0), copy_in_b.get(rank, 0)) for rank in sorted({*copy_in_a, *copy_in_b}))
    return list(dict.fromkeys([(0, 0), *of_ranks]))


class PairSlice(NamedTuple):
    """Elements of one copy of a tensor, in each of the two checkpoints."""

    pair: Pair
    """The tensor in both checkpoints."""
    copy_a: int
    """The number of the copy in a."""
    copy_b: int
    """The number of the copy in b."""
    span: Span
    """The elements."""

    @property
    def nbytes(self) -> int:
        """The size in bytes of these elements in one checkpoint."""
        return self.span.numel * self.pair.a.item_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The comparison of two checkpoints, shared by ``size`` processes."""

    a: Loader
    """The first checkpoint."""
    b: Loader
    """The second checkpoint."""
    budget: Budget
    """The memory and the threads of this process."""
    rtol: float
    """The relative tolerance."""
    atol: float
    """The absolute tolerance."""
    number: int
    """The number of this process, from 0 to ``size - 1``."""
    size: int
    """The number of processes that share the work."""

    def run(self, pairs: Sequence[Pair], progress: Progress | None) -> dict[str, Tally]:
        """Compares this process's share of the values of these tensors. Returns the tally of each tensor that differs,
        by its key. Raises FormatError and StorageError."""
        for checkpoint, infos in ((self.a, [pair.a for pair in pairs]), (self.b, [pair.b for pair in pairs])):
            checkpoint.contents.check_sizes(infos)
        tallies: dict[str, Tally] = {}
        lock = threading.Lock()
        limit = slice_bytes(self.budget, max(self.a.manifest.block_bytes, self.b.manifest.block_bytes))
        # Each process finds the same batches, in the same order.
        all_batches = batches(self._slices(pairs, limit), lambda item: item.nbytes, limit, BATCH_SLICES_MAX)
        own_batches = list(islice(all_batches, self.number, None, self.size))
        total = 2 * sum(pair_slice.nbytes for batch in own_batches for pair_slice in batch)

        def work(batch: Sequence[PairSlice]) -> None:
            read_a = self._read(self.a, [(pair_slice.pair.a, pair_slice.copy_a, pair_slice) for pair_slice in batch])
            read_b = self._read(self.b, [(pair_slice.pair.b, pair_slice.copy_b, pair_slice) for pair_slice in batch])
            for pair_slice, values_a, values_b in zip(batch, read_a, read_b, strict=True):
                tally = compare(values_a, values_b, self.rtol, self.atol)
                if tally.changed:
                    with lock:
                        tallies[pair_slice.pair.key] = tallies.get(pair_slice.pair.key, Tally()).plus(tally)
            advance(2 * sum(pair_slice.nbytes for pair_slice in batch))

        with reported(progress, "compare", total) as advance:
            run_tasks([partial(work, batch) for batch in own_batches], self.budget.threads)
        return tallies

    @staticmethod
    def _read(checkpoint: Loader, ranges: Sequence[tuple[TensorInfo, int, PairSlice]]) -> list[torch.Tensor]:
        """Reads the elements of each slice from one checkpoint. ``ranges``: the tensor, the number of its copy, and the
        slice."""
        requests = [ReadRequest.fresh(info, pair_slice.span, copy) for info, copy, pair_slice in ranges]
        try:
            checkpoint.read(requests, verify=True)
        except FormatError as error:
            if error.file is not None:  # The absolute path tells which of the two checkpoints is damaged.
                error.file = str(Location.of(checkpoint.path).child(error.file))
            raise
        return [request.target for request in requests]

    def _slices(self, pairs: Sequence[Pair], limit: int) -> Iterator[PairSlice]:
        """Yields all slices that have to be read. They have at most ``limit`` bytes."""
        compared = [(pair, *copies) for pair in pairs for copies in compared_copies(self.a, self.b, pair)]
        for (pair, copy_a, copy_b), (starts, spans) in zip(compared, unequal(self.a, self.b, compared), strict=True):
            item_bytes = pair.a.item_bytes
            block_items = self.a.manifest.block_bytes // item_bytes
            for span in spans:
                # In b, which may have other pieces, a slice may begin or end within a block, which is read twice then.
                for part in cut_at_blocks(span, starts, block_items, limit // item_bytes):
                    yield PairSlice(pair, copy_a, copy_b, part)


def unequal(a: Loader, b: Loader, compared: Sequence[tuple[Pair, int, int]]) -> Iterator[tuple[Ints, list[Span]]]:
    """Yields for each pair of copies the spans of elements that may differ, in ascending order, and the first elements
    of the pieces in the order of these spans. The digests of all other elements are equal. No values are read.
    ``compared``: the tensors, with the numbers of their copies in a and in b.

    If a and b store a tensor in different orders, the spans are in row-major order. A box of one of them could need all
    pieces of the other one, and these would be read again for the next box."""
    stored_a = a.contents.stored_each([pair.a for pair, *_ in compared], [copy for _, copy, _ in compared])
    stored_b = b.contents.stored_each([pair.b for pair, *_ in compared], [copy for *_, copy in compared])
    digests_a, digests_b = _Digests(a), _Digests(b)
    for (pair, *_), pieces_a, pieces_b in zip(compared, stored_a, stored_b, strict=True):
        grid_a, grid_b, item_bytes = a.contents.grid(pair.a), b.contents.grid(pair.b), pair.a.item_bytes
        whole = grid_a.all if grid_a == grid_b else all_of(pair.a.shape)
        spans = [whole] if whole.numel else []
        same_pieces = np.array_equal(pieces_a.start, pieces_b.start) and np.array_equal(pieces_a.stop, pieces_b.stop)
        if same_pieces and grid_a == grid_b and a.manifest.block_bytes == b.manifest.block_bytes:
            digests = digests_a.of(pieces_a, item_bytes), digests_b.of(pieces_b, item_bytes)
            spans = differing(whole.grid, pieces_a, *digests, a.manifest.block_bytes // item_bytes)
        if whole.grid == grid_a:
            starts = pieces_a.start
        elif whole.grid == grid_b:
            starts = pieces_b.start
        else:
            starts = np.zeros(1, np.int64)
        yield starts, spans


class _Digests:
    """The digest tables of a checkpoint, one after the other. Each table is read when it is first needed."""

    def __init__(self, checkpoint: Loader) -> None:
        manifest = checkpoint.manifest
        self._contents, self._block_bytes = checkpoint.contents, manifest.block_bytes
        self._rank = np.array(manifest.files.rank, np.int64)
        self._first_block = np.array(manifest.files.first_block, np.int64)
        self._start = np.full(manifest.world_size, -1)
        """The row of ``_all`` at which the table of each rank begins, or -1 if the table has not been read."""
        self._all = np.empty((0, DIGEST_BYTES), np.uint8)

    def of(self, pieces: StoredPieces, item_bytes: int) -> NDArray[np.uint8]:
        """Returns an array with a row for the digest of each block of the pieces, in their order."""
        rank = self._rank[pieces.file]
        new = np.unique(rank[self._start[rank] < 0]).tolist()
        if new:
            tables = [np.frombuffer(self._contents.read_digest_table(new_rank), np.uint8) for new_rank in new]
            rows = [len(table) // DIGEST_BYTES for table in tables]
            self._start[new] = len(self._all) + np.cumsum([0, *rows[:-1]])
            self._all = np.concatenate([self._all, *(table.reshape(-1, DIGEST_BYTES) for table in tables)])
        first = self._start[rank] + self._first_block[pieces.file] + pieces.block
        piece, number = ragged(block_count(pieces.numel * item_bytes, self._block_bytes))
        digests: NDArray[np.uint8] = self._all[first[piece] + number]
        return digests
