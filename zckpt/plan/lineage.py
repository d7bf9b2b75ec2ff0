"""What a checkpoint can be used for, and which run it belongs to. Whoever makes a checkpoint records both in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zckpt.format.digest import digest
from zckpt.plan.inventory import MASTER, PARAM, WEIGHT_PARTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_RUN_ID = re.compile("[0-9a-f]{16}")


class Use(StrEnum):
    """What a checkpoint can be used for."""

    RESUME = "resume"
    """Training can go on from it: it holds the state of an optimizer, and the weights that this optimizer updates."""
    WEIGHTS = "weights"
    """It holds all weights of a model. Either the state of the optimizer was left out, or there was no optimizer."""
    PART = "part"
    """It holds less than all weights, or it has lost something."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a checkpoint says about its origin."""

    run_id: str
    """The identity of the training run: 16 hexadecimal digits. A run that is resumed from one of its checkpoints keeps
    its identity. Two engines, such as an actor and a critic, belong to two runs."""
    use: Use

    def tree(self, tensors: Mapping[str, int]) -> dict[str, object]:
        """Returns the value that the tree of a checkpoint holds. ``tensors``: the number of tensors that the checkpoint
        has of each part."""
        return {"run": self.run_id, "use": str(self.use), "tensors": dict(tensors)}


def lineage_of(value: object, tensors: Mapping[str, int]) -> Lineage | None:
    """Returns the lineage from the value that a tree holds, or None if it is not one. ``tensors``: the number of
    tensors that the checkpoint has of each part. If there are fewer of them than ``value`` says, the checkpoint has
    lost some, whatever it was made for."""
    if not isinstance(value, dict):
        return None
    run_id, use, recorded = (value.get(key) for key in ("run", "use", "tensors"))
    if not (isinstance(run_id, str) and _RUN_ID.fullmatch(run_id)):
        return None
    if use not in list(Use) or not isinstance(recorded, dict):
        return None
    lost = any(not isinstance(count, int) or tensors.get(part, 0) < count for part, count in recorded.items())
    lost = lost or (use == Use.RESUME and MASTER not in tensors)
    return Lineage(run_id, Use.PART if lost else Use(use))


def judged(tensors: Collection[str], engine_state: object, *, left_out: Collection[str], partial: bool) -> Use:
    """Returns the use of a checkpoint that has no lineage, because an older version of zckpt has made it. In doubt, it
    is the lower use. ``tensors``: the parts of which the checkpoint has tensors. ``engine_state``: the state of the
    engine that is not a tensor. ``left_out``: the parts that a write has left out. ``partial``: whether this is a copy
    of some tensors of another checkpoint."""
    if partial or not {MASTER, PARAM}.intersection(tensors):
        return Use.PART
    trained = isinstance(engine_state, dict) and engine_state.get("optimizer") is not None and MASTER in tensors
    return Use.RESUME if trained and not left_out else Use.WEIGHTS


def run_by_tensors(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Returns the identity of the run of a checkpoint that was not written by an engine that knew its run. It is the
    same for all checkpoints of a model. ``tensors``: the names and shapes of the weights."""
    return digest("\n".join(sorted({f"{name} {[*shape]}" for name, shape in tensors})).encode()).hex()[:16]


def use_of(written: Collection[str], parts: Collection[str], *, trains: bool, all_weights: bool = False) -> Use:
    """Returns the use of a checkpoint that has some parts of an engine's state. ``written``: the parts that it has
    whole. ``parts``: the parts of the engine. ``trains``: whether the engine has an optimizer. ``all_weights``: whether
    the part ``param`` also has the weights that have a master."""
    missing = {*parts}.difference(written)
    if trains and missing <= {PARAM}:  # The model that is given to the engine has the frozen weights.
        return Use.RESUME
    if all_weights:
        missing.discard(MASTER)
    return Use.PART if missing.intersection(WEIGHT_PARTS) else Use.WEIGHTS
