"""Plans what one rank restores, and checks all of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from zckpt.checkpoint.reading.state_dict import paths_of
from zckpt.checkpoint.restoring.matching import Match, match
from zckpt.checkpoint.restoring.mismatch import (
    WITH_OPTIMIZER,
    Caller,
    fits_in_part,
    hint,
    leaves_out,
    not_dealt_out,
    told,
)
from zckpt.engines.contract import EngineAdapter, Restoring, Selection
from zckpt.engines.state_dict import STATE_DICT
from zckpt.errors import check_flags
from zckpt.format.names import CLIENT_STATE
from zckpt.geometry import same_order
from zckpt.plan.inventory import MASTER, RESERVED_PARTS, WEIGHT_PARTS
from zckpt.plan.select import by_part, several
from zckpt.transfer.budget import Budget, verifies

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zckpt.checkpoint.listing.tensors import TensorInfo
    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.progress import Progress


def check_settings(settings: str) -> None:
    """Raises ValueError for an argument ``settings`` that is not allowed."""
    if settings not in ("checkpoint", "engine"):
        raise ValueError(f"settings must be 'checkpoint' or 'engine', got {settings!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``zckpt.restore``, whose docstring explains them, and some that an attached engine needs."""

    parts: Collection[str] | None = None
    strict: bool = True
    state: Collection[str] | None = None
    rng: bool = False
    settings: str = "checkpoint"
    verify: bool | None = None
    budget: Budget | None = None
    progress: Progress | None = None
    with_rank_state: bool = False
    own_client_state: bool = False
    """Which client_state a rank gets if each rank of the writer had its own. False: that of rank 0. True: its own one,
    if there are as many ranks as then. With another number of ranks, all get that of rank 0, and a warning says so."""
    caller: Caller = Caller()  # noqa: RUF009  it cannot change
    """The function that the user has called."""
    all_moments: bool = False
    """Whether a checkpoint without the optimizer's state is refused even if ``strict`` would not refuse it."""
    leave_out: bool = False
    """Whether the engine may have state that no checkpoint can hold. It stays as it is."""
    has_weights: bool = False
    """Whether the weights were restored by an earlier call, and ``parts`` has all others."""
    absent_parts: bool = False
    """Whether ``parts`` may name parts that the checkpoint does not have, all tensors of which are missing."""

    def checked(self) -> Request:
        """Returns the same request, with a single part or tree as a collection of one. Raises TypeError and ValueError
        for an argument that is not allowed."""
        check_settings(self.settings)
        check_flags(strict=self.strict, rng=self.rng, with_rank_state=self.with_rank_state)
        verifies(self.verify)
        return replace(self, parts=several(self.parts), state=several(self.state))

    @property
    def resumes(self) -> bool:
        """Whether the training goes on where it was. If not, chosen parts are restored, as for a warm start."""
        return self.parts is None or self.has_weights


