"""Where the state of a live engine is, as its tensors and files tell, and what the system and the accelerator say."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zckpt.engines import adapt, group_of
from zckpt.errors import UnsupportedError
from zckpt.offloading.away import moved_from
from zckpt.offloading.memory import is_locked
from zckpt.ranks.collectives import Ranks
from zckpt.state.inventory import BUFFER, GRADIENT, MASTER, PARAM, FileSpan
from zckpt.system.available import available_bytes
from zckpt.system.linux import locked_ranges, resident_bytes
from zckpt.transfer.devices import used_bytes
from zckpt.transfer.torch_dtypes import torch_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from zckpt.engines.contract import EngineAdapter

TIERS = ("device", "pinned", "pageable", "nvme", "offloaded")
"""The memory of a device; host memory that torch has pinned or the system has locked; other host memory; swap files of
the framework; what zckpt.offload has moved out, to scratch files."""
_LAST_PARTS = (PARAM, BUFFER, GRADIENT)
_COLUMNS = 8
"""How many ranks stand beside each other in a table. The others come below."""
_TOLD = {
    "resident memory": "resident_bytes",
    "available memory": "available_bytes",
    "device allocated": "allocated_bytes",
    "device reserved": "reserved_bytes",
}
"""Maps the words of the table to the fields of ``RankMemory``."""


@dataclass(frozen=True, slots=True)
class PlacementEntry:
    """What one rank holds of one part of the state in one place."""

    rank: int
    """The rank that holds it."""
    part: str
    """The part of the state, such as ``master``, ``exp_avg``, ``param``, ``buffer`` or ``gradient``."""
    dtype: str
    """Torch's name of the dtype, such as ``float32``."""
    tier: str
    """The kind of place: "device", "pinned", "pageable", "nvme" or "offloaded"."""
    nbytes: int
    """The bytes that the storages take, with their padding. For a swap file, it is what the file takes on the disk."""
    path: str | None
    """The swap file, or the directory that was given to ``zckpt.offload``. It is None for memory, and for what was
    offloaded without being written because nobody needs its values."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What the operating system and the accelerator say about the memory of one rank. A figure is None where they do
    not say it."""

    rank: int
    """The rank."""
    resident_bytes: int | None
    """All memory that the process has, not only that of the state."""
    available_bytes: int | None
    """How much more the process could take on its machine."""
    allocated_bytes: int | None
    """What torch's allocator has given to tensors on the engine's devices."""
    reserved_bytes: int | None
    """What torch's allocator has taken from these devices."""
    free_bytes: Mapping[str, int]
    """The space that is free on the disk of each directory in which there are files of the state."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What ``zckpt.where`` has found, on all ranks. ``str()`` of it is a table."""

    entries: tuple[PlacementEntry, ...]
    """What each rank holds: one entry for each rank, part, dtype, tier and path."""
    ranks: tuple[RankMemory, ...]
    """The memory of each rank."""

    def total(self, tier: str) -> int:
        """The bytes that all parts on all ranks have in one tier. Raises ValueError where there is no such tier."""
        if tier not in TIERS:
            raise ValueError(f"there is no tier {tier!r}; the tiers are {', '.join(TIERS)}")
        return sum(entry.nbytes for entry in self.entries if entry.tier == tier)

    def __str__(self) -> str:
        numbers = [one.rank for one in self.ranks]
        blocks = [numbers[start : start + _COLUMNS] for start in range(0, len(numbers), _COLUMNS)]
        return "\n".join([*(self._table(block, last=block is blocks[-1]) for block in blocks), *self._directories()])

    def _table(self, ranks: Sequence[int], *, last: bool) -> str:
        """``last``: with a column for the sum of all ranks, not only these."""
        sums: dict[tuple[str, str, str], Counter[int]] = {}
        for one in self.entries:
            for row in ((one.part, one.dtype, one.tier), ("all parts", "", one.tier)):
                sums.setdefault(row, Counter())[one.rank] += one.nbytes
        rows = [["part", "dtype", "tier", *(f"rank {rank}" for rank in ranks), *(["all ranks"] if last else [])]]
        for row in sorted(sums, key=_place_in_table):
            of_ranks = [*(sums[row][rank] for rank in ranks), *([sums[row].total()] if last else [])]
            rows.append([*row, *map(_size, of_ranks)])
        for label, field in _TOLD.items():
            told = [getattr(self.ranks[rank], field) for rank in ranks]
            if any(one is not None for one in told):
                cells = ["" if one is None else _size(one) for one in told]
                rows.append([label, "", "", *cells, *([""] if last else [])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        formats = [f"{'<' if column < 3 else '>'}{width}" for column, width in enumerate(widths)]
        lines = ("  ".join(map(format, row, formats)).rstrip() for row in rows)
        return "".join(f"{line}\n" for line in lines)

    def _directories(self) -> Iterator[str]:
        nbytes: Counter[tuple[int, str]] = Counter()
        for one in self.entries:
            if one.path is not None:
                nbytes[one.rank, _directory(one.tier, one.path)] += one.nbytes
        for (rank, directory), taken in sorted(nbytes.items()):
            free = self.ranks[rank].free_bytes.get(directory)
            left = "" if free is None else f", {_size(free)} free"
            yield f"rank {rank}: {_size(taken)} in {directory}{left}"


def where(engine: object) -> Placement:
    """Where the state of a live engine is: every part of it, on every rank, and its gradients, in bytes, beside what
    the operating system and the accelerator say. ``print`` it for a table.

    Each storage counts once, whole, and where it is now; what the engine is configured to do does not matter. If it
    holds several parts, as the parameters of an engine in fp32 may, it counts for the first of them, ``master`` before
    all others. Buffers through which a framework swaps whatever it needs next are no state and are not counted.

    Every rank over which the engine is spread calls it, and each gets the whole answer. It changes nothing, and may be
    called at any time. Raises UnsupportedError for an engine that could not be written, and RankError.
    """
    ranks = Ranks(group_of(engine), call="zckpt.where")
    found = ranks.share(lambda: _look(adapt(engine)), "look where the state is")
    entries = [PlacementEntry(rank, *entry) for rank, (own, _) in enumerate(found) for entry in own]
    return Placement(tuple(entries), tuple(RankMemory(rank, *told) for rank, (_, told) in enumerate(found)))


def _look(adapter: EngineAdapter) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
    """The fields of this rank's entries, and those of its ``RankMemory``, without the rank."""
    adapter.refuse_unsupported(drop_gradients=True)
    sums: Counter[tuple[str, str, str, str | None]] = Counter()
    seen: set[int | str] = set()
    locked = locked_ranges()
    for one in adapter.memory():
        place: int | str
        path: str | None
        if isinstance(one.data, FileSpan):
            place, tier, nbytes, path = one.data.path, "nvme", _on_disk(one.data.path), one.data.path
        else:
            storage = one.data.untyped_storage()
            place, nbytes, moved = storage._cdata, storage.nbytes(), moved_from(storage)
            path = moved.saved.file.directory if moved is not None and moved.saved is not None else None
            tier = "offloaded" if moved is not None else _tier(storage, locked)
        if place not in seen:
            seen.add(place)
            sums[one.part, torch_name(one.dtype), tier, path] += nbytes
    entries = [(part, dtype, tier, nbytes, path) for (part, dtype, tier, path), nbytes in sums.items()]
    used = [found for device in adapter.devices if (found := used_bytes(device)) is not None]
    allocated, reserved = (sum(numbers) for numbers in zip(*used, strict=True)) if used else (None, None)
    available = None
    with suppress(UnsupportedError):  # this system does not tell
        available = available_bytes()
    directories = {_directory(tier, path) for _, _, tier, path in sums if path is not None}
    free = {}
    for directory in directories:
        with suppress(OSError):  # somebody has removed it
            free[directory] = shutil.disk_usage(directory).free
    return entries, (resident_bytes(), available, allocated, reserved, free)


def _tier(storage: torch.UntypedStorage, locked: Sequence[tuple[int, int]]) -> str:
    if storage.device.type != "cpu":
        return "device"
    # DeepSpeed can pin memory in its own way, of which torch does not know.
    return "pinned" if is_locked(storage, locked) or storage.is_pinned() else "pageable"


def _on_disk(path: str) -> int:
    """The bytes that a file takes; 0 if the framework has not written it yet."""
    with suppress(FileNotFoundError):
        return os.stat(path).st_blocks * 512
    return 0


def _directory(tier: str, path: str) -> str:
    return path if tier == "offloaded" else os.path.dirname(path)


def _place_in_table(row: tuple[str, str, str]) -> tuple[object, ...]:
    part, dtype, tier = row
    last = _LAST_PARTS.index(part) if part in _LAST_PARTS else -1
    return part == "all parts", part != MASTER, last, part, dtype, TIERS.index(tier)


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} B"
    size, units = nbytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:,.1f} {units[0]}"
