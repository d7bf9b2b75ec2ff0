"""The checkpoints of Hugging Face's Trainer, of Accelerate and of Lightning: which of them are whole, and which of them
may be removed.

Each of Trainer's is a directory ``checkpoint-<step>`` that has zckpt's checkpoint beside files that Trainer writes
itself. Trainer writes some of these files after zckpt's commit, and a crash may cut off any of them. So a run can be
resumed from a directory only if all of it is whole.
"""

from __future__ import annotations

import json
import os
import zipfile
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.listing.runs import can_resume, committed_at, directories, if_whole, is_begun, is_of_trainer
from zckpt.errors import ZckptError
from zckpt.plan.lineage import Use
from zckpt.storage.lock import is_alive, is_lock, read_lock
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
FSDP_MODEL, FSDP_OPTIMIZER = "pytorch_model_fsdp_", "optimizer_"
"""The names that Accelerate gives to the directories of an FSDP2 model, followed by the number of the model."""


class DirectoryKind(Enum):
    """What a directory of one checkpoint is."""

    UNFINISHED = "not whole: it is being written, or its writer has died, or something of it is missing or cut off"
    WEIGHTS = "whole, but the optimizer's state was left out"
    FULL = "whole, and training can go on from it"
    FOREIGN = "not zckpt's: the framework has saved the state itself, so it can resume from it"


RESUMABLE = (DirectoryKind.FULL, DirectoryKind.FOREIGN)


def kind_of(folder: str) -> DirectoryKind:
    """Returns what the directory is, as far as that can be told without reading a tensor. The file
    ``trainer_state.json`` is the last one that Trainer writes on rank 0."""
    if not _is_json(os.path.join(folder, TRAINER_STATE)):
        return DirectoryKind.UNFINISHED
    if not is_zckpts(folder):
        return DirectoryKind.FOREIGN if _is_resumable(os.listdir(folder)) else DirectoryKind.UNFINISHED
    is_fsdp = os.path.isdir(os.path.join(folder, f"{FSDP_MODEL}0"))
    try:
        contents = if_whole(open_store(os.path.join(folder, f"{FSDP_OPTIMIZER}0")) if is_fsdp else find(folder))
    except ZckptError:
        contents = None
    if contents is None:
        return DirectoryKind.UNFINISHED
    ranks = contents.manifest.world_size
    expected = [rng_file(rank, ranks) for rank in range(ranks)]
    engine = contents.plain_state.get("engine")
    if isinstance(engine, dict) and engine.get("scheduler") is None:  # then Trainer has the scheduler
        expected.append(SCHEDULER)
    # With save_only_model, Trainer writes none of these files.
    if not {*expected, SCHEDULER}.isdisjoint(os.listdir(folder)) and not all(
        zipfile.is_zipfile(os.path.join(folder, name)) for name in expected
    ):
        return DirectoryKind.UNFINISHED
    return DirectoryKind.FULL if contents.lineage.use is Use.RESUME else DirectoryKind.WEIGHTS


def _is_resumable(entries: Sequence[str]) -> bool:
    """Returns whether training can be resumed from a directory with these entries, which has no checkpoint of zckpt. It
    can if the directory has the state of an optimizer, or if it was written with save_only_model and so has no state of
    the random generators either. If a write of zckpt fails in the background after Trainer has written its own files,
    the directory has the state of the generators but none of an optimizer."""
    kept = any("optimizer" in name or name.startswith("global_step") for name in entries)
    return kept or not any(name.startswith("rng_state") for name in entries)


def rng_file(rank: int, ranks: int) -> str:
    """Returns the name of the file in which Trainer keeps the random generators of a rank. It is a zip archive, as
    torch.save makes them, so its end tells whether it is whole."""
    return "rng_state.pth" if ranks <= 1 else f"rng_state_{rank}.pth"


def is_zckpts(folder: str) -> bool:
    """Returns whether zckpt has written, or begun to write, in this directory of a Trainer."""
    return any(is_begun(entries) for _, entries in directories(open_store(folder)))


