"""An opened checkpoint: its tensors and its other state, any part of which can be loaded."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from zckpt.checkpoint.listing.contents import TensorInfo
from zckpt.checkpoint.reading.extra_state import extra_state
from zckpt.checkpoint.reading.state_dict import PlainValues, own_rank, plan_load
from zckpt.checkpoint.reading.targets import checked_target, empty_tensors
from zckpt.engines.tensors import set_in_place
from zckpt.errors import FormatError, MismatchError, count
from zckpt.format import names, tree
from zckpt.geometry import Span, all_of, row_count, same_order, slice_of
from zckpt.plan.inventory import BUFFER, MASTER, PARAM, STATE, unconverted
from zckpt.plan.reads import SPACED_GAP_BYTES, plan_reads
from zckpt.plan.reshard import Wanted, piece_ranges
from zckpt.progress import Progress, reported
from zckpt.system.collector import without_collector
from zckpt.transfer.budget import Budget, flag
from zckpt.transfer.devices import check_device, devices_of
from zckpt.transfer.memory import Targets, check_memory, fresh_tensor, lies_in_order
from zckpt.transfer.read import places_of, run_reads
from zckpt.transfer.staging import StagingPool, pool_for
from zckpt.transfer.torch_dtypes import dtype_of

if TYPE_CHECKING:
    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.geometry import Grid
    from zckpt.plan.select import Keys
    from zckpt.storage.contract import IOCount

Device = torch.device | str
HOST = torch.device("cpu")
PLANNED_PIECES = 1 << 16
"""About how many pieces ``Checkpoint.read`` plans at a time. The plan of a piece takes up to 400 bytes."""


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


class Checkpoint(Mapping[str, TensorInfo]):
    """An opened checkpoint, which ``zckpt.open`` returns.

    It is a mapping from each key (``<part>/<parameter name>``) to the tensor's TensorInfo. Opening a checkpoint reads
    only the manifest. Several threads may share a Checkpoint.
    """

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
        self.budget = (budget or Budget.from_environment()).serving(contents.store)
        self._advised = advised
        """Makes a context manager that may add to the hint of an error that leaves it. Its argument says what an error
        leaves behind. Without the argument, an error leaves everything unchanged."""

    # Contents

    def __getitem__(self, key: str) -> TensorInfo:
        """Returns the tensor with this key. A tied weight has a key for each of its names. Raises KeyNotFoundError,
        which names the nearest keys."""
        return self.contents[key]

    def __contains__(self, key: object) -> bool:
        return key in self.contents

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents)

    def __len__(self) -> int:
        return len(self.contents)

    def __repr__(self) -> str:
        tensors = f"{count(len(self), 'tensor')} of {', '.join(self.parts)}"
        return f"<zckpt.Checkpoint {self.path!r}: step {self.step}, {tensors}>"

    @property
    def step(self) -> int:
        """The number of training steps that were done when the checkpoint was written."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        return self.manifest.world_size

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that the checkpoint has, such as ``master`` and ``exp_avg``."""
        return tuple(part.name for part in self.manifest.parts if part.name != STATE)

    @property
    def aliases(self) -> Mapping[str, str]:
        """For each other name of a tied weight, the name under which it is stored."""
        return self.manifest.aliases

    @property
    def nbytes(self) -> int:
        """The size in bytes of all files that hold tensors, as the manifest records it."""
        return sum(self.manifest.files.nbytes)

    @property
    def io(self) -> IOCount:
        """Counts the reads of this checkpoint so far, and their bytes."""
        return self.reader.count

    @cached_property
    def state(self) -> Any:
        """The tree of non-tensor state that all ranks share. Tensors in the tree are on the CPU."""
        with self._advised():
            return self._tree(self.manifest.state, names.MANIFEST)

    def rank_state(self, rank: int, *, lazy: bool = False, key: str | None = None) -> Any:
        """Returns the tree of state that belongs to one rank alone, such as its random number generators.

        Args:
            rank: one of the ranks that wrote the checkpoint, from 0 on.
            lazy: whether a function without arguments takes the place of each tensor and array. The function reads the
                tensor.
            key: a key of the tree. Only its value is returned, and no other tensors are read. None means the whole
                tree.

        Returns:
            The tree, or its value under ``key``. None if there is none.

        Raises:
            IndexError: there was no such rank.
            FormatError: data is damaged or missing.
            StorageError: the operating system reports an error when it reads.
        """
        with self._advised():
            packed = self.contents.packed_state(rank)
            if packed is None:
                return None
            return tree.unpack(packed[0], self._lazy_leaf, packed[1]) if lazy else self._tree(*packed, key)

    def client_rank_state(self, rank: int) -> dict[str, Any] | None:
        """Returns the ``rank_state`` that one rank has passed to ``zckpt.write``.

        It also contains, by name, the states of the objects that this rank had registered (``zckpt.register``).

        Args:
            rank: one of the ranks that wrote the checkpoint, from 0 on. It need not be the rank of this process.

        Returns:
            A dict with tensors on the CPU. None if the rank has passed and registered nothing.

        Raises:
            IndexError: there was no such rank.
            FormatError: data is damaged or missing.
            StorageError: the operating system reports an error when it reads.
        """
        if rank not in range(self.world_size):
            raise IndexError(f"there is no rank {rank}: ranks 0 to {self.world_size - 1} have written {self.path}")
        return self.map_of_rank(rank, names.CLIENT_RANK_STATE)

    def map_of_rank(self, rank: int, key: str) -> dict[str, Any] | None:
        """Returns a map from the tree of one rank.

        Args:
            rank: one of the ranks that wrote the checkpoint, from 0 on.
            key: the key of the map in that tree.

        Returns:
            The map. None if the tree has none under this key.

        Raises:
            FormatError: the value is not a map, or data is damaged or missing.
        """
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
            self._load(infos, existing=tensors)
        return unpack(lambda ext, name: _leaf(ext, tensors[name]) if name in tensors else None)

    def _lazy_leaf(self, ext: int, name: str) -> Callable[[], object]:
        """Returns a function that reads a tensor of a tree."""
        info = self.contents.state_info(name)
        return lambda: _leaf(ext, self._load({name: info})[name])

    # Loading

    @without_collector
    def load(
        self,
        keys: Keys = None,
        *,
        device: Device = "cpu",
        dtype: torch.dtype | str | None = None,
        verify: bool | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        progress: Progress | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns whole tensors by key, assembled from the pieces of all ranks.

        It reads only these tensors, the index chunks that list them and the digests that cover them. It reads nothing
        for tensors on the device "meta".

        Args:
            keys: one key, a glob (``"master/*"``), several keys or globs, or a predicate over keys. None selects the
                keys of ``out``, or all keys if there is no ``out``. If a glob matches the key under which a tied weight
                is stored, as ``"master/*"`` does, the weight is returned once, under this key. If a glob matches only
                another name of a tied weight, the weight is returned under that name. A predicate is called with the
                keys under which tensors are stored.
            device: the device on which the tensors are made.
            dtype: the dtype to which the tensors are converted. Only conversions between floating point types, or
                between integer types, are possible. It is a ``torch.dtype`` or its name, such as ``"bfloat16"``. None
                keeps the stored dtypes.
            verify: whether every block is compared with its digest. None means yes, unless the environment has
                ZCKPT_VERIFY=0.
            out: tensors by key that are filled, and to whose dtype the stored elements are converted. They must be
                contiguous and have the stored shapes. They may be on any device. After an error they have undefined
                values.
            progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.

        Returns:
            The tensors by key. With ``out``, these are the tensors of ``out``. Otherwise, they are new tensors. In host
            memory, many small ones share about 1 MiB, which goes back to the system when the last of them is gone.

        Raises:
            KeyNotFoundError: ``keys`` matches nothing, or there is no tensor for a key of ``out``.
            MismatchError: a tensor of ``out`` does not fit, or ``keys`` does not select it.
            CastError: a dtype cannot be converted to ``dtype``.
            ValueError: there is no such ``dtype``.
            TypeError: ``out`` is not a mapping to tensors.
            DeviceError: the device does not exist, does not work or has too little memory. The error names the usable
                devices.
            FormatError: data is damaged or missing.
            StorageError: the operating system reports an error when it reads.
        """
        device = check_device(device)
        targets = {} if out is None else out
        if not isinstance(targets, Mapping):
            raise TypeError(f"out must be a dict of tensors by key, such as 'master/embed', got {type(out).__name__}")
        infos = {key: self[key] for key in targets} if keys is None and out is not None else self.contents.select(keys)
        unused = [key for key in targets if key not in infos]
        if unused:
            raise MismatchError(f"out has {', '.join(unused[:5])}, which keys does not ask for", key=unused[0])
        dtypes = dict.fromkeys(infos, dtype_of(dtype))
        targets = {key: checked_target(infos[key], tensor) for key, tensor in targets.items()}
        named = ((f"out[{key!r}]", tensor) for key, tensor in targets.items() if not tensor.is_meta)
        check_memory(named, MismatchError)
        leftovers = ["the tensors in `out` have undefined values; nothing else was changed"] if targets else []
        nbytes = sum(info.nbytes for info in infos.values())
        with self._advised(*leftovers), reported(progress, "load", nbytes) as advance:
            return self._load(infos, device, dtypes, targets, verify=verify, advance=advance)

    def iter(
        self,
        keys: Keys = None,
        *,
        device: Device = "cpu",
        dtype: torch.dtype | str | None = None,
        verify: bool | None = None,
        progress: Progress | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(key, tensor)`` one at a time.

        Only one tensor is in memory at a time, unless the caller keeps more.

        Args:
            keys: as for ``load``.
            device: as for ``load``.
            dtype: as for ``load``.
            verify: as for ``load``.
            progress: as for ``load``.

        Returns:
            An iterator. It reads each tensor when the caller asks for it.

        Raises:
            ZckptError: the tensors cannot be loaded. ``load`` lists these errors.
        """
        device = check_device(device)
        infos = self.contents.select(keys)
        target_dtype = dtype_of(dtype)
        staging = self.staging([device])
        with (
            self._advised(),
            reported(progress, "load", sum(info.nbytes for info in infos.values())) as advance,
            staging.kept(),
        ):
            for key, info in infos.items():
                tensors = self._load(
                    {key: info}, device, {key: target_dtype}, verify=verify, advance=advance, staging=staging
                )
                yield key, tensors[key]

    def load_slice(
        self,
        key: str,
        index: slice | tuple[slice, ...],
        *,
        device: Device = "cpu",
        dtype: torch.dtype | str | None = None,
        verify: bool | None = None,
    ) -> torch.Tensor:
        """Returns ``tensor[index]``.

        Reads of the tensor only the blocks (1 MiB each) that have bytes of the slice. For some columns, these may be
        all blocks. With ``verify=False``, reads the bytes of the slice, and what lies between two of its rows if that
        is at most 64 KiB.

        Args:
            key: the key of the tensor.
            index: a slice, or one slice for each leading dimension. All steps are 1.
            device: as for ``load``.
            dtype: as for ``load``.
            verify: as for ``load``.

        Returns:
            A new tensor with the elements of the slice.

        Raises:
            ZckptError: the tensors cannot be loaded. ``load`` lists these errors.
        """
        device = check_device(device)
        info = self[key]
        shape, span = slice_of(info.shape, index if isinstance(index, tuple) else (index,))
        with self._advised():
            if device.type != "meta":
                self.contents.check_sizes([info], self.budget.nbytes)
            (target,) = empty_tensors([info], [shape], device, [dtype_of(dtype)], [0])
            self.read([ReadRequest(info, span, target)], verify=verify)
        return target

    def load_pieces(
        self, rank: int, keys: Keys = None, *, device: Device = "cpu", verify: bool | None = None
    ) -> dict[tuple[str, int, int], torch.Tensor]:
        """Returns the pieces that one rank wrote, with their stored dtypes.

        Args:
            rank: one of the ranks that wrote the checkpoint, from 0 on.
            keys: as for ``load``.
            device: as for ``load``.
            verify: as for ``load``.

        Returns:
            A 1-D tensor for each piece, by ``(key, start, stop)``. It has the elements ``[start, stop)`` of the tensor,
            counted as in ``PieceInfo``.

        Raises:
            ZckptError: the tensors cannot be loaded. ``load`` lists these errors.
        """
        device = check_device(device)
        requests: dict[tuple[str, int, int], ReadRequest] = {}
        infos = self.contents.select(keys)
        with self._advised():
            pieces_of_rank = {
                key: [piece for piece in self.contents.pieces(info) if piece.rank == rank]
                for key, info in infos.items()
            }
            copies = {(info.key, piece.copy): info for key, info in infos.items() for piece in pieces_of_rank[key]}
            if device.type != "meta":
                self.contents.check_copies(list(copies.values()), [copy for _, copy in copies], self.budget.nbytes)
            each = [(key, info, piece) for key, info in infos.items() for piece in pieces_of_rank[key]]
            shapes = [(piece.span.numel,) for _, _, piece in each]
            targets = empty_tensors(
                [info for _, info, _ in each], shapes, device, [None] * len(each), [piece.offset for *_, piece in each]
            )
            for (key, info, piece), target in zip(each, targets, strict=True):
                requests[key, piece.span.start, piece.span.stop] = ReadRequest(info, piece.span, target, piece.copy)
            self.read(list(requests.values()), verify=verify)
        return {place: request.target for place, request in requests.items()}

    def weights(self) -> dict[str, TensorInfo]:
        """Returns the TensorInfos of the weights and buffers of the model.

        Returns:
            The TensorInfos by the name in the model. A weight is that of the part ``master`` if this part has it, and
            that of ``param`` otherwise. A tied weight has one of its names.
        """
        infos: dict[str, TensorInfo] = {}
        for part in (BUFFER, PARAM, MASTER):
            infos |= {info.name: info for info in self.contents.of_part(part)}
        return infos

    @without_collector
    def state_dict(
        self,
        *,
        dtype: torch.dtype | str | None = None,
        device: Device = "cpu",
        verify: bool | None = None,
        progress: Progress | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns a dict for ``model.load_state_dict``: weights and buffers, and tied weights by each of their names.

        A weight is that of the part ``master`` if this part has it, and that of ``param`` otherwise.

        Args:
            dtype: the dtype of floating point weights. Buffers and quantized weights keep their dtype.
            device: as for ``load``.
            verify: as for ``load``.
            progress: as for ``load``.

        Returns:
            The tensors by their names in the model.

        Raises:
            ZckptError: the tensors cannot be loaded. ``load`` lists these errors.
        """
        device, weight_dtype = check_device(device), dtype_of(dtype)
        sources = self.weights()
        kept = unconverted(() if weight_dtype is None else extra_state(self))
        casts = {
            name: weight_dtype if info.part != BUFFER and info.dtype.is_floating_point and name not in kept else None
            for name, info in sources.items()
        }

        with self._advised(), reported(progress, "load", sum(info.nbytes for info in sources.values())) as advance:
            targets = self._load(sources, device, casts, verify=verify, advance=advance)
        return targets | {alias: targets[name] for alias, name in self.aliases.items() if name in targets}

    @without_collector
    def load_into(
        self,
        state_dict: Mapping[Any, Any],
        *,
        strict: bool = True,
        verify: bool | None = None,
        progress: Progress | None = None,
    ) -> list[str]:
        """Reads the checkpoint into a state dict, as ``zckpt.write_state_dict`` takes it.

        A state dict is a dict of tensors, DTensors, plain values, and dicts and lists of them. Tensors are filled in
        place, and plain values are replaced. A rank reads only what it holds of a DTensor, so the number of ranks, the
        mesh and the placements may be others than those of the writer. Names of the checkpoint that the state dict does
        not have are not read. If an engine has written the checkpoint, the state dict is that of a model, such as
        ``model.state_dict()``, and gets the weights as ``state_dict`` returns them.

        This is not collective: each rank calls it for itself.

        Args:
            state_dict: a dict as ``write_state_dict`` takes it.
            strict: whether the checkpoint must have every tensor and plain value of the state dict. With False, those
                that it does not have stay as they are.
            verify: as for ``load``.
            progress: as for ``load``.

        Returns:
            The names of what the checkpoint does not have. With ``strict``, there are none.

        Raises:
            MismatchError: a tensor has another shape, is missing, or has no memory. Nothing was changed.
            StateError: two leaves of the state dict have the same name.
            TypeError: ``state_dict`` is not a dict.
            FormatError: data is damaged or missing.
            StorageError: the operating system reports an error when it reads.
        """
        left = "the tensors in the state dict have undefined values, and its plain values are unchanged"
        with self._advised():
            plan, values = plan_load(self, state_dict, strict=strict), PlainValues(self, own_rank(self))
            loaded = [(leaf, copy.deepcopy(values[name])) for name, leaf in plan.values.items()]
            self.contents.check_sizes(info for _, info, span, _ in plan.tensors if span.numel)
        requests = [ReadRequest(info, span, target) for _, info, span, target in plan.tensors if span.numel]
        nbytes = sum(request.span.numel * request.info.item_bytes for request in requests)
        with self._advised(left), reported(progress, "load", nbytes) as advance:
            self.fill(requests, rank=own_rank(self), verify=verify, advance=advance)
        for leaf, value in loaded:
            leaf.container[leaf.key] = value
        return plan.left

    def fill(
        self,
        requests: Sequence[ReadRequest],
        *,
        rank: int | None = None,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Fills the target of every request, as ``read`` does.

        The elements of a target need not lie in order. Such a target is read into memory of its own first, one at a
        time.

        Args:
            requests: as for ``read``.
            rank: as for ``read``.
            verify: as for ``load``.
            advance: as for ``read``.

        Raises:
            ZckptError: the tensors cannot be loaded. ``load`` lists these errors.
        """
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
        """Fills the target of every request. All tensor data is read by this method.

        Args:
            requests: the tensors, the elements of them that are read, and the memory that they go to. Nothing is read
                for a target on the device "meta".
            rank: the rank whose copy is read if a tensor has several copies and ``rank`` alone has one of them.
                Otherwise, and with None, the first copy is read.
            verify: as for ``load``.
            advance: called with the number of bytes that have been read.
            staging: a pool that the method ``staging`` has returned, for several calls inside of its ``kept``. None
                makes a pool for this call alone.
            urgent: the number of requests, at the beginning of ``requests``, that are urgent. They are read first, but
                what is in the page cache is read before what is on the disk.
            after_urgent: called once, as soon as the targets of all urgent requests are filled. It may be called in any
                of the threads that do the work, and delays this thread, so it should return soon.

        Raises:
            ZckptError: the tensors cannot be loaded. ``load`` lists these errors.
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
            pieces = self.world_size
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
        """Makes a pool of buffers for ``read``.

        Args:
            devices: the devices, besides the CPU, to whose memory tensors are read.

        Returns:
            The pool.
        """
        return pool_for(devices, self.budget, self.manifest.block_bytes)

    @property
    def batch_bytes(self) -> int:
        """The largest number of bytes that one read moves through a staging buffer."""
        return self.budget.batch_bytes(self.manifest.block_bytes)

    def _load(
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
