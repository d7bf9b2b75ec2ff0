"""The state that was read from a folder in another format, in the form in which it can be written as a checkpoint."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.errors import FormatError, StorageError, ZckptError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.plan.inventory import Fragment


COPY_AGAIN = "copy the checkpoint to this folder again, or take another one"
_SUFFIXES = (".pt", ".bin", ".safetensors", ".swp", ".json", ".distcp", ".metadata")
AS_WRITTEN = "give the checkpoint as the training run has written it, with all its files and no others"


class FileState(NamedTuple):
    """What tells whether a file was changed or replaced."""

    number: int
    """The number of its inode."""
    nbytes: int
    changed: int
    """The time at which its content was changed, in nanoseconds."""


def file_states(path: str) -> dict[str, FileState]:
    """Returns the state of each file in a folder that may have a part of a checkpoint, by its path. ``path`` may be a
    file itself. Raises StorageError."""
    if not os.path.isdir(path):
        return {path: _file_state(path)}
    files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return {file: _file_state(file) for file in files if file.endswith(_SUFFIXES) and os.path.exists(file)}


def _file_state(file: str) -> FileState:
    try:
        status = os.stat(file)
    except OSError as error:
        raise from_os_error(error, "examine", file) from error
    return FileState(status.st_ino, status.st_size, status.st_mtime_ns)


class RankPart(NamedTuple):
    """The part of a source that one rank has."""

    fragments: list[Fragment]
    """The fragments of tensors that the rank has. Their data are ranges of files, tensors whose values are in a file,
    or are in memory if they are small."""
    state: Mapping[str, Any]
    """The tree of state of this rank alone. It is empty if the rank has none."""
    optimizer: Mapping[str, Any]
    """What the files of this rank contain of the optimizer's state that is kept once for all ranks. It must be equal on
    all ranks."""
    replicas: Sequence[tuple[str, Fragment]] = ()
    """The fragments of local tensors that other groups of ranks hold too, with the same values, each with a name of the
    local tensor for people. Only one of the groups has them in ``fragments``."""
    group: str = ""
    """The name of the rank's group, for people."""


@dataclass(frozen=True, slots=True)
class Source:
    """One training state that was found in a folder."""

    path: str
    """The directory in which the state was found."""
    found_format: str
    """A description of the folder for people, such as "DeepSpeed checkpoint, ZeRO stage 3"."""
    world_size: int
    """The number of ranks that wrote the folder."""
    step: int
    """The number of training steps that were done."""
    aliases: Mapping[str, str]
    """For each other name of a tied weight, the name under which it is stored."""
    state: Mapping[str, Any]
    """The tree of the engine's state that all ranks share."""
    client_state: Mapping[str, Any]
    """What the caller of ``save_checkpoint`` has saved."""
    description: Mapping[str, str]
    """The framework, its versions and its mode, as in ``EngineAdapter.description``."""
    missing: tuple[str, ...]
    """A phrase for each thing that a checkpoint of the same engine would have, and that the source does not have."""
    files: Mapping[str, FileState]
    """The state of each file of the folder before the first one was read."""
    rank: Callable[[int], RankPart]
    """A function that reads what one rank has. It reads it again at each call, so that the state of all ranks need not
    be in memory at once."""

    @property
    def nbytes(self) -> int:
        """The number of bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def refuse_changes(self) -> None:
        """Raises StorageError if a file is not what it was before the first one was read."""
        for file, before in self.files.items():
            if _file_state(file) != before:
                raise StorageError(
                    "the file was changed while it was converted", file=file,
                    hint="convert the folder when nothing writes to it any more",
                )  # fmt: skip


@contextmanager
def values_of(file: str) -> Iterator[None]:
    """A context in which the values of ``file`` are used. If a value causes an error of Python, because it is not what
    it has to be, the context raises FormatError instead. For an error of the operating system, it raises StorageError.
    An error of zckpt that names no file is changed to name this file, and a FormatError without a hint gets one."""
    try:
        yield
    except ZckptError as error:
        error.file = error.file or file
        if isinstance(error, FormatError):
            error.hint = error.hint or AS_WRITTEN
        raise
    except OSError as error:
        raise from_os_error(error, "read", file) from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise FormatError(
            f"it has values that cannot be: {type(error).__name__}: {why}", file=file, hint=AS_WRITTEN
        ) from error


def is_file_name(name: str) -> bool:
    """Returns whether a file or directory can have this name, so that it does not lead elsewhere."""
    return os.path.basename(name) == name and name not in ("", os.curdir, os.pardir) and "\0" not in name


def check_regular(path: str) -> None:
    """Raises FormatError if ``path`` is not a regular file. To open a pipe, for example, would block until somebody
    writes to it. Raises OSError if the file cannot be examined."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FormatError("this is not a regular file", file=path, hint=AS_WRITTEN)
