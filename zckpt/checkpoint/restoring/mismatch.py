"""Messages which say that a checkpoint and an engine do not fit. They are short, whatever the size of the model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from zckpt.checkpoint.listing.runs import newest_to_resume, run_of
from zckpt.errors import first_few
from zckpt.plan.inventory import MASTER, PARAM, RESERVED_PARTS
from zckpt.plan.select import part_of
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.checkpoint.restoring.matching import Match
    from zckpt.engines.contract import EngineAdapter, Selection

SHOWN_MAX = 5
"""The largest number of similar lines or names that a message shows."""


class Caller(NamedTuple):
    """The function that restores and the names of its arguments, as they are shown in error messages."""

    call: str = "zckpt.restore"
    in_part: str = "strict=False"
    weights: str = "parts={parts} restores the weights alone"
    """How the weights alone are restored. ``{parts}`` stands for the parts of the checkpoint that have weights and
    buffers."""
    counters: str = ""
    """How the counters are restored with the weights, but without the state of the optimizer. Empty if the function
    cannot do this."""
    settings: str = 'settings="engine"'
    """How the engine keeps its own settings."""
    scheduler: str = "state={trees}"
    """How the scheduler stays as it is. ``{trees}`` stands for all trees of state but the scheduler."""


WITH_OPTIMIZER = (
    "; to resume the optimizer of a state dict, make a training state of it: `zckpt convert PATH FOLDER --to dcp`, "
    "then `zckpt convert FOLDER NEW`; or load it with dcp.load or Checkpoint.load_into, and write it with zckpt.write"
)


class Mismatch(NamedTuple):
    """Why a tensor of the engine cannot be restored: ``MISSING``, ``SHAPE`` or ``DTYPE``, and a line of text."""

    kind: str
    line: str


MISSING = "tensors of the engine are missing in the checkpoint"
SHAPE = "tensors differ in shape"
DTYPE = "tensors differ in dtype"


def told(lines: Sequence[str], what: str, total: int = 0) -> list[str]:
    """Returns all lines if there are at most ``SHOWN_MAX``. Otherwise returns a line with their number (and ``total``,
    if it is given), and then the first ``SHOWN_MAX`` lines."""
    if len(lines) <= SHOWN_MAX:
        return list(lines)
    number = f"all {total}" if len(lines) == total else f"{len(lines)} of {total}" if total else str(len(lines))
    return [f"{number} {what}; the first {SHOWN_MAX}:", *(f"  {line}" for line in lines[:SHOWN_MAX])]


def told_differences(differences: Mapping[str, Mismatch], keys: Collection[str]) -> list[str]:
    """Returns the lines that describe ``differences``. ``keys``: those of all tensors of the engine."""
    lines: list[str] = []
    for kind in (MISSING, SHAPE, DTYPE):
        lines += told([each.line for each in differences.values() if each.kind == kind], kind, len(keys))
    weights = [key for key in keys if part_of(key) in (MASTER, PARAM)]
    if weights and differences.keys() >= set(weights):
        there = any(differences[key].kind != MISSING for key in weights)
        other = "a model of another size" if there else "another model, or its parameters have other names"
        lines.append(f"no parameter fits: this looks like {other}")
    return lines


def summary(what: str, keys: Sequence[str]) -> str:
    """Returns a line that says how many tensors there are, to which parts they belong, and the first few of their
    names."""
    if not keys:
        return f"0 {what}"
    parts = ", ".join(f"{count} of {part}" for part, count in Counter(map(part_of, keys)).items())
    names = list(dict.fromkeys(key.partition("/")[2] for key in keys))
    return f"{len(keys)} {what} ({parts}: {first_few(names, SHOWN_MAX, ', ...')})"


def not_dealt_out(checkpoint: Loader, size: int, lost: Sequence[str]) -> str:
    """Returns the warning that states of single ranks are given to no rank, because the number of ranks is another
    one."""
    return (
        f"each of the {checkpoint.manifest.world_size} ranks that wrote {checkpoint.path} had values of its own "
        f"({', '.join(map(repr, lost))}). Now the number of ranks is {size}, and none gets any of them, so that a data "
        "loader or a loss scale begins anew. zckpt.open(path).client_rank_state(rank) returns those of each rank"
    )


def fits_in_part(checkpoint: Loader, matched: Match, trees: Collection[str]) -> list[str]:
    """Returns the warning that says which tensors are not restored, or nothing if all are."""
    kept = matched.kept
    if not (kept or matched.unexpected or matched.zeroed):
        return []
    lines = [
        summary("tensors are restored", [f"{part}/{name}" for part, of in matched.sources.items() for name in of]),
        summary("of the engine are kept as they are", kept),
        summary("of the checkpoint are left out", matched.unexpected),
    ]
    if matched.zeroed:
        moments = "moments of restored weights are not in the checkpoint and begin at zero"
        lines.append(summary(moments, list(matched.zeroed)))
    if "optimizer" in trees and any(part_of(key) not in RESERVED_PARTS for key in kept):
        lines.append("kept moments beside restored ones, in one partition, take the checkpoint's step")
    return [f"{checkpoint.path} fits the engine in part: {'; '.join(lines)}"]


def leaves_out(checkpoint: Loader, weights: Sequence[str], caller: Caller) -> tuple[list[str], str]:
    """Returns the problem and the hint for a checkpoint that leaves out what a training needs to go on. ``weights``: as
    for ``hint``. Looks for a checkpoint of the run that does not."""
    store = open_store(checkpoint.path)
    full = newest_to_resume(store, checkpoint.contents.lineage)
    nothing = f"no other one of the run in {run_of(store).location} holds all"
    resume = f"resume from {full}, the newest one that holds all" if full else nothing
    problem = (
        f"the checkpoint leaves out {', '.join(checkpoint.contents.left_out)}, without which training cannot go on"
    )
    return [problem], f"{resume}; {caller.weights.format(parts=json.dumps(weights))}"


def hint(
    adapter: EngineAdapter,
    selection: Selection,
    matched: Match,
    weights: Sequence[str],
    misfits: Sequence[str],
    roles: Sequence[str],
    against: Sequence[str],
    saved: object,
    caller: Caller,
) -> str | None:
    """Returns the hint for the problems, if there is one. What it says has been tried, as far as that can be done
    without reading a tensor. ``weights`` has the parts of the checkpoint that have weights and buffers. The other
    arguments are the variables of ``plan_restore``."""
    if matched.restores_nothing:
        return (
            "no weight at all would be restored: make the engine of the model that was saved, or copy the weights "
            "into the model yourself, by zckpt.open(path).load_into(...) if it is a state dict, and otherwise from "
            "zckpt.open(path).state_dict()"
        )

    if not misfits and not against:
        return None

    def works(changed: Selection) -> bool:
        return saved is not None and not adapter.restoring(changed).problems()

    in_part = f"{caller.in_part} leaves out what does not fit, and converts what is frozen on one side only"
    if any(" is frozen in the engine " in role for role in roles):
        in_part = f"to freeze weights after the restore keeps their moments; {in_part}"
    relaxed = replace(selection, strict=False)
    if works(relaxed):
        return in_part
    hints = []
    others = {name: tree for name, tree in selection.state.items() if name != "scheduler"}
    remedies = (
        (f"{caller.settings} keeps the settings and the schedule of the engine", {"keeps_settings": True}),
        (f"{caller.scheduler.format(trees=json.dumps([*others]))} leaves the scheduler as it is", {"state": others}),
    )
    for said, changes in remedies if against else ():
        if works(replace(relaxed if misfits else selection, **changes)):
            hints.append(f"{in_part}; with it, {said}" if misfits else said)
            break
    if against and weights:
        misfitting = {*map(part_of, (*matched.differences, *matched.no_place)), *([MASTER] if roles else [])}
        those_that_fit = f", those that fit with {caller.in_part}" if misfitting.intersection(weights) else ""
        hints.append(caller.weights.format(parts=json.dumps(weights)) + those_that_fit)
        if saved is not None and caller.counters:
            hints.append(caller.counters)
    if saved is None:
        hints.append("zckpt.open(path).state_dict() has the weights too")
    return "; ".join(hints) or None
