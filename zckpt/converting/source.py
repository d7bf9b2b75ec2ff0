"""What a folder of another format holds, in the form in which it can be written as a checkpoint."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.errors import FormatError, ZckptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from zckpt.state.inventory import FileSpan, Fragment


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
    kind that it cannot be, the context raises FormatError. An error of zckpt that names no file yet is made to name
    this one."""
    try:
        yield
    except ZckptError as error:
        error.file = error.file or file
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise FormatError(f"it has values that cannot be: {type(error).__name__}: {why}", file=file) from error
