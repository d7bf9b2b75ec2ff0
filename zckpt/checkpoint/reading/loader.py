"""Reads any elements of any tensors of a checkpoint into memory, and its trees of other state."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from zckpt.checkpoint.listing.contents import TensorInfo
from zckpt.checkpoint.reading.targets import empty_tensors
from zckpt.engines.tensors import set_in_place
from zckpt.errors import FormatError
from zckpt.format import names, tree
from zckpt.geometry import Span, all_of, same_order
from zckpt.orders import row_count
from zckpt.plan.inventory import BUFFER, MASTER, PARAM, STATE
from zckpt.plan.reads import SPACED_GAP_BYTES, plan_reads
from zckpt.plan.reshard import Wanted, piece_ranges
from zckpt.system.collector import without_collector
from zckpt.transfer.budget import Budget, budget_or_default, flag
from zckpt.transfer.devices import devices_of
from zckpt.transfer.memory import Targets, fresh_tensor, lies_in_order
from zckpt.transfer.read import places_of, run_reads
from zckpt.transfer.staging import StagingPool, pool_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.geometry import Grid

HOST = torch.device("cpu")
PLANNED_PIECES = 1 << 16
"""About how many pieces ``Loader.read`` plans at a time. The plan of a piece takes up to 400 bytes."""


class ReadRequest(NamedTuple):
    """The elements of a tensor that are read, and the contiguous memory that they go to, in the order of the span.
    ``copy`` is the number of the copy that is read, or None if any copy will do."""

    info: TensorInfo
    span: Span
    target: torch.Tensor
    copy: int | None = None

    @classmethod
    def fresh(cls, info: TensorInfo, span: Span, copy: int | None = None) -> ReadRequest:
        """Returns a request whose target is a new 1-D tensor of the stored dtype in host memory."""
        return cls(info, span, fresh_tensor((span.numel,), info.dtype, HOST), copy)


def _leaf(ext: int, tensor: torch.Tensor) -> object:
    return tensor if ext == tree.TENSOR else tensor.numpy()


def _tensors_in(value: object) -> Iterator[TensorInfo]:
    """Yields the tensors that a tree refers to."""
    if isinstance(value, TensorInfo):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


class Loader:
    """Reads a checkpoint for the modules of zckpt. ``Checkpoint`` shows of it what users need. Threads may share it."""

    def __init__(
        self,
        path: str,
        contents: Contents,
        budget: Budget | None = None,
        advised: Callable[..., AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.path = path
        self.contents = contents
        self.manifest = contents.manifest
        self.reader = contents.reader
        self.budget = budget_or_default(budget).serving(contents.store)
        self.advised = advised
        """Makes a context manager that may add to the hint of an error that leaves it. Its argument says what an error
        leaves behind. Without the argument, an error leaves everything unchanged."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that the checkpoint has, such as ``master`` and ``exp_avg``."""
        return tuple(part.name for part in self.manifest.parts if part.name != STATE)

    @cached_property
    def state(self) -> Any:
        """The tree of non-tensor state that all ranks share. Tensors in the tree are on the CPU."""
        with self.advised():
            return self._tree(self.manifest.state, names.MANIFEST)

    def rank_state(self, rank: int, *, lazy: bool = False, key: str | None = None) -> Any:
        """Returns what ``Checkpoint.rank_state`` returns."""
        with self.advised():
            packed = self.contents.packed_state(rank)
            if packed is None:
                return None
            return tree.unpack(packed[0], self._lazy_leaf, packed[1]) if lazy else self._tree(*packed, key)

    def client_rank_state(self, rank: int) -> dict[str, Any] | None:
        """Returns what ``Checkpoint.client_rank_state`` returns."""
        writers = self.manifest.world_size
        if rank not in range(writers):
            raise IndexError(f"there is no rank {rank}: ranks 0 to {writers - 1} have written {self.path}")
        return self.map_of_rank(rank, names.CLIENT_RANK_STATE)

    def map_of_rank(self, rank: int, key: str) -> dict[str, Any] | None:
        """Returns the map that the tree of one rank has under ``key``, or None if it has nothing there. Raises
        FormatError if the value is not a map, or if data is damaged or missing."""
        value = self.rank_state(rank, key=key)
        if not isinstance(value, dict | None):
            raise FormatError(f"state: the {key} of rank {rank} is not a map", file=self.path)
        return value

    def _tree(self, packed: bytes, file: str, key: str | None = None) -> Any:
        """Returns a tree with all tensors that it refers to. The tensors are read together, so their sizes are first
        checked against the sizes of their files. With ``key``, returns only the value that the tree has under this
        key."""

        def unpack(get: Callable[[int, str], object]) -> Any:
            value = tree.unpack(packed, get, file)
            return value if key is None else value.get(key) if isinstance(value, dict) else None

        infos = {info.name: info for info in _tensors_in(unpack(lambda ext, name: self.contents.state_info(name)))}
        self.contents.check_sizes(infos.values())
        # torch.set_rng_state reads from the start of the storage of its tensor, so each tensor has a storage of its
        # own.
        tensors = {name: torch.empty(info.shape, dtype=info.dtype, device="cpu") for name, info in infos.items()}
        if infos:
            self.load(infos, existing=tensors)
        return unpack(lambda ext, name: _leaf(ext, tensors[name]) if name in tensors else None)

    def _lazy_leaf(self, ext: int, name: str) -> Callable[[], object]:
        """Returns a function that reads a tensor of a tree."""
        info = self.contents.state_info(name)
        return lambda: _leaf(ext, self.load({name: info})[name])

    def weights(self) -> dict[str, TensorInfo]:
        """Returns what ``Checkpoint.weights`` returns."""
        infos: dict[str, TensorInfo] = {}
        for part in (BUFFER, PARAM, MASTER):
            infos |= {info.name: info for info in self.contents.of_part(part)}
        return infos

    def fill(
        self,
        requests: Sequence[ReadRequest],
        *,
        rank: int | None = None,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Fills the target of every request, as ``read`` does. The elements of a target need not lie in order. Such a
        target is read into memory of its own first, one at a time."""
        in_order = [each for each in requests if lies_in_order(each.target)]
        self.read(in_order, rank=rank, verify=verify, advance=advance)
        for request in requests:
            if not lies_in_order(request.target):
                values = fresh_tensor(request.target.shape, request.target.dtype, request.target.device)
                self.read([request._replace(target=values)], rank=rank, verify=verify, advance=advance)
                set_in_place(request.target, values)

    @without_collector
    def read(
        self,
        requests: Sequence[ReadRequest],
        *,
        rank: int | None = None,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
        staging: StagingPool | None = None,
        urgent: int = 0,
        after_urgent: Callable[[], None] = lambda: None,
    ) -> None:
        """Fills the target of every request. All tensor data is read by this method. Nothing is read for a target on
        the device "meta". Raises the errors of ``Checkpoint.load``.

        ``rank``: the rank whose copy is read if a tensor has several copies and ``rank`` alone has one of them.
        Otherwise, and with None, the first copy is read. ``verify``: as for ``Checkpoint.load``. ``advance`` is called
        with the number of bytes that have been read. ``staging``: a pool that the method ``staging`` has returned, for
        several calls inside of its ``kept``. None makes a pool for this call alone.

        ``urgent``: the number of requests, at the beginning of ``requests``, that are urgent. They are read first, but
        what is in the page cache is read before what is on the disk. ``after_urgent`` is called once, as soon as the
        targets of all urgent requests are filled. It may be called in any of the threads that do the work, and delays
        this thread, so it should return soon.
        """
        verify = flag("ZCKPT_VERIFY", True) if verify is None else verify
        for request in requests:
            if request.target.is_meta:
                advance(request.info.nbytes)
        urgent = sum(not request.target.is_meta for request in requests[:urgent])
        requests = [request for request in requests if not request.target.is_meta]
        staging = staging or self.staging(devices_of(request.target for request in requests))
        if not urgent:
            after_urgent()
        grids = self.contents.grids(request.info for request in requests)
        batches, left = list(self._batches(requests, grids, verify)), urgent
        with staging.kept() if len(batches) > 1 else nullcontext():
            for batch in batches:
                size = batch.stop - batch.start
                has_last_urgent = 0 < left <= size
                after = after_urgent if has_last_urgent else lambda: None
                urgent_of_batch = left if has_last_urgent else 0
                self._read(requests[batch], grids[batch], rank, verify, advance, staging, urgent_of_batch, after)
                left -= size

    def _batches(self, requests: Sequence[ReadRequest], grids: Sequence[Grid], verify: bool) -> Iterator[slice]:
        """Yields the positions of the requests that are planned together. Planning takes memory for each piece of a
        tensor, for each row of equally spaced runs, and for each range that is read by itself. ``grids``: the grid of
        the tensor of each request."""
        first, planned = 0, 0
        for number, (request, grid) in enumerate(zip(requests, grids, strict=True)):
            pieces = self.manifest.world_size
            if not same_order(request.span.grid, grid):
                pieces += row_count(request.span, grid) - 1
                if not verify:  # The most ranges that ``plan_reads`` does not read together.
                    pieces += request.info.nbytes // SPACED_GAP_BYTES
            if number > first and planned + pieces > PLANNED_PIECES:
                yield slice(first, number)
                first, planned = number, 0
            planned += pieces
        if requests:
            yield slice(first, len(requests))

    def _read(
        self,
        requests: Sequence[ReadRequest],
        grids: Sequence[Grid],
        rank: int | None,
        verify: bool,
        advance: Callable[[int], None],
        staging: StagingPool,
        urgent: int,
        after_urgent: Callable[[], None],
    ) -> None:
        manifest = self.manifest
        infos, spans, tensors, copies = zip(*requests, strict=True)
        stored_ranges = piece_ranges(
            self.contents.stored(infos, copies, rank),
            grids,
            map(Wanted, itertools.count(), spans),
            [info.item_bytes for info in infos],
        )
        numbers, first = np.unique(stored_ranges.file, return_index=True)
        first_targets = stored_ranges.target[first].tolist()
        keys = {number: infos[row].key for number, row in zip(numbers.tolist(), first_targets, strict=True)}
        files = {number: self.contents.read_file(number, verify=verify) for number in keys}
        targets = Targets([info.key for info in infos], tensors, [info.dtype for info in infos])
        ops = plan_reads(
            stored_ranges,
            data_starts=manifest.files.data_start,
            block_bytes=manifest.block_bytes,
            verify=verify,
            batch_bytes=staging.batch_bytes,
            places=places_of(self.reader, targets, files),
            urgent=urgent,
            gap_bytes=self.contents.store.gap_bytes,
        )
        checks = self.contents.checks_beside(keys, verify=verify)
        try:
            run_reads(self.reader, ops, files, targets, self.budget, staging, advance, after_urgent, checks)
        except FormatError:
            for check in checks:  # A file that is too short, for example, explains what is wrong with its data.
                check()
            raise

    def staging(self, devices: Iterable[torch.device]) -> StagingPool:
        """Makes a pool of buffers for ``read``. ``devices``: those, besides the CPU, to whose memory is read."""
        return pool_for(devices, self.budget, self.manifest.block_bytes)

    def load(
        self,
        infos: Mapping[str, TensorInfo],
        device: torch.device = HOST,
        dtypes: Mapping[str, torch.dtype | None] | None = None,
        existing: Mapping[str, torch.Tensor] | None = None,
        *,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
        staging: StagingPool | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns whole tensors, by the names of ``infos``. Tensors that are in ``existing`` are read into that memory,
        all others into new memory."""
        dtypes, existing = dtypes or {}, existing or {}
        unread = {name for name in infos if (existing[name].is_meta if name in existing else device.type == "meta")}
        read = (info for name, info in infos.items() if name not in unread)
        offsets = self.contents.check_sizes(read, self.budget.nbytes)
        new = {name: info for name, info in infos.items() if name not in existing}
        made = empty_tensors(
            list(new.values()),
            [info.shape for info in new.values()],
            device,
            [dtypes.get(name) for name in new],
            [offsets.get(info.key, 0) for info in new.values()],
        )
        of_new = dict(zip(new, made, strict=True))
        targets = {name: of_new[name] if name in of_new else existing[name] for name in infos}
        requests = [ReadRequest(info, all_of(info.shape), targets[name]) for name, info in infos.items()]
        self.read(requests, verify=verify, advance=advance, staging=staging)
        return targets
