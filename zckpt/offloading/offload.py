"""Moves states of a live engine to files on a local disk and back, so that their memory is free meanwhile."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zckpt.checkpoint.background import BackgroundWork, wait_for
from zckpt.engines import adapt, group_of
from zckpt.errors import MismatchError, RankError, ZckptError, check_flags, first_few
from zckpt.offloading.away import LOST_HINT, Back, MovedStorages, away_of, storages
from zckpt.offloading.files import unchanged, write_out
from zckpt.offloading.memory import check_supported, give_back
from zckpt.offloading.parts import asked_for, chosen, in_order, movable, next_in_use
from zckpt.offloading.scratch import scratch_directory, wait_for_closing
from zckpt.plan.inventory import MASTER, PARAM
from zckpt.progress import logger
from zckpt.ranks.collectives import BACKGROUND, Ranks, check_arguments, comparable
from zckpt.transfer.budget import Budget, budget_or_default, verifies
from zckpt.transfer.devices import synchronize
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from zckpt.offloading.files import Moved
    from zckpt.storage.location import StrPath


class Offloaded:
    """The result of ``zckpt.offload``."""

    def __init__(self, parts: tuple[str, ...] = (), nbytes: int = 0, pending: BackgroundWork | None = None) -> None:
        self.parts = parts
        """The names of the parts of which at least one rank moves something."""
        self.nbytes = nbytes
        """The number of bytes of memory that are freed on this rank. They include buffers that are not written to disk,
        because nobody needs their values. After an offload in the background, they do not include what has stayed in
        memory, because other code has changed it meanwhile."""
        self._pending = pending

    def __repr__(self) -> str:
        state = f", {self._pending.state}" if self._pending is not None else ""
        return f"<zckpt.Offloaded {', '.join(self.parts) or 'nothing'}: {self.nbytes} bytes{state}>"

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the memory is free. It may be called again.

        Args:
            timeout: the number of seconds to wait at most. None waits without a limit.

        Raises:
            TimeoutError: the offload is still running.
            ZckptError: the offload has failed. This is the error that ``zckpt.offload`` raises without ``background``.
        """
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
    """Moves states of a training engine to scratch files on a disk of this machine, and frees their memory.

    Every rank has to call this. ``zckpt.reload`` brings the states back. The states may be in the memory of a device or
    of the host. No memory is freed before every rank has written all of its states. If one rank fails, for instance
    because its disk is full, every rank raises an error, and the engine is unchanged.

    The files have no names if the file system allows that. They are then gone when the process ends, even if it is
    killed. Otherwise the next offload to the same directory, or ``zckpt.gc``, removes the files of a killed process.

    Args:
        engine: the training engine.
        directory: the directory in which the files are made. It need not exist, and it may differ from rank to rank.
        parts: the names of the parts that are moved, such as ``["master", "exp_avg"]``. None means ``master``, all
            moments, ``param`` and ``gradient``. DeepSpeed's names ``hp_params``, ``optim_states``, ``lp_params``,
            ``lp_grads`` and ``contiguous_grad_buffer`` are accepted too, also as members of its
            ``OffloadStateTypeEnum``. ``optim_states`` names all moments that exist. A part that is already offloaded is
            skipped. Memory that also holds a part which is not to be moved is left alone. So are states in swap files,
            in memory that several processes share, and in memory that DeepSpeed has pinned in its own way.
        background: whether to return at once and move the states in a thread. Every call that uses the engine waits for
            this thread. A part that other code changes before its memory is taken away stays in memory, and a warning
            is logged. If the offload fails, an error is printed on stderr at once, and the engine is unchanged. The
            next offload, reload, write or restore raises the error, unless ``wait`` of the result has raised it.
        auto: whether a call that uses an offloaded state, such as ``engine.step()``, first brings back what it needs.
            If ``auto`` is true, every rank has to make such a call, because a reload is collective. If ``auto`` is
            false, such a call raises OffloadedError. The last offload decides this for everything that is offloaded.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.

    Returns:
        The parts that are moved, and their size. With ``background``, its ``wait`` returns once the memory is free.

    Raises:
        ValueError: there is no part of such a name.
        OffloadedError: a state that an earlier offload moved is lost.
        UnsupportedError: the engine is not supported.
        NoSpaceError: there is too little free space.
        StorageError: the operating system reports an error when it writes.
        DeviceError: a device fails.
        RankError: another rank has failed or is lost.
    """
    group = group_of(engine)
    ranks = Ranks(group, call="zckpt.offload")
    wait_for(ranks)
    rank_offload = _RankOffload(engine, auto, budget)

    def prepare() -> tuple[dict[str, object], tuple[str, ...]]:
        check_flags(background=background, auto=auto)
        requested = asked_for(parts)
        arguments = comparable(parts=requested, background=background, auto=auto)
        return arguments, rank_offload.prepare(directory, requested)

    def moved_of_all(prepared: Sequence[tuple[dict[str, object], tuple[str, ...]]]) -> tuple[str, ...]:
        check_arguments([arguments for arguments, _ in prepared])
        return in_order({part for _, moved in prepared for part in moved})

    with ranks.undivided():
        moved_parts = tuple(ranks.decide(prepare, moved_of_all, "prepare the offload"))
        if not moved_parts:
            rank_offload.decide_auto()
            return Offloaded()
        writing_ranks = Ranks(group, channel=BACKGROUND, call="zckpt.offload") if background else ranks

        def finish(snapshot: Snapshot) -> None:
            try:
                writing_ranks.together(lambda: rank_offload.write(snapshot, background=background), "offload")
                writing_ranks.together(lambda: rank_offload.detach(compare=background), "offload")
            except BaseException:
                rank_offload.give_up()
                raise
            rank_offload.free(moved_parts)
            result.nbytes = rank_offload.nbytes

        what = f"the offload to {rank_offload.directory}"
        pending = BackgroundWork(what, finish, writing_ranks) if background else None
        result = Offloaded(moved_parts, rank_offload.nbytes, pending)
        try:
            ranks.together(lambda: rank_offload.begin(pending), "begin the offload")
        except BaseException:
            if pending is not None:
                pending.cancel()
            rank_offload.give_up()
            raise
        if pending is None:
            finish(Snapshot())
        else:
            pending.start()
        return result


