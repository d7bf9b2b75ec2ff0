"""Writes a folder in DeepSpeed's own format from a checkpoint, as DeepSpeed 0.19.8's ``engine.save_checkpoint`` does.

    <destination>/latest                                          names the tag
    <destination>/<tag>/mp_rank_00_model_states.pt                stages 0 to 2: weights, buffers, counters, scheduler;
                                                                  at stage 0 also the optimizer's state
    <destination>/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt stage 3: the same for rank R, without weights
    <destination>/<tag>/zero_pp_rank_R_mp_rank_00_optim_states.pt master weights and moments of rank R; in bf16 the
                                                                  name begins with "bf16_"

Each file is planned as a tree (deepspeed_plan.py), whose tensors are read from the checkpoint while the file is
written.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from zckpt.converting.deepspeed_plan import FolderPlan
from zckpt.converting.source import values_of
from zckpt.errors import CheckpointExistsError, from_os_error
from zckpt.exporting.checkpoint_source import CheckpointFiller
from zckpt.exporting.write import write_files
from zckpt.format import names
from zckpt.listing.other_formats import deepspeed_files
from zckpt.listing.runs import refuse_in_checkpoint
from zckpt.plan.share import shared_out
from zckpt.progress import reported
from zckpt.storage.files import put_in_place, take_back
from zckpt.storage.process_names import remove_left_over, temporary
from zckpt.storage.schemes import open_store
from zckpt.storage.space import Space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zckpt.progress import Progress
    from zckpt.ranks.collectives import Ranks
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.transfer.budget import Budget


def to_deepspeed(
    checkpoint: Checkpoint,
    destination: str,
    ranks: Ranks,
    *,
    tag: str | None = None,
    stage: int | None = None,
    world_size: int | None = None,
    overwrite: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Writes ``<destination>/<tag>``, which stock ``engine.load_checkpoint`` resumes from, and then ``latest``.

    ``tag``: the name of the folder; None means ``global_step<N>``. ``stage`` (0 to 3) and ``world_size``: the ZeRO
    stage and the number of ranks of the engines that will load the folder; None means those of the checkpoint.
    ``overwrite``: whether a folder in DeepSpeed's format that exists already is replaced. ``budget``: the memory that
    may be used; None means the budget of the checkpoint. The processes ``ranks`` share the files, and all of them have
    to call this function.

    Returns the path of the folder, and a phrase for each thing that the folder lacks. Raises UnsupportedError for a
    checkpoint that is not of a training run with DeepSpeed. Raises MismatchError for optimizer state that cannot be cut
    for this stage and world size. Raises ValueError for a stage or world size that does not exist. Raises
    CheckpointExistsError, NoSpaceError and StorageError, and FormatError for a damaged checkpoint. After an error,
    nothing of the folder remains in ``destination``.
    """
    tag = f"global_step{checkpoint.step}" if tag is None else tag
    run = os.path.abspath(destination)
    plan = ranks.together(lambda: FolderPlan(checkpoint, stage, world_size), "plan the folder")
    ranks.first(lambda: _check_place(run, tag, overwrite), "look at the destination")

    def measure() -> tuple[CheckpointFiller, list[tuple[int, int]], tuple[str, ...]]:
        with values_of(checkpoint.path):
            filler = CheckpointFiller(checkpoint, plan.infos, budget or checkpoint.budget, plan.copies)
            return filler, [(file.nbytes, filler.nbytes([file])) for file in plan.files()], plan.missing()

    filler, sizes, missing = ranks.together(measure, "plan the folder")
    file_bytes = [nbytes for nbytes, _ in sizes]
    own_files = [number for number, owner in enumerate(shared_out(file_bytes, ranks.size)) if owner == ranks.rank]

    def write() -> None:
        with reported(progress, "convert", sum(sizes[number][1] for number in own_files)) as filler.advance:
            for number, file in enumerate(plan.files()):
                if number in own_files:
                    write_files(open_store(directory), [file], {}, filler, filler.budget)

    with ExitStack() as new_directory:
        directory_context = _new_directory(run, tag, sum(file_bytes), overwrite)
        directory = ranks.first(lambda: new_directory.enter_context(directory_context), "make a directory")
        ranks.together(write, "convert")
        ranks.first(new_directory.close, "put the folder in place")
    return os.path.join(run, tag), missing


