"""An opened checkpoint: what it holds, and any part of it as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zckpt.errors import FormatError, MismatchError, count
from zckpt.format import names, tree
from zckpt.listing.contents import TensorInfo
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.reshard import Span, extents, slice_spans
from zckpt.progress import Progress, reported
from zckpt.state.inventory import BUFFER, MASTER, PARAM, STATE
from zckpt.transfer.budget import Budget, flag
from zckpt.transfer.devices import check_device, check_devices
from zckpt.transfer.memory import Sinks, check_cast, fresh_tensor, lies_in_order
from zckpt.transfer.read import places_of, run_reads
from zckpt.transfer.staging import StagingPool, pool_for
from zckpt.transfer.torch_dtypes import dtype_of

if TYPE_CHECKING:
    from zckpt.listing.contents import Contents
    from zckpt.plan.select import Keys
    from zckpt.storage.contract import IOCount

Device = torch.device | str
HOST = torch.device("cpu")


class Want(NamedTuple):
    """Elements of one tensor, and the contiguous memory that they go to. ``copy`` is the copy of the tensor to be read;
    None: whichever suits."""

    info: TensorInfo
    spans: Sequence[Span]
    target: torch.Tensor
    copy: int | None = None


@lru_cache
def _all_of(numel: int) -> tuple[Span]:
    """The span of a whole tensor: few objects where there are many tensors."""
    return (Span(0, numel, 0),)


def _leaf(ext: int, tensor: torch.Tensor) -> object:
    return tensor if ext == tree.TENSOR else tensor.numpy()


def _tensors_in(value: object) -> Iterator[TensorInfo]:
    """Those that a tree refers to."""
    if isinstance(value, TensorInfo):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


class Checkpoint(Mapping[str, TensorInfo]):
    """An opened checkpoint, which ``zckpt.open`` returns: a mapping from each key (``<part>/<parameter name>``) to its
    TensorInfo. Several threads may share it. Only the manifest is read before anything else is asked for.
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
        self.budget = budget or Budget.from_environment()
        self._advised = advised
        """Makes a context manager that may add to the hint of an error which leaves it. Its argument says what an error
        leaves behind; without it, an error leaves everything unchanged."""

    # What it holds

    def __getitem__(self, key: str) -> TensorInfo:
        """Returns the tensor with this key. A tied weight is found under each of its names. Raises KeyNotFoundError,
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
        """Returns the tree of state that ``rank`` alone had, such as its random number generators, or None if there is
        none.

        ``lazy``: the tree has, in the place of each tensor and array, a function without arguments that reads it.
        ``key``: returns only what the tree has under this key, or None, and reads no tensors of anything else.
        """
        with self._advised():
            found = self.contents.packed_state(rank)
            if found is None:
                return None
            return tree.unpack(found[0], self._lazy_leaf, found[1]) if lazy else self._tree(*found, key)

    def client_rank_state(self, rank: int) -> dict[str, Any] | None:
        """What ``rank`` has given to ``zckpt.write`` as its ``rank_state``, and the states of the objects that it had
        registered (``zckpt.register``), by name, with tensors on the CPU; None if there was neither.

        ``rank`` is one of the ranks that wrote the checkpoint, from 0 on: any of them, whoever reads. Raises IndexError
        for another one, FormatError and StorageError.
        """
        if rank not in range(self.world_size):
            raise IndexError(f"there is no rank {rank}: ranks 0 to {self.world_size - 1} have written {self.path}")
        return self.map_of_rank(rank, names.CLIENT_RANK_STATE)

    def map_of_rank(self, rank: int, key: str) -> dict[str, Any] | None:
        """The map that the tree of one rank has under this key; None if it has none. Raises FormatError, also for what
        is no map."""
        found = self.rank_state(rank, key=key)
        if not isinstance(found, dict | None):
            raise FormatError(f"state: the {key} of rank {rank} is not a map", file=self.path)
        return found

    def _tree(self, packed: bytes, file: str, key: str | None = None) -> Any:
        """With all tensors that it refers to, which are read at once: so they cannot take more than their files.
        ``key``: only what it has under this key; None: all of it."""

        def unpack(get: Callable[[int, str], object]) -> Any:
            found = tree.unpack(packed, get, file)
            return found if key is None else found.get(key) if isinstance(found, dict) else None

        infos = {info.name: info for info in _tensors_in(unpack(lambda ext, name: self.contents.state_info(name)))}
        self.contents.check_sizes(infos.values())
        # torch.set_rng_state reads from where the storage of its tensor begins, so each tensor begins there too.
        tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
        if infos:
            self._load(infos, given=tensors)
        return unpack(lambda ext, name: _leaf(ext, tensors[name]) if name in tensors else None)

    def _lazy_leaf(self, ext: int, name: str) -> Callable[[], object]:
        info = self.contents.state_info(name)
        return lambda: _leaf(ext, self._load({name: info})[name])

    # Any part of it

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
        """Whole tensors by key, assembled from the pieces of all ranks, in memory of their own on ``device``.

        ``keys``: one key, a glob (``"master/*"``), several of either, a predicate over keys, or None for the keys of
        ``out``, and for all where there is no ``out``. A glob that matches only a further name of a tied weight finds
        it under that name; one that matches the name under which it is stored too, as ``"master/*"`` does, gives it
        once, under that one. A predicate is asked about the keys under which tensors are stored. ``dtype`` converts
        between floating point types, or between integer types, on the way; it is a ``torch.dtype`` or its name, such as
        ``"bfloat16"``. ``verify`` checks every block's digest; None: unless the environment has ZCKPT_VERIFY=0.
        ``out``: contiguous tensors by key, of the stored shapes, on any device, which are read into and converted to
        their dtype; after an error they hold undefined values. ``progress``: such as ``zckpt.ProgressBar()``. Reads
        nothing but these tensors, the index chunks that list them and the digests that cover them, and nothing at all
        for tensors on the device "meta".

        Raises DeviceError for a device that does not exist or does not work, which names the devices there are, and for
        too little memory; KeyNotFoundError, also for a key of ``out`` and where ``keys`` matches nothing; TypeError
        where ``out`` is no mapping to tensors; ValueError for a ``dtype`` that does not exist; CastError; MismatchError
        (a tensor of ``out`` does not fit, or ``keys`` does not ask for it); FormatError (damaged or missing data) and
        StorageError; then nothing is returned.
        """
        device = check_device(device)
        given = {} if out is None else out
        if not isinstance(given, Mapping):
            raise TypeError(f"out must be a dict of tensors by key, such as 'master/embed', got {type(out).__name__}")
        infos = {key: self[key] for key in (given if keys is None and out is not None else self.contents.select(keys))}
        unused = [key for key in given if key not in infos]
        if unused:
            raise MismatchError(f"out has {', '.join(unused[:5])}, which keys does not ask for", key=unused[0])
        dtypes = dict.fromkeys(infos, dtype_of(dtype))
        given = {key: self._given(infos[key], tensor) for key, tensor in given.items()}
        check_devices(tensor for tensor in given.values() if not tensor.is_meta)
        left = ["the tensors in `out` have undefined values; nothing else was changed"] if given else []
        nbytes = sum(info.nbytes for info in infos.values())
        with self._advised(*left), reported(progress, "load", nbytes) as advance:
            return self._load(infos, device, dtypes, given, verify=verify, advance=advance)

    def iter(
        self,
        keys: Keys = None,
        *,
        device: Device = "cpu",
        dtype: torch.dtype | str | None = None,
        verify: bool | None = None,
        progress: Progress | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Like ``load``, one ``(key, tensor)`` at a time: only one is in memory, unless the caller keeps more."""
        device = check_device(device)
        infos = {key: self[key] for key in self.contents.select(keys)}
        wanted = dtype_of(dtype)
        staging = self.staging([device])
        with (
            self._advised(),
            reported(progress, "load", sum(info.nbytes for info in infos.values())) as advance,
            staging.kept(),
        ):
            for key, info in infos.items():
                one = self._load({key: info}, device, {key: wanted}, verify=verify, advance=advance, staging=staging)
                yield key, one[key]

    def load_slice(
        self,
        key: str,
        index: slice | tuple[slice, ...],
        *,
        device: Device = "cpu",
        dtype: torch.dtype | str | None = None,
        verify: bool | None = None,
    ) -> torch.Tensor:
        """``tensor[index]`` without reading the rest; ``index`` is a slice, or one per leading dimension, of step 1.

        With ``verify`` the blocks (1 MiB) at the edges are read whole. Raises as ``load`` does.
        """
        device = check_device(device)
        info = self[key]
        shape, spans = slice_spans(info.shape, index if isinstance(index, tuple) else (index,))
        with self._advised():
            if device.type != "meta":
                self.contents.check_sizes([info])
            target = self._empty(info, shape, device, dtype_of(dtype))
            self.read([Want(info, spans, target)], verify=verify)
        return target

    def load_pieces(
        self, rank: int, keys: Keys = None, *, device: Device = "cpu", verify: bool | None = None
    ) -> dict[tuple[str, int, int], torch.Tensor]:
        """What one rank wrote, as it is: 1-D tensors of the elements ``[start, stop)`` by ``(key, start, stop)``.

        Raises as ``load`` does.
        """
        device = check_device(device)
        wants: dict[tuple[str, int, int], Want] = {}
        infos = {key: self[key] for key in self.contents.select(keys)}
        with self._advised():
            own = {key: [one for one in self.contents.pieces(info) if one.rank == rank] for key, info in infos.items()}
            copies = {(info.key, piece.copy): info for key, info in infos.items() for piece in own[key]}
            if device.type != "meta":
                self.contents.check_copies(list(copies.values()), [copy for _, copy in copies])
            for key, info in infos.items():
                for piece in own[key]:
                    span = Span(piece.start, piece.stop, 0)
                    target = self._empty(info, (piece.stop - piece.start,), device)
                    wants[key, piece.start, piece.stop] = Want(info, [span], target, piece.copy)
            self.read(list(wants.values()), verify=verify)
        return {place: want.target for place, want in wants.items()}

    def weights(self) -> dict[str, TensorInfo]:
        """Returns the weights and buffers of the model by the names that they have in the model. A weight is that of
        the part ``master`` if there is one, and that of ``param`` otherwise. A tied weight has one of its names."""
        found: dict[str, TensorInfo] = {}
        for part in (BUFFER, PARAM, MASTER):
            found |= {info.name: info for info in self.values() if info.part == part}
        return found

    def state_dict(
        self,
        *,
        dtype: torch.dtype | str | None = None,
        device: Device = "cpu",
        verify: bool | None = None,
        progress: Progress | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns what ``model.load_state_dict`` takes: weights (from the part ``master`` if there is one, otherwise
        from ``param``) and buffers, with tied weights under each of their names. ``dtype`` applies to floating point
        weights; buffers keep their dtype. Raises what ``load`` raises."""
        device, wanted = check_device(device), dtype_of(dtype)
        sources = self.weights()
        casts = {
            name: wanted if info.part != BUFFER and info.dtype.is_floating_point else None
            for name, info in sources.items()
        }

        with self._advised(), reported(progress, "load", sum(info.nbytes for info in sources.values())) as advance:
            targets = self._load(sources, device, casts, verify=verify, advance=advance)
        return targets | {alias: targets[name] for alias, name in self.aliases.items() if name in targets}

    def read(
        self,
        wants: Sequence[Want],
        *,
        rank: int | None = None,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
        staging: StagingPool | None = None,
    ) -> None:
        """Fills the target of every want. The one way in which tensor data is read.

        Where a tensor has several copies, that which ``rank`` alone holds is read if there is one, else the first. For
        a target on the device "meta" nothing is read. ``advance`` is told the bytes that have been read. ``staging``:
        what the method of that name returns, for several calls inside of its ``kept``; None: for this call alone.
        """
        verify = flag("ZCKPT_VERIFY", True) if verify is None else verify
        manifest = self.manifest
        for want in wants:
            if want.target.is_meta:
                advance(want.info.nbytes)
        wants = [want for want in wants if not want.target.is_meta]
        infos, spans, targets, copies = zip(*wants, strict=True) if wants else ((),) * 4
        found = extents(self.contents.stored(infos, copies, rank), spans, [info.item_bytes for info in infos])
        files = {number: self.contents.read_file(number, verify=verify) for number in set(found.file.tolist())}
        sinks = Sinks([info.key for info in infos], targets, [info.dtype for info in infos])
        staging = staging or self.staging(sinks.devices)
        ops = plan_reads(
            found,
            data_starts=manifest.files.data_start,
            block_bytes=manifest.block_bytes,
            verify=verify,
            batch_bytes=staging.batch_bytes,
            places=places_of(self.reader, sinks, files),
        )
        run_reads(self.reader, ops, files, sinks, self.budget, staging, advance)

    def staging(self, devices: Iterable[torch.device]) -> StagingPool:
        """Makes a pool of buffers for ``read`` into memory of these devices and of the host."""
        return pool_for(devices, self.budget, self.manifest.block_bytes)

    @property
    def batch_bytes(self) -> int:
        """The most bytes of one read into host memory."""
        return self.budget.batch_bytes(self.manifest.block_bytes)

    def _load(
        self,
        infos: Mapping[str, TensorInfo],
        device: torch.device = HOST,
        dtypes: Mapping[str, torch.dtype | None] | None = None,
        given: Mapping[str, torch.Tensor] | None = None,
        *,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
        staging: StagingPool | None = None,
    ) -> dict[str, torch.Tensor]:
        """Whole tensors, in the memory that is ``given`` for some of them, all others in memory of their own."""
        dtypes, given = dtypes or {}, given or {}
        unread = {name for name in infos if (given[name].is_meta if name in given else device.type == "meta")}
        begins = self.contents.check_sizes(info for name, info in infos.items() if name not in unread)
        targets = {
            name: given[name]
            if name in given
            else self._empty(info, info.shape, device, dtypes.get(name), begins.get(info.key, 0))
            for name, info in infos.items()
        }
        wants = [Want(info, _all_of(math.prod(info.shape)), targets[name]) for name, info in infos.items()]
        self.read(wants, verify=verify, advance=advance, staging=staging)
        return targets

    def _empty(
        self,
        info: TensorInfo,
        shape: tuple[int, ...],
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        begins: int = 0,
    ) -> torch.Tensor:
        """Memory for elements of ``info``, which begin at byte ``begins`` of a file. Its sizes are checked before, so
        that there is never more asked for than the files really hold, whatever the manifest says."""
        check_cast(info.dtype, dtype or info.dtype, info.key)
        return fresh_tensor(shape, dtype or info.dtype, device, begins)

    def _given(self, info: TensorInfo, target: torch.Tensor) -> torch.Tensor:
        """Memory of the caller's, if it can hold ``info``. Raises TypeError, MismatchError, CastError."""
        given: object = target
        if not isinstance(given, torch.Tensor):
            what = f"{type(given).__module__}.{type(given).__name__}"
            raise TypeError(
                f"out[{info.key!r}] must be a torch.Tensor, got {what}; torch.from_numpy shares an array's memory"
            )
        check_cast(info.dtype, target.dtype, info.key)
        if tuple(target.shape) != info.shape or not lies_in_order(target):
            what = str(list(target.shape)) if lies_in_order(target) else "a view whose elements do not lie in order"
            raise MismatchError(f"out has {what}, the checkpoint {list(info.shape)}", key=info.key)
        return target
