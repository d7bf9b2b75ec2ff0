"""Restores a checkpoint into a live engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch

from zckpt.checkpoint.background import wait_for
from zckpt.checkpoint.listing.find import advised
from zckpt.checkpoint.listing.runs import whole_neighbours
from zckpt.checkpoint.reading.loader import Loader, ReadRequest
from zckpt.checkpoint.restoring.machines import find_spread
from zckpt.checkpoint.restoring.peers import Peers
from zckpt.checkpoint.restoring.plan import Request, Restored, RestorePlan, plan_restore
from zckpt.checkpoint.tiers.choice import Chosen, choose
from zckpt.engines import adapt, engine_of, group_of
from zckpt.engines.away import away, tensors_in_memory
from zckpt.engines.history import note_restore
from zckpt.engines.registered import registered
from zckpt.engines.tensors import for_training
from zckpt.errors import (
    CheckpointNotFoundError,
    FormatError,
    MismatchError,
    RankError,
    StorageError,
    UnfinishedWriteError,
    warn,
)
from zckpt.plan.lineage import Use
from zckpt.progress import Progress, logged, reported
from zckpt.ranks.collectives import Ranks, check_arguments, check_equal, comparable
from zckpt.storage.location import Location, StrPath
from zckpt.storage.schemes import open_store
from zckpt.system.collector import without_collector
from zckpt.system.threads import beside
from zckpt.transfer.devices import check_device, synchronize
from zckpt.transfer.memory import check_fragments, check_memory

if TYPE_CHECKING:
    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.checkpoint.listing.tensors import TensorInfo
    from zckpt.plan.inventory import Fragment
    from zckpt.storage.contract import Store
    from zckpt.transfer.budget import Budget

    Place = StrPath | Sequence[StrPath] | Chosen
    """What is restored: a path, several places, or a checkpoint that was chosen from several places."""

    class _Options(TypedDict, total=False):
        parts: Collection[str] | None
        strict: bool
        state: Collection[str] | None
        rng: bool
        settings: Literal["checkpoint", "engine"]
        verify: bool | None
        budget: Budget | None
        progress: Progress | None


class RankStates(Sequence["dict[str, Any] | None"]):
    """A sequence with the state of each rank of the writer: its ``rank_state``, and the states of its registered
    objects by name. An element is None if the rank had neither.

    Each element is read anew whenever it is accessed. Every rank can read all elements. Indexing raises IndexError,
    FormatError and StorageError.
    """

    def __init__(self, checkpoint: Loader, own: dict[str, Any] | None) -> None:
        self._checkpoint = checkpoint
        self.own = own
        """The state of this rank, which is already in memory. It is None if the writer had another number of ranks."""

    def __len__(self) -> int:
        return self._checkpoint.manifest.world_size

    @overload
    def __getitem__(self, index: int) -> dict[str, Any] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any] | None]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any] | None] | None:
        if isinstance(index, slice):
            return [self[rank] for rank in range(len(self))[index]]
        return self._checkpoint.client_rank_state(index + len(self) if index < 0 else index)


@overload
def restore(
    engine: object,
    path: StrPath | Sequence[StrPath],
    *,
    with_rank_state: Literal[False] = False,
    **options: Unpack[_Options],
) -> Restored: ...
@overload
def restore(
    engine: object, path: StrPath | Sequence[StrPath], *, with_rank_state: Literal[True], **options: Unpack[_Options]
) -> tuple[Restored, RankStates]: ...
@overload
def restore(
    engine: object, path: StrPath | Sequence[StrPath], *, with_rank_state: bool, **options: Unpack[_Options]
) -> Restored | tuple[Restored, RankStates]: ...
def restore(
    engine: object,
    path: StrPath | Sequence[StrPath],
    *,
    parts: Collection[str] | None = None,
    strict: bool = True,
    state: Collection[str] | None = None,
    rng: bool = False,
    settings: Literal["checkpoint", "engine"] = "checkpoint",
    with_rank_state: bool = False,
    verify: bool | None = None,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Restored | tuple[Restored, RankStates]:
    """Reads a checkpoint straight into the memory of a live engine. Every rank has to call this.

    The world size, the ZeRO stage and the offload may differ from those of the writer. Everything that can be known
    without reading tensors is checked before the engine is changed. If one rank fails, every rank raises an error: its
    own, or a RankError that names the rank. If the engine was changed before, the error's hint says so.

    Weights in the dtype that the model computes with are derived from the restored master weights. Objects that are
    registered with the engine (``zckpt.register``) get their states last, unless ``parts`` is given. Gradients of the
    engine that no optimizer step has used yet are dropped, because they belong to the former weights. States that
    ``zckpt.offload`` has moved to disk come back first; lost ones have to be among the restored tensors.

    Parameters that were frozen and are trained now, or the reverse, can be restored with ``strict=False``. Then
    ``master`` is converted from ``param``, and ``param`` from ``master``. If a weight is restored and the checkpoint
    has no moments for it, because it was frozen, its moments begin at zero, and a warning says so. A parameter whose
    weight is kept keeps its moments. If the checkpoint has no state of the optimizer at all, as before the first step,
    the optimizer begins anew.

    The parameters of one param group share their settings. Parameters whose steps DeepSpeed counts together, such as
    all those of one partition, share a step. If one of these parameters is restored and the checkpoint has settings or
    a step for it, the whole group gets them. So moments that were kept are used with the restored step from then on. If
    the checkpoint has no settings for any restored parameter of the group, the settings stay as they are. If it has no
    step, the step stays as it is while all weights of the group are kept, and begins at 0 if one is restored.

    Args:
        engine: the engine that ``deepspeed.initialize`` has returned, a ``zckpt.TrainState``, or a tuple ``(model,
            optimizer)`` or ``(model, optimizer, scheduler)``.
        path: the directory of a checkpoint, or that of a run, whose file ``latest`` names the checkpoint. Or several
            places, the nearest first, such as ``["/nvme/run", "s3://bucket/run"]``. Then rank 0 chooses the checkpoint
            with the most steps among those that the files ``latest`` name, if all of its files are in the places. If
            none of them is whole, it chooses the one with the most steps that is whole among all checkpoints of the
            same training runs from which training can go on. Each file is read from the first place in which it has the
            right length. A warning says which checkpoint or place was left out, and why.
        parts: one or several parts of the state, such as ``["master"]`` for a warm start. None means all of the engine.
        strict: whether the checkpoint and the engine must have the same tensors. With False, tensors that are missing,
            unexpected or of another shape are left out, and the engine keeps its own values of them. A warning says how
            many they are, and the result names them. If weights are to be restored, at least one of them has to fit. A
            param group that the checkpoint does not have keeps its settings, and its entries in the scheduler.
        state: the names of the trees of non-tensor state that are restored: "counters", "optimizer", "scaler",
            "scheduler". None means all of them, or none if ``parts`` is given.
        rng: whether the random number generators of all ranks are restored too, which needs the writer's world size.
        settings: "checkpoint" restores the settings too. With "engine", the engine keeps its own: every entry of its
            param groups, such as a new learning rate, betas or weight decay, and its own scheduler. The moments, the
            steps, the counters and the loss scale come from the checkpoint. The scheduler takes as many steps as that
            of the checkpoint had taken, so the learning rate is the one of the engine's own schedule at this step.
            Entries of param groups that an optimizer changes itself, such as ``d`` of Prodigy, are restored.
        with_rank_state: whether the state that each rank of the writer had alone is returned too.
        verify: whether every block is compared with its digest. None means yes, unless ZCKPT_VERIFY=0 is set.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.
        progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.

    Returns:
        The ``client_state``, as a dict that also names the tensors that were restored. With ``with_rank_state``, a pair
        of this dict and the ``RankStates``.

    Raises:
        MismatchError: the checkpoint does not fit the engine. On one rank, the error says how many tensors do not fit,
            and names some of each kind. On ranks with the same problems, it refers to that rank.
        ValueError: there is no part or tree of such a name.
        CheckpointNotFoundError: there is no checkpoint at ``path``.
        FormatError: data of the checkpoint are damaged or missing.
        UnsupportedError: the engine has something that cannot be restored, or there is no store for the scheme of a
            URL.
        RankError: another rank has failed or is lost, or the ranks have different arguments.
        StorageError: the operating system reports an error when it reads.
    """
    request = Request(
        parts=parts, strict=strict, state=state, rng=rng, settings=settings, verify=verify, budget=budget,
        progress=progress, with_rank_state=with_rank_state,
    )  # fmt: skip
    restored, ranks = restore_engine(engine_of(engine), path, request)
    return (restored, ranks) if with_rank_state else restored


def restore_engine(engine: object, path: Place, request: Request) -> tuple[Restored, RankStates]:
    """Does the work of ``restore``, and of an attached engine's ``load_checkpoint``, which may pass a ``Chosen``."""
    ranks = Ranks(group_of(engine), call=request.caller.call)
    wait_for(ranks)
    plans: list[RestorePlan] = []

    def arguments() -> dict[str, object]:
        nonlocal request
        request = request.checked()
        return comparable(
            path=_said(path), parts=request.parts, strict=request.strict, state=request.state, rng=request.rng,
            settings=request.settings,
        )  # fmt: skip

    def prepare() -> list[str]:
        plans.append(_plan(engine, opened, request, ranks))
        return ["\n".join(plans[0].problems), plans[0].checkpoint.manifest.save_id]

    # Each step below runs on all ranks. Nothing between two steps can fail, or one rank would leave the others waiting.
    with ranks.undivided(), ExitStack() as contexts:
        ranks.decide(arguments, check_arguments, "prepare the restore")
        opened: Callable[[], tuple[Store, Contents]]
        if isinstance(path, (str, os.PathLike)):
            spread, opened = find_spread(path, ranks)
            if spread is not None:
                peers = contexts.enter_context(Peers(group_of(engine), spread.store.reader(), request.caller.call))
                opened = partial(spread.opened, peers)
        else:
            if not isinstance(path, Chosen):
                found = ranks.first(partial(_choose, path), "choose the checkpoint")
                if isinstance(found, str):  # Every rank raises this error, so a program can go on from its first step.
                    raise CheckpointNotFoundError(
                        "there is no checkpoint in any of these places", file=_said(path), hint=found or None
                    )
                path = Chosen(*found)
            opened = path.opened
        first, same_as = ranks.decide_each(prepare, _compare_problems, "prepare the restore")
        (plan,) = plans
        if first is not None:
            raise _mismatch(plan, first, same_as, ranks)
        contexts.enter_context(for_training(plan.adapter))
        out = away(engine)
        if out is not None:
            out.bring_back_to_restore(plan.unfilled, ranks, request.budget)
        rank_of_writer = ranks.rank if plan.checkpoint.manifest.world_size == ranks.size else None
        ranks.together(lambda: _change(plan, rank_of_writer, request), "restore")
        # ``finish`` uses collectives of its own, so no rank may skip them, not even after an interrupt.
        errors: list[BaseException] = []
        try:
            plan.restoring.finish()
            synchronize(plan.adapter.devices)  # From here on, every stream of a device may use the restored tensors.
            lineage = plan.checkpoint.contents.lineage
            goes_on = request.resumes and plan.adapter.trains and lineage.use is Use.RESUME
            path_of_last = str(Location.of(plan.checkpoint.path).absolute())
            note_restore(engine, path_of_last, lineage.run_id if goes_on else None)
        except BaseException as error:  # It is raised again below, where the other ranks learn of it.
            errors.append(error)
        ranks.together(lambda: _raise_first(errors), "restore")
        if out is not None:
            out.note_on_disk((), {})  # The lost states were restored.
        ranks.together(lambda: _load_registered(engine, plan, request, ranks), "load what is registered")
    return plan.restored, RankStates(plan.checkpoint, plan.rank_state)