def last_checkpoint(output_dir: str) -> str | None:
    """Returns the directory of the checkpoint with the highest step from which training can go on. If all whole
    checkpoints are without the optimizer's state, it returns one of these: to load it is an error that says so, but
    with None a script would begin anew."""
    steps = sorted(int(name.rpartition("-")[2]) for name in os.listdir(output_dir) if is_of_trainer(name))
    folders = [os.path.join(output_dir, f"checkpoint-{step}") for step in steps]
    return last_of_kinds(folders, RESUMABLE) or last_of_kinds(folders, (DirectoryKind.WEIGHTS,))


def last_of_kinds(folders: Sequence[str], kinds: Collection[DirectoryKind]) -> str | None:
    """Returns the last of these directories that is of one of the kinds, or None."""
    return next((folder for folder in reversed(folders) if os.path.isdir(folder) and kind_of(folder) in kinds), None)


def kind_of_models(folder: str) -> DirectoryKind:
    """Returns what a directory of Accelerate is, which has a checkpoint for each model."""
    # The states of the random generators are the last files that Accelerate writes.
    if not any(name.startswith("random_states_") for name in os.listdir(folder)):
        return DirectoryKind.UNFINISHED
    stores = {store.location.name: store for store, entries in directories(open_store(folder)) if is_begun(entries)}
    models = [
        if_whole(store)
        for name, store in stores.items()
        # If there is a checkpoint of everything, that of the weights does not count.
        if not (name.startswith(FSDP_MODEL) and name.replace(FSDP_MODEL, FSDP_OPTIMIZER) in stores)
    ]
    if not models:
        return DirectoryKind.FOREIGN if any(Path(folder).glob("**/*optim*")) else DirectoryKind.UNFINISHED
    if None in models:
        return DirectoryKind.UNFINISHED
    is_full = all(model and model.lineage.use is Use.RESUME for model in models)
    return DirectoryKind.FULL if is_full else DirectoryKind.WEIGHTS


def is_last_to_resume(folder: str) -> bool:
    """Returns whether training can be resumed from the checkpoint in this directory of Lightning, and from no newer one
    of the same run beside it."""
    try:
        checkpoint = find(folder)
    except ZckptError:
        return False
    contents = if_whole(checkpoint)
    if contents is None or contents.lineage.use is not Use.RESUME:
        return False
    written, beside = committed_at(checkpoint), os.path.dirname(os.path.abspath(folder))
    for name in os.listdir(beside):
        with suppress(ZckptError):
            other = find(os.path.join(beside, name))
            if committed_at(other) > written and can_resume(other, contents.lineage.run_id):
                return False
    return True


def superseded(
    folders: Sequence[str], limit: int, best: str | None, kind_of: Callable[[str], DirectoryKind] = kind_of
) -> list[str]:
    """Returns which of these directories, given from the oldest to the newest, are to be removed if ``limit`` of them
    may stay. The newest one and the best one always stay, as with Trainer alone. The newest one from which training can
    go on stays too. A directory that is not whole is removed first, unless somebody is writing there. If no directory
    is whole, none is removed."""
    kinds = {folder: kind_of(folder) for folder in reversed(folders)}
    whole = [folder for folder, kind in kinds.items() if kind is not DirectoryKind.UNFINISHED]
    if not whole:
        return []
    resumable = [folder for folder, kind in kinds.items() if kind in RESUMABLE]
    protected = dict.fromkeys([whole[0], *resumable[:1], *(folder for folder in folders if folder == best)])
    ranked = list(dict.fromkeys([*protected, *whole, *kinds]))
    return [folder for folder in ranked[max(limit, len(protected)) :] if not _is_being_written(folder)]


def _is_being_written(folder: str) -> bool:
    for store, _ in directories(open_store(folder)):
        holder = read_lock(store)
        if holder is not None and is_lock(holder) and is_alive(store, holder):
            return True
    return False


def _is_json(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return isinstance(json.load(file), dict)
    except (OSError, ValueError, RecursionError):
        return False