def reload(
    engine: object,
    parts: Collection[str] | None = None,
    *,
    verify: bool | None = None,
    prefetch: int = 1,
    budget: Budget | None = None,
) -> None:
    """Brings back the states that ``zckpt.offload`` has moved to disk, bit for bit, to the memory where they were.

    The states are there when this returns. Every rank has to call it.

    Args:
        engine: the training engine.
        parts: the names of the parts that are brought back, as for ``zckpt.offload``. None means all that are
            offloaded. A part that is not offloaded is skipped.
        verify: whether every block is compared with its digest. None means yes, unless the environment has
            ZCKPT_VERIFY=0.
        prefetch: the number of further parts that a thread reads into the page cache afterwards, so that their reload
            is faster. They are those that the training uses next. The system can reclaim this memory.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.

    Raises:
        FormatError: a scratch file is damaged (DigestError) or missing (MissingFileError). The attribute ``key`` of the
            error names up to three tensors that the damaged bytes belong to. These tensors, and all others in the same
            storage, are lost. Everything else is back. The engine refuses to step, to compute and to be saved until
            these tensors are back, by another reload or by ``zckpt.restore``.
        StorageError: the operating system reports an error when it reads. The consequences are those of a FormatError.
        ValueError: there is no part of such a name.
        DeviceError: there is too little memory. The states that are not back are still on disk.
        RankError: another rank has failed or is lost.
    """
    _reload(engine, parts, verify, prefetch, budget, "zckpt.reload")