def _choose(places: Sequence[StrPath]) -> Chosen | str:
    """Returns the checkpoint that is restored. If there is none, returns the hint of the error, which may be empty.
    Raises the other errors of ``choose``."""
    try:
        return choose(places)
    except CheckpointNotFoundError as error:
        if error.rule or isinstance(error, UnfinishedWriteError):
            raise
        return error.hint or ""


def _said(path: Place) -> str:
    """Returns the places as a text, which has to be the same on all ranks."""
    places: object = (
        [path] if isinstance(path, (str, os.PathLike)) else path.paths if isinstance(path, Chosen) else path
    )
    if not isinstance(places, Sequence):
        kind = type(path).__name__
        raise TypeError(f"path must be a path or a list of paths, got {kind}; the engine comes first")
    return " ".join(str(Location.of(place).absolute()) for place in places)


def _load_registered(engine: object, plan: RestorePlan, request: Request, ranks: Ranks) -> None:
    """Gives each registered object its state. States for which no object is registered wait for a ``register`` until
    the next step."""
    if not request.resumes:
        return
    of_engine, states = registered(engine), plan.rank_state or {}
    of_engine.load(states)
    caller_takes_them = request.with_rank_state or not plan.adapter.trains
    unclaimed = {name: state for name, state in states.items() if name not in of_engine.objects}
    of_engine.keep({} if caller_takes_them else unclaimed, plan.adapter, warns=ranks.rank == 0)


