"""Writes the weights of a checkpoint or engine for other programs: as the folder of a Hugging Face model or of an
adapter, or as a single file for torch.load."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading.checkpoint import Checkpoint, loader_of
from zckpt.engines import group_of, is_engine
from zckpt.errors import count, first_few, printable
from zckpt.progress import reported
from zckpt.ranks.collectives import Ranks
from zckpt.storage.location import Location
from zckpt.tools.exporting.adapter import ADAPTER_FILES, CONFIG, Adapter, plan_adapter, read_config, refuse_adapters
from zckpt.tools.exporting.checkpoint_source import CheckpointSource
from zckpt.tools.exporting.engine_source import EngineSource
from zckpt.tools.exporting.hugging_face import FILES, plan_hugging_face
from zckpt.tools.exporting.live import write_from_ranks
from zckpt.tools.exporting.merge import Merge, with_merges, without_adapters
from zckpt.tools.exporting.place import TORCH_FILE, Place, write_in_place
from zckpt.tools.exporting.plan import size_in_bytes
from zckpt.tools.exporting.selection import everything, with_prefix
from zckpt.tools.exporting.torch_file import plan_torch_file
from zckpt.tools.exporting.write import write_files
from zckpt.tools.share import shared_out
from zckpt.transfer.budget import budget_or_default
from zckpt.transfer.torch_dtypes import FLOATING_POINT, dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from zckpt.progress import Progress
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.tools.exporting.plan import ExportPlan, OutputFile
    from zckpt.transfer.budget import Budget

Format = Literal["hf", "pt"]
FORMATS: tuple[Format, ...] = ("hf", "pt")


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of ``zckpt.export``."""

    path: str
    """The absolute path, or the URL, of the directory or file that was written."""
    files: tuple[str, ...]
    """The paths of all files, relative to ``path``. If ``path`` is itself a file, this is its name."""
    nbytes: int
    """The sum of the sizes of all files, in bytes."""
    left_out: tuple[str, ...]
    """The names of the weights and buffers of the source that were not exported, because they do not belong to the
    module ``strip_prefix``, to the adapter ``adapter``, or to the model with the adapter ``merge``."""

    def __str__(self) -> str:
        lines = [f"{self.path}: {count(len(self.files), 'file')}, {self.nbytes:,} bytes", *self.files]
        if self.left_out:
            lines.append(f"left out: {count(len(self.left_out), 'tensor')}: {first_few(self.left_out, 3)}")
        return "\n  ".join(map(printable, lines))