def _reload(
    engine: object,
    parts: Collection[str] | None,
    verify: bool | None,
    prefetch: int,
    budget: Budget | None,
    call: str,
) -> None:
    """``call``: what every rank has to call, for messages."""
    ranks = Ranks(group_of(engine), call=call)
    wait_for(ranks)
    out = away_of(engine)
    if out is None:
        chosen(asked_for(parts), movable(adapt(engine).parts))  # This raises ValueError for an unknown part.
        return
    rank_reload = _RankReload(engine, out, verify, budget)

    def prepare() -> dict[str, object]:
        rank_reload.prepare(asked_for(parts))
        return comparable(parts=rank_reload.parts)

    with ranks.undivided():
        ranks.decide(prepare, check_arguments, "prepare the reload")
        rank_reload.bring(ranks)
        out.read_ahead(next_in_use(rank_reload.parts, out.parts, prefetch))
        rank_reload.check(ranks)


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
    """Offloads states for the duration of a ``with`` block, and reloads them at its end, also after an error.

    Args:
        engine: the training engine.
        directory: as for ``zckpt.offload``.
        parts: as for ``zckpt.offload``.
        background: as for ``zckpt.offload``.
        auto: as for ``zckpt.offload``.
        budget: as for ``zckpt.offload``. It is used for the reload too.

    Returns:
        A context manager, whose value is the result of ``zckpt.offload``.

    Raises:
        ZckptError: the states cannot be moved at the beginning, or cannot be brought back at the end. ``zckpt.offload``
            and ``zckpt.reload`` list these errors. If the block itself has raised an error, that error is raised, and
            has a note about this one.
    """
    moved = offload(engine, directory, parts=parts, background=background, auto=auto, budget=budget)
    try:
        yield moved
    except BaseException as error:
        try:
            reload(engine, moved.parts, budget=budget)
        except ZckptError as failure:
            error.add_note(f"zckpt.offloaded: {failure}")
        raise
    reload(engine, moved.parts, budget=budget)


def bring_back_to_restore(
    engine: object, out: MovedStorages, kept: Collection[str], ranks: Ranks, budget: Budget | None
) -> None:
    """Does what ``Away.bring_back_to_restore`` says, for the engine whose state ``out`` has."""
    rank_reload = _RankReload(engine, out, None, budget)
    ranks.together(lambda: rank_reload.prepare(None), "bring the state back")
    rank_reload.bring(ranks)
    missing = [key for key in out.lost if _is_kept(key, kept)]
    if missing:
        raise MismatchError(
            f"{first_few(missing, 3)}: lost while offloaded, and not restored",
            hint="restore all parts that were lost, in full: restore(engine, path)",
        )
    ranks.together(out.replace_lost, "bring the state back")
    out.note_on_disk((), out.lost)


def _is_kept(key: str, kept: Collection[str]) -> bool:
    part, _, name = key.partition("/")
    return key in kept or (part == PARAM and f"{MASTER}/{name}" in kept)