def _raise_first(errors: Sequence[BaseException]) -> None:
    if errors:
        raise errors[0]


@without_collector
def _plan(engine: object, opened: Callable[[], tuple[Store, Contents]], request: Request, ranks: Ranks) -> RestorePlan:
    """Plans the restore of this rank. ``opened`` returns the directory of the checkpoint, and what it holds."""
    adapter = adapt(engine)
    adapter.refuse_unsupported(drop_gradients=True, leave_out=request.leave_out)
    if any(check_device(device).type == "meta" for device in adapter.devices):
        raise MismatchError(
            "tensors of the engine are on the device meta, which keeps no values",
            hint="give them memory before they are restored, such as by module.to_empty(device=...)",
        )
    check_memory(tensors_in_memory(adapter), MismatchError)
    store, contents = opened()
    with advised(store):
        checkpoint = Loader(str(store.location), contents, request.budget)
        names = registered(engine).objects if request.resumes else ()
        plan = plan_restore(adapter, checkpoint, request, ranks.rank, ranks.size, names)
    for warning in plan.warnings if ranks.rank == 0 else ():
        warn(warning)
    return plan


def _compare_problems(reports: Sequence[Sequence[str]]) -> tuple[tuple[int, str] | None, dict[int, int]]:
    """Compares what all ranks have found. Returns the first rank that has found problems, and its problems. For each
    rank with problems, also returns the first rank that has the same ones. ``reports``: for each rank, a text with its
    problems, and the save id of its checkpoint. Raises RankError if the ranks have different checkpoints."""
    first: dict[str, int] = {}
    for rank, (problems, _) in enumerate(reports):
        if problems:
            first.setdefault(problems, rank)
    if not first:
        check_equal([save_id for _, save_id in reports], "checkpoints")
    equal = {rank: first[problems] for rank, (problems, _) in enumerate(reports) if problems}
    return next(((rank, problems) for problems, rank in first.items()), None), equal


