"""Which part of an engine's state is on disk for a while and has no memory, as ``zckpt.offload`` leaves it. The core
calls ask here, so that they need nothing of the code that moves states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from zckpt.format.names import Tier
from zckpt.plan.inventory import GRADIENT, FileRange
from zckpt.transfer.memory import not_plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import torch

    from zckpt.engines.contract import EngineAdapter
    from zckpt.plan.inventory import Fragment
    from zckpt.ranks.collectives import Ranks
    from zckpt.transfer.budget import Budget


class Away(ABC):
    """What a rank has moved from the memory of one engine to disk. The fields are the same on all ranks."""

    parts: frozenset[str]
    """The parts that are on disk on any rank."""
    lost: dict[str, str]
    """Maps the keys of tensors that cannot be brought back to the reason why."""

    @abstractmethod
    def refuse_lost(self, call: str) -> None:
        """Raises OffloadedError if a tensor is lost. ``call``: the name of the call that needs it."""

    @abstractmethod
    def bring_back_to_restore(self, kept: Collection[str], ranks: Ranks, budget: Budget | None) -> None:
        """Brings back everything before a restore. This is collective. A state that is lost gets memory again, but not
        its values. ``kept``: the keys of the tensors that the restore does not set. Raises MismatchError if one of
        these is lost, and the errors of ``zckpt.reload``."""

    @abstractmethod
    def note_on_disk(self, parts: Iterable[str], lost: Mapping[str, str]) -> None:
        """Notes, on all ranks, which parts are on disk and which keys are lost. If there are none, the engine can be
        used again without restrictions."""


class OnDisk(Protocol):
    """The record of a storage whose bytes are on disk."""

    def file_range(self, offset: int, nbytes: int) -> FileRange:
        """Returns the range of a file that has these bytes of the storage."""


AWAY = "_zckpt_away"
"""The name of the attribute of an engine that has its ``Away``. A table of all engines would keep them alive, because
an ``Away`` refers to its engine."""
storages_on_disk: WeakValueDictionary[int, OnDisk] = WeakValueDictionary()
"""The records of all storages that are on disk, by the address of torch's own object for the storage, which exists as
long as the storage."""


def away(engine: object) -> Away | None:
    """Returns what of an engine is on disk, or None if all of it is in memory."""
    return getattr(engine, AWAY, None)


def is_on_disk(tensor: torch.Tensor) -> bool:
    """Returns whether the storage of a tensor is on disk."""
    return not not_plain(tensor) and tensor.untyped_storage()._cdata in storages_on_disk


def where_they_are(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Returns ``fragments``. If the tensor of a fragment, which is contiguous, is on disk, its data is the range of the
    file that has the values."""
    found = [*fragments]
    # Mostly no storage is on disk. Then the tensors are not looked at, because there may be very many.
    for number, fragment in enumerate(found if storages_on_disk else ()):
        tensor = fragment.data
        if not isinstance(tensor, FileRange | None) and is_on_disk(tensor):
            start, nbytes = int(tensor.storage_offset()) * tensor.itemsize, tensor.numel() * tensor.itemsize
            place = storages_on_disk[tensor.untyped_storage()._cdata].file_range(start, nbytes)
            found[number] = fragment._replace(tier=Tier.NVME, data=place)
    return found


def tensors_in_memory(adapter: EngineAdapter) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a name and the tensor of each holding that a restore may fill and that is not on disk. A tensor that
    belongs to two parts is yielded once."""
    seen: dict[int, torch.Tensor] = {}  # The tensors stay alive, so that no other one gets the same ``id``.
    for holding in adapter.memory():
        data = holding.data
        if holding.part == GRADIENT or holding.in_tree or isinstance(data, FileRange) or id(data) in seen:
            continue
        seen[id(data)] = data
        if not (storages_on_disk and is_on_disk(data)):
            yield f"{holding.part}/{holding.name}", data
