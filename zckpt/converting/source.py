"""What a folder of another format holds, in the form in which it can be written as a checkpoint."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.errors import FormatError, ZckptError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from zckpt.state.inventory import FileSpan, Fragment


COPY_AGAIN = "copy the checkpoint to this folder again, or take another one"
AS_WRITTEN = "give the checkpoint as the training run has written it, with all its files and no others"


class RankPart(NamedTuple):
    """What one rank has of a source."""

    fragments: list[Fragment]
    """The fragments of tensors that the rank has. Their data are mapped files of the source, or are in memory if they
    are small."""
    state: Mapping[str, Any]
    """The tree of this rank alone. It is empty if the rank has none."""
    optimizer: Mapping[str, Any]
    """What the files of this rank say about the state that the optimizer keeps once for all ranks. It has to be equal
    on all ranks."""
    place: Callable[[torch.Tensor | FileSpan | None], torch.Tensor | FileSpan | None]
    """Returns for the data of a fragment where they lie: the range of a file for a tensor that is mapped."""


@dataclass(frozen=True, slots=True)
class Source:
    """One training state that was found in a folder."""

    path: str
    found_format: str
    """What the folder is, in words."""
    world_size: int
    """The number of ranks that wrote the folder."""
    step: int
    """The number of training steps that were done."""
    aliases: Mapping[str, str]
    """For each other name of a tied weight the name under which it is stored."""
    state: Mapping[str, Any]
    """The tree of the engine's state that all ranks share."""
    client_state: Mapping[str, Any]
    """What the caller of ``save_checkpoint`` has saved."""
    description: Mapping[str, str]
    """The framework, its mode and its versions, as ``EngineAdapter.description`` has them."""
    missing: tuple[str, ...]
    """What a checkpoint has that the engine writes, and the source does not have. Each entry is a phrase."""
    rank: Callable[[int], RankPart]
    """Reads what one rank has. It reads it again at each call, so that the memory for all ranks is never needed at
    once."""


@contextmanager
def values_of(file: str) -> Iterator[None]:
    """A context in which the values of ``file`` are used. If a value leads to an error of Python, because it is of a
    kind that it cannot be, the context raises FormatError; for an error of the system, StorageError. An error of zckpt
    that names no file yet is made to name this one, and a FormatError without a hint to say what to do."""
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


def check_regular(path: str) -> None:
    """Raises FormatError for what is not a regular file, because to open a pipe would wait for somebody who writes.
    Raises OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FormatError("this is not a regular file", file=path, hint=AS_WRITTEN)
