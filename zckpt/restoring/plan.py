"""What one rank restores, all of it checked, and what stands against it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.engines.contract import Selection
from zckpt.format.names import CLIENT_STATE
from zckpt.plan.select import part_of
from zckpt.restoring.matching import Match, match
from zckpt.restoring.mismatch import summary, told
from zckpt.state.inventory import BUFFER, MASTER, PARAM, RESERVED_PARTS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zckpt.engines.contract import EngineAdapter, Restoring
    from zckpt.progress import Progress
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.transfer.budget import Budget


class Caller(NamedTuple):
    """The function that restores, and what its arguments are called, for whoever reads an error."""

    call: str = "zckpt.restore"
    in_part: str = "strict=False"
    weights: str = "parts={parts} restores the weights alone"
    """``{parts}`` stands for those of the checkpoint that hold weights and buffers."""
    counters: str = ""
    """How more than the weights is restored, without the state of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``zckpt.restore``, whose docstring explains them, and two that an attached engine needs."""

    parts: Collection[str] | None = None
    strict: bool = True
    state: Collection[str] | None = None
    rng: bool = False
    verify: bool | None = None
    budget: Budget | None = None
    progress: Progress | None = None
    with_rank_state: bool = False
    own_client_state: bool = False
    """Where the ranks of the writer each had a ``client_state`` of their own, a rank gets its own again; with another
    number of ranks all get rank 0's, and a warning says so."""
    caller: Caller = Caller()  # noqa: RUF009  it cannot change
    """The function that the user has called."""

    @property
    def resumes(self) -> bool:
        """Whether training goes on from where it was; else chosen parts are restored, as for a warm start."""
        return self.parts is None


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How one rank restores; or, where there are ``problems``, why it does not."""

    adapter: EngineAdapter
    checkpoint: Checkpoint
    match: Match
    restoring: Restoring
    client_state: dict[str, Any]
    rank_state: dict[str, Any] | None
    """The ``client_rank_state`` of this rank, where it is read: None if the rank has none, and if the writer had
    another number of ranks."""
    problems: Sequence[str]
    hint: str | None
    """What to do about the problems."""
    warnings: Sequence[str]


def plan_restore(
    adapter: EngineAdapter, checkpoint: Checkpoint, request: Request, rank: int, size: int, registered: Collection[str]
) -> RestorePlan:
    """Reads what the checkpoint says of its tensors, and the trees of state. ``rank`` of ``size`` ranks plans.
    ``registered``: the names of the objects that are to be restored with the engine. Raises ValueError for a part or
    tree that does not exist, and what reading raises."""
    names = {
        part: {info.name: info.dtype for info in checkpoint.values() if info.part == part} for part in checkpoint.parts
    }
    trees = request.state
    if trees is None:
        trees = adapter.trees if request.parts is None else ()
    known = ((request.parts or (), names, "checkpoint has no part"), (trees, adapter.trees, "engine has no"))
    for asked, there, who in known:
        unknown = sorted(set(asked).difference(there))
        if unknown:
            raise ValueError(f"the {who} {', '.join(unknown)}; it has {', '.join(there)}")
    if request.parts is not None:
        names = {part: names[part] for part in request.parts}
    in_part, trains = request.parts is not None, adapter.trains
    found = match(checkpoint, names, adapter.wanted(names), adapter.unexpected(names), in_part=in_part, trains=trains)

    saved, same_size = engine_state(checkpoint), checkpoint.world_size == size
    state = {name: (saved or {}).get(name) for name in trees}
    needs_rank_state = request.rng or (saved is not None and adapter.needs_rank_state(state))
    rank_state = checkpoint.rank_state(rank, lazy=True) if needs_rank_state and same_size else None
    selection = Selection(
        stored=names, wanted=found.filled, restored=found.sources.keys(), kept=found.weights_kept, state=state,
        rank_state=rank_state, rng=request.rng,
    )  # fmt: skip
    restoring = adapter.restoring(selection)

    # Where weights alone are asked for, it does not matter who trained them.
    roles = found.changed_roles() if MASTER in names and trains else []
    misfits = found.problems(roles) if request.strict or found.restores_nothing else []
    if saved is None and trees:
        against = [f"{', '.join(trees)}: not in the checkpoint; repair keeps no such state where the manifest was lost"]
    else:
        against = restoring.problems()
    problems = [*misfits, *told(against, "parts of the other state do not fit")]
    if request.rng and not same_size:
        problems.append(f"rng=True needs {checkpoint.world_size} ranks, as wrote the checkpoint; these are {size}")

    own_state: dict[str, Any] | None = None
    warnings: list[str] = []
    if request.with_rank_state or request.resumes:
        if same_size:
            own_state = checkpoint.client_rank_state(rank)
            lost = [name for name in registered if name not in (own_state or {})]
            if lost:
                said = f"the checkpoint has no state of {', '.join(lost)}, registered with the engine"
                anew = "to begin anew with such an object, register it after the restore"
                (problems if request.strict else warnings).append(f"{said}: {anew}")
        elif rank == 0:
            lost = sorted({*registered, *(checkpoint.client_rank_state(0) or {})})
            if lost and (registered or not request.with_rank_state):
                warnings.append(_not_dealt_out(checkpoint, size, lost))

    client_state: dict[str, Any] = {} if saved is None else checkpoint.state[CLIENT_STATE]
    if not problems:
        checkpoint.contents.check_sizes(
            found.sources[f.key] for f in found.filled if f.start < f.stop and f.key in found.sources
        )
        if request.own_client_state:
            own = checkpoint.map_of_rank(rank if same_size else 0, CLIENT_STATE)
            if own is not None and same_size:
                client_state = own
            elif own is not None:
                warnings.append(
                    f"each of the {checkpoint.world_size} ranks that wrote {checkpoint.path} had a client_state of its "
                    f"own; these are {size} ranks, and all of them get that of rank 0"
                )
        if not request.strict:
            warnings += _fits_in_part(checkpoint, found, trees)
    weights = [part for part in names if part in (MASTER, PARAM, BUFFER)]
    hint = _hint(found, weights, misfits, roles, against, saved, request.caller)
    return RestorePlan(adapter, checkpoint, found, restoring, client_state, own_state, problems, hint, warnings)


def engine_state(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The trees of an engine's non-tensor state; None if the checkpoint has lost them, or is of something else."""
    root = checkpoint.state if isinstance(checkpoint.state, dict) else {}
    engine, client_state = root.get("engine"), root.get(CLIENT_STATE)
    return engine if isinstance(engine, dict) and isinstance(client_state, dict) else None