def _check_place(run: str, tag: str, overwrite: bool) -> None:
    """Raises ValueError or CheckpointExistsError unless a folder of this name may be made in the directory ``run``."""
    if tag in ("", ".", "..", "latest") or tag != os.path.basename(tag).strip() or "\n" in tag or "\0" in tag:
        raise ValueError(f"tag must be the name of a directory, got {tag!r}")
    target = os.path.join(run, tag)
    refuse_in_checkpoint(run)
    for directory in (run, target):
        if os.path.lexists(os.path.join(directory, names.MANIFEST)):
            raise CheckpointExistsError(
                "this is a checkpoint of zckpt", file=directory, hint="choose another destination or tag"
            )
    latest_tag = ""
    with suppress(OSError, UnicodeDecodeError), open(os.path.join(run, names.LATEST)) as file:
        latest_tag = file.read().strip()
    if latest_tag and os.path.lexists(os.path.join(run, latest_tag, names.MANIFEST)):
        raise CheckpointExistsError(
            "this is a run of zckpt, whose file `latest` would be replaced", file=run, hint="choose another destination"
        )
    if os.path.lexists(target):
        entries = os.listdir(target) if os.path.isdir(target) else [""]
        if entries and not deepspeed_files(entries):
            raise CheckpointExistsError(
                "something else than a checkpoint of DeepSpeed is here", file=target, hint="choose another tag"
            )
        if not overwrite:
            raise CheckpointExistsError(
                "a checkpoint of DeepSpeed is here already", file=target,
                hint="choose another tag, or replace it with overwrite=True (--overwrite)",
            )  # fmt: skip


@contextmanager
def _new_directory(run: str, tag: str, nbytes: int, overwrite: bool) -> Iterator[str]:
    """A context whose value is a new directory, which the caller fills with ``nbytes`` bytes. When the context ends,
    the directory is put at ``<run>/<tag>``, and ``latest`` is made to name it. If the context ends by an error, the
    directory is removed, and what was there before is still there. Raises CheckpointExistsError, NoSpaceError and
    StorageError."""
    target, store, made_directories = os.path.join(run, tag), open_store(run), _missing(run)
    # A process that is killed leaves this directory behind. Its name shows that the folder is not complete, and the
    # next conversion into this run removes it.
    directory, latest, placed = temporary(target), None, False
    try:
        remove_left_over(store)
        store.make_directories(os.path.basename(directory))
        Space.of(open_store(directory), nbytes).refuse_lack()
        yield directory
        store.sync_names(os.path.basename(directory))
        latest = store.prepare(names.LATEST, tag.encode(), secrets.token_hex(4))
        _check_place(run, tag, overwrite)  # Another process may have put something there in the meantime.
        try:
            put_in_place(directory, target)
        except OSError as error:
            raise from_os_error(error, "rename", directory) from error
        placed = True
        store.sync_names("")
        store.commit(names.LATEST, latest)
    except BaseException:
        with suppress(OSError):  # Only the first error is reported.
            if placed:
                take_back(directory, target)
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            if latest is not None:
                os.unlink(os.path.join(run, latest))
        for path in made_directories:
            with suppress(OSError):  # The directory is not empty if another process has put something there.
                os.rmdir(path)
        raise
    shutil.rmtree(directory, ignore_errors=True)


def _missing(path: str) -> list[str]:
    """Returns ``path`` and all directories above it that do not exist, the innermost one first."""
    directories = []
    while not os.path.lexists(path):
        directories.append(path)
        path = os.path.dirname(path)
    return directories