class Restored(dict[str, Any]):
    """The ``client_state`` of a checkpoint as a dict, and the names of the tensors that ``zckpt.restore`` has set.

    The attributes ``restored``, ``kept``, ``unexpected`` and ``converted`` map the name of a part to names of tensors.
    They are equal on every rank. Moments that begin at zero are in none of them.
    """

    def __init__(
        self,
        client_state: Mapping[str, Any],
        restored: Mapping[str, tuple[str, ...]],
        kept: Mapping[str, tuple[str, ...]],
        unexpected: Mapping[str, tuple[str, ...]],
        converted: Mapping[str, tuple[str, ...]],
    ) -> None:
        super().__init__(client_state)
        self.restored = restored
        """The tensors of the engine that have the values of the checkpoint now."""
        self.kept = kept
        """The tensors of the engine that should have been restored, but keep their former values, because the
        checkpoint does not have them in the right shape."""
        self.unexpected = unexpected
        """The tensors of the checkpoint that were not read, because the engine has no such tensor, or has it in another
        shape."""
        self.converted = converted
        """Those of the restored master weights and moments that have another dtype in the checkpoint: fp32, where the
        engine updates weights of 16 bits, or the reverse. A run that goes on from a narrower dtype is not equal to one
        that never stopped."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What one rank restores. If there are ``problems``, nothing is restored, and these are the reasons."""

    adapter: EngineAdapter
    checkpoint: Loader
    sources: Mapping[str, Mapping[str, TensorInfo]]
    """As in ``Match``. The plan has no fragments, because there may be very many of them."""
    read_bytes: int
    """How many bytes of the checkpoint this rank reads into the engine."""
    unfilled: Collection[str]
    """The keys of the fragments in ``EngineAdapter.wanted`` that are not filled."""
    restoring: Restoring
    restored: Restored
    """What ``restore`` returns."""
    rank_state: dict[str, Any] | None
    """The ``client_rank_state`` of this rank, if it is read. It is None if the rank has none, and if the checkpoint was
    written by another number of ranks."""
    problems: Sequence[str]
    hint: str | None
    warnings: Sequence[str]


