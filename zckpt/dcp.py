"""Lets PyTorch's distributed checkpoints (DCP) be written and read in zckpt's format:

    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=zckpt.dcp.Writer(path))
    dcp.load(state, storage_reader=zckpt.dcp.Reader(path))

DCP plans on rank 0 for all ranks: what each of them writes or reads, piece by piece. With thousands of ranks this takes
minutes. The writer and the reader here keep the plan of each rank to themselves and give rank 0 an empty one. A write
then takes the steps of ``zckpt.write_state_dict``, and a read those of ``Checkpoint.load_into``.
"""

from __future__ import annotations

import io
from collections import deque
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Unpack
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.futures import Future

from zckpt.checkpoint.listing.other_formats import DCP
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading.loader import ReadRequest
from zckpt.checkpoint.reading.state_dict import PlainValues, own_rank, paths_of, tensors_by_name
from zckpt.checkpoint.state_dict import Options, write_contents
from zckpt.checkpoint.writing.options import Background, EarlierCopyOptions, WriteOptions
from zckpt.engines.shards import bounds_of
from zckpt.engines.state_dict import HeldLeaves, fragment_of, held, values_in_order
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    MismatchError,
    StateError,
    UnsupportedError,
    refuse_unknown,
)
from zckpt.geometry import box_of, span_of
from zckpt.plan.select import several
from zckpt.progress import reported
from zckpt.storage.location import Location
from zckpt.tools.converting.dcp_folder import divisions
from zckpt.tools.converting.restricted_pickle import loads
from zckpt.transfer.memory import check_cast, check_memory

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from zckpt.checkpoint.background import PendingWrite
    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.plan.inventory import Fragment
    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget

_ANOTHER_LAYOUT = (
    "DCP describes a tensor wrongly if FSDP2 cuts what tensor parallelism has cut, and the number of rows cannot be "
    "divided: zckpt.write_state_dict and Checkpoint.load_into do not"
)


