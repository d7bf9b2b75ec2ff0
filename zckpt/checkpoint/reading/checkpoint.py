"""An opened checkpoint: its tensors and its other state, any part of which can be loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zckpt.checkpoint.listing.tensors import TensorInfo
from zckpt.checkpoint.reading.loader import Loader, ReadRequest
from zckpt.checkpoint.reading.state_dict import PlainValues, own_rank, plan_load
from zckpt.checkpoint.reading.targets import check_casts, check_target, empty_tensors
from zckpt.errors import MismatchError, check_flags, count
from zckpt.geometry import Span, slice_of
from zckpt.plan.inventory import BUFFER, unconverted
from zckpt.progress import Progress, reported
from zckpt.system.collector import without_collector
from zckpt.transfer.devices import check_device
from zckpt.transfer.memory import check_memory
from zckpt.transfer.torch_dtypes import dtype_of

if TYPE_CHECKING:
    from zckpt.plan.select import Keys
    from zckpt.storage.contract import IOCount

Device = torch.device | str


class Checkpoint(Mapping[str, TensorInfo]):
    """An opened checkpoint, which ``zckpt.open`` returns.

    It is a mapping from each key (``<part>/<parameter name>``) to the tensor's TensorInfo. Opening a checkpoint reads
    only the manifest. Several threads may share a Checkpoint.
    """

    def __init__(self, loader: Loader) -> None:
        self.path = loader.path
        self._loader = loader

    # Contents

    def __getitem__(self, key: str) -> TensorInfo:
        """Returns the tensor with this key. A tied weight has a key for each of its names. Raises KeyNotFoundError,
        which names the nearest keys."""
        return self._loader.contents[key]

    def __contains__(self, key: object) -> bool:
        return key in self._loader.contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._loader.contents)

    def __len__(self) -> int:
        return len(self._loader.contents)

    def __repr__(self) -> str:
        tensors = f"{count(len(self), 'tensor')} of {', '.join(self.parts)}"
        return f"<zckpt.Checkpoint {self.path!r}: step {self.step}, {tensors}>"

    @property
    def step(self) -> int:
        """The number of training steps that were done when the checkpoint was written."""
        return self._loader.manifest.step

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        return self._loader.manifest.world_size

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that the checkpoint has, such as ``master`` and ``exp_avg``."""
        return self._loader.parts

    @property
    def aliases(self) -> Mapping[str, str]:
        """For each other name of a tied weight, the name under which it is stored."""
        return self._loader.manifest.aliases

    @property
    def nbytes(self) -> int:
        """The size in bytes of all files that hold tensors, as the manifest records it."""
        return sum(self._loader.manifest.files.nbytes)

    @property
    def io(self) -> IOCount:
        """Counts the reads of this checkpoint so far, and their bytes."""
        return self._loader.reader.count

    @property
    def state(self) -> Any:
        """The tree of non-tensor state that all ranks share. Tensors in the tree are on the CPU."""
        return self._loader.state

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
        check_flags(lazy=lazy)
        return self._loader.rank_state(rank, lazy=lazy, key=key)

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
        return self._loader.client_rank_state(rank)

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
            memory, many small ones share up to 2 MiB, which goes back to the system when the last of them is gone. So
            they cannot be resized (``resize_``), as large ones cannot.

        Raises:
            KeyNotFoundError: ``keys`` matches nothing, or there is no tensor for a key of ``out``.
            MismatchError: a tensor of ``out`` does not fit or shares memory, or ``keys`` does not select it.
            CastError: a dtype cannot be converted to ``dtype``.
            ValueError: there is no such ``dtype``.
            TypeError: ``out`` is not a mapping to tensors.
            DeviceError: the device does not exist, does not work or has too little memory. The error names the usable
                devices.
            FormatError: data is damaged or missing.
            StorageError: the operating system reports an error when it reads.
        """
        loader, device = self._loader, check_device(device)
        targets = {} if out is None else out
        if not isinstance(targets, Mapping):
            raise TypeError(f"out must be a dict of tensors by key, such as 'master/embed', got {type(out).__name__}")
        if keys is None and out is not None:
            names, tensors = list(targets), loader.contents.named(targets)
        else:
            names, tensors = loader.contents.chosen(keys)
        asked = set(names) if targets else ()
        unused = [key for key in targets if key not in asked]
        if unused:
            raise MismatchError(f"out has {', '.join(unused[:5])}, which keys does not ask for", key=unused[0])
        if targets:
            for key, stored, shape in zip(names, tensors.dtypes, tensors.shapes, strict=True):
                if key in targets:
                    check_target(key, stored, shape, targets[key])
        named = ((f"out[{key!r}]", tensor) for key, tensor in targets.items() if not tensor.is_meta)
        check_memory(named, MismatchError)
        leftovers = ["the tensors in `out` have undefined values; nothing else was changed"] if targets else []
        dtypes = [dtype_of(dtype)] * len(names)
        with loader.advised(*leftovers), reported(progress, "load", sum(tensors.nbytes.tolist())) as advance:
            return loader.load(names, tensors, device, dtypes, targets, verify=verify, advance=advance)

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
        loader, device = self._loader, check_device(device)
        infos = loader.contents.select(keys)
        target_dtype = dtype_of(dtype)
        staging = loader.staging([device])
        with (
            loader.advised(),
            reported(progress, "load", sum(info.nbytes for info in infos.values())) as advance,
            staging.kept(),
        ):
            for key, info in infos.items():
                tensors = loader.load(
                    [key], [info], device, [target_dtype], verify=verify, advance=advance, staging=staging
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

        Only those blocks of the tensor, of 1 MiB each, are read that have bytes of the slice. For some columns, these
        may be all blocks. With ``verify=False``, the bytes of the slice are read, and what lies between two of its rows
        if that is at most 64 KiB.

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
        loader, device = self._loader, check_device(device)
        info = self[key]
        shape, span = slice_of(info.shape, index if isinstance(index, tuple) else (index,))
        with loader.advised():
            if device.type != "meta":
                loader.contents.check_sizes([info], loader.budget.nbytes)
            tensors, dtypes = loader.contents.tensors([info]), [dtype_of(dtype)]
            check_casts(tensors, dtypes)
            (target,) = empty_tensors(tensors, [shape], device, dtypes, [0])
            loader.read([ReadRequest(info, span, target)], verify=verify)
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
        loader, device = self._loader, check_device(device)
        requests: dict[tuple[str, int, int], ReadRequest] = {}
        infos = loader.contents.select(keys)
        with loader.advised():
            each: list[tuple[str, Span, int, int]] = []
            for key, info in infos.items():
                pieces, copies, ranks = loader.contents.pieces(info)
                grid, own = loader.contents.grid(info), ranks == rank
                columns = (column[own].tolist() for column in (pieces.start, pieces.stop, copies, pieces.offset))
                for start, stop, copy, offset in zip(*columns, strict=True):
                    each.append((key, Span(grid, start, stop), copy, offset))
            tensors = loader.contents.tensors(infos[key] for key, _, _, _ in each)
            if device.type != "meta":
                loader.contents.check_sizes(tensors, loader.budget.nbytes, copies=[copy for _, _, copy, _ in each])
            shapes, offsets = [(span.numel,) for _, span, _, _ in each], [offset for _, _, _, offset in each]
            targets = empty_tensors(tensors, shapes, device, [None] * len(each), offsets)
            for (key, span, copy, _), target in zip(each, targets, strict=True):
                requests[key, span.start, span.stop] = ReadRequest(infos[key], span, target, copy)
            loader.read(list(requests.values()), verify=verify)
        return {place: request.target for place, request in requests.items()}

    def weights(self) -> dict[str, TensorInfo]:
        """Returns the TensorInfos of the weights and buffers of the model.

        Returns:
            The TensorInfos by the name in the model. A weight is that of the part ``master`` if this part has it, and
            that of ``param`` otherwise. A tied weight has one of its names.
        """
        return self._loader.weights()

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
        loader, device, weight_dtype = self._loader, check_device(device), dtype_of(dtype)
        sources = self.weights()
        kept = unconverted(() if weight_dtype is None else loader.extra_state)
        casts = [
            weight_dtype if info.part != BUFFER and info.dtype.is_floating_point and name not in kept else None
            for name, info in sources.items()
        ]

        with loader.advised(), reported(progress, "load", sum(info.nbytes for info in sources.values())) as advance:
            targets = loader.load([*sources], [*sources.values()], device, casts, verify=verify, advance=advance)
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
            MismatchError: a tensor has another shape, is missing, has no memory, or shares memory. Nothing was changed.
            StateError: two leaves of the state dict have the same name.
            TypeError: ``state_dict`` is not a dict.
            FormatError: data is damaged or missing.
            StorageError: the operating system reports an error when it reads.
        """
        check_flags(strict=strict)
        loader = self._loader
        left = "the tensors in the state dict have undefined values, and its plain values are unchanged"
        with loader.advised():
            plan, values = plan_load(loader, state_dict, strict=strict), PlainValues(loader, own_rank(loader))
            loaded = [(leaf, copy.deepcopy(values[name])) for name, leaf in plan.values.items()]
            requests = [request for request in plan.tensors.values() if request.span.numel]
            loader.contents.check_sizes(request.info for request in requests)
        nbytes = sum(request.span.numel * request.info.item_bytes for request in requests)
        with loader.advised(left), reported(progress, "load", nbytes) as advance:
            loader.fill(requests, rank=own_rank(loader), verify=verify, advance=advance)
        for leaf, value in loaded:
            leaf.container[leaf.key] = value
        return plan.left


def loader_of(checkpoint: Checkpoint) -> Loader:
    """Returns what the other modules of zckpt read this checkpoint with."""
    return checkpoint._loader
