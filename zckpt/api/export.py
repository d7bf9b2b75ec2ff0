"""From a checkpoint to files that others load: a model's folder as Hugging Face has it, or one file of torch's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from zckpt.api.open import open as open_path
from zckpt.exporting.checkpoint_source import CheckpointSource
from zckpt.exporting.hugging_face import FILES, plan_hugging_face
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
    import torch

    from zckpt.exporting.plan import ExportPlan
    from zckpt.progress import Progress
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
    source: StrPath | Checkpoint,
    out: StrPath,
    *,
    format: Format = "hf",  # noqa: A002  what users call it
    dtype: torch.dtype | str | None = None,
    config: StrPath | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes the weights and persistent buffers of a checkpoint as others load them. Tensors reach the disk in slices:
    no more than ``budget`` is in memory, beside weights that have to be whole to be converted.

    ``source``: a path as for ``zckpt.open``, or what that returned. ``format``: "hf" makes the directory ``out`` with
    ``model.safetensors``, or several files of at most ``max_shard_size`` (bytes, or a text such as "5GB") and an index.
    With ``config``, a folder with the model's ``config.json``, it is what ``model.to(dtype).save_pretrained(out)``
    writes, with the folder's tokenizer and processor files, and ``from_pretrained`` loads it; without, tensors have the
    names that they have in the model, a tied weight has one of them, and there is no configuration. "pt" makes the file
    ``out``, a dict of all tensors that ``torch.load(out, weights_only=True)`` returns, tied weights under every name.
    ``dtype``: what all floating point tensors are converted to, such as "bf16"; None: they stay as they are stored,
    weights in fp32 if the optimizer had them so. ``overwrite``: replaces an earlier export.

    ``out`` appears once all of it is durable. After an error there is nothing new, and an earlier export is as it was;
    only a process that is killed leaves a temporary directory or file beside it, ``<out>.<digits>.tmp``.

    Where torch.distributed is initialised, every rank calls it with the same arguments, and they share the files.

    Raises what ``zckpt.open`` and ``Checkpoint.load`` raise; CheckpointExistsError; MismatchError if the configuration
    is of another model; UnsupportedError for a model that transformers does not know, or without transformers;
    ValueError for an unknown format, dtype or size; NoSpaceError, StorageError and RankError.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if format == "pt" and config is not None:
        raise ValueError("a configuration is for format 'hf' alone: a 'pt' file has the names of the model in memory")
    directory = format == "hf"
    shard_bytes_max, wanted = size_in_bytes(max_shard_size), dtype_of(dtype)
    ranks = Ranks(call="zckpt.export")
    with ranks.undivided():
        path = ranks.first(lambda: find_place(out, FILES if directory else None, overwrite), "find the place")

        def prepare() -> tuple[CheckpointSource, ExportPlan]:
            checkpoint = source if isinstance(source, Checkpoint) else open_path(source, budget=budget)
            tensors = CheckpointSource(checkpoint, wanted, budget or checkpoint.budget)
            if directory:
                folder = None if config is None else str(Location.of(config))
                return tensors, plan_hugging_face(tensors.sources, tensors.aliases, folder, shard_bytes_max)
            return tensors, plan_torch_file(tensors.sources, tensors.aliases, Location.of(path).name)

        tensors, plan = ranks.together(prepare, "plan the export")
        prepared = ranks.first(lambda: begin(path, directory=directory), "make a directory")
        try:
            ranks.together(lambda: _write(prepared, directory, plan, tensors, ranks, progress), "write")
            ranks.first(lambda: put_in_place(prepared, path), "put the export in place")
        except BaseException:
            if ranks.rank == 0:
                open_store(prepared).remove("")
            raise
    files = {file.name: file.nbytes for file in plan.files} | {
        name: len(data) for name, data in plan.small_files.items()
    }
    return Exported(path, tuple(sorted(files)), sum(files.values()))


def _write(
    prepared: str,
    directory: bool,
    plan: ExportPlan,
    tensors: CheckpointSource,
    ranks: Ranks,
    progress: Progress | None,
) -> None:
    """This rank's files."""
    store, files = open_store(prepared), plan.files[ranks.rank :: ranks.size]
    if not directory:
        store, files = store.parent, tuple(replace(file, name=Location.of(prepared).name) for file in files)
    if ranks.rank == 0:
        for name, data in plan.small_files.items():
            store.put(name, data)
    with reported(progress, "export", tensors.nbytes(files, plan.conversions)) as tensors.advance:
        write_files(store, files, plan.conversions, tensors, tensors.budget)
    store.sync_names("")
