"""Converts the checkpoint of another program to one of zckpt, and a checkpoint of zckpt to one of DeepSpeed, in its own
format or as a Universal Checkpoint, or of PyTorch's DCP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.open import open_loader
from zckpt.errors import UnsupportedError, check_flags, printable
from zckpt.ranks.collectives import Ranks
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.tools.converting import formats
from zckpt.tools.converting.dcp_folder import read_accelerate, read_dcp, read_torch_file
from zckpt.tools.converting.deepspeed import read_deepspeed
from zckpt.tools.converting.hugging_face import read_hugging_face
from zckpt.tools.converting.to_deepspeed import to_deepspeed
from zckpt.tools.converting.write import write_source

if TYPE_CHECKING:
    from zckpt.progress import Progress
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


_READERS = {
    formats.DEEPSPEED: read_deepspeed, formats.HUGGINGFACE: read_hugging_face, formats.DCP: read_dcp,
    formats.ACCELERATE_FSDP: read_accelerate, formats.TORCH_FILE: read_torch_file,
}  # fmt: skip

_OPTIONS: dict[str, tuple[str, ...]] = {
    "zckpt": ("tag",), "deepspeed": ("tag", "stage", "world_size"), "universal": ("tag",), "dcp": ("world_size",),
}  # fmt: skip
"""For each format of a result, the options that it has."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of ``zckpt.convert``."""

    path: str
    """The absolute path of the new checkpoint."""
    found_format: str
    """The format of the source in words, such as ``a checkpoint of zckpt``."""
    missing: tuple[str, ...]
    """Descriptions of what an engine would have saved and the new checkpoint does not have, because the source does not
    have it or the new format has no place for it."""

    def __str__(self) -> str:
        lines = [f"{self.path}: converted from {self.found_format}"]
        return "\n".join(map(printable, [*lines, *(f"  missing: {item}" for item in self.missing)]))


def convert(
    source: StrPath,
    destination: StrPath,
    *,
    to: Literal["zckpt", "deepspeed", "universal", "dcp"] = "zckpt",
    tag: str | None = None,
    stage: int | None = None,
    world_size: int | None = None,
    overwrite: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Converts a checkpoint of another format to one of zckpt, or one of zckpt to the format of DeepSpeed or DCP.

    DeepSpeed does not have to be installed, and a single process is enough. If torch.distributed is initialised, every
    rank has to call this with the same arguments, and the ranks share the files. If one rank fails or is lost, all of
    them raise an error.

    Code in the pickles of old checkpoints is never executed. The pickles may contain plain values, tensors and
    DeepSpeed's own classes. An error names anything else that they contain. The memory for tensors is limited by
    ``budget``. The new checkpoint is at ``destination`` only once all of it is durable.

    Args:
        source: with ``to="zckpt"`` a folder in DeepSpeed's own format (stage 0 to 3), a Universal Checkpoint, a folder
            of PyTorch's DCP, a file of ``torch.save``, a Hugging Face model, or the directory of a run. Otherwise a
            checkpoint of zckpt, or the directory of a run of zckpt.
        destination: with ``to="zckpt"`` the directory of the new checkpoint, from which ``zckpt.restore`` resumes. No
            file ``latest`` is written. With ``to="deepspeed"`` the directory of a run in DeepSpeed's format. The new
            checkpoint is the folder ``tag`` in it, from which DeepSpeed's own ``engine.load_checkpoint`` resumes, and
            the file ``latest`` names it. With ``to="universal"`` the same, except that the folder is a Universal
            Checkpoint, which ``latest_universal`` names, and which engines with ``checkpoint.load_universal`` load at
            any of the stages 1 to 3. With ``to="dcp"`` the new folder, which ``torch.distributed.checkpoint.load``
            reads.
        to: the format of the result, "zckpt", "deepspeed", "universal" or "dcp".
        tag: with ``to="zckpt"`` the checkpoint of the run ``source`` that is converted. None means the one that
            ``latest`` names. With ``to="deepspeed"`` or ``to="universal"`` the name of the new folder. None means
            ``global_step<N>``.
        stage: with ``to="deepspeed"`` the ZeRO stage of the engine that will resume. None means the stage of the engine
            that wrote the checkpoint.
        world_size: with ``to="deepspeed"`` the number of ranks of the engine that will resume, and with ``to="dcp"``
            the number of data files. None means the number of ranks that wrote the checkpoint.
        overwrite: whether a checkpoint at ``destination`` is replaced.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.
        progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.

    Returns:
        The path of the result, the format of ``source``, and what could not be converted.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at ``source``.
        UnsupportedError: the source has a format that cannot be converted, which the error names, or it has state that
            the new format has no place for.
        FormatError: the source is damaged or malicious. If a file is missing, the error is a MissingFileError.
        CheckpointExistsError: there is already a checkpoint at ``destination``.
        NoSpaceError: there is too little free space.
        StorageError: the operating system reports an error when it reads or writes.
        RankError: another rank has failed or is lost, or the ranks have different arguments.
        ValueError: the arguments contradict each other, or the checkpoint has a name that the own files of a checkpoint
            have.
    """
    ranks = Ranks(call="zckpt.convert")

    def check() -> tuple[str, Store]:
        check_flags(overwrite=overwrite)
        if to not in _OPTIONS:
            raise ValueError(f"to must be one of {', '.join(map(repr, _OPTIONS))}, got {to!r}")
        given = {"tag": tag, "stage": stage, "world_size": world_size}
        for name, value in given.items():
            if value is not None and name not in _OPTIONS[to]:
                fitting = " or ".join(f"to={other!r}" for other in _OPTIONS if name in _OPTIONS[other])
                raise ValueError(f"{name} is not for to={to!r}: it may be given only with {fitting} (--to)")
        return str(Location.of(source).absolute()), open_store(Location.of(destination).absolute())

    def look() -> tuple[str, str]:
        if to != "zckpt":
            return formats.ZCKPT, str(find(origin).location)
        folder = formats.find_format(origin, tag)
        if folder.format == formats.ZCKPT:
            others = formats.those_in(origin)  # `latest` may name one of zckpt beside them.
            hint = (
                "copy it with zckpt.cp (zckpt cp), or convert it: to='deepspeed' (--to deepspeed), to='universal' "
                "(--to universal) or to='dcp' (--to dcp)"
            )
            raise UnsupportedError(
                f"{printable(folder.path)} is a checkpoint of zckpt", hint=f"{others}; or {hint}" if others else hint
            )
        return folder

    with ranks.undivided():
        origin, store = ranks.together(check, "check the arguments")
        ranks.agree([origin, str(store.location), to, tag, stage, world_size, overwrite], "arguments")
        source_format, path = ranks.first(look, "look at the source")
        if to != "zckpt":
            checkpoint = ranks.together(lambda: open_loader(path, budget=budget), "open the checkpoint")
            write: Any = partial(to_deepspeed, universal=to == "universal", tag=tag, stage=stage, world_size=world_size)
            if to == "dcp":
                # It imports torch.distributed.checkpoint, which takes a second.
                from zckpt.tools.converting.to_dcp import to_dcp

                write = partial(to_dcp, world_size=world_size)
            new_path, missing = write(
                checkpoint, str(store.location), ranks, overwrite=overwrite, budget=budget, progress=progress
            )
            return Converted(new_path, "a checkpoint of zckpt", missing)
        content = ranks.together(lambda: _READERS[source_format](path), "read the source")
        write_source(content, store, ranks, overwrite=overwrite, budget=budget, progress=progress)
    return Converted(str(store.location), content.found_format, content.missing)
