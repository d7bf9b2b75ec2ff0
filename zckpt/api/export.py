"""From a checkpoint to files that others load: a model's folder as Hugging Face has it, or one file of torch's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from zckpt.api.open import open as open_path
from zckpt.engines import group_of, is_engine
from zckpt.exporting import adapter as adapter_plan
from zckpt.exporting.checkpoint_source import CheckpointSource
from zckpt.exporting.engine_source import EngineSource
from zckpt.exporting.hugging_face import FILES, plan_hugging_face
from zckpt.exporting.live import write_from_ranks
from zckpt.exporting.place import begin, find_place, put_in_place
from zckpt.exporting.plan import size_in_bytes
from zckpt.exporting.torch_file import plan_torch_file
from zckpt.exporting.write import write_files
from zckpt.progress import reported
from zckpt.ranks.collectives import Ranks
from zckpt.reading.checkpoint import Checkpoint
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
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
    files: tuple[str, ...]
    """Paths relative to ``path``; the name of the file itself where that is what was written."""
    nbytes: int
    """Of all files."""

    def __str__(self) -> str:
        names = "\n".join(f"  {name}" for name in self.files)
        return f"{self.path}: {len(self.files)} files, {self.nbytes:,} bytes\n{names}"


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
    """Writes the weights and persistent buffers of a checkpoint or of a live engine as others load them. Tensors reach
    the disk in slices: no more than ``budget`` is in memory, beside weights that have to be whole to be converted.

    ``source``: a path as for ``zckpt.open``, or what that returned; or a training engine, whose weights are written
    from where they are, without a checkpoint: each file by one rank, to which the others send its slices. Every rank
    that the engine is spread over calls it then. ``format``: "hf" makes the directory ``out`` with
    ``model.safetensors``, or several files of at most ``max_shard_size`` (bytes, or a text such as "5GB") and an index.
    With ``config``, a folder with the model's ``config.json``, it is what ``model.to(dtype).save_pretrained(out)``
    writes, with the folder's tokenizer and processor files, and ``from_pretrained`` loads it; without, tensors have the
    names that they have in the model, a tied weight has one of them, and there is no configuration; but an engine's
    model of transformers' brings its own. "pt" makes the file ``out``, a dict of all tensors that ``torch.load(out,
    weights_only=True)`` returns, tied weights under every name. ``dtype``: what all floating point tensors are
    converted to, such as "bf16"; None: they stay as they are stored, weights in fp32 if the optimizer had them so;
    those of an engine stay as the model computes with them. ``adapter``: the name of a LoRA adapter of PEFT's, such as
    "default": ``out`` becomes its folder, as ``PeftModel.save_pretrained`` writes it and ``PeftModel.from_pretrained``
    loads it. The adapter's configuration is in the checkpoint; if not, ``config`` is a folder with its
    ``adapter_config.json``. ``overwrite``: replaces an earlier export.

    ``out`` appears once all of it is durable. After an error there is nothing new, and an earlier export is as it was;
    only a process that is killed leaves a temporary directory or file beside it, ``<out>.<digits>.tmp``.

    Where torch.distributed is initialised, every rank calls it with the same arguments, and they share the files.

    Raises what ``zckpt.open`` and ``Checkpoint.load`` raise, or for an engine what ``zckpt.write`` raises;
    CheckpointExistsError; MismatchError if the configuration is of another model; KeyNotFoundError for an adapter that
    does not exist; UnsupportedError for a model that transformers does not know, or without transformers, for an
    adapter that is not LoRA, and for format "hf" of a model with adapters where none is named; ValueError for an
    unknown format, dtype or size; NoSpaceError, StorageError and RankError.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if format == "pt" and config is not None:
        raise ValueError("a configuration is for format 'hf' alone: a 'pt' file has the names of the model in memory")
    if format == "pt" and adapter is not None:
        raise ValueError("an adapter is for format 'hf' alone: its folder has a safetensors file and its configuration")
    directory = format == "hf"
    patterns = (adapter_plan.FILES if adapter is not None else FILES) if directory else None
    shard_bytes_max, wanted = size_in_bytes(max_shard_size), dtype_of(dtype)
    ranks = Ranks(group_of(source), call="zckpt.export")
    with ranks.undivided():
        path = ranks.first(lambda: find_place(out, patterns, overwrite), "find the place")

        def open_source() -> CheckpointSource:
            checkpoint = source if isinstance(source, Checkpoint) else open_path(source, budget=budget)
            return CheckpointSource(checkpoint, wanted, budget or checkpoint.budget)

        def prepare() -> ExportPlan:
            if adapter is not None:
                return _plan_adapter(tensors, adapter, config)
            if not directory:
                return plan_torch_file(tensors.sources, tensors.aliases, Location.of(path).name)
            adapter_plan.refuse_adapters(tensors.sources, tensors.adapters)
            with tensors.own_config() as own:
                folder = own if config is None else str(Location.of(config))
                return plan_hugging_face(tensors.sources, tensors.aliases, folder, shard_bytes_max)

        tensors: CheckpointSource | EngineSource
        if is_engine(source):
            tensors = EngineSource(source, wanted, budget, ranks)
        else:
            tensors = ranks.together(open_source, "open the checkpoint")
        plan = ranks.together(prepare, "plan the export")
        ranks.agree([path, *([file.name, file.nbytes] for file in plan.files)], "exports")
        prepared = ranks.first(lambda: begin(path, directory=directory), "make a directory")
        try:
            store, files = open_store(prepared), plan.files
            if not directory:
                store, files = store.parent, (replace(files[0], name=Location.of(prepared).name),)
            ranks.first(lambda: _put_small(store, plan), "write")
            if isinstance(tensors, EngineSource):
                write_from_ranks(store, files, plan.conversions, tensors, ranks, progress)
            else:
                ranks.together(lambda: _write(store, files, plan.conversions, tensors, ranks, progress), "write")
            ranks.first(lambda: _put_in_place(store, prepared, path), "put the export in place")
        except BaseException:
            if ranks.rank == 0:
                open_store(prepared).remove("")
            raise
    sizes = {file.name: file.nbytes for file in plan.files} | {
        name: len(data) for name, data in plan.small_files.items()
    }
    return Exported(path, tuple(sorted(sizes)), sum(sizes.values()))


def _plan_adapter(tensors: CheckpointSource | EngineSource, adapter: str, config: StrPath | None) -> ExportPlan:
    configs = tensors.adapters
    if config is not None:
        configs = {**configs, adapter: adapter_plan.read_config(str(Location.of(config)))}
    return adapter_plan.plan_adapter(tensors.sources, tensors.aliases, adapter, configs)


def _write(
    store: Store,
    files: Sequence[OutputFile],
    conversions: Sequence[Conversion],
    tensors: CheckpointSource,
    ranks: Ranks,
    progress: Progress | None,
) -> None:
    """This rank's files."""
    own = files[ranks.rank :: ranks.size]
    with reported(progress, "export", tensors.nbytes(own, conversions)) as tensors.advance:
        write_files(store, own, conversions, tensors, tensors.budget)


def _put_small(store: Store, plan: ExportPlan) -> None:
    for name, data in plan.small_files.items():
        store.put(name, data)


def _put_in_place(store: Store, prepared: str, path: str) -> None:
    store.sync_names("")
    put_in_place(prepared, path)
