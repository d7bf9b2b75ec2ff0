"""Writes the state of a live engine as a checkpoint, at once or in the background."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from zckpt.checkpoint.background import PendingWrite, is_ending, wait_for
from zckpt.checkpoint.cleaning.older import remove_older
from zckpt.checkpoint.listing.doubt import settle
from zckpt.checkpoint.listing.leftovers import left_alone
from zckpt.checkpoint.tiers import queue
from zckpt.checkpoint.tiers.upload import Upload, place_there, refuse_copy, run_there
from zckpt.checkpoint.writing.decide import Agreed, Assigned, Facts, ForRank, Planned, agree, describe
from zckpt.checkpoint.writing.machines import Machines, find_machines
from zckpt.checkpoint.writing.options import (
    Background,
    CopyTo,
    EarlierCopyOptions,
    EarlierOptions,
    WriteOptions,
    only_earlier,
)
from zckpt.checkpoint.writing.prepare import Preparation, claimed, plan, prepare
from zckpt.checkpoint.writing.rank_write import RankWrite, join
from zckpt.engines import engine_of, group_of
from zckpt.engines.away import away
from zckpt.engines.history import history_of, note_write
from zckpt.engines.tensors import for_training
from zckpt.errors import warn
from zckpt.plan.inventory import PARAM
from zckpt.ranks.collectives import BACKGROUND, UPLOADS, Ranks
from zckpt.storage.lock import WriteLock
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from zckpt.progress import Progress
    from zckpt.storage.location import Location, StrPath
    from zckpt.storage.space import Space
    from zckpt.transfer.budget import Budget


class CommonOptions(EarlierCopyOptions, total=False):
    """The arguments that ``zckpt.write_state_dict`` and ``zckpt.dcp.Writer`` have, too."""

    latest: bool
    budget: Budget | None
    progress: Progress | None
    keep_last: int | None
    keep_every: int | None
    reuse: StrPath | None
    node_local: bool
    ranks_per_file: int
    copy_to: StrPath | CopyTo | None


class _Options(CommonOptions, EarlierOptions, total=False):
    step: int | None
    parts: Collection[str] | None
    exclude: Collection[str]
    client_state: Mapping[str, Any] | None
    rank_state: Mapping[str, Any] | None
    overwrite: bool
    pending_gradients: Literal["refuse", "drop"]


@overload
def write(
    engine: object, path: StrPath | None = None, *, background: Literal[False] = False, **options: Unpack[_Options]
) -> str: ...
@overload
def write(
    engine: object, path: StrPath | None = None, *, background: Literal[True] | Background, **options: Unpack[_Options]
) -> PendingWrite: ...
@overload
def write(
    engine: object, path: StrPath | None = None, *, background: bool | Background, **options: Unpack[_Options]
) -> str | PendingWrite: ...
def write(
    engine: object,
    path: StrPath | None = None,
    *,
    step: int | None = None,
    parts: Collection[str] | None = None,
    exclude: Collection[str] = (),
    client_state: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    latest: bool = True,
    budget: Budget | None = None,
    progress: Progress | None = None,
    pending_gradients: Literal["refuse", "drop"] = "refuse",
    keep_last: int | None = None,
    keep_every: int | None = None,
    reuse: StrPath | None = "latest",
    node_local: bool = False,
    ranks_per_file: int = 1,
    copy_to: StrPath | CopyTo | None = None,
    background: bool | Background = False,
    **earlier: Unpack[EarlierOptions],
) -> str | PendingWrite:
    """Writes the state of a training engine as one checkpoint. Every rank has to call this.

    The checkpoint is durable when this returns. If any rank fails, this raises an error on every rank, and nothing of
    the checkpoint is left. Everything that can be checked from the state alone is checked before a byte is written. A
    KeyboardInterrupt on one rank makes the other ranks raise RankError. If it comes after all ranks have agreed to
    commit, the checkpoint is complete all the same.

    Without ``background``, nothing may change master weights and moments before the write returns, or a later load
    would report them as damaged. With ``background``, this returns as soon as the training may continue, and the
    checkpoint has the state at the time of this call. The same ranks do only one write at a time. If it fails, its
    error is printed on stderr at once. The next write or restore of these ranks waits for it and raises its error. The
    end of the process waits for it too, and prints its error.

    The states of the objects that are registered with the engine (``zckpt.register``) are saved too. States that
    ``zckpt.offload`` has moved to disk are not loaded into memory. Their bytes are copied from file to file, or shared
    with the checkpoint if the file system can do that.

    With ``copy_to``, the checkpoint is also copied to another place, such as an object store, while the training goes
    on. The copy begins once the checkpoint is committed, and each rank copies the files that it has written. The same
    ranks make one copy at a time. If several checkpoints wait, only the newest of them is copied, and a warning names
    the others. If a copy fails, a warning says so, the checkpoint stays as it is, and the copy is tried once more with
    the next one. ``zckpt.wait`` and the end of the process wait for the copies.

    Args:
        engine: the engine that ``deepspeed.initialize`` has returned, a ``zckpt.TrainState``, or a tuple ``(model,
            optimizer)`` or ``(model, optimizer, scheduler)``.
        path: the directory of the checkpoint: a path of a file system, or a URL such as ``s3://bucket/run/step100``.
            All ranks have to see it, unless ``node_local`` is true. None means ``checkpoints/global_step<N>``.
        step: the number of steps that the optimizer has taken, for a TrainState or a tuple. It becomes the ``step`` of
            the TrainState. None means the steps that the TrainState has counted; that of a tuple counts from the first
            call on.
        parts: the name of a part of the state, or several names. None means all parts that a bit-exact resume needs.
        exclude: the names of parts that are left out, such as ``param``, which holds frozen weights. If a tied tensor
            is left out, so are all of its names.
        client_state: values of the caller that are saved too: plain values, arrays, and tensors on any device. Those of
            rank 0 are saved, and a warning says if another rank passes different ones. Other values come back in a
            plain form: numpy scalars and subclasses of str, int, float, bytes, list, tuple and dict as the plain type,
            also ``torch.Size`` and namedtuples; an enum as its value; a dataclass, a ``Namespace`` and any map as a
            dict; a configuration of OmegaConf as it was written; a set as a sorted list, a deque and an array of texts
            or objects as a list; a path, ``Decimal``, UUID, dtype and device as text; a date or time as text in ISO
            8601, and a ``timedelta`` as seconds. Keys that are neither strings nor integers become text, such as
            ``"(0, 1)"``. One warning names the values whose plain form is not equal to them, except numpy scalars,
            paths, dates, times and sets.
        rank_state: values of this rank that are saved too, such as the position of its data loader. They may have the
            same types as those of ``client_state``. Those of each rank are saved. Ranks are numbered within the
            engine's process group.
        overwrite: whether a checkpoint at ``path`` is replaced. It stays complete until the new one is committed. After
            that, the files of a checkpoint in DeepSpeed's own format are removed too.
        latest: whether the file ``latest`` beside the checkpoint is changed to name it.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.
        progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.
        pending_gradients: what happens if gradients wait for an optimizer step, which no checkpoint can hold. "refuse"
            raises UnsupportedError, and "drop" leaves them out.
        keep_last: the number of checkpoints that are kept of this engine's run, for each use. Once this checkpoint is
            committed, rank 0 removes older ones, as ``zckpt.prune`` does, but none of another run, such as that of
            another engine. If that fails, it gives a warning. None removes nothing.
        keep_every: with ``keep_last``, checkpoints whose step is a multiple of this number are kept too.
        reuse: an earlier checkpoint, or a run, whose data files are reused. Data files of 64 KiB or more that have not
            changed since then, such as those of frozen weights, are not written again. They share their blocks with the
            earlier files if the file system can do that, and are hard links to them otherwise. Digests tell which files
            have not changed, and no tensor of the earlier checkpoint is read. Both checkpoints are complete by
            themselves, so each may be deleted, moved or copied. Damage to a shared file damages both. "latest" means
            the checkpoint that this engine wrote or restored last. If there is none, or if it cannot be read, "latest"
            means the checkpoint that the file ``latest`` names. If that cannot be read either, all files are written.
            None also writes all files.
        node_local: whether ``path`` may be on a disk of its own on each machine. Each machine then gets the files of
            its own ranks, and all machines commit together. Which ranks see the same directory is found out. If all of
            them do, this changes nothing.
        ranks_per_file: the number of ranks that write to one data file. These are always ranks of one host. Files of
            several ranks are not reused (``reuse``), and buffers stay in files of one rank. This is for runs with so
            many ranks that the number of files is a burden on the file system. Object stores do not support it.
        copy_to: the directory of a run, such as ``"s3://bucket/run"``, to which the checkpoint is copied with the same
            bytes. The copy has the same path relative to this directory as the checkpoint has relative to the directory
            of its own run. If ``latest`` changes, the file ``latest`` of ``copy_to`` changes too once the copy is
            complete. With ``overwrite``, a checkpoint that is already there is replaced. ``keep_last`` never removes a
            checkpoint that is being copied or is the next one to be copied. A ``zckpt.CopyTo`` also says which copies
            are kept. Otherwise all are.
        background: whether a PendingWrite is returned before the data are on disk. A ``zckpt.Background`` also says
            what is copied before, and into how much memory.
        earlier: arguments that are fields of ``Background`` and ``CopyTo`` now: ``snapshot``, ``snapshot_bytes``,
            ``copy_keep_last`` and ``copy_keep_every``. They are accepted as before.

    Returns:
        The absolute path of the checkpoint. With ``background``, a PendingWrite.

    Raises:
        UnsupportedError: the engine has a state that cannot be saved and restored completely, or the state exceeds a
            limit of the format.
        StateError: a value cannot be saved, such as a function, the values of a tensor are not in memory of its own, or
            the optimizers of the ranks differ in settings that are saved only once.
        DeviceError: copying from a device fails.
        OffloadedError: a state that ``zckpt.offload`` moved to disk is lost.
        ValueError: the engine does not have one of the parts, ``latest`` cannot name ``path``, or an argument has a
            value that is not allowed.
        TypeError: an argument has the wrong type, or there is no such argument.
        CheckpointExistsError: there is already a checkpoint at ``path``, or ``path`` is the directory of a run or is
            inside of a checkpoint. One of two nested checkpoints would hide the other. The same holds for the
            copy (``copy_to``). If it is in an object store and ``path`` is not, only the copy itself fails.
        LockedError: another writer is writing to ``path``.
        RankError: another rank has failed or is lost, or the ranks have different arguments.
        NoSpaceError: there is too little free space. The space that all ranks need is compared with the free space
            before a byte is written. A checkpoint that is replaced takes its space until the new one is committed.
        StorageError: the operating system reports an error when it reads or writes.
    """
    options = WriteOptions(
        parts=parts, exclude=exclude, client_state=client_state, rank_state=rank_state, overwrite=overwrite,
        latest=latest, budget=budget, progress=progress, pending_gradients=pending_gradients, keep_last=keep_last,
        keep_every=keep_every, reuse=reuse, node_local=node_local, ranks_per_file=ranks_per_file, copy_to=copy_to,
        background=background, earlier=only_earlier(write, earlier), replace_foreign=overwrite, step=step,
    )  # fmt: skip
    return write_engine(engine_of(engine), path, options)


def write_engine(engine: object, path: StrPath | None, options: WriteOptions) -> str | PendingWrite:
    """Does the work of ``zckpt.write``, and of the ``save_checkpoint`` of an attached engine."""
    ranks = Ranks(group_of(engine), call="zckpt.write")
    wait_for(ranks)
    with ranks.undivided():
        return write_together(engine, path, options, "zckpt.write", ranks)


def write_together(
    engine: object, path: StrPath | None, options: WriteOptions, call: str, ranks: Ranks
) -> str | PendingWrite:
    """Does the work of ``write_engine``, and of the writes of state dicts. ``call``: the function that every rank has
    to call, for messages. ``ranks``: those of the engine. The caller is inside of their ``undivided``, and has waited
    for their writes in the background."""
    # Each step below runs on all ranks. Nothing between two steps can fail, or one rank would leave the others waiting.
    group = group_of(engine)
    prepared: Preparation
    machines: Machines
    copy_at: Location | None = None
    planned: RankWrite
    together: Sequence[int]
    write: RankWrite | None = None
    finish: Callable[[Snapshot], None]
    pending: PendingWrite | None = None
    upload: Upload | None = None

    def prepare_here() -> Facts:
        nonlocal prepared, machines, copy_at
        prepared = prepare(engine, path, options, first=ranks.rank == 0)
        # This is inside of the step, because it may fail. It stays so unless ``find_machines`` finds several.
        machines = Machines.one(ranks.size)
        if (copies := prepared.options.copies) is not None:
            run, checkpoint = prepared.run.location, prepared.store.location
            copy_at = place_there(copies.path, run, checkpoint)
            if ranks.rank == 0:
                refuse_copy(copy_at, run_there(copies.path, run), checkpoint, prepared.options)
        return prepared.facts

    def plan_here() -> Planned:
        nonlocal planned, together
        planned, together, told = plan(prepared, agreed, own, machines, ranks)
        return told

    def begin() -> Space | None:
        nonlocal write, finish, pending
        # A write in the background has to connect its ranks while the training still has its process groups.
        writers = writing_ranks.part(together) if len(together) > 1 else None
        with ranks.interruptible():
            assert assigned is not None, "rank 0 tells every rank what to check"
            to_check, described, data_bytes = Assigned(*assigned)
            note_write(engine, agreed.run_id)
            leads = machines.leads(ranks.rank)
            latest_in = claimed(prepared) if leads else None
            write = replace(planned, latest_in=latest_in, writers=writers, described=described, data_bytes=data_bytes)
            finish = partial(_finish, prepared, agreed, machines, write, to_check, writing_ranks, upload)
            if in_background:
                pending = PendingWrite(prepared.target, finish, writing_ranks)
            if upload is not None:
                queue.uploads_of(writing_ranks).expect(upload)
            return write.begin(WriteLock(prepared.store, save_id=agreed.save_id)) if leads else None

    common, each = ranks.decide_each(prepare_here, lambda facts: agree(prepared, facts), "prepare the write")
    assert each is not None, "rank 0 tells every rank its shares"
    agreed, own = Agreed(*common), ForRank(*each)
    if options.node_local:
        settle(prepared.store, ranks)  # A crash may have left a checkpoint committed on some machines only.
        machines = find_machines(prepared.store, agreed.save_id, ranks)
    _, assigned = ranks.decide_each(
        plan_here, lambda plans: describe(prepared, own.hosts, machines, planned, plans), "plan the write",
        interruptible=False,
    )  # fmt: skip
    # The ranks have agreed by now on whether they write in the background.
    in_background = prepared.options.in_background is not None
    writing_ranks = Ranks(group, channel=BACKGROUND, call=call) if in_background else ranks
    if copy_at is not None:
        upload = _upload(prepared, agreed, Ranks(group, channel=UPLOADS, call=call), copy_at)
    try:
        first, own_space = ranks.decide_each(begin, machines.of_leaders, "begin the write", interruptible=False)
        ranks.together(
            lambda: join(
                prepared.store, agreed.save_id, ranks.rank, machines.of(ranks.rank).ranks[0], own_space or first
            ),
            "begin the write",
        )
        if pending is None:
            finish(Snapshot())
        else:
            _continue_in_background(pending, prepared, ranks)
    except BaseException:
        # A thread that has begun to write removes its files by itself.
        if pending is None or pending.cancel():
            _give_up(write, upload)
        raise
    if is_ending():
        queue.wait_until_all_ended()
    offloaded = away(engine)
    # ``after_write`` may gather parameters, which have to be in memory.
    if offloaded is None or PARAM not in offloaded.parts:
        with for_training(prepared.adapter):
            prepared.adapter.after_write()
    return pending or prepared.target


def _upload(prepared: Preparation, agreed: Agreed, ranks: Ranks, target: Location) -> Upload:
    """Returns the copy of the checkpoint that is made after its commit. It has no reference to the engine's state.
    ``ranks``: the ranks of the write, for use in the thread of the uploads. ``target``: the directory of the copy."""
    queue.uploads_of(ranks)  # on each rank, before a rank can fail
    options, copies = prepared.options, prepared.options.copies
    assert copies is not None, "there is a place for copies"
    copy_to = os.fspath(copies.path)
    kept, written = (copies.keep_last, copies.keep_every), (agreed.run_id, agreed.save_id)
    return Upload(
        source=prepared.store.location, target=target, run=run_there(copy_to, prepared.run.location),
        save_id=agreed.save_id, ranks=ranks, overwrite=options.overwrite, budget=options.budget,
        afterwards=partial(_remove_older, str(target), copy_to, *kept, written),
    )  # fmt: skip


def _give_up(write: RankWrite | None, upload: Upload | None) -> None:
    """Removes the files of a write that has failed on any rank."""
    if upload is not None:
        queue.uploads_of(upload.ranks).cancel(upload)
    if write is not None:
        write.remove()


def _finish(
    prepared: Preparation, agreed: Agreed, machines: Machines, write: RankWrite, to_check: Sequence[tuple[str, int]],
    ranks: Ranks, upload: Upload | None, snapshot: Snapshot,
) -> None:  # fmt: skip
    """Writes the files of every rank and commits them. Then rank 0 removes older checkpoints. After a failure on any
    rank, no file is left. All ranks call this, in the main thread or in the thread of a background write."""
    leads = write.lock is not None

    def check() -> None:
        snapshot.check()  # This rank may have been interrupted while it waited for the others.
        write.check_files({path: range(nbytes, nbytes + 1) for path, nbytes in to_check})

    def finish() -> None:
        if leads:
            write.finish()
            history_of(prepared.engine).last = prepared.target

    try:
        _, digests = ranks.decide_each(
            lambda: write.write_data_files(snapshot),
            lambda all_of: (None, dict.fromkeys(machines.leaders, all_of)),
            "write",
            interruptible=write.writers is None,
        )
        ranks.together(check, "check the files")
        # Nothing is committed before all leaders have prepared, so no machine shows what another one will not show.
        try:
            ranks.together(
                lambda: None if digests is None else write.prepare_commit(*write.with_digests(digests)), "commit",
                interruptible=False,
            )  # fmt: skip
        except BaseException:
            if ranks.lost:
                write.leave_in_doubt()
            raise
        ranks.together(lambda: write.commit_prepared() if leads else None, "commit", interruptible=False)
        ranks.together(finish, "commit", interruptible=False)
    except BaseException:
        _give_up(write, upload)
        raise
    if upload is not None:
        upload.latest = write.latest_in is not None
        queue.uploads_of(upload.ranks).add(upload)
    if write.lock is not None:
        write.lock.release()
        options, written = prepared.options, (agreed.run_id, agreed.save_id)
        _remove_older(prepared.target, str(prepared.run.location), options.keep_last, options.keep_every, written)


def _remove_older(
    target: str, run: str, keep_last: int | None, keep_every: int | None, written: tuple[str, str]
) -> None:
    """Removes older checkpoints of the run, unless ``keep_last`` is None. Gives a warning if that fails, or if
    something in them is not zckpt's. ``target``: the checkpoint that was written. ``written``: as for
    ``remove_older``."""
    if keep_last is None:
        return
    try:
        cleanup = remove_older(run, keep_last, keep_every, written=written, needed=queue.needed_sources())
        message = left_alone(cleanup.foreign) if cleanup.foreign else ""
    except Exception as error:
        message = f"{target} is written, but older checkpoints could not be removed: {error}"
    # The new checkpoint is committed, so the write must not fail, even if warnings are errors.
    with suppress(Warning):
        if message:
            warn(message)


def _continue_in_background(pending: PendingWrite, prepared: Preparation, ranks: Ranks) -> None:
    """Lets a thread finish the write, and returns when the training may continue. With a lazy snapshot, the next
    optimizer step of the engine waits for the thread."""

    def stand_by() -> None:
        pending.stand_by()
        if prepared.options.lazy:
            prepared.adapter.before_change(pending.wait_until_taken)

    ranks.together(stand_by, "begin the write")
    pending.start()
    ranks.together(lambda: pending.wait_until_copied(ranks), "copy the state", interruptible=False)
    if is_ending():
        pending.wait()
