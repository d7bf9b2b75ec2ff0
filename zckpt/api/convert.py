"""Converts the checkpoint of another program to one of zckpt, and a checkpoint of zckpt to one of DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zckpt.api.open import open as open_path
from zckpt.converting import formats
from zckpt.converting.deepspeed import read_deepspeed
from zckpt.converting.hugging_face import read_hugging_face
from zckpt.converting.to_deepspeed import to_deepspeed
from zckpt.converting.write import write_source
from zckpt.errors import UnsupportedError
from zckpt.ranks.collectives import Ranks
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from zckpt.progress import Progress
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


_DESCRIPTIONS = {
    formats.ZCKPT: "a checkpoint of zckpt", formats.DEEPSPEED: "a checkpoint of DeepSpeed",
    formats.HUGGINGFACE: "a Hugging Face model",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of ``zckpt.convert``."""

    path: str
    """The absolute path of the new checkpoint."""
    found_format: str
    """What the source was found to be, such as ``a checkpoint of zckpt``."""
    missing: tuple[str, ...]
    """What the new checkpoint lacks of what an engine would have saved, because the source does not have it or the new
    format has no place for it. Each entry is a phrase about one thing."""

    def __str__(self) -> str:
        lines = [f"{self.path}: converted from {self.found_format}"]
        return "\n".join([*lines, *(f"  missing: {one}" for one in self.missing)])


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
    """Converts the checkpoint in the folder ``source`` to the format ``to``. It does not need DeepSpeed, and a single
    process is enough. Where torch.distributed is initialised, every rank calls it with the same arguments, and the
    ranks share the files. If one rank fails or is lost, all of them raise an error.

    ``to="zckpt"``: ``source`` is a folder in DeepSpeed's own format (stage 0 to 3), a Universal Checkpoint, or a
    Hugging Face model. It may also be the directory of a run: then the checkpoint is the one that ``tag`` names, or,
    without ``tag``, the one that ``latest`` names. ``destination`` is the directory of the new checkpoint; no file
    ``latest`` is written. ``zckpt.restore`` resumes from the new checkpoint as it would from one that ``zckpt.write``
    has written. What such a checkpoint would have and the source does not have is listed in ``Converted.missing``.

    ``to="deepspeed"``: ``source`` is a checkpoint of zckpt, or the directory of a run of zckpt. ``destination`` is the
    directory of a run in DeepSpeed's format. In it the folder ``tag`` (None means ``global_step<N>``) is written, from
    which stock ``engine.load_checkpoint`` resumes, and ``latest`` names it. ``stage`` and ``world_size`` are the ZeRO
    stage and the number of ranks of the engine that is to resume; None means those of the engine that wrote the
    checkpoint.

    The code in the pickles of old checkpoints is not run. They may hold plain values, tensors and DeepSpeed's own
    classes; anything else is refused with an error that names it. Tensors are copied range by range in the memory of
    ``budget`` (None means ``Budget.from_environment()``). ``overwrite``: replace a checkpoint at ``destination``.
    Nothing at ``destination`` can be taken for a checkpoint until all of it is durable.

    Raises CheckpointNotFoundError; UnsupportedError for a folder of another format, which it names, and for state that
    the new format has no place for; MissingFileError and FormatError for a source that is damaged or malicious;
    CheckpointExistsError, NoSpaceError, StorageError and RankError; and ValueError for arguments that contradict each
    other.
    """
    ranks = Ranks(call="zckpt.convert")

    def check() -> tuple[str, Store]:
        if to not in ("zckpt", "deepspeed"):
            raise ValueError(f"to must be 'zckpt' or 'deepspeed', got {to!r}")
        if to == "zckpt" and (stage, world_size) != (None, None):
            raise ValueError(
                "stage and world_size may be given only with to='deepspeed' (--to deepspeed): a checkpoint of zckpt "
                "fits any of them"
            )
        return str(Location.of(source).absolute()), open_store(Location.of(destination).absolute())

    def look() -> tuple[str, str]:
        found = formats.find_format(origin, tag if to == "zckpt" else None)
        if (found.format == formats.ZCKPT) != (to == "deepspeed"):
            hint = "copy it with zckpt.cp (zckpt cp), or convert it with to='deepspeed' (--to deepspeed)"
            if to == "deepspeed":
                hint = "convert it to a checkpoint of zckpt first: to='zckpt' (without --to)"
            raise UnsupportedError(f"{found.path} is {_DESCRIPTIONS[found.format]}", hint=hint)
        return found

    with ranks.undivided():
        origin, store = ranks.together(check, "check the arguments")
        ranks.agree([origin, str(store.location), to, tag, stage, world_size, overwrite], "arguments")
        kind, path = ranks.first(look, "look at the source")
        if to == "deepspeed":
            checkpoint = ranks.together(lambda: open_path(path, budget=budget), "open the checkpoint")
            made, missing = to_deepspeed(
                checkpoint, str(store.location), ranks, tag=tag, stage=stage, world_size=world_size,
                overwrite=overwrite, budget=budget, progress=progress,
            )  # fmt: skip
            return Converted(made, _DESCRIPTIONS[formats.ZCKPT], missing)
        read = {formats.DEEPSPEED: read_deepspeed, formats.HUGGINGFACE: read_hugging_face}[kind]
        found = ranks.together(lambda: read(path), "read the source")
        write_source(found, store, ranks, overwrite=overwrite, budget=budget, progress=progress)
    return Converted(str(store.location), found.found_format, found.missing)
