"""From the checkpoint of another program to one of zckpt, and back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zckpt.api.open import open as open_path
from zckpt.converting import formats
from zckpt.converting.deepspeed import read_deepspeed
from zckpt.converting.hugging_face import read_hugging_face
from zckpt.converting.to_deepspeed import to_deepspeed
from zckpt.converting.write import write_source
from zckpt.errors import UnsupportedError
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


_A = {
    formats.ZCKPT: "a checkpoint of zckpt", formats.DEEPSPEED: "a checkpoint of DeepSpeed",
    formats.HUGGINGFACE: "a Hugging Face model",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of ``zckpt.convert``."""

    path: str
    found_format: str
    """What the source was, in words."""
    missing: tuple[str, ...]
    """What the result would have if it had been written by the engine, and the source has not: a phrase for each."""

    def __str__(self) -> str:
        lines = [f"{self.path}: converted from {self.found_format}"]
        return "\n".join([*lines, *(f"  not in the source: {one}" for one in self.missing)])


def convert(
    source: StrPath,
    destination: StrPath,
    *,
    to: Literal["zckpt", "deepspeed"] = "zckpt",
    tag: str | None = None,
    stage: int | None = None,
    world_size: int | None = None,
    overwrite: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Writes the checkpoint in the folder ``source`` anew, in the format ``to``. One process does it, for all ranks; it
    needs neither DeepSpeed nor torch.distributed.

    ``to="zckpt"``: ``source`` is a folder in DeepSpeed's own format, of stage 0 to 3, a Universal Checkpoint, or a
    Hugging Face model; in the directory of a run it is the one that ``tag`` names, or ``latest``. ``destination`` is
    the directory of the new checkpoint; no file ``latest`` names it. ``zckpt.restore`` resumes from it as from what
    ``zckpt.write`` of the saved engine would have written; what the source has not of that, ``missing`` says.

    ``to="deepspeed"``: ``source`` is a checkpoint of zckpt, or a run; ``destination`` the directory of a run, in which
    ``tag`` (None: ``global_step<N>``) becomes a folder that stock ``engine.load_checkpoint`` resumes from, of this ZeRO
    ``stage`` and ``world_size`` (None: as when it was written), and ``latest`` names it.

    The pickles of old checkpoints are not run: what is more than values, tensors and DeepSpeed's own classes in them is
    refused by name. Tensors are copied by range, with the memory of ``budget``. ``overwrite``: replace a checkpoint
    at ``destination``. Nothing there can be taken for a checkpoint until all of it is durable.

    Raises CheckpointNotFoundError, UnsupportedError for another format, by its name, or for what zckpt has no place
    for; MissingFileError, FormatError for a source that is damaged or made to do harm; CheckpointExistsError,
    NoSpaceError, StorageError, and ValueError for arguments that do not go together.
    """
    if to not in ("zckpt", "deepspeed"):
        raise ValueError(f"to must be 'zckpt' or 'deepspeed', got {to!r}")
    if to == "zckpt" and (stage, world_size) != (None, None):
        raise ValueError("stage and world_size are about to='deepspeed': a checkpoint of zckpt fits any of them")
    store = open_store(Location.of(destination).absolute())
    found = formats.find_format(os.path.abspath(source), tag if to == "zckpt" else None)
    if (found.format == formats.ZCKPT) != (to == "deepspeed"):
        hint = "zckpt.cp copies it; to='deepspeed' converts it" if to == "zckpt" else "convert it to one of zckpt first"
        raise UnsupportedError(f"{found.path} is {_A[found.format]}", hint=hint)
    if to == "deepspeed":
        checkpoint = open_path(found.path, budget=budget)
        missing = to_deepspeed(
            checkpoint, str(store.location), tag=tag, stage=stage, world_size=world_size, overwrite=overwrite,
            budget=budget, progress=progress,
        )  # fmt: skip
        path = store.location.child(f"global_step{checkpoint.step}" if tag is None else tag)
        return Converted(str(path), _A[formats.ZCKPT], missing)
    read = {formats.DEEPSPEED: read_deepspeed, formats.HUGGINGFACE: read_hugging_face}[found.format](found.path)
    write_source(read, store, overwrite=overwrite, budget=budget, progress=progress)
    return Converted(str(store.location), read.found_format, read.missing)
