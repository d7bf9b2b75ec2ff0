"""From a live engine to a checkpoint, now or in the background: what all ranks do together, step by step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from zckpt.api.background import PendingWrite, wait
from zckpt.api.prune import prune
from zckpt.engines import group_of
from zckpt.errors import warn
from zckpt.offloading.away import away
from zckpt.ranks.collectives import Ranks
from zckpt.state.inventory import PARAM
from zckpt.storage.space import Space
from zckpt.transfer.snapshot import Snapshot
from zckpt.writing.options import WriteOptions
from zckpt.writing.prepare import Preparation

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from typing_extensions import Unpack

    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget

    class _Options(TypedDict, total=False):
        parts: Collection[str] | None
        exclude: Collection[str]
        client_state: Mapping[str, Any] | None
        rank_state: Mapping[str, Any] | None
        overwrite: bool
        latest: bool
        budget: Budget | None
        progress: Progress | None
        pending_gradients: Literal["refuse", "drop"]
        keep_last: int | None
        keep_every: int | None
        reuse: StrPath | None

    class _BackgroundOptions(_Options, total=False):
        snapshot: Literal["copy", "lazy"]
        snapshot_bytes: int | None


@overload
def write(
    engine: object, path: StrPath | None = None, *, background: Literal[False] = False, **options: Unpack[_Options]
) -> str: ...
@overload
def write(
    engine: object, path: StrPath | None = None, *, background: Literal[True], **options: Unpack[_BackgroundOptions]
) -> PendingWrite: ...
@overload
def write(
    engine: object, path: StrPath | None = None, *, background: bool, **options: Unpack[_BackgroundOptions]
) -> str | PendingWrite: ...
def write(
    engine: object,
    path: StrPath | None = None,
    *,
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
    background: bool = False,
    snapshot: Literal["copy", "lazy"] = "copy",
    snapshot_bytes: int | None = None,
) -> str | PendingWrite:
    """Writes the state of a training engine as one checkpoint; durable when it returns. Every rank calls it.

    ``path`` is the checkpoint's directory, on a file system that all ranks share; None: ``checkpoints/global_step<N>``.
    ``parts``: which parts of the state; None: all that a bit-exact resume needs. ``exclude``: parts to leave out, such
    as the ``param`` of frozen weights. Both take one name or several. If a tied tensor is left out, so are all
    of its names. ``client_state``: the caller's own plain values, tensors on any device and arrays, taken from rank
    0; a warning says so where another rank gives other ones. Some values come back as plain ones: a numpy scalar as
    Python's number or string, ``torch.Size`` as a tuple, a path as a string, a date or time as a string in ISO 8601, a
    set as a sorted list, a ``defaultdict`` as a dict. ``rank_state``: what this rank alone has, such as the position of
    its data loader, of the same kinds of values; each rank's own is kept, and rank numbers are those of the engine's
    ranks. What ``zckpt.register`` has registered with the engine is kept beside it, without being passed here.
    ``overwrite``: replace the checkpoint at ``path``, which stays
    whole until the new one is committed; after that, files of a checkpoint in DeepSpeed's own format go too.
    ``latest``: have the file ``latest`` beside the checkpoint name it. ``budget``: memory, threads and kind of I/O;
    None: ``Budget.from_environment()``. ``progress``: such as ``zckpt.ProgressBar()``. ``pending_gradients``: what is
    done where gradients wait for an optimizer step, which no checkpoint holds: "refuse" the write, or "drop" them.
    ``keep_last``, ``keep_every``: once this checkpoint is committed, rank 0 removes older ones beside it, as
    ``zckpt.prune`` does with these arguments; None: none is removed. A failure to remove them is a warning.
    ``reuse``: an earlier checkpoint, or a run. Data files of 64 KiB or more that it has already, such as those of
    frozen weights, are not written again: they share their blocks with its files where the file system can do that,
    else they are further names (hard links) of them. Digests say which ones have not changed, and no tensor of the
    earlier checkpoint is read. Both checkpoints are whole by themselves: either may be deleted, moved or copied. But
    damage to a shared file is damage to both. "latest": the one that this engine has written or was restored from last,
    else the one that ``latest`` names; if there is none that can be read, all is written. None: all is written.
    Without ``background``, nothing may change masters and moments before the write returns: a load would find them
    damaged.

    ``background``: return a PendingWrite as soon as training may go on; the checkpoint is of the state at this call.
    With ``snapshot="copy"`` that is once the state has been copied. With "lazy" it is once that has been copied which
    the optimizer does not own, such as buffers and frozen weights. Masters and moments are read while the next forward
    and backward passes run, and the next optimizer step waits until that is done; change them in no other way before.
    ``snapshot_bytes`` bounds the memory for copies on this rank: where the state is larger, the rest is on disk before
    training goes on. None: half of what is available, shared by the ranks of a machine. One write is under way at a
    time: the next write or restore and the end of the process wait for it and raise or print its error, which stderr
    shows as soon as it happens.

    What ``zckpt.offload`` has moved to disk is not loaded: the checkpoint shares pages with those files where the file
    system can do that, and else their bytes are copied.

    Returns the checkpoint's absolute path. Raises on every rank, and leaves nothing behind, if any rank fails:
    UnsupportedError (also for more than the format can hold), StateError, DeviceError (a device that gives no bytes),
    OffloadedError for what was lost while it was offloaded, ValueError for a part that the engine does not have and for
    a path that ``latest`` cannot name, CheckpointExistsError (also where ``path`` is the directory of a run or lies in
    a checkpoint: whoever opens the outer of two gets that), LockedError (somebody else is writing there), RankError,
    StorageError, NoSpaceError (before a byte is written, where the file system says how much is free: what all ranks
    need is compared with it, and a checkpoint that is replaced stays until the new one is committed). All that can be
    known from the state is checked before a byte is written.
    KeyboardInterrupt on one rank makes the others raise RankError, unless it comes when all have agreed to commit: then
    the write has happened.
    """
    options = WriteOptions(
        parts=parts, exclude=exclude, client_state=client_state, rank_state=rank_state, overwrite=overwrite,
        latest=latest, budget=budget, progress=progress, pending_gradients=pending_gradients, keep_last=keep_last,
        keep_every=keep_every, reuse=reuse, background=background, snapshot=snapshot, snapshot_bytes=snapshot_bytes,
        replace_foreign=overwrite,
    )  # fmt: skip
    return write_engine(engine, path, options)


def write_engine(engine: object, path: StrPath | None, options: WriteOptions) -> str | PendingWrite:
    """What ``zckpt.write`` and an attached engine have in common."""
    # Each step runs on all ranks, with nothing that can fail between two steps.
    wait()
    group = group_of(engine)
    ranks = Ranks(group, call="zckpt.write")
    prepared = Preparation(engine, path, options, ranks.rank, ranks.size)
    pending: PendingWrite | None = None
    with ranks.undivided():
        facts = ranks.share(prepared.prepare, "prepare the write")
        plans = ranks.share(lambda: prepared.plan(facts), "plan the write")
        own = prepared.write
        # The ranks have agreed that all of them write in the background, or none.
        others = Ranks(group, background=True, call="zckpt.write") if options.background else ranks

        finish = partial(_finish, prepared, others)

        def begin() -> Space:
            nonlocal pending
            if options.background:
                pending = PendingWrite(prepared.target, finish, others)
            return prepared.begin(plans)

        try:
            spaces = ranks.share(begin, "begin the write")
            ranks.together(lambda: Space(*spaces[0]).refuse_lack(), "begin the write")
            if pending is None:
                finish(Snapshot())
            else:
                _go_on(pending, prepared, ranks)
        except BaseException:
            # A thread that has been started removes what there is by itself, and is only told.
            if pending is None or pending.cancel():
                own.remove()
            raise
        out = away(engine)
        if out is None or PARAM not in out.parts:  # what would be gathered is in memory
            prepared.adapter.after_write()
        return pending or prepared.target


def _finish(prepared: Preparation, ranks: Ranks, snapshot: Snapshot) -> None:
    """Writes every rank's files and commits them; after a failure on any rank, none of it is left. Then rank 0 removes
    older checkpoints. All ranks call it, in the main thread or in that of a background write."""
    own = prepared.write
    try:
        digests = ranks.share(lambda: own.write_own(snapshot), "write")
        ranks.together(snapshot.check, "write")  # what has come to a rank while it waited for the others
        ranks.first(lambda: prepared.commit(digests), "commit")
    except BaseException:
        own.remove()
        raise
    if own.lock is not None:
        own.lock.release()
        if prepared.options.keep_last is not None:
            _remove_older(prepared, prepared.options.keep_last)


def _remove_older(prepared: Preparation, keep_last: int) -> None:
    """Removes the checkpoints of the run that are no longer to be kept. Warns where that fails."""
    try:
        prune(str(prepared.run.location), keep_last=keep_last, keep_every=prepared.options.keep_every)
    except Exception as error:  # the checkpoint is committed, and its write has not failed
        warn(f"{prepared.target} is written, but older checkpoints could not be removed: {error}")


def _go_on(pending: PendingWrite, prepared: Preparation, ranks: Ranks) -> None:
    """Has a thread finish the write, and the engine wait for it where it has to; returns when training may go on."""

    def stand_by() -> None:
        pending.stand_by()
        if prepared.options.lazy:
            prepared.adapter.before_change(pending.wait_until_taken)

    ranks.together(stand_by, "begin the write")
    pending.start()  # raises nothing
    ranks.together(lambda: pending.wait_until_copied(ranks), "copy the state", interruptible=False)
