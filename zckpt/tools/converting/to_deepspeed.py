"""Writes a folder in DeepSpeed's own format from a checkpoint, as DeepSpeed 0.19.8's ``engine.save_checkpoint`` does,
or a Universal Checkpoint, as its ``ds_to_universal.py`` does.

    <destination>/latest                                          names the tag
    <destination>/<tag>/mp_rank_00_model_states.pt                stages 0 to 2: weights, buffers, counters, scheduler;
                                                                  at stage 0 also the optimizer's state
    <destination>/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt stage 3: the same for rank R, without weights
    <destination>/<tag>/zero_pp_rank_R_mp_rank_00_optim_states.pt master weights and moments of rank R; in bf16 the
                                                                  name begins with "bf16_"

The name of a Universal Checkpoint is in the file ``latest_universal``. Each file is planned as a tree
(deepspeed_plan.py, and for a Universal Checkpoint universal_plan.py), whose tensors are read from the checkpoint while
the file is written.
"""

from __future__ import annotations

import secrets
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.other_formats import DEEPSPEED_FILES, LATEST_UNIVERSAL, UNIVERSAL_FILES
from zckpt.errors import CheckpointExistsError, FormatError, StorageError
from zckpt.format import names
from zckpt.format.limits import LATEST_BYTES_MAX
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.tools.converting.deepspeed_plan import DeepSpeedFolderPlan
from zckpt.tools.converting.source import is_file_name
from zckpt.tools.converting.universal_plan import UniversalPlan
from zckpt.tools.converting.write_folder import write_folder
from zckpt.tools.exporting.place import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.progress import Progress
    from zckpt.ranks.collectives import Ranks
    from zckpt.transfer.budget import Budget


def to_deepspeed(
    checkpoint: Loader,
    destination: str,
    ranks: Ranks,
    *,
    universal: bool,
    tag: str | None,
    stage: int | None,
    world_size: int | None,
    overwrite: bool,
    budget: Budget | None,
    progress: Progress | None,
) -> tuple[str, tuple[str, ...]]:
    """Writes ``<destination>/<tag>``, which stock ``engine.load_checkpoint`` resumes from, and then ``latest``.

    ``universal``: whether to write a Universal Checkpoint instead, and then ``latest_universal``. Engines of stages 1
    to 3 with the setting ``checkpoint.load_universal`` resume from it. ``tag``: the name of the folder; None means
    ``global_step<N>``. ``stage`` (0 to 3) and ``world_size``: the ZeRO stage and the number of ranks of the engines
    that will load the folder, unless it is a Universal Checkpoint; None means those of the checkpoint. ``overwrite``:
    whether a folder in DeepSpeed's format that exists already is replaced. ``budget``: the memory that may be used;
    None means the budget of the checkpoint. The processes ``ranks`` share the files, and all of them have to call this
    function.

    Returns the path of the folder, and a phrase for each thing that the folder lacks. Raises UnsupportedError for a
    checkpoint that is not of a training run with DeepSpeed. Raises MismatchError for optimizer state that cannot be cut
    for this stage and world size. Raises ValueError for a stage or world size that does not exist. Raises
    CheckpointExistsError, NoSpaceError and StorageError, and FormatError for a damaged checkpoint. After an error,
    nothing of the folder remains in ``destination``.
    """
    tag = f"global_step{checkpoint.manifest.step}" if tag is None else tag
    run = Location.of(destination).absolute()
    latest, patterns = (LATEST_UNIVERSAL, UNIVERSAL_FILES) if universal else (names.LATEST, DEEPSPEED_FILES)

    def make_plan() -> DeepSpeedFolderPlan:
        return UniversalPlan(checkpoint, None, 1) if universal else DeepSpeedFolderPlan(checkpoint, stage, world_size)

    missing = write_folder(
        checkpoint, ranks.together(make_plan, "plan the folder"), lambda: _place(run, tag, overwrite, patterns),
        lambda place: _finish(place, run, tag, latest), ranks, budget=budget, progress=progress,
    )  # fmt: skip
    return str(run.child(tag)), missing


def _place(run: Location, tag: str, overwrite: bool, patterns: Sequence[str]) -> Place:
    """Returns the place of a folder with this name and with files of these patterns in the directory ``run``. Raises
    ValueError or CheckpointExistsError if the folder may not be made there."""
    if not is_file_name(tag) or tag in (names.LATEST, LATEST_UNIVERSAL) or tag != tag.strip() or "\n" in tag:
        raise ValueError(f"tag must be the name of a directory, got {tag!r}")
    _check_latest(run)
    what = "checkpoint of DeepSpeed"
    return Place.choose(str(run.child(tag)), what, overwrite=overwrite, patterns=patterns)


def _check_latest(run: Location) -> None:
    """Raises CheckpointExistsError if the file ``latest`` in the directory ``run`` names a checkpoint of zckpt."""
    store, tag = open_store(run), _named(run, names.LATEST)
    if tag and store.entry(f"{tag}/{names.MANIFEST}") is not None:
        raise CheckpointExistsError(
            "this is a run of zckpt, whose file `latest` would be replaced", file=str(run),
            hint="choose another destination",
        )  # fmt: skip


def _named(run: Location, latest: str) -> str:
    """Returns what the file of the name ``latest`` names, or an empty text if there is no such file, or if zckpt could
    not have written it. Raises StorageError."""
    with suppress(FormatError), closing(open_store(run).reader()) as reader:
        return names.decode_latest(reader.read(latest, 0, LATEST_BYTES_MAX + 1), latest)
    return ""


def _finish(place: Place, run: Location, tag: str, latest: str) -> None:
    """Puts the folder in place, and makes the file of the name ``latest`` name it. Raises CheckpointExistsError,
    NoSpaceError and StorageError. After an error, what was in the directory before is unchanged."""
    store = open_store(run)
    prepared = store.prepare(latest, tag.encode(), secrets.token_hex(4))

    def commit() -> None:
        try:
            prepared.commit()
        except StorageError as error:
            if not error.transient:
                raise
            # The answer of an object store may have been lost. While the file may name the folder, it has to stay.
            made = place.made.copy()
            place.made.clear()
            if _named(run, latest) == tag:
                return
            place.made.extend(made)
            raise

    try:
        _check_latest(run)  # Another process may have written a checkpoint there in the meantime.
        place.finish(commit)
    except BaseException:
        prepared.discard()
        raise