def plan_restore(
    adapter: EngineAdapter, checkpoint: Loader, request: Request, rank: int, size: int, registered: Collection[str]
) -> RestorePlan:
    """Plans the restore of rank ``rank`` of ``size`` ranks. Reads what the checkpoint says of its tensors, and the
    trees of state. ``registered`` has the names of the objects that are to be restored with the engine. Raises
    ValueError for a part or a tree that does not exist, and the errors of reading."""
    trees = request.state
    if trees is None:
        trees = adapter.trees if request.parts is None else ()
    parts = checkpoint.parts if request.parts is None else request.parts
    asked_parts = () if request.absent_parts else parts
    known = ((asked_parts, checkpoint.parts, "checkpoint has no part"), (trees, adapter.trees, "engine has no"))
    for asked, there, who in known:
        unknown = sorted(set(asked).difference(there))
        if unknown:
            raise ValueError(f"the {who} {', '.join(unknown)}; it has {', '.join(there)}")
    names = {part: {info.name: info for info in checkpoint.contents.of_part(part)} for part in parts}
    in_part, trains = request.parts is not None, adapter.trains
    wanted, no_place = adapter.wanted(names), adapter.unexpected(names)
    matched = match(names, checkpoint.manifest.aliases, wanted, no_place, in_part=in_part, trains=trains)

    saved, same_size = engine_state(checkpoint), checkpoint.manifest.world_size == size
    state = {name: (saved or {}).get(name) for name in trees}
    moments = names.keys() - RESERVED_PARTS
    if state.get("optimizer") is not None and not (in_part or moments or checkpoint.contents.left_out):
        # The optimizer that was saved had no moments, as before its first step. So the optimizer of the engine begins
        # anew, and its moments are not missing in the checkpoint.
        missing = {key: why for key, why in matched.differences.items() if key not in matched.zeroed}
        matched = replace(matched, differences=missing)
    needs_rank_state = request.rng or (saved is not None and adapter.needs_rank_state(state))
    rank_state = checkpoint.rank_state(rank, lazy=True) if needs_rank_state and same_size else None
    selection = Selection(
        stored=names, wanted=matched.filled, restored=matched.sources, kept=matched.weights_kept, state=state,
        rank_state=rank_state, rng=request.rng, strict=request.strict, keeps_settings=request.settings == "engine",
    )  # fmt: skip
    restoring = adapter.restoring(selection)

    # If only weights are restored, it does not matter whether they were trained.
    roles = matched.changed_roles() if names.get(MASTER) and trains else []
    misfits = matched.problems(roles) if request.strict or matched.restores_nothing else []
    if saved is None and trees:
        why = "a state dict has no such state, and repair keeps none where the manifest was lost"
        against = [f"{', '.join(trees)}: not in the checkpoint; {why}"]
    else:
        against = restoring.problems()
    problems = [*misfits, *told(against, "parts of the other state do not fit")]
    if request.rng and not same_size:
        problems.append(
            f"rng=True needs {checkpoint.manifest.world_size} ranks, as wrote the checkpoint; these are {size}"
        )

    own_state: dict[str, Any] | None = None
    warnings: list[str] = []
    if request.with_rank_state or request.resumes:
        if same_size:
            own_state = checkpoint.client_rank_state(rank)
            lost = [name for name in registered if name not in (own_state or {})]
            if lost:
                said = f"the checkpoint has no state of {', '.join(map(repr, lost))}, registered with the engine"
                anew = "to begin anew with such an object, register it after the restore"
                (problems if request.strict else warnings).append(f"{said}: {anew}")
        elif rank == 0:
            lost = sorted({*registered, *(checkpoint.client_rank_state(0) or {})})
            if lost and (registered or not request.with_rank_state):
                warnings.append(not_dealt_out(checkpoint, size, lost))

    client_state: dict[str, Any] = {} if saved is None else checkpoint.state[CLIENT_STATE]
    if not problems:
        _check_sizes(checkpoint, matched)
        if request.own_client_state:
            state_of_rank = checkpoint.map_of_rank(rank if same_size else 0, CLIENT_STATE)
            if state_of_rank is not None and same_size:
                client_state = state_of_rank
            elif state_of_rank is not None:
                warnings.append(
                    f"each of the {checkpoint.manifest.world_size} ranks that wrote {checkpoint.path} had a "
                    f"client_state of its own; these are {size} ranks, and all of them get that of rank 0"
                )
        if not request.strict:
            warnings += fits_in_part(checkpoint, matched, trees)
    weights = [part for part in names if part in WEIGHT_PARTS and names[part]]
    what_to_do = hint(adapter, selection, matched, weights, misfits, roles, against, saved, request.caller)
    if what_to_do and any(
        str(key).startswith("param_groups") for path in paths_of(checkpoint).values() for key in path
    ):  # It is a state dict with the state of an optimizer.
        what_to_do += WITH_OPTIMIZER
    if checkpoint.contents.left_out and "optimizer" in trees and (request.strict or request.all_moments):
        problems, what_to_do = leaves_out(checkpoint, weights, request.caller)
    sources, converted = (
        {part: tuple(of_part) for part, of_part in by_name.items()} for by_name in (matched.sources, matched.converted)
    )
    return RestorePlan(
        adapter, checkpoint, matched.sources, matched.read_bytes, matched.unfilled, restoring,
        Restored(client_state, sources, by_part(matched.kept), by_part(matched.unexpected), converted),
        own_state, problems, what_to_do, warnings,
    )  # fmt: skip


def _check_sizes(checkpoint: Loader, matched: Match) -> None:
    """Checks the lengths of the files that this rank reads. A thousand ranks have thousands of files, so not every rank
    can look at all of them."""
    read = [f for f in matched.filled if f.span.numel and f.name in matched.sources.get(f.part, ())]
    tensors = checkpoint.contents.tensors(matched.sources[f.part][f.name] for f in read)
    bounds = np.empty((len(read), 2), np.int64)
    for number, (f, stored) in enumerate(zip(read, tensors.grids, strict=True)):
        grid, start, stop = f.span
        bounds[number] = (start, stop) if same_order(grid, stored) else (0, grid.numel)
    checkpoint.contents.check_sizes(tensors, bounds=bounds)


def engine_state(checkpoint: Loader) -> Mapping[str, Any] | None:
    """Returns the trees of the engine's state, or None if a repair could not save them, or no engine had them."""
    engine, client_state = checkpoint.root.get("engine"), checkpoint.root.get(CLIENT_STATE)
    is_engine = isinstance(engine, dict) and STATE_DICT not in engine
    return engine if is_engine and isinstance(client_state, dict) else None
