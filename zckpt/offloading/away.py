"""What this rank has moved from an engine's memory to disk, and the guard of the engine's methods until it is back."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, cast

from zckpt.engines.away import AWAY, Away, away, storages_on_disk
from zckpt.engines.hooks import before_calls
from zckpt.errors import FormatError, OffloadedError, StorageError, UnsupportedError, ZckptError, first_few
from zckpt.offloading.files import Moved, read_back
from zckpt.offloading.memory import fresh_memory, give_memory, is_movable, is_pinned, take_memory
from zckpt.offloading.parts import in_order
from zckpt.offloading.scratch import close_in_background
from zckpt.plan.inventory import FileRange
from zckpt.system import linux
from zckpt.system.available import available_bytes
from zckpt.system.threads import Worker, stop
from zckpt.transfer.memory import not_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from zckpt.engines.contract import EngineAdapter, UsingMethod
    from zckpt.offloading.scratch import ScratchRange
    from zckpt.plan.inventory import Holding
    from zckpt.ranks.collectives import Ranks
    from zckpt.transfer.budget import Budget

LOST_HINT = "restore the engine from a checkpoint: zckpt.restore(engine, path)"
READ_AHEAD_BYTES = 128 << 10
"""How many bytes one call asks the kernel to read ahead. It reads no more than this."""


def moved_from(storage: torch.UntypedStorage) -> Moved | None:
    """Returns the record of a storage that is on disk, or None if it is in memory."""
    return cast("Moved | None", storages_on_disk.get(storage._cdata))


def storage_of(holding: Holding) -> torch.UntypedStorage:
    """Returns the storage of a holding in memory. Raises UnsupportedError if its values are not in a storage."""
    assert not isinstance(holding.data, FileRange), "the holding is in memory"
    why = not_plain(holding.data)
    if why is not None:
        raise UnsupportedError(f"{holding.part}/{holding.name} {why}")
    return holding.data.untyped_storage()


def storages(adapter: EngineAdapter, parts: Collection[str]) -> list[Moved]:
    """Returns the storages in memory that hold nothing but these parts, each once. It leaves out those that are on disk
    already, those that another process can see, and those of values that a checkpoint has in a tree."""
    found: dict[int, tuple[torch.UntypedStorage, list[Holding]]] = {}
    locked = linux.locked_ranges()
    for holding in adapter.memory():
        if isinstance(holding.data, FileRange):
            continue
        storage = storage_of(holding)
        found.setdefault(storage._cdata, (storage, []))[-1].append(holding)
    moved = []
    for cdata, (storage, on_it) in found.items():
        own_parts, workspace = {holding.part for holding in on_it}, all(holding.workspace for holding in on_it)
        in_tree = any(holding.in_tree for holding in on_it)
        if own_parts <= {*parts} and not in_tree and cdata not in storages_on_disk and is_movable(storage, locked):
            moved.append(Moved(storage, in_order(own_parts), on_it[0].name, is_pinned(storage), workspace))
    return moved


def keys_of(adapter: EngineAdapter, moved: Moved, start: int, stop: int) -> list[str]:
    """Returns the keys of the tensors that have bytes [start, stop) of a storage. For states that no checkpoint has,
    such as gradients, it returns their names."""
    tensors = [(fragment.key, fragment.data) for fragment in adapter.inventory(adapter.parts).fragments]
    others = [(f"{holding.part}/{holding.name}", holding.data) for holding in adapter.memory()]
    for named in (tensors, others):
        keys = [
            key for key, data in named if not isinstance(data, FileRange | None) and _meets(data, moved, start, stop)
        ]
        if keys:
            return list(dict.fromkeys(keys))
    return [moved.name]


def _meets(tensor: torch.Tensor, moved: Moved, start: int, stop: int) -> bool:
    first = int(tensor.storage_offset()) * tensor.itemsize
    same = tensor.untyped_storage()._cdata == moved.storage._cdata
    return same and first < stop and first + tensor.numel() * tensor.itemsize > start


def _read_ahead(file_ranges: Sequence[ScratchRange], stopped: Event) -> None:
    left_bytes = available_bytes() // 2
    for file_range in file_ranges:
        with suppress(ZckptError):  # if the file cannot be opened, the read that comes later says why
            fd = file_range.file.open(os.O_RDONLY)
            try:
                for offset in range(
                    file_range.offset, file_range.offset + min(file_range.nbytes, left_bytes), READ_AHEAD_BYTES
                ):
                    if stopped.is_set():
                        return
                    linux.read_ahead(fd, offset, READ_AHEAD_BYTES)
            finally:
                os.close(fd)
        left_bytes = max(left_bytes - file_range.nbytes, 0)


@dataclass
class Back:
    """What a rank could not bring back into memory."""

    left: tuple[str, ...] = ()
    """The parts of which something is still on disk."""
    lost: dict[str, str] = field(default_factory=dict)
    """The keys that cannot be brought back, and the reason of each, as in ``Away``."""
    error: FormatError | StorageError | None = None
    """The first error, if there was one."""


class MovedStorages(Away):
    """The storages of one engine that this rank has moved to disk, and the guard of the engine's methods."""

    def __init__(self, engine: object, uses: Iterable[UsingMethod]) -> None:
        """``uses`` are the calls of the engine that use the state."""
        self.parts, self.lost = frozenset(), {}
        self.bring_back: Callable[[str, Collection[str]], None] | None = None
        """Brings parts back for a call that uses them, on all ranks. Its arguments are the name of the call and the
        parts. If it is None, such a call is refused."""
        self.moved: list[Moved] = []
        """The storages of this rank that are on disk."""
        self.wait: Callable[[], None] = lambda: None
        """Waits until the offload in the background has ended."""
        self._engine = engine
        self._ahead: list[Worker] = []
        self._stopped = Event()
        self._undo = before_calls(
            (use.owner, use.method, partial(self._check, use.called or use.method, use.parts)) for use in uses
        )
        setattr(engine, AWAY, self)

    def note_on_disk(self, parts: Iterable[str], lost: Mapping[str, str]) -> None:
        self.parts, self.lost = frozenset(parts), dict(lost)
        if not self.parts and not self.lost:
            self._undo()
            vars(self._engine).pop(AWAY, None)

    def detach(self, moved: Sequence[Moved]) -> None:
        """Takes the memory away from storages that have been written, so that other code cannot change it any more."""
        for record in moved:
            record.memory = take_memory(record.storage)
            storages_on_disk[record.storage._cdata] = record
        self.moved += moved

    def attach(self, moved: Sequence[Moved]) -> None:
        """Gives their memory back to storages that ``detach`` has taken it from, and that are not free yet."""
        self._put_back(moved, [record.memory for record in moved if record.memory is not None])

    def free(self, parts: Collection[str]) -> None:
        """Frees the memory that ``detach`` has taken. ``parts`` are the parts of all ranks."""
        for record in self.moved:
            record.memory = None
        self.parts |= {*parts}

    def bring(self, parts: Collection[str], adapter: EngineAdapter, budget: Budget, *, verify: bool) -> Back:
        """Reads the storages of these parts into new memory. A storage that cannot be read stays on disk. Raises
        DeviceError if there is too little memory. Then more storages stay on disk."""
        self._stop_reading_ahead()
        records = [record for record in self.moved if not {*parts}.isdisjoint(record.parts)]
        back = Back()
        try:
            self._put_back(records, read_back(records, budget, verify=verify))
        except (FormatError, StorageError):
            for record in records:
                try:
                    self._put_back([record], read_back([record], budget, verify=verify))
                except (FormatError, StorageError) as error:
                    start = record.start if error.start is None else error.start
                    stop = record.start + record.nbytes if error.stop is None else error.stop
                    error.key = first_few(keys_of(adapter, record, start - record.start, stop - record.start), 3)
                    error.hint = LOST_HINT
                    back.error = back.error or error
                    back.lost.update(dict.fromkeys(keys_of(adapter, record, 0, record.nbytes), error.message))
        back.left = in_order({part for record in self.moved for part in record.parts})
        return back

    def read_ahead(self, parts: Collection[str]) -> None:
        """Starts a thread that reads the storages of these parts into the page cache, up to half of the available
        memory. The system can take that memory back."""
        self._stop_reading_ahead()
        records = (record for record in self.moved if not record.workspace and not {*parts}.isdisjoint(record.parts))
        file_ranges = [record.file_range(0, record.nbytes) for record in records]
        if file_ranges:
            self._stopped = Event()
            self._ahead = [Worker(partial(_read_ahead, file_ranges, self._stopped), "zckpt-read-ahead", daemon=True)]
            with suppress(ZckptError):  # the system allows no more threads
                self._ahead[0].start()

    def _stop_reading_ahead(self) -> None:
        self._stopped.set()
        stop(self._ahead)

    def replace_lost(self) -> None:
        """Gives new memory, filled with zeros, to the storages that are still on disk."""
        records = [*self.moved]
        self._put_back(records, [fresh_memory(record.storage, pinned=record.pinned).zero_() for record in records])

    def _put_back(self, moved: Sequence[Moved], memory: Sequence[torch.Tensor]) -> None:
        for record, fresh in zip(moved, memory, strict=True):
            give_memory(record.storage, fresh)
            record.memory = None
            storages_on_disk.pop(record.storage._cdata, None)
        self.moved = [record for record in self.moved if record not in {*moved}]
        used = {record.saved for record in self.moved}
        close_in_background(
            record.saved.file for record in moved if record.saved is not None and record.saved not in used
        )

    def _check(self, call: str, needed: Collection[str] | None) -> None:
        """Is called before a call that uses these parts. Raises OffloadedError unless the parts can be brought back."""
        self.wait()
        self.refuse_lost(call)
        out = in_order(self.parts if needed is None else self.parts & {*needed})
        if not out:
            return
        if self.bring_back is None:
            raise OffloadedError(
                f"{call} uses {', '.join(out)}, which zckpt.offload has moved to disk",
                hint="call zckpt.reload(engine) first, on every rank, or pass auto=True to zckpt.offload; "
                "zckpt.write and zckpt.export need no reload",
            )
        self.bring_back(call, out)

    def refuse_lost(self, call: str) -> None:
        if self.lost:
            key, why = next(iter(self.lost.items()))
            raise OffloadedError(
                f"{call}: {first_few([*self.lost], 3)} could not be brought back: {why}", key=key, hint=LOST_HINT
            )

    def bring_back_to_restore(self, kept: Collection[str], ranks: Ranks, budget: Budget | None) -> None:
        from zckpt.offloading.offload import bring_back_to_restore

        bring_back_to_restore(self._engine, self, kept, ranks, budget)


def away_of(engine: object) -> MovedStorages | None:
    """Returns what ``zckpt.offload`` has moved of an engine, or None if all of it is in memory."""
    return cast("MovedStorages | None", away(engine))
