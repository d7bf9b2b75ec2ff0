"""The states of a live engine to files on a local disk and back, so that their memory is free meanwhile."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from zckpt.api.background import Background, wait
from zckpt.engines import adapt, group_of
from zckpt.errors import MismatchError, RankError, first_few
from zckpt.offloading.away import LOST_HINT, Away, Back, away, storages
from zckpt.offloading.files import write_out
from zckpt.offloading.memory import check_supported, give_back
from zckpt.offloading.parts import chosen, in_order, movable, next_in_use
from zckpt.plan.select import several
from zckpt.ranks.collectives import Ranks, check_arguments, comparable
from zckpt.state.inventory import MASTER, PARAM
from zckpt.storage.scratch import scratch_directory, wait_for_closing
from zckpt.transfer.budget import Budget, flag
from zckpt.transfer.devices import synchronize
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from zckpt.offloading.files import Moved
    from zckpt.storage.location import StrPath


class Offloaded:
    """What ``zckpt.offload`` returns."""

    def __init__(self, parts: tuple[str, ...] = (), nbytes: int = 0, pending: Background | None = None) -> None:
        self.parts = parts
        """The parts of which something is moved on at least one rank."""
        self.nbytes = nbytes
        """The number of bytes of memory that are freed on this rank. Some of them belong to buffers whose values nobody
        needs, which are not written."""
        self._pending = pending

    def __repr__(self) -> str:
        return f"<zckpt.Offloaded {', '.join(self.parts) or 'nothing'}: {self.nbytes} bytes>"

    def wait(self, timeout: float | None = None) -> None:
        """Returns once the memory is free. Raises what ``zckpt.offload`` would have raised, and TimeoutError after
        ``timeout`` seconds. May be called again."""
        if self._pending is not None:
            self._pending.join(timeout)


def offload(
    engine: object,
    directory: StrPath,
    *,
    parts: Collection[str] | None = None,
    background: bool = False,
    auto: bool = False,
    budget: Budget | None = None,
) -> Offloaded:
    """Moves states of a training engine from the memory of a device or of the host to scratch files on a disk of this
    machine, and frees that memory. Every rank calls it. ``zckpt.reload`` brings them back.

    ``directory``: where the files are made; it need not exist, and each rank may have another one. The files have no
    names where the file system allows that, and are gone when the process ends, however it does.

    ``parts``: such as ``["master", "exp_avg"]``; None: ``master``, all moments, ``param`` and ``gradient``. DeepSpeed's
    names ``hp_params``, ``optim_states``, ``lp_params``, ``lp_grads`` and ``contiguous_grad_buffer`` mean the same
    here. A part that is out already, or of which there is nothing yet, is left alone. So is memory that also holds a
    part which is not asked for, and what lies in swap files, in memory that processes share, or in memory that
    DeepSpeed itself has locked.

    ``background``: return at once, and have a thread move the states. Whatever uses the engine waits for it.
    ``auto``: a call that uses what is out, such as ``engine.step()``, first brings back what it needs. Without ``auto``
    it raises OffloadedError. The last offload decides this for all that is out. ``budget``: as for ``write``.

    Nothing is freed before every rank has written all of its own: if one fails, by a full disk for instance, all raise,
    and the engine is as before. Raises ValueError for an unknown part; OffloadedError if an earlier offload has lost
    something; UnsupportedError, StorageError, NoSpaceError, DeviceError, RankError.
    """
    wait()
    group = group_of(engine)
    ranks = Ranks(group, call="zckpt.offload")
    own = _Offload(engine, auto, budget)

    def prepare() -> dict[str, object]:
        asked = None if parts is None else [*several(parts)]
        arguments = comparable(parts=asked, background=background, auto=auto)
        return {"arguments": arguments, "parts": own.prepare(directory, asked)}

    with ranks.undivided():
        told: list[Any] = ranks.share(prepare, "prepare the offload")
        check_arguments([one["arguments"] for one in told])
        moving = in_order({part for one in told for part in one["parts"]})
        if not moving:
            return Offloaded()
        others = Ranks(group, background=True, call="zckpt.offload") if background else ranks

        def finish(snapshot: Snapshot) -> None:
            try:
                others.together(lambda: own.write(snapshot), "offload")
            except BaseException:
                own.give_up()
                raise
            own.take(moving)

        pending = Background(f"the offload to {own.directory}", finish, others) if background else None
        try:
            ranks.together(lambda: own.begin(pending), "begin the offload")
        except BaseException:
            if pending is not None:
                pending.cancel()
            own.give_up()
            raise
        if pending is None:
            finish(Snapshot())
        else:
            pending.start()
        return Offloaded(moving, own.nbytes, pending)


def reload(
    engine: object,
    parts: Collection[str] | None = None,
    *,
    verify: bool | None = None,
    prefetch: int = 1,
    budget: Budget | None = None,
) -> None:
    """Brings states back that ``zckpt.offload`` has moved to disk, to the memory of the device or host where they were,
    bit for bit; when it returns, they are there. Every rank calls it.

    ``parts``: as for ``offload``; None: all that is out. What is not out is left alone. ``verify``: compare every block
    with its digest; None: yes, unless the environment has ZCKPT_VERIFY=0. ``prefetch``: how many more parts a
    thread reads into the page cache when these are back, so that their reload finds them there; it takes those that
    training uses next, and the system can take that memory back. ``budget``: as for ``write``.

    Raises MissingFileError, DigestError and other FormatErrors, and StorageError, where a file is lost, damaged or not
    readable: ``key`` says which tensors that means. All else is back then, and the engine refuses to step, to compute
    and to be saved until these tensors are: by another reload, or by ``zckpt.restore``. Raises ValueError for an
    unknown part; DeviceError where there is too little memory, and what is not back then is on disk still; RankError.
    """
    wait()
    out = away(engine)
    if out is None:
        chosen(several(parts), movable(adapt(engine).parts))
        return
    ranks = Ranks(group_of(engine), call="zckpt.reload")
    own = _Reload(engine, out, verify, budget)

    def prepare() -> dict[str, object]:
        own.prepare(several(parts))
        return comparable(parts=own.parts)

    with ranks.undivided():
        check_arguments(ranks.share(prepare, "prepare the reload"))
        own.bring(ranks)
        out.read_ahead(next_in_use(own.parts, out.parts, prefetch))
        own.check(ranks)


@contextmanager
def offloaded(
    engine: object,
    directory: StrPath,
    *,
    parts: Collection[str] | None = None,
    background: bool = False,
    auto: bool = False,
    budget: Budget | None = None,
) -> Iterator[Offloaded]:
    """A context in which states are offloaded; at its end, also after an error, they are reloaded. The arguments and
    the value are those of ``offload``."""
    moved = offload(engine, directory, parts=parts, background=background, auto=auto, budget=budget)
    try:
        yield moved
    finally:
        reload(engine, moved.parts, budget=budget)


def bring_back_to_restore(engine: object, kept: Collection[str], ranks: Ranks, budget: Budget | None) -> None:
    """Before a restore, on all ranks: brings back all that is out. What cannot be brought back gets memory again.
    ``kept``: the keys of the tensors that the restore leaves as they are; none of these may be lost. Raises
    MismatchError, and what ``reload`` raises."""
    out = away(engine)
    if out is None:
        return
    own = _Reload(engine, out, None, budget)
    ranks.together(lambda: own.prepare(None), "bring the state back")
    own.bring(ranks)
    missing = [key for key in out.lost if _is_kept(key, kept)]
    if missing:
        raise MismatchError(
            f"{first_few(missing, 3)}: lost while offloaded, and not restored",
            hint="restore all parts that were lost, in full: restore(engine, path)",
        )
    ranks.together(out.replace_lost, "bring the state back")
    out.settled((), out.lost)


def _is_kept(key: str, kept: Collection[str]) -> bool:
    part, _, name = key.partition("/")
    return key in kept or (part == PARAM and f"{MASTER}/{name}" in kept)


class _Offload:
    """One rank's part in an offload: ``prepare``, ``begin``, ``write``, ``take``; after a failure on any rank
    ``give_up``."""

    def __init__(self, engine: Any, auto: bool, budget: Budget | None) -> None:
        self._engine, self._auto, self._budget = engine, auto, budget
        self.directory = ""
        self._moved: list[Moved] = []

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._moved)

    def prepare(self, directory: StrPath, asked: Collection[str] | None) -> tuple[str, ...]:
        """The parts that this rank has something of to move."""
        check_supported()
        self.directory = os.fspath(directory)
        adapter = self._adapter = adapt(self._engine)
        adapter.refuse_unsupported(drop_gradients=True)
        out = away(self._engine)
        if out is not None:
            out.refuse_lost("zckpt.offload")
        self._moved = storages(adapter, chosen(asked, movable(adapter.parts)))
        if self._moved:
            self.directory = scratch_directory(self.directory)
        return in_order({part for one in self._moved for part in one.parts})

    def begin(self, pending: Background | None) -> None:
        """From now on, whatever uses the engine asks first what is out, and waits for ``pending``."""
        out = away(self._engine) or Away(self._engine, self._adapter.uses())
        if pending is not None:
            pending.stand_by()
            out.wait = pending.settle

    def write(self, snapshot: Snapshot) -> None:
        wait_for_closing()
        synchronize(self._adapter.devices)
        write_out(self._moved, self.directory, self._budget or Budget.from_environment(), snapshot)

    def take(self, parts: Collection[str]) -> None:
        out = away(self._engine)
        assert out is not None, "it has begun"
        out.take(self._moved, parts)
        out.bring_back = partial(reload, self._engine, budget=self._budget) if self._auto else None
        give_back(self._adapter.devices)

    def give_up(self) -> None:
        for one in self._moved:
            one.drop()
        out = away(self._engine)
        if out is not None:
            out.settled(out.parts, out.lost)


class _Reload:
    """One rank's part in a reload."""

    def __init__(self, engine: object, out: Away, verify: bool | None, budget: Budget | None) -> None:
        self._engine, self._out, self._verify, self._budget = engine, out, verify, budget
        self._back = Back()

    def prepare(self, asked: Collection[str] | None) -> None:
        self._adapter = adapt(self._engine)
        self.parts = chosen(asked, {*movable(self._adapter.parts), *self._out.parts})
        self._checked = flag("ZCKPT_VERIFY", True) if self._verify is None else self._verify

    def bring(self, ranks: Ranks) -> None:
        """Brings back what can be, and tells all ranks of the rest."""

        def bring() -> tuple[tuple[str, ...], dict[str, str]]:
            budget = self._budget or Budget.from_environment()
            self._back = self._out.bring(self.parts, self._adapter, budget, verify=self._checked)
            return self._back.left, self._back.lost

        told = ranks.share(bring, "reload")
        self._told = [lost for _, lost in told]
        lost = {key: why for key, why in self._out.lost.items() if key.partition("/")[0] not in self.parts}
        for one in self._told:
            lost |= one
        self._out.settled({part for left, _ in told for part in left}, lost)

    def check(self, ranks: Ranks) -> None:
        """Raises the same kind of error on all ranks if any of them could not bring something back."""
        if self._back.error is not None:
            raise self._back.error
        for number, lost in enumerate(self._told):
            if lost:
                rank, (key, why) = ranks.members[number], next(iter(lost.items()))
                raise RankError(f"rank {rank} failed to reload {key}: {why}", rank=rank, key=key, hint=LOST_HINT)
