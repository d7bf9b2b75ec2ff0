"""Writes the weights of a checkpoint or engine to files that other programs load: to the folder of a Hugging Face
model, or to a single file of torch's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from zckpt.api.open import open as open_path
from zckpt.engines import group_of, is_engine
from zckpt.errors import count
from zckpt.exporting import adapter as adapter_plan
from zckpt.exporting.checkpoint_source import CheckpointSource
from zckpt.exporting.engine_source import EngineSource
from zckpt.exporting.hugging_face import FILES, plan_hugging_face
from zckpt.exporting.live import write_from_ranks
from zckpt.exporting.place import begin, check_place, choose_place, put_in_place
from zckpt.exporting.plan import size_in_bytes
from zckpt.exporting.torch_file import plan_torch_file
from zckpt.exporting.write import write_files
from zckpt.listing.find import find
from zckpt.plan.share import shared_out
from zckpt.progress import reported
from zckpt.ranks.collectives import Ranks
from zckpt.reading.checkpoint import Checkpoint
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.storage.space import Space
from zckpt.transfer.torch_dtypes import dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from zckpt.exporting.plan import Conversion, ExportPlan, OutputFile
    from zckpt.progress import Progress
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget

Format = Literal["hf", "pt"]
FORMATS: tuple[Format, ...] = ("hf", "pt")


@dataclass(frozen=True, slots=True)
class Exported:
    """What ``zckpt.export`` has written."""

    path: str
    """The absolute path of the directory or file that was written."""
    files: tuple[str, ...]
    """The paths of all files, relative to ``path``. If ``path`` is itself a file, this is its name."""
    nbytes: int
    """The size of all files in bytes."""

    def __str__(self) -> str:
        names = "\n".join(f"  {name}" for name in self.files)
        return f"{self.path}: {count(len(self.files), 'file')}, {self.nbytes:,} bytes\n{names}"


def export(
    source: StrPath | Checkpoint | Any,
    out: StrPath,
    *,
    format: Format = "hf",  # noqa: A002  what users call it
    dtype: torch.dtype | str | None = None,
    config: StrPath | None = None,
    max_shard_size: int | str = "5GB",
    adapter: str | None = None,
    overwrite: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes the weights and persistent buffers of a checkpoint or of a live engine in a form that other programs load.
    Tensors are written in slices, so that no more than the memory of ``budget`` is taken. The exception are weights
    that can only be converted as a whole.

    ``source``: a path as for ``zckpt.open``, a ``Checkpoint``, or a training engine. The weights of an engine are
    written from where they are, without a checkpoint: each file is written by one rank, and the other ranks send it
    their slices. Every rank that the engine is spread over then has to call this.

    ``format="hf"`` makes the directory ``out`` with the file ``model.safetensors``, or with several files of at most
    ``max_shard_size`` (a number of bytes, or a text such as "5GB") and an index. ``config`` is a folder with the
    model's ``config.json``. With it, ``out`` gets the files that ``model.to(dtype).save_pretrained(out)`` writes, and
    the tokenizer and processor files of that folder; ``from_pretrained`` loads it. Without ``config``, tensors keep the
    names that they have in the model, a tied weight is written under one of its names, and no configuration is written.
    An engine whose model is one of transformers' needs no ``config``, because the model has its configuration.

    ``format="pt"`` makes the file ``out``. ``torch.load(out, weights_only=True)`` returns a dict of all tensors, in
    which a tied weight has all of its names.

    ``dtype``: the dtype that all floating point tensors are converted to, such as "bf16". None keeps the dtypes of the
    source: those of a checkpoint are the ones that are stored, which is fp32 for weights of which the optimizer has
    fp32 master weights; those of an engine are the ones that the model computes with.

    ``adapter``: the name of a LoRA adapter of PEFT, such as "default". Then ``out`` becomes the folder of this adapter,
    as ``PeftModel.save_pretrained`` writes it and ``PeftModel.from_pretrained`` loads it. If the checkpoint does not
    have the adapter's configuration, ``config`` is a folder with its ``adapter_config.json``.

    ``overwrite``: replace an earlier export. ``budget``: memory, threads and kind of I/O; None means that of the
    ``Checkpoint``, or ``Budget.from_environment()``. ``progress``: an object that is told how far the export is, such
    as ``zckpt.ProgressBar()``.

    ``out`` appears once all of it is durable. After an error nothing new is there, and an earlier export is unchanged.
    Only a process that is killed leaves a temporary directory or file beside ``out``, named ``<out>.<digits>.tmp``.

    Where torch.distributed is initialised, every rank has to call this with the same arguments. The ranks share the
    files that are written.

    Raises what ``zckpt.open`` and ``Checkpoint.load`` raise, or for an engine what ``zckpt.write`` raises;
    CheckpointExistsError; MismatchError if the configuration is of another model; KeyNotFoundError for an adapter that
    does not exist; UnsupportedError for a model that transformers does not know, where transformers is not installed,
    for an adapter that is not LoRA, and for format "hf" of a model with adapters where ``adapter`` is not given;
    ValueError for an unknown format, dtype or size; NoSpaceError, StorageError and RankError.
    """
    ranks = Ranks(group_of(source), call="zckpt.export")
    with ranks.undivided():
        wanted = ranks.together(
            lambda: _Wanted.of(format, dtype, config, max_shard_size, adapter), "check the arguments"
        )
        ranks.agree([str(one) for one in (out, *wanted, overwrite)], "arguments")
        path, prepared = ranks.first(lambda: choose_place(out, wanted.patterns, overwrite), "find the place")
        tensors = _open(source, wanted.dtype, budget, ranks)
        plan = ranks.together(lambda: _plan(tensors, wanted, path), "plan the export")
        ranks.agree([path, *([file.name, file.nbytes] for file in plan.files)], "exports")
        sizes = {file.name: file.nbytes for file in plan.files}
        sizes |= {name: len(data) for name, data in plan.small_files.items()}
        try:
            ranks.first(lambda: begin(prepared, directory=wanted.directory), "make a directory")
            store, files = open_store(prepared), plan.files
            if not wanted.directory:
                store, files = store.parent, (replace(files[0], name=Location.of(prepared).name),)
            space = ranks.first(lambda: Space.of(store, sum(sizes.values())), "look for space")
            ranks.together(lambda: Space(*space).refuse_lack(), "look for space")
            ranks.first(lambda: _put_small(store, plan), "write")
            if isinstance(tensors, EngineSource):
                write_from_ranks(store, files, plan.conversions, tensors, ranks, progress)
            else:
                ranks.together(lambda: _write(store, files, plan.conversions, tensors, ranks, progress), "write")
            ranks.first(
                lambda: _put_in_place(store, prepared, path, wanted.patterns, overwrite), "put the export in place"
            )
        except BaseException:
            if ranks.rank == 0:
                open_store(prepared).remove("")
            raise
    return Exported(path, tuple(sorted(sizes)), sum(sizes.values()))


