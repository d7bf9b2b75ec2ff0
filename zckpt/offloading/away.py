"""What an engine has on disk instead of in memory, on this rank, and the guard of its methods meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from zckpt.engines.hooks import before_calls
from zckpt.errors import FormatError, OffloadedError, StorageError, ZckptError, first_few
from zckpt.offloading.files import Moved, read_back
from zckpt.offloading.memory import fresh_memory, give_memory, is_movable, is_pinned, take_memory
from zckpt.offloading.parts import in_order
from zckpt.state.inventory import FileSpan
from zckpt.storage.scratch import close_in_background
from zckpt.system import linux
from zckpt.system.available import available_bytes
from zckpt.system.threads import Worker, stop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from zckpt.engines.contract import EngineAdapter, Use
    from zckpt.state.inventory import Holding
    from zckpt.storage.scratch import ScratchSpan
    from zckpt.transfer.budget import Budget

LOST_HINT = "restore the engine from a checkpoint: zckpt.restore(engine, path)"
READ_AHEAD_BYTES = 128 << 10
"""How much one call asks for: the kernel reads no more ahead than that."""

_AWAY = "_zckpt_away"
"""The attribute of an engine with its ``Away``. A table of all engines would keep them alive, since an ``Away`` refers
to its engine."""
_storages: WeakValueDictionary[int, Moved] = WeakValueDictionary()
"""Everything that is out, by the address of torch's own object for the storage, which lives as long as the storage."""


def away(engine: object) -> Away | None:
    """What is out of an engine; None if all is in memory."""
    return getattr(engine, _AWAY, None)


def place_of(tensor: torch.Tensor) -> FileSpan | None:
    """Where the bytes of a contiguous tensor are that were moved to disk; None if they are in memory."""
    moved = _storages.get(tensor.untyped_storage()._cdata)
    if moved is None:
        return None
    return moved.span(int(tensor.storage_offset()) * tensor.itemsize, tensor.numel() * tensor.itemsize)


def moved_from(storage: torch.UntypedStorage) -> Moved | None:
    """What became of a storage that was moved; None if it is in memory."""
    return _storages.get(storage._cdata)


def storages(adapter: EngineAdapter, parts: Collection[str]) -> list[Moved]:
    """The storages in memory that hold nothing but these parts, each once. Those that are on disk already are left
    out, and those that another process can see."""
    found: dict[int, tuple[torch.UntypedStorage, list[Holding]]] = {}
    locked = linux.locked_ranges()
    for holding in adapter.memory():
        if isinstance(holding.data, FileSpan):
            continue
        storage = holding.data.untyped_storage()
        found.setdefault(storage._cdata, (storage, []))[-1].append(holding)
    moved = []
    for cdata, (storage, on_it) in found.items():
        own, workspace = {one.part for one in on_it}, all(one.workspace for one in on_it)
        if own <= {*parts} and cdata not in _storages and is_movable(storage, locked):
            moved.append(Moved(storage, in_order(own), on_it[0].name, is_pinned(storage), workspace))
    return moved


def keys_of(adapter: EngineAdapter, moved: Moved, start: int, stop: int) -> list[str]:
    """The keys of the tensors that have bytes [start, stop) of a storage; where no checkpoint has these, such as
    gradients, the names of what lies there."""
    tensors = [(one.key, one.data) for one in adapter.inventory(adapter.parts).fragments]
    others = [(f"{one.part}/{one.name}", one.data) for one in adapter.memory()]
    for named in (tensors, others):
        found = [
            key for key, data in named if not isinstance(data, FileSpan | None) and _meets(data, moved, start, stop)
        ]
        if found:
            return list(dict.fromkeys(found))
    return [moved.name]


def _meets(tensor: torch.Tensor, moved: Moved, start: int, stop: int) -> bool:
    first = int(tensor.storage_offset()) * tensor.itemsize
    same = tensor.untyped_storage()._cdata == moved.storage._cdata
    return same and first < stop and first + tensor.numel() * tensor.itemsize > start


def _read_ahead(spans: Sequence[ScratchSpan], stopped: Event) -> None:
    left = available_bytes() // 2
    for span in spans:
        with suppress(ZckptError):  # what is wrong shows when it is read
            fd = span.file.open(os.O_RDONLY)
            try:
                for offset in range(span.offset, span.offset + min(span.nbytes, left), READ_AHEAD_BYTES):
                    if stopped.is_set():
                        return
                    linux.read_ahead(fd, offset, READ_AHEAD_BYTES)
            finally:
                os.close(fd)
        left = max(left - span.nbytes, 0)


@dataclass
class Back:
    """What a rank could not bring back."""

    left: tuple[str, ...] = ()
    """The parts of which something is still out."""
    lost: dict[str, str] = field(default_factory=dict)
    """The keys that cannot be brought back, and why, as in ``Away``."""
    error: FormatError | StorageError | None = None
    """The first error."""