def _not_dealt_out(checkpoint: Checkpoint, size: int, lost: Sequence[str]) -> str:
    """The warning of states of single ranks that no rank gets, as there is another number of ranks."""
    return (
        f"each of the {checkpoint.world_size} ranks that wrote {checkpoint.path} had a state of its own of "
        f"{', '.join(lost)}; these are {size} ranks, and none of them gets one: a data loader begins anew. "
        "zckpt.open(path).client_rank_state(rank) returns that of each rank, to be divided anew"
    )


def _fits_in_part(checkpoint: Checkpoint, found: Match, trees: Collection[str]) -> list[str]:
    """The warning that says which tensors are not restored, if any."""
    kept = found.kept
    if not (kept or found.unexpected or found.zeroed):
        return []
    lines = [
        summary("tensors are restored", list(found.sources)),
        summary("of the engine are kept as they are", kept),
        summary("of the checkpoint are left out", found.unexpected),
    ]
    if found.zeroed:
        moments = "moments of restored weights are not in the checkpoint and begin at zero"
        lines.append(summary(moments, list(found.zeroed)))
    if "optimizer" in trees and any(part_of(key) not in RESERVED_PARTS for key in kept):
        lines.append("kept moments beside restored ones, in one partition, take the checkpoint's step")
    return [f"{checkpoint.path} fits the engine in part: {'; '.join(lines)}"]


def _hint(
    found: Match,
    weights: Sequence[str],
    misfits: Sequence[str],
    roles: Sequence[str],
    against: Sequence[str],
    saved: object,
    caller: Caller,
) -> str | None:
    """``weights``: the parts of the checkpoint that hold weights and buffers. The rest is as in ``plan_restore``."""
    if found.restores_nothing:
        return (
            "no weight at all would be restored: make the engine of the model that was saved, or put the weights "
            "where they belong yourself, from zckpt.open(path).state_dict()"
        )
    hints = [caller.weights.format(parts=json.dumps(weights))] if against and weights else []
    if hints and saved is not None and caller.counters:
        hints.append(caller.counters)
    misfitting = {*map(part_of, (*found.differences, *found.no_place)), *([MASTER] if roles else [])}
    if misfits and (not against or misfitting.intersection(weights)):
        hints.append(f"{caller.in_part} leaves out what does not fit, and converts what is frozen on one side only")
    if saved is None:
        hints.append("zckpt.open(path).state_dict() has the weights too")
    return "; ".join(hints) or None