class _RankOffload:
    """The part of one rank in an offload. The steps are ``prepare``, ``begin``, ``write``, ``detach`` and ``free``.
    After a failure on any rank, ``give_up`` takes the place of the remaining steps."""

    def __init__(self, engine: Any, auto: bool, budget: Budget | None) -> None:
        self._engine, self._auto, self._given_budget = engine, auto, budget
        self.directory = ""
        self._moved: list[Moved] = []

    @property
    def nbytes(self) -> int:
        return sum(moved.nbytes for moved in self._moved)

    def prepare(self, directory: StrPath, requested: Collection[str] | None) -> tuple[str, ...]:
        """Finds the memory that this rank can move. Returns the names of the parts in it. ``requested``: the names of
        parts that the caller has given, or None."""
        check_supported()
        self._budget = budget_or_default(self._given_budget)
        self.directory = os.fspath(directory)
        adapter = self._adapter = adapt(self._engine)
        adapter.refuse_unsupported(drop_gradients=True, leave_out=True)
        out = away_of(self._engine)
        if out is not None:
            out.refuse_lost("zckpt.offload")
        self._moved = storages(adapter, chosen(requested, movable(adapter.parts)))
        if self._moved:
            self.directory = scratch_directory(self.directory)
        return in_order({part for moved in self._moved for part in moved.parts})

    def begin(self, pending: BackgroundWork | None) -> None:
        """Makes every call that uses the engine wait for ``pending``, and check what is offloaded, from now on."""
        self._out = away_of(self._engine) or MovedStorages(self._engine, self._adapter.uses())
        if pending is not None:
            pending.stand_by()
            self._out.wait = pending.wait_until_ended

    def write(self, snapshot: Snapshot, *, background: bool) -> None:
        wait_for_closing()
        synchronize(self._adapter.devices)
        write_out(self._moved, self.directory, self._budget, snapshot, copied=background)

    def detach(self, *, compare: bool) -> None:
        """Takes the memory away from the engine. With ``compare``, gives back what other code has changed since it was
        written."""
        synchronize(self._adapter.devices)
        self._out.detach(self._moved)
        if not compare:
            return
        same = unchanged(self._moved, self._budget)
        changed = {*self._moved}.difference(same)
        if changed:
            parts = ", ".join(in_order({part for record in changed for part in record.parts}))
            logger.warning("%s has been changed while zckpt.offload wrote it to disk, and stays in memory", parts)
            self._out.attach([*changed])
            self._moved = same

    def free(self, parts: Collection[str]) -> None:
        self._out.free(parts)
        self.decide_auto()
        give_back(self._adapter.devices)

    def decide_auto(self) -> None:
        """Decides, for everything that is offloaded, whether a call that uses it brings it back."""
        out = away_of(self._engine)
        if out is not None:
            out.bring_back = self._bring_back if self._auto else None

    def _bring_back(self, call: str, parts: Collection[str]) -> None:
        call = f"{call} (with auto=True of zckpt.offload)"
        _reload(self._engine, parts, verify=None, prefetch=1, budget=self._budget, call=call)

    def give_up(self) -> None:
        for moved in self._moved:
            if moved.saved is not None:
                moved.saved.file.close()
        out = away_of(self._engine)
        if out is not None:
            detached = [moved for moved in self._moved if moved.memory is not None]
            if detached:
                out.attach(detached)
            out.note_on_disk(out.parts, out.lost)


class _RankReload:
    """The part of one rank in a reload. The steps are ``prepare``, ``bring`` and ``check``."""

    def __init__(self, engine: object, out: MovedStorages, verify: bool | None, budget: Budget | None) -> None:
        self._engine, self._out, self._verify, self._given_budget = engine, out, verify, budget
        self._back = Back()

    def prepare(self, requested: Collection[str] | None) -> None:
        self._budget = budget_or_default(self._given_budget)
        self._adapter = adapt(self._engine)
        self.parts = chosen(requested, {*movable(self._adapter.parts), *self._out.parts})
        self._verifies = verifies(self._verify)

    def bring(self, ranks: Ranks) -> None:
        """Brings back every state that can be brought back, and tells all ranks which ones cannot."""

        def bring() -> tuple[tuple[str, ...], dict[str, str]]:
            self._back = self._out.bring(self.parts, self._adapter, self._budget, verify=self._verifies)
            return self._back.left, self._back.lost

        def of_all(
            brought: Sequence[tuple[tuple[str, ...], dict[str, str]]],
        ) -> tuple[list[str], dict[str, tuple[int, str]]]:
            lost: dict[str, tuple[int, str]] = {}
            for rank, (_, lost_on_rank) in enumerate(brought):
                for key, reason in lost_on_rank.items():
                    lost.setdefault(key, (rank, reason))
            return sorted({part for left, _ in brought for part in left}), lost

        left, self._lost = ranks.decide(bring, of_all, "reload")
        lost = {key: reason for key, reason in self._out.lost.items() if key.partition("/")[0] not in self.parts}
        self._out.note_on_disk(left, lost | {key: reason for key, (_, reason) in self._lost.items()})

    def check(self, ranks: Ranks) -> None:
        """Raises an error on every rank if any rank could not bring something back. It is the rank's own error, or a
        RankError that names the other rank."""
        if self._back.error is not None:
            raise self._back.error
        for key, (number, reason) in self._lost.items():
            rank = ranks.members[number]
            raise RankError(f"rank {rank} failed to reload {key}: {reason}", rank=rank, key=key, hint=LOST_HINT)
