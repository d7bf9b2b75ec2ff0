"""What the saves and loads of all attached engines have in common: which saves hold the whole state, and where a load
looks for its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.checkpoint.background import after_commit, wait_for
from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.listing.runs import can_resume
from zckpt.checkpoint.tiers.choice import Chosen, choose
from zckpt.checkpoint.tiers.upload import run_there
from zckpt.checkpoint.write import write_engine
from zckpt.engines import adapt
from zckpt.errors import CheckpointNotFoundError, ZckptError
from zckpt.format import names
from zckpt.plan.inventory import RESERVED_PARTS
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.checkpoint.writing.saves import Saves
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.location import Location, StrPath


def save(engine: object, saves: Saves, options: WriteOptions, run: StrPath, path: str, ranks: Ranks) -> None:
    """Writes a checkpoint of an attached engine into the directory ``path``. If it is not the turn of a full one, it
    leaves out what the optimizer keeps for each weight. If the options have ``latest``, the file ``latest`` in the
    directory ``run`` names the checkpoint, unless it names a full one and this one is not full. Collective."""
    step, latest, exclude = adapt(engine).step, options.latest, options.exclude
    wait_for(ranks)  # The write before this one has to be committed, because its checkpoint may be the full one.
    number = saves.begin(run, path, step)
    if number:
        replaces_full, latest_is_full = ranks.first(
            lambda: (_is_full(path), _is_full(run)), "look for a full checkpoint"
        )
        number = 0 if replaces_full else number
        latest = latest and (replaces_full or not latest_is_full)
    if number:
        exclude = (*exclude, *moments(engine))
    write_engine(engine, path, replace(options, exclude=exclude, latest=latest, run=run))
    after_commit(lambda: saves.end(number, run, path, step), ranks)


def moments(engine: object) -> tuple[str, ...]:
    """Returns the parts of an engine that have what its optimizer keeps for each weight."""
    return tuple(part for part in adapt(engine).parts if part not in RESERVED_PARTS)


def _is_full(path: StrPath) -> bool:
    """Returns whether the checkpoint at ``path`` is full. In the directory of a run, it is the one that ``latest``
    names. Returns False if there is no checkpoint that can be read."""
    try:
        return can_resume(find(path))
    except ZckptError:
        return False


def choose_copy(saves: Saves, run: Location, tag: object, ranks: Ranks) -> tuple[Chosen, str] | None:
    """Returns the checkpoint that is loaded, and the directory that has it, if the saves are copied to another place.
    The checkpoint may be in the run or in this place. Returns None if the saves are not copied, and if there is no
    checkpoint in either. Raises the errors of ``choose``, also if a file ``latest`` names a checkpoint that is not
    there. Collective."""
    if saves.copy_to is None:
        return None
    places = run, run_there(saves.copy_to.path, run)

    def look() -> tuple[Chosen, str] | None:
        try:
            chosen = choose([str(place if tag is None else place.child(str(tag))) for place in places])
            return chosen, str(chosen.nearest().location)
        except CheckpointNotFoundError:
            if tag is None and any(open_store(place).entry(names.LATEST) is not None for place in places):
                raise
            return None

    found = ranks.first(look, "choose the checkpoint")
    return None if found is None else (Chosen(*found[0]), found[1])
