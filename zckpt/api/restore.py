"""From a checkpoint into a live engine: what fits, what stands in for what, all checked before anything is touched."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zckpt.api.background import wait
from zckpt.api.open import advised, find, open_checkpoint
from zckpt.engines import adapt, group_of
from zckpt.errors import (
    FormatError,
    MismatchError,
    RankError,
    StorageError,
    warn,
)
from zckpt.format.names import CLIENT_STATE
from zckpt.plan.reshard import Span
from zckpt.plan.select import several
from zckpt.progress import Progress, reported
from zckpt.ranks.collectives import Ranks, check_arguments, comparable
from zckpt.reading.checkpoint import Checkpoint, Want
from zckpt.reading.runs import whole_neighbours
from zckpt.restoring.mismatch import (
    DTYPE,
    MISSING,
    SHAPE,
    Caller,
    Difference,
    by_part,
    part_of,
    summary,
    told,
    told_differences,
)
from zckpt.state.inventory import BUFFER, MASTER, PARAM, RESERVED_PARTS, Fragment
from zckpt.storage.location import Location, StrPath
from zckpt.storage.schemes import open_store
from zckpt.transfer.devices import check_device, synchronize
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from zckpt.engines.contract import EngineAdapter
    from zckpt.reading.contents import TensorInfo
    from zckpt.transfer.budget import Budget


_STAND_INS = {MASTER: PARAM, PARAM: MASTER}
"""The part in which a parameter's weight was saved if it is not in the one that is wanted: it was frozen on one side.
"""


class Restored(dict[str, Any]):
    """What ``restore`` returns: the ``client_state``, and which tensors of the whole engine it has set.

    ``restored``: the engine's tensors that hold the checkpoint's values now. ``kept``: those that the checkpoint was
    asked for and did not have in the right shape, so that they are as before. ``unexpected``: the checkpoint's tensors
    that were left out, because the engine has no place for them or one of another shape. Each is a mapping from a
    part's name to names of tensors; all are equal on every rank. Moments that begin at zero are in none of them.
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