class Away:
    """What was moved out of one engine, on this rank. ``parts`` and ``lost`` are equal on all ranks."""

    def __init__(self, engine: object, uses: Iterable[Use]) -> None:
        """``uses``: the calls that touch the state."""
        self.parts: frozenset[str] = frozenset()
        """The parts that are out on any rank."""
        self.lost: dict[str, str] = {}
        """Maps the keys of tensors that no reload can bring back to the reason why."""
        self.bring_back: Callable[[Collection[str]], None] | None = None
        """Brings parts back for a call that uses them, on all ranks; None: such a call is refused."""
        self.moved: list[Moved] = []
        """The storages of this rank that are out."""
        self.wait: Callable[[], None] = lambda: None
        """Waits until nothing is being moved out in the background."""
        self._engine = engine
        self._ahead: list[Worker] = []
        self._stopped = Event()
        self._undo = before_calls(
            (use.owner, use.method, partial(self._check, use.called or use.method, use.parts)) for use in uses
        )
        setattr(engine, _AWAY, self)

    def settled(self, parts: Iterable[str], lost: Mapping[str, str]) -> None:
        """On all ranks: these parts are out, and these keys are lost. If there are none, it is as if nothing had ever
        been out."""
        self.parts, self.lost = frozenset(parts), dict(lost)
        if not self.parts and not self.lost:
            self._undo()
            vars(self._engine).pop(_AWAY, None)

    def take(self, moved: Sequence[Moved], parts: Collection[str]) -> None:
        """Takes the memory from storages that have been written. ``parts``: those of all ranks."""
        for one in moved:
            take_memory(one.storage)
            _storages[one.storage._cdata] = one
        self.moved += moved
        self.parts |= {*parts}

    def bring(self, parts: Collection[str], adapter: EngineAdapter, budget: Budget, *, verify: bool) -> Back:
        """Reads the storages of these parts into new memory. What cannot be read stays out. Raises DeviceError where
        there is too little memory; then more stays out."""
        self._stop_reading_ahead()
        wanted = [one for one in self.moved if not {*parts}.isdisjoint(one.parts)]
        back = Back()
        try:
            self._put_back(wanted, read_back(wanted, budget, verify=verify))
        except (FormatError, StorageError):
            for one in wanted:
                try:
                    self._put_back([one], read_back([one], budget, verify=verify))
                except (FormatError, StorageError) as error:
                    start, stop = (0, one.nbytes) if error.start is None else (error.start, error.stop)
                    error.key = first_few(keys_of(adapter, one, start - one.start, (stop or one.nbytes) - one.start), 3)
                    error.hint = LOST_HINT
                    back.error = back.error or error
                    back.lost.update(dict.fromkeys(keys_of(adapter, one, 0, one.nbytes), error.message))
        back.left = in_order({part for one in self.moved for part in one.parts})
        return back

    def read_ahead(self, parts: Collection[str]) -> None:
        """Has a thread read the storages of these parts into the page cache, up to half of the memory that is
        available. The system can take that back."""
        self._stop_reading_ahead()
        wanted = (one for one in self.moved if not one.workspace and not {*parts}.isdisjoint(one.parts))
        spans = [one.span(0, one.nbytes) for one in wanted]
        if spans:
            self._stopped = Event()
            self._ahead = [Worker(partial(_read_ahead, spans, self._stopped), "zckpt-read-ahead", daemon=True)]
            with suppress(RuntimeError):  # the system has no thread left
                self._ahead[0].start()

    def _stop_reading_ahead(self) -> None:
        self._stopped.set()
        stop(self._ahead)

    def replace_lost(self) -> None:
        """Gives new memory, filled with zeros, to the storages that are still out."""
        left = [*self.moved]
        self._put_back(left, [fresh_memory(one.storage, pinned=one.pinned).zero_() for one in left])

    def _put_back(self, moved: Sequence[Moved], memory: Sequence[torch.Tensor]) -> None:
        for one, own in zip(moved, memory, strict=True):
            give_memory(one.storage, own)
            _storages.pop(one.storage._cdata, None)
        self.moved = [one for one in self.moved if one not in {*moved}]
        used = {one.saved for one in self.moved}
        close_in_background(one.saved.file for one in moved if one.saved is not None and one.saved not in used)

    def _check(self, call: str, needed: Collection[str] | None) -> None:
        """Before a call that uses these parts. Raises OffloadedError, unless they can be brought back."""
        self.wait()
        self.refuse_lost(call)
        out = in_order(self.parts if needed is None else self.parts & {*needed})
        if not out:
            return
        if self.bring_back is None:
            raise OffloadedError(
                f"{call} uses {', '.join(out)}, which zckpt.offload has moved to disk",
                hint="call zckpt.reload(engine) first, on every rank, or pass auto=True to zckpt.offload",
            )
        self.bring_back(out)

    def refuse_lost(self, call: str) -> None:
        """Raises OffloadedError if something is lost."""
        if self.lost:
            key, why = next(iter(self.lost.items()))
            raise OffloadedError(
                f"{call}: {first_few([*self.lost], 3)} could not be brought back: {why}", key=key, hint=LOST_HINT
            )