def _mismatch(plan: RestorePlan, first: tuple[int, str], same_as: int | None, ranks: Ranks) -> Exception:
    """Returns the error that this rank raises if any rank has found problems. If several ranks have the same problems,
    the first of them lists them, and the others only name that rank. Otherwise a thousand ranks would print the same
    list a thousand times. ``first``: the first rank with problems, and its problems. ``same_as``: the first rank with
    the problems of this one, or None if this one has none."""
    message = "the checkpoint does not fit the engine; nothing was changed"
    if same_as == ranks.rank:
        listed = "\n  ".join(plan.problems)
        return MismatchError(f"{message}:\n  {listed}", file=plan.checkpoint.path, rank=ranks.job_rank, hint=plan.hint)
    listed_on, problems = first if same_as is None else (same_as, "\n".join(plan.problems))
    line = problems.partition("\n")[0].partition("; the first")[0]
    message = f"{message}: {line}; rank {ranks.members[listed_on]} lists all that differs"
    error_class, rank = (RankError, ranks.members[listed_on]) if same_as is None else (MismatchError, ranks.job_rank)
    return error_class(message, file=plan.checkpoint.path, rank=rank, hint=plan.hint)


@without_collector
def _change(plan: RestorePlan, rank: int | None, request: Request) -> None:
    """Does what this rank can do alone. ``rank``: its number, or None if the writer had another number of ranks."""
    try:
        _fill(plan, rank, request)
        plan.restoring.set_state()
    except (FormatError, StorageError) as error:
        error.hint = "the engine is restored in part: restore it from a whole checkpoint before you train on"
        whole = whole_neighbours(open_store(plan.checkpoint.path))
        if whole:
            error.hint += f", such as, newest first, {', '.join(whole)}"
        raise


def _fill(plan: RestorePlan, rank: int | None, request: Request) -> None:
    checkpoint, sources, devices = plan.checkpoint, plan.sources, plan.adapter.devices
    synchronize(devices)
    staging = checkpoint.staging(devices)
    with (
        staging.kept(),
        logged("restored", checkpoint.path, plan.read_bytes),
        reported(request.progress, "restore", plan.read_bytes) as advance,
        closing(plan.restoring.fill()) as batches,
    ):
        for batch in batches:
            check_fragments(batch.urgent + batch.others)
            urgent = sum(fragment.name in sources.get(fragment.part, ()) for fragment in batch.urgent)
            requests, derive = _requests(batch.urgent + batch.others, sources), batch.after_urgent
            del batch  # There may be very many fragments, and ``read`` keeps only what it needs of them.
            with beside(derive, "zckpt-derive") as after_urgent:
                checkpoint.read(
                    requests, rank=rank, verify=request.verify, advance=advance, staging=staging, urgent=urgent,
                    after_urgent=after_urgent,
                )  # fmt: skip


def _requests(fragments: Iterable[Fragment], sources: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[ReadRequest]:
    """Yields a request for each fragment for which ``sources`` has a tensor of the checkpoint. Sets all others to zero:
    they are moments of parameters that were frozen when the checkpoint was written."""
    for fragment in fragments:
        assert isinstance(fragment.data, torch.Tensor), "``fill`` supplies the memory"
        info = sources.get(fragment.part, {}).get(fragment.name)
        if info is None:
            fragment.data.zero_()
        else:
            yield ReadRequest(info, fragment.span, fragment.data)
