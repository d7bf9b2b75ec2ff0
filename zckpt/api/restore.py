"""Restores a checkpoint into a live engine. Everything is checked before anything in the engine is changed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from zckpt.api.background import wait
from zckpt.api.offload import bring_back_to_restore
from zckpt.api.open import open_checkpoint
from zckpt.engines import adapt, group_of
from zckpt.engines.registered import registered
from zckpt.errors import FormatError, MismatchError, RankError, StorageError, warn
from zckpt.listing.find import advised, find
from zckpt.listing.runs import whole_neighbours
from zckpt.offloading.away import away
from zckpt.plan.reshard import Span
from zckpt.plan.select import by_part, several
from zckpt.progress import Progress, reported
from zckpt.ranks.collectives import Ranks, check_arguments, comparable
from zckpt.reading.checkpoint import Want
from zckpt.restoring.plan import Request, RestorePlan, plan_restore
from zckpt.storage.location import Location, StrPath
from zckpt.storage.schemes import open_store
from zckpt.transfer.devices import check_device, synchronize
from zckpt.writing.reuse import remember

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from typing_extensions import Unpack

    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.transfer.budget import Budget

    class _Options(TypedDict, total=False):
        parts: Collection[str] | None
        strict: bool
        state: Collection[str] | None
        rng: bool
        verify: bool | None
        budget: Budget | None
        progress: Progress | None


class Restored(dict[str, Any]):
    """What ``restore`` returns: the ``client_state`` as a dict, and which tensors of the engine were set.

    ``restored``: the engine's tensors that have the checkpoint's values now. ``kept``: the engine's tensors that were
    to be restored, but are as before, because the checkpoint does not have them in the right shape. ``unexpected``: the
    checkpoint's tensors that were not read, because the engine has no place for them, or one of another shape. Each is
    a mapping from the name of a part to names of tensors, and is equal on every rank. Moments that begin at zero are in
    none of them.
    """

    def __init__(
        self,
        client_state: Mapping[str, Any],
        restored: Mapping[str, tuple[str, ...]],
        kept: Mapping[str, tuple[str, ...]],
        unexpected: Mapping[str, tuple[str, ...]],
    ) -> None:
        super().__init__(client_state)
        self.restored = restored
        self.kept = kept
        self.unexpected = unexpected


class RankStates(Sequence["dict[str, Any] | None"]):
    """What each rank of the writer had of its own: its ``rank_state``, and what was registered with its engine, by
    name; None for a rank that had neither.

    A sequence as long as the writer had ranks. Each element is read when it is asked for, on any rank, and anew each
    time. ``own``: that of this rank, read already; None if the writer had another number of ranks. Indexing raises
    IndexError, FormatError and StorageError.
    """

    def __init__(self, checkpoint: Checkpoint, own: dict[str, Any] | None) -> None:
        self._checkpoint = checkpoint
        self.own = own

    def __len__(self) -> int:
        return self._checkpoint.world_size

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
    engine: object, path: StrPath, *, with_rank_state: Literal[False] = False, **options: Unpack[_Options]
) -> Restored: ...
@overload
def restore(
    engine: object, path: StrPath, *, with_rank_state: Literal[True], **options: Unpack[_Options]
) -> tuple[Restored, RankStates]: ...
@overload
def restore(
    engine: object, path: StrPath, *, with_rank_state: bool, **options: Unpack[_Options]
) -> Restored | tuple[Restored, RankStates]: ...
def restore(
    engine: object,
    path: StrPath,
    *,
    parts: Collection[str] | None = None,
    strict: bool = True,
    state: Collection[str] | None = None,
    rng: bool = False,
    with_rank_state: bool = False,
    verify: bool | None = None,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Restored | tuple[Restored, RankStates]:
    """Reads a checkpoint straight into the memory of a live engine, of any world size, stage and offload. Every rank
    that the engine is spread over calls it. Returns the ``client_state``, as a dict that also says which tensors were
    restored; ``with_rank_state``: returns that and what each rank of the writer had of its own, as ``RankStates``.

    ``parts``: only these, such as ``["master"]`` for a warm start; None: all that the engine has. Weights in the dtype
    that the model computes with are derived from restored masters. ``state``: which trees of non-tensor state
    ("counters", "optimizer", "scaler", "scheduler"); None: all, or none where ``parts`` is given. Both take one name or
    several. ``rng``: also restore the random number generators of every rank, which needs the world size of the writer.
    ``verify``: compare every block with its digest; None: yes, unless the environment has ZCKPT_VERIFY=0. ``budget``:
    as for ``open``. ``progress``: such as ``zckpt.ProgressBar()``.

    ``strict=False``: leaves out what is missing, unexpected or of another shape, and the engine keeps its own tensors;
    a warning says how much that is, and the result says which tensors. At least one weight has to fit, if weights are
    asked for. What was frozen and now is trained, or the reverse, is restored: ``master`` from ``param`` and ``param``
    from ``master``, converted. If the weight of a parameter is restored and the checkpoint has no moments of it, as it
    was frozen, its moments begin at zero, and the warning says so. A parameter whose weight is kept keeps its moments.
    Parameters of one param group share their settings; those whose steps DeepSpeed counts together, such as all of one
    partition, share a step. If the checkpoint has settings or a step for a restored one of them, all take these, and
    kept moments are counted with that step from then on. If not, the settings stay as they are, and so does the step
    where all of these weights are kept; where one is restored, the step begins at 0.

    Objects that are registered with the engine (``zckpt.register``) get their states last, unless ``parts`` is given.
    Gradients of the engine that no optimizer step has used yet are dropped: they belong to the weights that it had.
    What ``zckpt.offload`` has moved to disk is brought back first; what was lost there has to be restored.

    Everything that can be known without reading tensors is checked before the engine is touched. Raises MismatchError,
    which says how many tensors do not fit and shows some of each kind, in full on one rank; ValueError for a part or
    tree that does not exist; and what ``zckpt.open`` and ``Checkpoint.load`` raise. If one rank fails, every rank
    raises an error: its own, or a RankError that names the rank. A FormatError or StorageError that comes after the
    engine was touched says so in its hint.
    """
    request = Request(
        parts=several(parts), strict=strict, state=several(state), rng=rng, verify=verify, budget=budget,
        progress=progress, with_rank_state=with_rank_state,
    )  # fmt: skip
    restored, ranks = restore_engine(engine, path, request)
    return (restored, ranks) if with_rank_state else restored


def restore_engine(engine: object, path: StrPath, request: Request) -> tuple[Restored, RankStates]:
    """``restore``, for integrations."""
    wait()
    ranks = Ranks(group_of(engine), call=request.caller.call)
    plans: list[RestorePlan] = []

    def arguments() -> dict[str, object]:
        return comparable(
            path=str(Location.of(path).absolute()), parts=request.parts, strict=request.strict, state=request.state,
            rng=request.rng,
        )  # fmt: skip

    def prepare() -> str:
        plans.append(_plan(engine, path, request, ranks))
        return "\n".join(plans[0].problems)

    # Every step of a chain of `share` runs on all ranks, with nothing that can fail between two of them.
    with ranks.undivided():
        check_arguments(ranks.share(arguments, "prepare the restore"))
        problems = ranks.share(prepare, "prepare the restore")
        (plan,) = plans
        if any(problems):
            raise _mismatch(plan, problems, ranks)
        ranks.agree(plan.checkpoint.manifest.save_id, "checkpoints")
        kept = {one.key for one in plan.match.wanted} - {one.key for one in plan.match.filled}
        bring_back_to_restore(engine, kept, ranks, request.budget)
        own = ranks.rank if plan.checkpoint.world_size == ranks.size else None
        ranks.together(lambda: _fill(plan, own, request), "restore")
        ranks.together(lambda: _set_state(plan), "restore")
        # Nobody has failed: from here on, none leaves the others alone in a collective, not even by an interrupt.
        errors: list[BaseException] = []
        try:
            plan.restoring.finish()
            synchronize(plan.adapter.devices)  # so that every stream may use what was restored
            remember(engine, str(Location.of(plan.checkpoint.path).absolute()))
        except BaseException as error:  # raised again below, for the others to know
            errors.append(error)
        ranks.together(lambda: _raise_first(errors), "restore")
        out = away(engine)
        if out is not None:
            out.settled((), {})  # nothing is lost any more
        ranks.together(lambda: _load_registered(engine, plan, request, ranks), "load what is registered")
    found = plan.match
    restored = Restored(plan.client_state, by_part(found.sources), by_part(found.kept), by_part(found.unexpected))
    return restored, RankStates(plan.checkpoint, plan.rank_state)


def _load_registered(engine: object, plan: RestorePlan, request: Request, ranks: Ranks) -> None:
    """The state of each object that is registered; those of names that are not are kept until the next step."""
    if not request.resumes:
        return
    own, states = registered(engine), plan.rank_state or {}
    own.load(states)
    taken = request.with_rank_state or not plan.adapter.trains
    unclaimed = {} if taken else {name: state for name, state in states.items() if name not in own.objects}
    own.keep(unclaimed, plan.adapter, warns=ranks.rank == 0)


def _raise_first(errors: Sequence[BaseException]) -> None:
    if errors:
        raise errors[0]


def _plan(engine: object, path: StrPath, request: Request, ranks: Ranks) -> RestorePlan:
    adapter = adapt(engine)
    adapter.refuse_unsupported(drop_gradients=True)
    if any(check_device(device).type == "meta" for device in adapter.devices):
        raise MismatchError(
            "tensors of the engine are on the device meta, which keeps no values",
            hint="give them memory before they are restored, such as by module.to_empty(device=...)",
        )
    found = find(path)
    with advised(found):
        checkpoint = open_checkpoint(found, request.budget)
        names = registered(engine).objects if request.resumes else ()
        plan = plan_restore(adapter, checkpoint, request, ranks.rank, ranks.size, names)
    for warning in plan.warnings if ranks.rank == 0 else ():
        warn(warning)
    return plan


def _mismatch(plan: RestorePlan, problems: Sequence[str], ranks: Ranks) -> Exception:
    """The error of this rank, where any rank has found ``problems``. The first rank that has found them lists them, and
    the others name it: on a thousand ranks the same list a thousand times would hide everything."""
    own = problems[ranks.rank]
    message = "the checkpoint does not fit the engine; nothing was changed"
    if own and own not in problems[: ranks.rank]:
        listed = own.replace("\n", "\n  ")
        return MismatchError(f"{message}:\n  {listed}", file=plan.checkpoint.path, rank=ranks.job_rank, hint=plan.hint)
    first = problems.index(own) if own else next(rank for rank, text in enumerate(problems) if text)
    line = problems[first].partition("\n")[0].partition("; the first")[0]
    message = f"{message}: {line}; rank {ranks.members[first]} lists all that differs"
    kind, rank = (MismatchError, ranks.job_rank) if own else (RankError, ranks.members[first])
    return kind(message, file=plan.checkpoint.path, rank=rank, hint=plan.hint)


def _fill(plan: RestorePlan, rank: int | None, request: Request) -> None:
    checkpoint, sources = plan.checkpoint, plan.match.sources
    nbytes = sum((f.stop - f.start) * sources[f.key].dtype.itemsize for f in plan.match.filled if f.key in sources)
    synchronize(plan.adapter.devices)
    staging = checkpoint.staging(plan.adapter.devices)
    with (
        _changing_the_engine(checkpoint),
        staging.kept(),
        reported(request.progress, "restore", nbytes) as advance,
        closing(plan.restoring.fill()) as batches,
    ):
        for fragments in batches:
            wants = []
            for fragment in fragments:
                assert isinstance(fragment.data, torch.Tensor), "fill supplies the memory"
                info = sources.get(fragment.key)
                if info is None:
                    fragment.data.zero_()
                    continue
                span = Span(fragment.start, fragment.stop, 0)
                wants.append(Want(info, [span], fragment.data))
            checkpoint.read(wants, rank=rank, verify=request.verify, advance=advance, staging=staging)


def _set_state(plan: RestorePlan) -> None:
    with _changing_the_engine(plan.checkpoint):
        plan.restoring.set_state()


@contextmanager
def _changing_the_engine(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except (FormatError, StorageError) as error:
        error.hint = "the engine is restored in part: restore it from a whole checkpoint before you train on"
        whole = whole_neighbours(open_store(checkpoint.path))
        if whole:
            error.hint += f", such as, newest first, {', '.join(whole)}"
        raise