class _Wanted(NamedTuple):
    """What the caller wants to be written. The arguments are checked."""

    format: str
    dtype: torch.dtype | None
    config: StrPath | None
    shard_bytes_max: int
    adapter: str | None

    @classmethod
    def of(
        cls,
        format: str,  # noqa: A002  as in ``export``
        dtype: torch.dtype | str | None,
        config: StrPath | None,
        max_shard_size: int | str,
        adapter: str | None,
    ) -> _Wanted:
        """Raises ValueError for arguments that do not exist, or that contradict each other."""
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        if format == "pt" and config is not None:
            raise ValueError("config may be given only with format 'hf': a 'pt' file has the names of the live model")
        if format == "pt" and adapter is not None:
            raise ValueError("adapter may be given only with format 'hf': its folder has a safetensors file")
        return cls(format, dtype_of(dtype), config, size_in_bytes(max_shard_size), adapter)

    @property
    def directory(self) -> bool:
        """Whether the export is a directory. If not, it is a file."""
        return self.format == "hf"

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """The files that the directory may have, or None for a file."""
        if not self.directory:
            return None
        return FILES if self.adapter is None else adapter_plan.FILES


def _open(
    source: StrPath | Checkpoint | Any, dtype: torch.dtype | None, budget: Budget | None, ranks: Ranks
) -> CheckpointSource | EngineSource:
    """Opens the source on all ranks. If it is not an engine, it is the same checkpoint on each of them."""
    if is_engine(source):
        return EngineSource(source, dtype, budget, ranks)

    def open_checkpoint() -> CheckpointSource:
        checkpoint = source if isinstance(source, Checkpoint) else open_path(found, budget=budget)
        return CheckpointSource(checkpoint, dtype, budget or checkpoint.budget)

    if not isinstance(source, Checkpoint):
        found = ranks.first(lambda: str(find(source).location.absolute()), "find the checkpoint")
    tensors = ranks.together(open_checkpoint, "open the checkpoint")
    ranks.agree(tensors.save_id, "checkpoints")
    return tensors


def _plan(tensors: CheckpointSource | EngineSource, wanted: _Wanted, path: str) -> ExportPlan:
    config = None if wanted.config is None else str(Location.of(wanted.config))
    if not wanted.directory:
        return plan_torch_file(tensors.sources, tensors.aliases, Location.of(path).name)
    if wanted.adapter is not None:
        configs = tensors.adapters
        if config is not None:
            configs = {**configs, wanted.adapter: adapter_plan.read_config(config)}
        return adapter_plan.plan_adapter(tensors.sources, tensors.aliases, wanted.adapter, configs)
    adapter_plan.refuse_adapters(tensors.sources, tensors.adapters)
    with tensors.own_config() as own:
        return plan_hugging_face(tensors.sources, tensors.aliases, config or own, wanted.shard_bytes_max)


def _write(
    store: Store,
    files: Sequence[OutputFile],
    conversions: Sequence[Conversion],
    tensors: CheckpointSource,
    ranks: Ranks,
    progress: Progress | None,
) -> None:
    """Writes the files of this rank."""
    owners = shared_out([file.nbytes for file in files], ranks.size)
    own = [file for file, owner in zip(files, owners, strict=True) if owner == ranks.rank]
    with reported(progress, "export", tensors.nbytes(own, conversions)) as tensors.advance:
        write_files(store, own, conversions, tensors, tensors.budget)


def _put_small(store: Store, plan: ExportPlan) -> None:
    for name, data in plan.small_files.items():
        store.put(name, data)


def _put_in_place(store: Store, prepared: str, path: str, patterns: Sequence[str] | None, overwrite: bool) -> None:
    store.sync_names("")
    check_place(path, patterns, overwrite)  # Somebody may have put something there meanwhile.
    put_in_place(prepared, path)