def export(
    source: StrPath | Checkpoint | Any,
    out: StrPath,
    *,
    format: Format = "hf",  # noqa: A002  the usual name for users
    dtype: torch.dtype | str | None = None,
    config: StrPath | None = None,
    max_shard_size: int | str = "5GB",
    strip_prefix: str | None = None,
    adapter: str | None = None,
    merge: str | None = None,
    overwrite: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes the weights of a checkpoint or of a live engine in a format that other programs load.

    The persistent buffers are written too. Tensors are written in slices, so that the export takes no more memory than
    ``budget`` allows. Only weights that have to be converted as a whole take more. ``out`` appears once all of it is
    durable. After an error, nothing new is there, and an earlier export is unchanged. In an object store, the files of
    a directory appear one after the other, the index and the configuration last.

    If torch.distributed is initialised, every rank has to call this with the same arguments. The ranks share the files
    that are written.

    Args:
        source: a path as for ``zckpt.open``, a ``Checkpoint``, or a training engine. The weights of an engine are
            written straight from its memory, without a checkpoint, and every rank of the engine has to call this. Each
            file is written by one rank, to which the other ranks send their slices.
        out: the directory (format "hf") or the file (format "pt") that is written. It may be a URL of an object store,
            in which an earlier file can be replaced, and an earlier directory cannot.
        format: "hf" makes a directory with the file ``model.safetensors``, or with several files and an index. "pt"
            makes one file. ``torch.load(out, weights_only=True)`` returns from it a dict of all tensors, in which a
            tied weight has all of its names.
        dtype: the dtype to which all floating point tensors are converted, such as "bf16". None keeps the dtypes of the
            source. For a checkpoint these are the stored dtypes, which means fp32 for weights that have fp32 master
            weights. For an engine these are the dtypes that the model computes with.
        config: a folder with the model's ``config.json``, for the format "hf". With it, ``out`` gets the files that
            ``model.to(dtype).save_pretrained(out)`` writes, and the tokenizer and processor files of that folder, so
            that ``from_pretrained`` loads it. Without it, tensors keep the names that they have in the model, a tied
            weight is written under one of its names, and no configuration is written. It is not needed for an engine
            whose model is a class of transformers, because such a model has its configuration. With ``adapter`` or
            ``merge``, the configuration of the adapter is read from the file ``adapter_config.json`` of this folder if
            the checkpoint does not have it. With ``adapter``, nothing else is read from the folder, and its
            configuration of the adapter is preferred.
        max_shard_size: the largest size of one file of the format "hf", as a number of bytes or a text such as "5GB".
        strip_prefix: the path of a module in the model that was trained, such as "policy." (the dot at the end may be
            left out). If it is given, only the tensors of this module are exported, and their names begin after the
            path. ``config``, ``adapter`` and ``merge`` are then those of this module.
        adapter: the name of a LoRA adapter of PEFT, such as "default". If it is given, ``out`` becomes the folder of
            this adapter, as ``PeftModel.save_pretrained`` writes it and ``PeftModel.from_pretrained`` loads it.
        merge: the name of a LoRA adapter of PEFT. If it is given, the model of the adapter is exported with the adapter
            merged into it, as ``merge_and_unload`` does, under the names of the model without adapters. The merged
            weights are computed in fp32 and then converted to ``dtype``, or to the dtypes of the weights of the model.
        overwrite: whether an earlier export at ``out`` is replaced.
        budget: the memory, the threads and the kind of I/O. None means the budget of the ``Checkpoint`` if ``source``
            is one, and ``Budget.from_environment()`` otherwise.
        progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.

    Returns:
        The path of the result, its files and their size, and what was left out.

    Raises:
        CheckpointExistsError: there is already something at ``out`` that must not be replaced.
        MismatchError: the configuration belongs to another model or is broken, or weights of the adapter, or of the
            model that it is merged into, are missing.
        KeyNotFoundError: there is no adapter of this name, no tensor in the module ``strip_prefix``, or no weight.
        UnsupportedError: transformers does not know the model or is not installed, the adapter is not LoRA or of a kind
            that cannot be merged, or the model has adapters and neither ``adapter`` nor ``merge`` is given.
        ValueError: the format, the dtype or the size is unknown, or the arguments contradict each other.
        NoSpaceError: there is too little free space.
        StorageError: the operating system reports an error when it reads or writes.
        RankError: another rank has failed or is lost, or the ranks have different arguments.
        ZckptError: the weights cannot be read. ``zckpt.open`` and ``Checkpoint.load`` list these errors, and for an
            engine ``zckpt.write``.
    """
    ranks = Ranks(group_of(source), call="zckpt.export")
    with ranks.undivided():
        options = ranks.together(
            lambda: _Options.of(out, format, dtype, config, max_shard_size, strip_prefix, adapter, merge),
            "check the arguments",
        )
        ranks.agree([str(value) for value in (out, *options, overwrite)], "arguments")
        place_fields = ranks.first(
            lambda: Place.choose(out, "export", overwrite=overwrite, patterns=options.patterns, marks=TORCH_FILE),
            "find the place",
        )
        place = Place.of(*place_fields)
        tensors = _open(source, options.dtype, budget, ranks)
        plan = ranks.together(lambda: _plan(tensors, options, place.path), "plan the export")
        ranks.agree([place.path, *([file.name, file.nbytes] for file in plan.files)], "exports")
        sizes = {file.name: file.nbytes for file in plan.files}
        sizes |= {name: len(data) for name, data in plan.small_files.items()}

        def write() -> None:
            files = plan.files if options.directory else (replace(plan.files[0], name=place.name),)
            if isinstance(tensors, EngineSource):
                write_from_ranks(place.store, files, plan.sources, tensors, ranks, progress)
            else:
                ranks.together(lambda: _write(place.store, files, plan, tensors, ranks, progress), "write")
            ranks.first(lambda: place.put_small(plan.small_files), "write")

        write_in_place(place, ranks, sizes, write, place.finish)
    return Exported(place.path, tuple(sorted(sizes)), sum(sizes.values()), plan.left_out)


class _Options(NamedTuple):
    """The arguments of ``export`` that say what is written. They are checked."""

    format: str
    dtype: torch.dtype | None
    config: StrPath | None
    file_bytes_max: int
    prefix: str
    """What the names of the exported tensors begin with. It is empty, or the path of a module with a dot at the end."""
    adapter: str | None
    merge: str | None

    @classmethod
    def of(
        cls,
        out: StrPath,
        format: str,  # noqa: A002  the name of the argument of ``export``
        dtype: torch.dtype | str | None,
        config: StrPath | None,
        max_shard_size: int | str,
        strip_prefix: str | None,
        adapter: str | None,
        merge: str | None,
    ) -> _Options:
        """Checks the arguments. Raises ValueError if one of them has a value that is not allowed, or if they contradict
        each other."""
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        if format == "hf" and str(out).endswith((".bin", ".pt", ".pth", ".safetensors")):
            raise ValueError(f"{str(out)!r} is the name of a file, and format 'hf' makes a directory: pass format='pt'")
        if format == "pt" and config is not None:
            raise ValueError("config may be given only with format 'hf': a 'pt' file has the names of the live model")
        if format == "pt" and adapter is not None:
            raise ValueError("adapter may be given only with format 'hf': its folder has a safetensors file")
        if adapter is not None and merge is not None:
            raise ValueError("adapter exports an adapter alone and merge exports the whole model: give one of them")
        prefix = "" if strip_prefix is None else f"{strip_prefix.removesuffix('.')}."
        return cls(
            format, dtype_of(dtype, FLOATING_POINT), config, size_in_bytes(max_shard_size), prefix, adapter, merge
        )

    @property
    def directory(self) -> bool:
        """Whether the export is a directory. Otherwise it is a file."""
        return self.format == "hf"

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """The patterns of the names of all files that the exported directory may have. None if the export is a file."""
        if not self.directory:
            return None
        return FILES if self.adapter is None else ADAPTER_FILES


def _open(
    source: StrPath | Checkpoint | Any, dtype: torch.dtype | None, budget: Budget | None, ranks: Ranks
) -> CheckpointSource | EngineSource:
    """Opens the source on all ranks. If it is not an engine, checks that all ranks have the same checkpoint."""
    if is_engine(source) or not isinstance(source, (str, os.PathLike, Checkpoint)):
        return EngineSource(source, dtype, budget, ranks)  # It refuses what is no engine.

    def open_checkpoint() -> CheckpointSource:
        loader = loader_of(source) if isinstance(source, Checkpoint) else open_loader(path, budget)
        return CheckpointSource(loader, dtype, budget_or_default(budget or loader.budget))

    if not isinstance(source, Checkpoint):
        path = ranks.first(lambda: str(find(source).location.absolute()), "find the checkpoint")
    tensors = ranks.together(open_checkpoint, "open the checkpoint")
    ranks.agree(tensors.save_id, "checkpoints")
    return tensors


def _plan(tensors: CheckpointSource | EngineSource, options: _Options, path: str) -> ExportPlan:
    config = None if options.config is None else str(Location.of(options.config))
    names, sources = with_prefix(everything(tensors.sources, tensors.aliases), options.prefix), tensors.sources
    merges: dict[str, Merge] = {}
    adapter_name, adapter = options.merge if options.adapter is None else options.adapter, None
    if adapter_name is not None:
        configs, file = tensors.adapters, tensors.path
        if config is not None and (options.adapter is not None or adapter_name not in configs):
            file = str(Location.of(config).child(CONFIG))
            configs = {**configs, adapter_name: read_config(file)}
        adapter = Adapter.find(names, adapter_name, configs, file)
        names, merges = (adapter.own(names), {}) if options.merge is None else without_adapters(adapter, names, sources)
    if not options.directory:
        plan = plan_torch_file(names, sources, Location.of(path).name)
    elif options.adapter is not None and adapter is not None:
        plan = plan_adapter(names, sources, adapter.text)
    else:
        refuse_adapters(names, () if adapter else tensors.adapters)
        with tensors.own_config(options.prefix) as own_config:
            plan = plan_hugging_face(names, sources, config or own_config, options.file_bytes_max)
    used = {*names.values(), *(name for merge in merges.values() for name in merge.inputs)}
    left_out = tuple(name for name in sources if name not in used)
    return replace(with_merges(plan, merges, sources), left_out=left_out)


def _write(
    store: Store,
    files: Sequence[OutputFile],
    plan: ExportPlan,
    tensors: CheckpointSource,
    ranks: Ranks,
    progress: Progress | None,
) -> None:
    """Writes the files that this rank writes. The files are shared out by their sizes."""
    owners = shared_out([file.nbytes for file in files], ranks.size)
    files_of_this_rank = [file for file, owner in zip(files, owners, strict=True) if owner == ranks.rank]
    with reported(progress, "export", tensors.nbytes(files_of_this_rank)) as tensors.advance:
        write_files(store, files_of_this_rank, plan.sources, tensors)