class Writer(StorageWriter, AsyncStager):
    """Writes what ``dcp.save`` and ``dcp.async_save`` save, as one checkpoint of zckpt.

    The checkpoint is that of ``zckpt.write_state_dict``: replicas are compared and written once, each rank a share, and
    plain values have to be the same on all ranks that have them. No pickle is written. The bytes of a plain value are
    decoded, and a value of a class that zckpt does not know is refused by name.

    ``dcp.async_save`` uses the writer as its stager, unless it is given another one. Then the state is written in the
    background, with at most ``snapshot_bytes`` of memory for copies, and ``async_save`` returns as soon as the state
    may change. This needs a planner that leaves names and values as they are, as the usual one does.
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        overwrite: bool = True,
        snapshot_bytes: int | None = None,
        per_rank: Collection[str] = (),
        **options: Unpack[Options],
    ) -> None:
        """Prepares a write. It changes nothing.

        Args:
            path: the directory of the checkpoint: a path of a file system, or a URL such as ``s3://bucket/run/step100``.
                None means the ``checkpoint_id`` that is given to ``dcp.save``.
            process_group: the same as that of ``dcp.save``.
            overwrite: whether a checkpoint at ``path`` is replaced. It stays complete until the new one is committed.
                DCP replaces checkpoints, too.
            snapshot_bytes: as for ``zckpt.write``, for ``dcp.async_save``.
            per_rank: as for ``zckpt.write_state_dict``. It is needed for tensors that are not DTensors and differ, such
                as the statistics of a BatchNorm, of which DCP keeps those of one rank.
            options: all other options of ``zckpt.write_state_dict``, except ``background``.
        """
        known = ("path", "process_group", "overwrite", "snapshot_bytes", "per_rank", *Options.__annotations__)
        refuse_unknown("zckpt.dcp.Writer", options, known)
        self.path = path
        self._group = process_group
        self._background = Background(snapshot_bytes=snapshot_bytes)
        self._per_rank = per_rank
        of_write: dict[str, Any] = {**options}
        earlier = {name: of_write.pop(name) for name in EarlierCopyOptions.__annotations__ if name in of_write}
        self._options = WriteOptions(overwrite=overwrite, replace_foreign=overwrite, earlier=earlier, **of_write)
        if path is not None:
            Location.of(path)
        several(per_rank)
        self._options.checked()
        self._plan = SavePlan([])
        self._alone = False
        self._save_id = str(uuid4())
        self._staged: deque[tuple[PendingWrite, Collection[str]]] = deque()
        """The writes in the background that ``stage`` has begun, with the names of what they write."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this may be the path of a checkpoint."""
        return bool(str(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the path of the next checkpoint from ``dcp.save``, if it has one."""
        self._save_id = str(uuid4())
        if checkpoint_id is None:
            return
        if self._staged and Location.of(checkpoint_id).absolute() != Location.of(self._path).absolute():
            raise ValueError(f"async_save has begun to write {self.path}: pass the path {checkpoint_id} to the Writer")
        self.path = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuses a save in which the ranks do not know of each other."""
        if kwargs.get("use_collectives") is False:
            raise UnsupportedError("use_collectives=False: the ranks have to write one checkpoint together")
        self._alone = False

    def storage_meta(self) -> StorageMeta:
        """Returns what ``dcp.save`` tells its planner of this save: the path, and an id of its own on each rank."""
        return StorageMeta(checkpoint_id=None if self.path is None else str(self.path), save_id=self._save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keeps the plan of this rank, and returns an empty one for the coordinator."""
        self._plan = plan
        return replace(plan, items=[], planner_data=None if plan.planner_data is None else {})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Finds out, on the coordinator, whether it writes alone."""
        ranks = dist.get_world_size(self._group) if dist.is_initialized() else 1
        self._alone = len(plans) == 1
        if len(plans) not in (1, ranks):
            raise UnsupportedError(
                f"{len(plans)} ranks save, and the Writer is one of {ranks} ranks",
                hint="pass the process_group of dcp.save to zckpt.dcp.Writer, too",
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes and commits the checkpoint, together with the other ranks. If ``stage`` has begun it, this only waits
        for its end."""
        items = self._plan.items if getattr(self._plan, "usable", True) else _cached_items(planner)
        if self._staged:
            pending, names = self._staged.popleft()
            unknown = sorted({item.index.fqn for item in items}.difference(names))
            if unknown:
                raise UnsupportedError(
                    f"the planner of async_save has {unknown[0]}, which the state dict does not have",
                    hint="with a planner of your own, pass async_stager=DefaultStager() to async_save",
                )
            pending.wait()
        else:
            group = _group_of_itself(dist.get_rank()) if self._alone and dist.is_initialized() else self._group
            contents = partial(_contents, items, planner)
            try:
                write_contents(contents, self._path, self._options, group, self._per_rank, "dcp.save")
            except CheckpointExistsError as error:
                error.message = f"Checkpoint already exists: {error.message}"  # the words of DCP's own writer
                raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the metadata that ``dcp.save`` returns, on the coordinator. The checkpoint is committed already."""
        written = Reader(self._path).read_metadata()
        metadata.state_dict_metadata, metadata.planner_data = written.state_dict_metadata, written.planner_data
        metadata.storage_meta = self.storage_meta()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begins to write the state dict in the background, and returns it once it may change."""
        options = replace(self._options, background=self._background)
        names: list[str] = []

        def contents(ranks: int) -> HeldLeaves:
            made = HeldLeaves.of(state_dict, ranks)
            names.extend(made.paths)
            return made

        pending: Any = write_contents(contents, self._path, options, self._group, self._per_rank, "dcp.async_save")
        self._staged.append((pending, names))
        return state_dict

    def synchronize_staging(self) -> None:
        """Does nothing, because the state may change once ``stage`` has returned."""

    def close(self) -> None:
        """Does nothing, because the writer keeps nothing open."""

    def __getstate__(self) -> dict[str, Any]:
        if self._staged:
            raise UnsupportedError(
                "AsyncCheckpointerType.PROCESS: another process cannot wait for this one's write",
                hint="use AsyncCheckpointerType.THREAD, or pass async_stager=DefaultStager() to async_save",
            )
        return {**self.__dict__, "_group": None, "_plan": SavePlan([])}

    @property
    def _path(self) -> StrPath:
        if self.path is None:
            raise ValueError("pass the path of the checkpoint to zckpt.dcp.Writer")
        return self.path


class Reader(StorageReader):
    """Reads what ``dcp.load`` loads from a checkpoint of zckpt, which ``Writer``, ``zckpt.write_state_dict`` or
    ``zckpt.write`` has written.

    Each rank reads only what it holds of each tensor, straight into its memory, and compares it with its digests. The
    checkpoint of an engine has the names of the model's ``state_dict()``.
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        verify: bool | None = None,
        budget: Budget | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Prepares a read. It reads nothing.

        Args:
            path: the directory of a checkpoint, or that of a run, whose file ``latest`` names the checkpoint. None
                means the ``checkpoint_id`` that is given to ``dcp.load``.
            verify: as for ``Checkpoint.load``.
            budget: as for ``zckpt.open``.
            progress: as for ``Checkpoint.load``.
        """
        if path is not None:
            Location.of(path)
        self.path = path
        self._verify, self._budget, self._progress = verify, budget, progress
        self._opened: Loader | None = None
        self._items: Sequence[ReadItem] = ()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this may be the path of a checkpoint."""
        return bool(str(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the path of the checkpoint from ``dcp.load``, if it has one."""
        self.path, self._opened = self.path if checkpoint_id is None else checkpoint_id, None

    def read_metadata(self, *args: Any) -> Metadata:
        """Returns the names, shapes and dtypes of all tensors, and the names of the plain values."""
        checkpoint = self._checkpoint
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in PlainValues(checkpoint)}
        for name, info in tensors_by_name(checkpoint).items():
            size = torch.Size(info.shape)
            # With one chunk for the whole tensor, DCP plans one read for what a rank holds of it.
            chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)]
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=info.dtype), size, chunks)
        return Metadata(entries, {name: (name,) for name in entries} | paths_of(checkpoint))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Does nothing, because the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keeps the plan of this rank, and returns an empty one for the coordinator."""
        self._items = plan.items
        return replace(plan, items=[])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the planner of this rank has asked for."""
        checkpoint, infos = self._checkpoint, tensors_by_name(self._checkpoint)
        _refuse_other_layouts(getattr(planner, "state_dict", {}), infos)
        values, requests, targets = PlainValues(checkpoint, own_rank(checkpoint)), [], []
        for item in self._items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                saved = io.BytesIO()
                torch.save(values[name], saved)
                saved.seek(0)
                planner.load_bytes(item, saved)
                continue
            target = planner.resolve_tensor(item)
            if target.shape != item.lengths:
                raise UnsupportedError(
                    f"the planner reads {list(item.lengths)} of {name}, and its memory has {list(target.shape)}",
                    hint=_ANOTHER_LAYOUT,
                )
            check_cast(infos[name].dtype, target.dtype, name)
            bounds = list(zip(item.storage_offsets, item.lengths, strict=True))
            requests.append(ReadRequest(infos[name], span_of(infos[name].shape, bounds), target.detach()))
            targets.append((item, target))
        check_memory(((request.info.name, request.target) for request in requests), MismatchError)
        checkpoint.contents.check_sizes(request.info for request in requests)
        requests = [request for request in requests if request.span.numel]
        nbytes = sum(request.span.numel * request.info.item_bytes for request in requests)
        with reported(self._progress, "load", nbytes) as advance:
            checkpoint.fill(requests, rank=own_rank(checkpoint), verify=self._verify, advance=advance)
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _checkpoint(self) -> Loader:
        if self.path is None:
            raise ValueError("pass the path of the checkpoint to zckpt.dcp.Reader")
        if self._opened is None:
            try:
                self._opened = open_loader(self.path, budget=self._budget)
            except CheckpointNotFoundError as error:
                if error.message == f"this is {DCP.what}":
                    error.hint = f"without storage_reader, dcp.load reads it; {error.hint}"
                raise
        return self._opened


def _contents(items: Iterable[WriteItem], planner: SavePlanner, ranks: int) -> HeldLeaves:
    """Returns what this rank has, before DCP leaves out what other ranks have, too."""
    live: Mapping[str, Any] = getattr(planner, "state_dict", {})
    paths: Mapping[str, tuple[Any, ...]] = getattr(planner, "mappings", {})
    contents = HeldLeaves()
    for item in items:
        name, data = item.index.fqn, planner.resolve_data(item)
        path = paths.get(name, (name,))
        if item.type is WriteItemType.BYTE_IO:
            contents.add_value(name, path, _decoded(name, data))
        else:
            contents.add_tensor(path, _held(item, data, live.get(name), ranks))
    return contents


def _held(item: WriteItem, data: Any, live: object, ranks: int) -> Fragment:
    """Returns what this rank holds of a tensor, or one of several chunks of it. ``data``: these elements. ``live``: the
    tensor itself, if the planner has it. Raises UnsupportedError if DCP's description of it is wrong."""
    name, described = item.index.fqn, item.tensor_data
    assert described is not None, "an item with bytes was decoded"
    chunk = described.chunk
    if data.shape != chunk.sizes and (data.numel() or chunk.sizes.numel()):
        raise UnsupportedError(
            f"DCP says that this rank holds {list(chunk.sizes)} of {name}, and it holds {list(data.shape)}",
            hint=_ANOTHER_LAYOUT,
        )
    if isinstance(live, DTensor):
        _refuse_other_layout(name, live, [chunk])
        return held(name, live, ranks, data)
    if chunk.sizes == described.size:
        return held(name, data, ranks)
    bounds = tuple(zip(chunk.offsets, chunk.sizes, strict=True))
    if isinstance(live, ShardedTensor):
        others = [tuple(zip(of.shard_offsets, of.shard_sizes, strict=True)) for of in live.metadata().shards_metadata]
        try:
            span = box_of(described.size, divisions(name, described.size, others), bounds)
        except (FormatError, ValueError) as error:
            raise UnsupportedError(f"the chunks of {name} do not lie in rows and columns: {others[:4]}") from error
    else:
        span = span_of(described.size, bounds)
        if span.grid.sections:
            raise UnsupportedError(f"{name} is cut in another dimension than its first one: pass a DTensor to dcp.save")
    return fragment_of(name, span, values_in_order(name, data))


def _refuse_other_layouts(state_dict: Mapping[str, Any], infos: Collection[str]) -> None:
    """Raises UnsupportedError if DCP would read some elements of a DTensor into the place of others, or not at all."""
    for name, value in state_dict.items():
        if name in infos and isinstance(value, DTensor) and value.device_mesh.get_coordinate() is not None:
            _refuse_other_layout(name, value, value.__create_chunk_list__())  # type: ignore[no-untyped-call]


def _refuse_other_layout(name: str, tensor: DTensor, chunks: Sequence[ChunkStorageMetadata]) -> None:
    try:
        bounds = bounds_of(tensor)
    except ValueError as error:
        raise UnsupportedError(f"{name} {error}") from error
    described = [tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in chunks if chunk.sizes.numel()]
    if described != ([bounds] if all(size for _, size in bounds) else []):
        raise UnsupportedError(
            f"DCP says that this rank holds the elements {described} of {name}, and it holds {bounds}",
            hint=_ANOTHER_LAYOUT,
        )


def _decoded(name: str, saved: Any) -> Any:
    """Returns the plain value in bytes of ``torch.save``. Raises StateError, which names it, if it has anything that
    only a pickle can keep."""
    try:
        return loads(saved.getbuffer())
    except (FormatError, UnsupportedError) as error:
        raise StateError(
            f"{name} cannot be kept without a pickle: {error.message}", key=name,
            hint="save plain values, such as those of its state_dict()",
        ) from error  # fmt: skip


def _cached_items(planner: Any) -> Sequence[WriteItem]:
    """Returns the items of a planner that does not plan again what has not changed (``enable_plan_caching``)."""
    plan: SavePlan = SavePlanner._cached_save_plan[planner._cached_plans_key]
    return plan.items


@cache
def _group_of_itself(rank: int) -> dist.ProcessGroup:
    """Returns a process group of this rank alone."""
    group: dist.ProcessGroup = dist.new_group([rank], use_local_synchronization=True)
    return group
