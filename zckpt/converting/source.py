"""What a folder of another format holds, in zckpt's words, and what it takes to write it as a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from zckpt.state.inventory import FileSpan, Fragment


class RankPart(NamedTuple):
    """What one rank has of a source."""

    fragments: list[Fragment]
    """Their data lie in the files of the source, or in memory if they are small."""
    state: Mapping[str, Any]
    """The tree of this rank; empty if it has none."""
    optimizer: Mapping[str, Any]
    """What its files say of what the optimizer keeps once for all ranks: equal on all of them."""
    place: Callable[[torch.Tensor | FileSpan | None], torch.Tensor | FileSpan | None]
    """Where these data lie: the range of a file for a tensor that is mapped."""


@dataclass(frozen=True, slots=True)
class Source:
    """One training state. ``rank`` reads what one rank has of it: each time anew, so that nobody needs the memory for
    all ranks at once."""

    found_format: str
    """In words."""
    world_size: int
    step: int
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    """The tree that all ranks share."""
    client_state: Mapping[str, Any]
    description: Mapping[str, str]
    """Framework, versions and mode, as ``EngineAdapter.description``."""
    missing: tuple[str, ...]
    """A sentence for each thing that a checkpoint written by the engine would have, and the source has not."""
    rank: Callable[[int], RankPart]
