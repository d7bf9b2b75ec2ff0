"""Reads any elements of any tensors of a checkpoint into memory, and its trees of other state."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from zckpt.checkpoint.listing.tensors import TensorInfo, Tensors
from zckpt.checkpoint.reading.targets import check_casts, empty_tensors, refuse_overlaps
from zckpt.errors import FormatError
from zckpt.format import names, tree
from zckpt.geometry import Span, all_of, distinct, same_order
from zckpt.orders import row_count
from zckpt.plan.inventory import BUFFER, EXTRA_STATE, MASTER, PARAM, STATE
from zckpt.plan.reads import SPACED_GAP_BYTES, plan_reads
from zckpt.plan.reshard import RequestedSpan, piece_ranges
from zckpt.system.collector import without_collector
from zckpt.system.threads import beside
from zckpt.transfer.budget import Budget, budget_or_default, verifies
from zckpt.transfer.devices import devices_of
from zckpt.transfer.memory import Targets, fresh_tensor, lies_in_order
from zckpt.transfer.read import places_of, run_reads
from zckpt.transfer.staging import StagingPool, pool_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.geometry import Ints

HOST = torch.device("cpu")
PLANNED_PIECES = 1 << 16
"""About how many pieces ``Loader.read`` plans at a time. The plan of a piece takes up to 400 bytes, and there
are two plans in memory at a time."""
FIRST_TENSORS = 1 << 13
"""The most tensors that ``Loader.read`` plans before it reads the first of them. While it reads them, it plans up to
twice as many, and so on. If the number were smaller, more threads of Python would wait for each other, and the disk
would more often wait for the last reads of a plan."""


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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The elements of tensors that a read wants, and where they go. There may be very many tensors."""

    tensors: Tensors
    spans: Sequence[Span]
    """The elements of each tensor that are read."""
    copies: Ints
    """The number of the copy of each tensor that is read, or -1 if any copy will do."""
    targets: Callable[[slice], Sequence[torch.Tensor]]
    """Returns the memory that some of the tensors go to. It may make this memory, so it is called once for each
    tensor."""
    rank: int | None
    """This and all attributes below have the meaning of the arguments of ``Loader.read`` with the same names."""
    verify: bool
    advance: Callable[[int], None]
    staging: StagingPool
    urgent: int = 0
    after_urgent: Callable[[], None] = lambda: None

    def take(self, numbers: slice) -> _Wanted:
        """Returns what is read of the tensors with these numbers."""
        has_last_urgent = numbers.start < self.urgent <= numbers.stop
        return replace(
            self, tensors=self.tensors[numbers], spans=self.spans[numbers], copies=self.copies[numbers],
            targets=self.targets(numbers).__getitem__, urgent=self.urgent - numbers.start if has_last_urgent else 0,
            after_urgent=self.after_urgent if has_last_urgent else lambda: None,
        )  # fmt: skip


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

    @property
    def root(self) -> dict[Any, Any]:
        """The tree ``state``, or an empty dict if it is not a map."""
        return self.state if isinstance(self.state, dict) else {}

    @property
    def extra_state(self) -> frozenset[str]:
        """The names of the buffers that modules had added to their ``state_dict`` themselves. Raises FormatError."""
        engine = self.root.get("engine")
        extra = engine.get(EXTRA_STATE, []) if isinstance(engine, dict) else []
        if not isinstance(extra, list) or not all(isinstance(name, str) for name in extra):
            raise FormatError(f"state: {EXTRA_STATE} is not a list of names", file=self.path)
        return frozenset(extra)

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
        """Returns a tree, or with ``key`` the value that it has under this key, with all tensors that it refers to.
        They are read together, so their sizes are first checked against those of their files."""

        def unpack(get: Callable[[int, str], object]) -> Any:
            value = tree.unpack(packed, get, file)
            return value if key is None else value.get(key) if isinstance(value, dict) else None

        infos = {info.name: info for info in _tensors_in(unpack(lambda ext, name: self.contents.state_info(name)))}
        self.contents.check_sizes(infos.values())
        # torch.set_rng_state reads from the start of its tensor's storage, so each tensor has one of its own.
        tensors = {name: torch.empty(info.shape, dtype=info.dtype, device="cpu") for name, info in infos.items()}
        if infos:
            self.load([*infos], [*infos.values()], existing=tensors)
        return unpack(lambda ext, name: _leaf(ext, tensors[name]) if name in tensors else None)

    def _lazy_leaf(self, ext: int, name: str) -> Callable[[], object]:
        """Returns a function that reads a tensor of a tree."""
        info = self.contents.state_info(name)
        return lambda: _leaf(ext, self.load([name], [info])[name])

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
        target is read into memory of its own first, one at a time. Raises MismatchError if targets share memory."""
        refuse_overlaps((request.info.key, request.target) for request in requests)
        in_order = [each for each in requests if lies_in_order(each.target)]
        self.read(in_order, rank=rank, verify=verify, advance=advance)
        for request in requests:
            if not lies_in_order(request.target):
                values = fresh_tensor(request.target.shape, request.target.dtype, request.target.device)
                self.read([request._replace(target=values)], rank=rank, verify=verify, advance=advance)
                request.target.copy_(values)

    @without_collector
    def read(
        self,
        requests: Iterable[ReadRequest],
        *,
        rank: int | None = None,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
        staging: StagingPool | None = None,
        urgent: int = 0,
        after_urgent: Callable[[], None] = lambda: None,
    ) -> None:
        """Fills the target of each request, except on the device "meta". Raises the errors of ``Checkpoint.load``.

        ``rank``: the rank whose copy is read if a tensor has several copies and ``rank`` alone has one of them.
        Otherwise, and with None, the first copy is read. ``verify``: as for ``Checkpoint.load``. ``advance`` is called
        with the number of bytes that have been read. ``staging``: a pool that the method ``staging`` has returned, for
        several calls inside of its ``kept``. None makes a pool for this call alone.

        ``urgent``: the number of requests, at the beginning of ``requests``, that are urgent. They are read first, but
        what is in the page cache is read before what is on the disk. ``after_urgent`` is called once, as soon as the
        targets of all urgent requests are filled. Any thread that does the work may call it, so it should return soon.
        """
        infos, spans, targets, copies = list[TensorInfo](), list[Span](), list[torch.Tensor](), list[int]()
        urgent_read = 0
        for number, (info, span, target, copy) in enumerate(requests):  # There may be very many, so none is kept.
            if target.is_meta:
                advance(info.nbytes)
                continue
            urgent_read += number < urgent
            infos.append(info)
            spans.append(span)
            targets.append(target)
            copies.append(-1 if copy is None else copy)
        staging = staging or self.staging(devices_of(targets))
        if not urgent_read:
            after_urgent()
        wanted = _Wanted(
            self.contents.tensors(infos), spans, np.array(copies, np.int64), targets.__getitem__, rank,
            verifies(verify), advance, staging, urgent_read, after_urgent,
        )  # fmt: skip
        del infos, copies
        self._read(wanted)

    def _read(self, wanted: _Wanted) -> None:
        """Plans and carries out the reads batch by batch. A batch is planned while the one before it is read."""
        batches, inference = list(self._batches(wanted)), torch.is_inference_mode_enabled()
        plans: list[Callable[[], None]] = []

        def plan(batch: slice) -> None:
            with torch.inference_mode(inference):  # as in the thread of the caller, because targets are made here
                plans.append(self._plan(wanted.take(batch)))

        if not batches:
            return
        plan(batches[0])
        with wanted.staging.kept() if len(batches) > 1 else nullcontext():
            for following in batches[1:]:
                with beside(partial(plan, following), "zckpt-plan") as start:
                    start()
                    plans.pop(0)()
            plans.pop()()

    def _batches(self, wanted: _Wanted) -> Iterator[slice]:
        """Yields the positions of the tensors that are planned together. Planning takes memory for each piece of a
        tensor, for each row of equally spaced runs, and for each range that is read by itself."""
        pieces = np.full(len(wanted.tensors), self.manifest.world_size)
        for number, (span, grid) in enumerate(zip(wanted.spans, wanted.tensors.grids, strict=True)):
            if not same_order(span.grid, grid):
                pieces[number] += row_count(span, grid) - 1
                if not wanted.verify:  # The most ranges that ``plan_reads`` does not read together.
                    pieces[number] += wanted.tensors[number].nbytes // SPACED_GAP_BYTES
        stops = np.cumsum(pieces)
        first, together = 0, FIRST_TENSORS
        while first < len(pieces):
            fits = int(stops.searchsorted(stops[first] - pieces[first] + PLANNED_PIECES, "right"))
            stop = min(max(fits, first + 1), first + together, len(pieces))
            yield slice(first, stop)
            first, together = stop, together * 2

    def _plan(self, wanted: _Wanted) -> Callable[[], None]:
        """Plans the reads of a batch. Returns the function that carries them out and raises the errors of ``read``."""
        tensors, verify = wanted.tensors, wanted.verify
        stored_ranges = piece_ranges(
            self.contents.stored(tensors, wanted.copies, wanted.rank),
            tensors.grids,
            map(RequestedSpan, itertools.count(), wanted.spans),
            tensors.item_bytes,
        )
        numbers, first, _ = distinct(stored_ranges.file)
        first_targets = stored_ranges.target[first].tolist()
        keys_of_files = {number: tensors.key(row) for number, row in zip(numbers.tolist(), first_targets, strict=True)}
        files = {number: self.contents.read_file(number, verify=verify) for number in keys_of_files}
        targets = Targets(tensors.key, wanted.targets(slice(None)), tensors.dtypes)
        ops = plan_reads(
            stored_ranges,
            data_starts=self.manifest.files.data_start,
            block_bytes=self.manifest.block_bytes,
            verify=verify,
            batch_bytes=wanted.staging.batch_bytes,
            places=places_of(self.reader, targets, files),
            urgent=wanted.urgent,
            gap_bytes=self.contents.store.gap_bytes,
        )
        checks = self.contents.checks_beside(keys_of_files, verify=verify)
        how = self.budget, wanted.staging, wanted.advance, wanted.after_urgent, checks

        def carry_out() -> None:
            try:
                run_reads(self.reader, ops, files, targets, *how)
            except FormatError:
                for check in checks:  # A file that is too short, for example, explains what is wrong with its data.
                    check()
                raise

        return carry_out

    def staging(self, devices: Iterable[torch.device]) -> StagingPool:
        """Makes a pool of buffers for ``read``. ``devices``: those, besides the CPU, to whose memory is read."""
        return pool_for(devices, self.budget, self.manifest.block_bytes)

    def load(
        self,
        names: Sequence[str],
        infos: Sequence[TensorInfo],
        device: torch.device = HOST,
        dtypes: Sequence[torch.dtype | None] | None = None,
        existing: Mapping[str, torch.Tensor] | None = None,
        *,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
        staging: StagingPool | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns whole tensors by ``names``. Those that are in ``existing`` are read into that memory, all others into
        new memory, with the ``dtypes``, or the stored dtype where this is None. Nothing is read for a tensor on the
        device "meta". Raises the errors of ``Checkpoint.load``."""
        tensors, existing = self.contents.tensors(infos), existing or {}
        targets = {number: existing[name] for number, name in enumerate(names) if name in existing}
        casts = [None if dtypes is None or number in targets else dtypes[number] for number in range(len(names))]
        check_casts(tensors, casts)
        keys = tensors.keys if targets else []
        refuse_overlaps((keys[number], target) for number, target in targets.items())
        is_read = np.full(len(names), device.type != "meta")
        is_read[[*targets]] = [not target.is_meta for target in targets.values()]
        file_offsets = np.zeros(len(names), np.int64)
        file_offsets[is_read] = self.contents.check_sizes(tensors.take(is_read), self.budget.nbytes)
        devices = {*devices_of(targets.values()), *([device] if len(targets) < len(names) else [])}

        def made(numbers: Ints) -> list[torch.Tensor]:
            """Returns the tensors with these numbers. Makes those that do not exist yet."""
            missing = [number for number in numbers.tolist() if number not in targets]
            new = tensors.take(np.array(missing, np.int64))
            dtypes_of_new = [casts[number] for number in missing]
            of_new = empty_tensors(new, new.shapes, device, dtypes_of_new, file_offsets[missing])
            targets.update(zip(missing, of_new, strict=True))
            return [targets[number] for number in numbers.tolist()]

        unread, read = np.flatnonzero(~is_read), np.flatnonzero(is_read)
        if len(unread):
            made(unread)
            advance(sum(tensors.take(unread).nbytes.tolist()))
        whole = tensors.take(read)
        spans, copies = [*map(all_of, whole.shapes)], np.full(len(read), -1)
        how = verifies(verify), advance, staging or self.staging(devices)
        self._read(_Wanted(whole, spans, copies, lambda batch: made(read[batch]), None, *how))
        return {name: targets[number] for number, name in enumerate(names)}