def restore(
    engine: object,
    path: StrPath,
    *,
    parts: Collection[str] | None = None,
    strict: bool = True,
    state: Collection[str] | None = None,
    rng: bool = False,
    verify: bool | None = None,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Reads a checkpoint straight into the memory of a live engine, of any world size, stage and offload. Every rank
    that the engine is spread over calls it. Returns the ``client_state``, as a dict that also says which tensors were
    restored.

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
    As to settings and step, both join the others of their param group, and of the partition in which DeepSpeed keeps
    one step for several parameters: there, kept moments are counted with the checkpoint's step from then on. Where no
    parameter has others there, settings are kept, and so is the step beside kept weights; beside restored ones it
    begins at 0.

    Gradients of the engine that no optimizer step has used yet are dropped: they belong to the weights that it had.

    Everything that can be known without reading tensors is checked before the engine is touched. Raises MismatchError,
    which says how many tensors do not fit and shows some of each kind, in full on one rank; ValueError for a part or
    tree that does not exist; and what ``zckpt.open`` and ``Checkpoint.load`` raise. If one rank fails, every rank
    raises an error: its own, or a RankError that names the rank. A FormatError or StorageError that comes after the
    engine was touched says so in its hint.
    """
    return restore_engine(
        engine, path, parts=parts, strict=strict, state=state, rng=rng, verify=verify, budget=budget, progress=progress
    )


def restore_engine(
    engine: object,
    path: StrPath,
    *,
    parts: Collection[str] | None = None,
    strict: bool = True,
    state: Collection[str] | None = None,
    rng: bool = False,
    verify: bool | None = None,
    budget: Budget | None = None,
    progress: Progress | None = None,
    own_client_state: bool = False,
    caller: Caller = Caller(),  # noqa: B008  it cannot change
) -> Restored:
    """``restore``, for integrations. ``own_client_state``: where the ranks of the writer each had a ``client_state`` of
    their own, a rank gets its own again; with another number of ranks all get rank 0's, and a warning says so.
    ``caller``: what the user has called."""
    wait()
    ranks = Ranks(group_of(engine), call=caller.call)
    plans: list[_RestorePlan] = []

    def arguments() -> dict[str, object]:
        nonlocal parts, state
        parts, state = several(parts), several(state)
        return comparable(path=str(Location.of(path).absolute()), parts=parts, strict=strict, state=state, rng=rng)

    def prepare() -> str:
        plans.append(_plan_restore(engine, path, ranks, parts, strict, state, rng, budget, own_client_state, caller))
        return "\n".join(plans[0].problems)

    # Every step of a chain of `share` runs on all ranks, with nothing that can fail between two of them.
    with ranks.undivided():
        check_arguments(ranks.share(arguments, "prepare the restore"))
        problems = ranks.share(prepare, "prepare the restore")
        (plan,) = plans
        if any(problems):
            raise _mismatch(plan, problems, ranks)
        ranks.agree(plan.checkpoint.manifest.save_id, "checkpoints")
        own = ranks.rank if plan.checkpoint.world_size == ranks.size else None
        ranks.together(lambda: _fill(plan, own, verify, progress), "restore")
        ranks.together(lambda: _set_state(plan, rng), "restore")
        # Nobody has failed: from here on, none leaves the others alone in a collective, not even by an interrupt.
        errors: list[BaseException] = []
        try:
            plan.adapter.finish_restore()
            synchronize(plan.adapter.devices)  # so that every stream may use what was restored
        except BaseException as error:  # raised again below, for the others to know
            errors.append(error)
        ranks.together(lambda: _raise_first(errors), "restore")
    return Restored(plan.client_state, by_part(plan.sources), by_part(plan.kept), by_part(plan.unexpected))


def _raise_first(errors: Sequence[BaseException]) -> None:
    if errors:
        raise errors[0]


@dataclass(frozen=True, slots=True)
class _RestorePlan:
    """What one rank restores, all of it checked, and what stands against it."""

    adapter: EngineAdapter
    checkpoint: Checkpoint
    wanted: tuple[Fragment, ...]
    sources: Mapping[str, TensorInfo]
    """What is read for each key. What is wanted without a source starts at zero."""
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any] | None
    client_state: dict[str, Any]
    kept: Sequence[str]
    """The keys of the engine's tensors that are asked for and that the checkpoint does not have."""
    unexpected: Sequence[str]
    """The keys of the checkpoint's tensors that are left out."""
    problems: Sequence[str]
    hint: str | None


def _mismatch(plan: _RestorePlan, problems: Sequence[str], ranks: Ranks) -> Exception:
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


def _plan_restore(
    engine: object,
    path: StrPath,
    ranks: Ranks,
    parts: Collection[str] | None,
    strict: bool,
    trees: Collection[str] | None,
    rng: bool,
    budget: Budget | None,
    own_client_state: bool,
    caller: Caller,
) -> _RestorePlan:
    adapter = adapt(engine)
    adapter.refuse_unsupported(drop_gradients=True)
    if any(check_device(device).type == "meta" for device in adapter.devices):
        raise MismatchError(
            "tensors of the engine are on the device meta, which keeps no values",
            hint="give them memory before they are restored, such as by module.to_empty(device=...)",
        )
    found = find(path)
    with advised(found):
        return _plan(
            adapter, open_checkpoint(found, budget), ranks, parts, strict, trees, rng, own_client_state, caller
        )


def _plan(
    adapter: EngineAdapter,
    checkpoint: Checkpoint,
    ranks: Ranks,
    parts: Collection[str] | None,
    strict: bool,
    trees: Collection[str] | None,
    rng: bool,
    own_client_state: bool,
    caller: Caller,
) -> _RestorePlan:
    stored = {
        part: {info.name: info.dtype for info in checkpoint.values() if info.part == part} for part in checkpoint.parts
    }
    if trees is None:
        trees = adapter.trees if parts is None else ()
    for asked, known, who in ((parts or (), stored, "checkpoint has no part"), (trees, adapter.trees, "engine has no")):
        unknown = sorted(set(asked).difference(known))
        if unknown:
            raise ValueError(f"the {who} {', '.join(unknown)}; it has {', '.join(known)}")
    if parts is not None:
        stored = {part: stored[part] for part in parts}
    wanted = adapter.wanted(stored)
    sources, differences = _sources(checkpoint, wanted, stored if parts is not None else None, adapter.trains)
    used = {info.key for info in sources.values()}
    no_place = [key for key in adapter.unexpected(stored) if key not in used]
    zeroed = _without_moments(wanted, sources, differences)
    kept = [key for key in differences if key not in zeroed]
    problems: list[str] = []
    weight_restored = any(_is_weight(key) and 0 not in info.shape for key, info in sources.items())
    nothing = differences and (not sources or (_weights_kept(kept) and not weight_restored))
    misfits = {part_of(key) for key in (*differences, *no_place)}
    if strict or nothing:
        problems += told_differences(differences, {fragment.key: None for fragment in wanted})
        if MASTER in stored and adapter.trains:  # else it is weights that are asked for, whoever trained them
            changed = _changed_roles(wanted, sources)
            problems += told(changed, "parameters are frozen on one side only")
            misfits |= {MASTER} if changed else set()
        lines = [f"unexpected: {key}, the engine has no place for it" for key in no_place]
        problems += told(lines, "tensors of the checkpoint have no place in the engine")
    wanted = tuple(fragment for fragment in wanted if fragment.key in sources or fragment.key in zeroed)
    saved = engine_state(checkpoint)
    client_state: dict[str, Any] = {} if saved is None else checkpoint.state[CLIENT_STATE]
    chosen = {name: (saved or {}).get(name) for name in trees}
    needed = rng or (saved is not None and adapter.needs_rank_state(chosen))
    rank_state = (
        checkpoint.rank_state(ranks.rank, lazy=True) if needed and checkpoint.world_size == ranks.size else None
    )
    if saved is None and trees:
        against = [f"{', '.join(trees)}: not in the checkpoint; repair keeps no such state where the manifest was lost"]
    else:
        against = adapter.check_state(chosen, rank_state, sources.keys(), _weights_kept(kept))
    hint = None
    if nothing:
        hint = (
            "no weight at all would be restored: make the engine of the model that was saved, or put the weights "
            "where they belong yourself, from zckpt.open(path).state_dict()"
        )
    else:
        weights = [part for part in stored if part in (MASTER, PARAM, BUFFER)]
        hints = [caller.weights.format(parts=json.dumps(weights))] if against and weights else []
        if hints and saved is not None and caller.counters:
            hints.append(caller.counters)
        if problems and (not against or misfits.intersection(weights)):
            hints.append(f"{caller.in_part} leaves out what does not fit, and converts what is frozen on one side only")
        if saved is None:
            hints.append("zckpt.open(path).state_dict() has the weights too")
        hint = "; ".join(hints) or None
    problems += told(against, "parts of the other state do not fit")
    if rng and checkpoint.world_size != ranks.size:
        problems.append(
            f"rng=True needs {checkpoint.world_size} ranks, as wrote the checkpoint; these are {ranks.size}"
        )
    if not problems:
        checkpoint.contents.check_sizes(sources[f.key] for f in wanted if f.start < f.stop and f.key in sources)
    if own_client_state and not problems:
        client_state = _own_client_state(checkpoint, ranks, client_state)
    misfitting = {key.partition("/")[2] for key, found in differences.items() if found.kind != MISSING}
    unused = [f"{part}/{name}" for part, names in stored.items() for name in names if f"{part}/{name}" not in used]
    unexpected = [key for key in unused if key in set(no_place) or key.partition("/")[2] in misfitting]
    if not strict and not problems and (kept or unexpected or zeroed) and ranks.rank == 0:
        lines = [
            summary("tensors are restored", list(sources)),
            summary("of the engine are kept as they are", kept),
            summary("of the checkpoint are left out", unexpected),
        ]
        if zeroed:
            lines.append(summary("moments of restored weights are not in the checkpoint and begin at zero", [*zeroed]))
        if "optimizer" in trees and any(part_of(key) not in RESERVED_PARTS for key in kept):
            lines.append("kept moments beside restored ones, in one partition, take the checkpoint's step")
        warn(f"{checkpoint.path} fits the engine in part: {'; '.join(lines)}")
    return _RestorePlan(
        adapter, checkpoint, wanted, sources, chosen, rank_state, client_state, kept, unexpected, problems, hint
    )


def engine_state(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The trees of an engine's non-tensor state; None if the checkpoint has lost them, or is of something else."""
    root = checkpoint.state if isinstance(checkpoint.state, dict) else {}
    engine, client_state = root.get("engine"), root.get(CLIENT_STATE)
    return engine if isinstance(engine, dict) and isinstance(client_state, dict) else None


def _is_weight(key: str) -> bool:
    return part_of(key) in (MASTER, PARAM)


def _weights_kept(kept: Iterable[str]) -> frozenset[str]:
    """The names of the parameters whose weights are among these keys."""
    return frozenset(key.partition("/")[2] for key in kept if _is_weight(key))


def _own_client_state(checkpoint: Checkpoint, ranks: Ranks, common: dict[str, Any]) -> dict[str, Any]:
    """The ``client_state`` that this rank alone had when the checkpoint was written, if each rank had its own; else
    the ``common`` one."""
    same_size = checkpoint.world_size == ranks.size
    tree = checkpoint.rank_state(ranks.rank if same_size else 0)
    if not isinstance(tree, dict) or CLIENT_STATE not in tree:
        return common
    own = tree[CLIENT_STATE]
    if not isinstance(own, dict):
        raise FormatError("state: the client_state of a rank is not a mapping", file=checkpoint.path)
    if same_size:
        return own
    if ranks.rank == 0:
        warn(
            f"each of the {checkpoint.world_size} ranks that wrote {checkpoint.path} had a client_state of its own; "
            f"these are {ranks.size} ranks, and all of them get that of rank 0"
        )
    return common


def _sources(
    checkpoint: Checkpoint, wanted: Sequence[Fragment], parts: Collection[str] | None, trains: bool
) -> tuple[dict[str, TensorInfo], dict[str, Difference]]:
    """The stored tensor for each wanted key, and why there is none: missing, or of another shape or dtype.
    Only ``parts`` are read; what is wanted of others and has no stand-in among these is in neither.

    Weights and buffers in the dtype that a model computes with may be converted; what the optimizer updates may not. An
    engine that trains nothing takes every weight from its master, where there is one.
    """
    sources: dict[str, TensorInfo] = {}
    differences: dict[str, Difference] = {}
    for key, fragment in {fragment.key: fragment for fragment in wanted}.items():
        readable = [fragment.part, _STAND_INS.get(fragment.part, fragment.part)]
        readable = [part for part in readable if parts is None or part in parts]
        if not trains:
            readable.sort(key=lambda part: part != MASTER)
        found = [f"{part}/{fragment.name}" for part in readable if f"{part}/{fragment.name}" in checkpoint]
        if not found:
            if fragment.part in readable:
                differences[key] = Difference(MISSING, f"missing: {key} {list(fragment.shape)}")
            continue
        info, dtype = checkpoint[found[0]], TORCH_DTYPES[fragment.dtype]
        floating = dtype.is_floating_point and info.dtype.is_floating_point
        converts = floating and not {fragment.part, info.part}.isdisjoint((PARAM, BUFFER))
        if info.shape == fragment.shape and (converts or info.dtype == dtype):
            sources[key] = info
        else:
            there, here = f"{info.dtype} {list(info.shape)}", f"{dtype} {list(fragment.shape)}"
            kind = DTYPE if info.shape == fragment.shape else SHAPE
            differences[key] = Difference(kind, f"differs: {info.key} is {there}, the engine has {here}")
    return sources, differences


def _changed_roles(wanted: Sequence[Fragment], sources: Mapping[str, TensorInfo]) -> list[str]:
    """A line for each parameter that is frozen in the engine and was not when it was saved, or the reverse."""
    words = {MASTER: "trained", PARAM: "frozen"}
    found = {(f.name, f.part, sources[f.key].part): None for f in wanted if f.key in sources}
    return [
        f"differs: {name} is {words[here]} in the engine and was {words[there]} when it was saved"
        for name, here, there in found
        if here != there
    ]


def _without_moments(
    wanted: Sequence[Fragment], sources: Mapping[str, TensorInfo], differences: Collection[str]
) -> dict[str, None]:
    """The keys of moments that start at zero: of parameters whose weight is restored and of which no moment can be. One
    alone is not made up: beside another one from the checkpoint, it would make for steps of any size."""
    moments = [fragment for fragment in wanted if fragment.part not in RESERVED_PARTS]
    restored = {fragment.name for fragment in moments if fragment.key in sources}
    return {
        f.key: None
        for f in moments
        if f.key in differences and f.name not in restored and f"{MASTER}/{f.name}" in sources
    }


def _fill(plan: _RestorePlan, rank: int | None, verify: bool | None, progress: Progress | None) -> None:
    checkpoint, sources = plan.checkpoint, plan.sources
    nbytes = sum((f.stop - f.start) * sources[f.key].dtype.itemsize for f in plan.wanted if f.key in sources)
    synchronize(plan.adapter.devices)
    staging = checkpoint.staging(plan.adapter.devices)
    with (
        _changing_the_engine(checkpoint),
        staging.kept(),
        reported(progress, "restore", nbytes) as advance,
        closing(plan.adapter.fill(plan.wanted)) as batches,
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
            checkpoint.read(wants, rank=rank, verify=verify, advance=advance, staging=staging)


def _set_state(plan: _RestorePlan, rng: bool) -> None:
    with _changing_the_engine(plan.checkpoint):
        plan.adapter.set_state(plan.state, plan.rank_state, _weights_kept(plan.kept), rng)


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
