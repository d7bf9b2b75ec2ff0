"""Reports where the state of a live engine is, and what the operating system and the accelerator say about memory."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zckpt.engines import adapt, group_of
from zckpt.errors import UnsupportedError
from zckpt.offloading.away import moved_from, storage_of
from zckpt.offloading.memory import is_locked, is_pinned
from zckpt.plan.inventory import BUFFER, GRADIENT, MASTER, PARAM, FileRange
from zckpt.ranks.collectives import Ranks
from zckpt.system.available import available_bytes
from zckpt.system.linux import locked_ranges, resident_bytes
from zckpt.transfer.devices import used_bytes
from zckpt.transfer.torch_dtypes import torch_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from zckpt.engines.contract import EngineAdapter

TIERS = ("device", "pinned", "pageable", "nvme", "offloaded")
"""The kinds of places where a state can be. "device" is the memory of a device. "pinned" is host memory that torch has
pinned or that is locked. "pageable" is other host memory. "nvme" is a swap file of the framework. "offloaded" is a
scratch file of ``zckpt.offload``, or nothing at all for a buffer whose values nobody needs."""
_LAST_PARTS = (PARAM, BUFFER, GRADIENT)
"""The parts that are shown last, in this order."""
_COLUMNS = 8
"""The number of ranks that are shown side by side in a table. Further ranks follow in further tables."""
_MEMORY_ROWS = {
    "resident memory": "resident_bytes",
    "available memory": "available_bytes",
    "device allocated": "allocated_bytes",
    "device reserved": "reserved_bytes",
}
"""The fields of ``RankMemory`` by their labels in the table."""


@dataclass(frozen=True, slots=True)
class PlacementEntry:
    """The bytes of one part of the state that one rank holds in one place."""

    rank: int
    """The rank that holds the bytes."""
    part: str
    """The name of the part, such as ``master``, ``exp_avg``, ``param``, ``buffer`` or ``gradient``."""
    dtype: str
    """Torch's name of the dtype, such as ``float32``."""
    tier: str
    """The kind of place: "device", "pinned", "pageable", "nvme" or "offloaded"."""
    nbytes: int
    """The size of the storages in bytes, with their padding. For a swap file, this is the space that the file takes on
    the disk."""
    path: str | None
    """The path of the swap file, or the directory that was given to ``zckpt.offload``. It is None for memory, and for
    offloaded buffers that were not written because nobody needs their values."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank, as the operating system and the accelerator report it. A number is None if they do not
    report it."""

    rank: int
    """The number of the rank."""
    resident_bytes: int | None
    """The number of bytes of memory that the process has, not only for the state."""
    available_bytes: int | None
    """The number of bytes of memory that the process could still take on its machine."""
    allocated_bytes: int | None
    """The number of bytes on the engine's devices that torch's allocator has given to tensors."""
    reserved_bytes: int | None
    """The number of bytes on the engine's devices that torch's allocator has taken from the devices."""
    free_bytes: Mapping[str, int]
    """The number of bytes that are free on the disk, for each directory that has files of the state."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of ``zckpt.where`` for all ranks. ``str()`` of it is a table."""

    entries: tuple[PlacementEntry, ...]
    """The bytes of the state that each rank holds. There is one entry for each rank, part, dtype, tier and path."""
    ranks: tuple[RankMemory, ...]
    """The memory of each rank."""

    def total(self, tier: str) -> int:
        """Returns the number of bytes that all parts on all ranks have in one tier.

        Args:
            tier: the name of the tier, such as "device".

        Returns:
            The number of bytes.

        Raises:
            ValueError: there is no such tier.
        """
        if tier not in TIERS:
            raise ValueError(f"there is no tier {tier!r}; the tiers are {', '.join(TIERS)}")
        return sum(entry.nbytes for entry in self.entries if entry.tier == tier)

    def __str__(self) -> str:
        numbers = [memory.rank for memory in self.ranks]
        blocks = [numbers[start : start + _COLUMNS] for start in range(0, len(numbers), _COLUMNS)]
        return "\n".join([*(self._table(block, last=block is blocks[-1]) for block in blocks), *self._directories()])

    def _table(self, ranks: Sequence[int], *, last: bool) -> str:
        """Returns a table of these ranks. ``last``: whether it has a column for the sums over all ranks of the job."""
        sums: dict[tuple[str, str, str], Counter[int]] = {}
        for entry in self.entries:
            for row in ((entry.part, entry.dtype, entry.tier), ("all parts", "", entry.tier)):
                sums.setdefault(row, Counter())[entry.rank] += entry.nbytes
        rows = [["part", "dtype", "tier", *(f"rank {rank}" for rank in ranks), *(["all ranks"] if last else [])]]
        for row in sorted(sums, key=_place_in_table):
            of_ranks = [*(sums[row][rank] for rank in ranks), *([sums[row].total()] if last else [])]
            rows.append([*row, *map(_size, of_ranks)])
        for label, field in _MEMORY_ROWS.items():
            numbers = [getattr(self.ranks[rank], field) for rank in ranks]
            if any(number is not None for number in numbers):
                cells = ["" if number is None else _size(number) for number in numbers]
                rows.append([label, "", "", *cells, *([""] if last else [])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        formats = [f"{'<' if column < 3 else '>'}{width}" for column, width in enumerate(widths)]
        lines = ("  ".join(map(format, row, formats)).rstrip() for row in rows)
        return "".join(f"{line}\n" for line in lines)

    def _directories(self) -> Iterator[str]:
        nbytes: Counter[tuple[int, str]] = Counter()
        for entry in self.entries:
            if entry.path is not None:
                nbytes[entry.rank, _directory(entry.tier, entry.path)] += entry.nbytes
        for (rank, directory), used in sorted(nbytes.items()):
            free = self.ranks[rank].free_bytes.get(directory)
            remaining = "" if free is None else f", {_size(free)} free"
            yield f"rank {rank}: {_size(used)} in {directory}{remaining}"


def where(engine: object) -> Placement:
    """Returns where the state of a live engine is: the bytes of every part and of the gradients, on every rank.

    The result also has what the operating system and the accelerator report about memory. ``print`` shows it as a
    table.

    Each storage is counted once, as a whole, in the place where it is now. If it holds several parts, as the parameters
    of an engine in fp32 may, it is counted for the first of them, and ``master`` comes before all others. Buffers
    through which a framework moves the state that it needs next are not counted.

    Every rank of the engine has to call this. It changes nothing, and it may be called at any time.

    Args:
        engine: the training engine.

    Returns:
        The bytes by rank, part and tier. Every rank gets the entries of all ranks.

    Raises:
        UnsupportedError: zckpt does not support the engine.
        RankError: another rank has failed or is lost.
    """
    ranks = Ranks(group_of(engine), call="zckpt.where")
    rows = ranks.decide(lambda: _look(adapt(engine)), list, "look where the state is")
    entries = [PlacementEntry(rank, *fields) for rank, (of_rank, _) in enumerate(rows) for fields in of_rank]
    return Placement(tuple(entries), tuple(RankMemory(rank, *fields) for rank, (_, fields) in enumerate(rows)))


def _look(adapter: EngineAdapter) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
    """Returns the fields of this rank's entries and those of its ``RankMemory``, both without the rank."""
    adapter.refuse_unsupported(drop_gradients=True, leave_out=True)
    sums: Counter[tuple[str, str, str, str | None]] = Counter()
    seen: set[int | str] = set()
    locked = locked_ranges()
    for holding in adapter.memory():
        place: int | str
        path: str | None
        if isinstance(holding.data, FileRange):
            place, tier, path = holding.data.path, "nvme", holding.data.path
            nbytes = _on_disk(path)
        else:
            storage = storage_of(holding)
            place, nbytes, moved = storage._cdata, storage.nbytes(), moved_from(storage)
            path = moved.saved.file.directory if moved is not None and moved.saved is not None else None
            tier = "offloaded" if moved is not None else _tier(storage, locked)
        if place not in seen:
            seen.add(place)
            sums[holding.part, torch_name(holding.dtype), tier, path] += nbytes
    entries = [(part, dtype, tier, nbytes, path) for (part, dtype, tier, path), nbytes in sums.items()]
    used = [numbers for device in adapter.devices if (numbers := used_bytes(device)) is not None]
    allocated, reserved = (sum(numbers) for numbers in zip(*used, strict=True)) if used else (None, None)
    available = None
    with suppress(UnsupportedError):  # Not every operating system reports it.
        available = available_bytes()
    directories = {_directory(tier, path) for _, _, tier, path in sums if path is not None}
    free = {}
    for directory in directories:
        with suppress(OSError):  # Another process may have removed the directory.
            free[directory] = shutil.disk_usage(directory).free
    return entries, (resident_bytes(), available, allocated, reserved, free)


def _tier(storage: torch.UntypedStorage, locked: Sequence[tuple[int, int]]) -> str:
    if storage.device.type != "cpu":
        return "device"
    # DeepSpeed can lock memory in its own way, which torch does not notice.
    return "pinned" if is_locked(storage, locked) or is_pinned(storage) else "pageable"


def _on_disk(path: str) -> int:
    """Returns the space in bytes that a file takes on the disk, or 0 if the framework has not written it yet."""
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
