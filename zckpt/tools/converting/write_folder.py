"""Writes the files of a folder in the format of another program from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.progress import reported
from zckpt.tools.converting.source import values_of
from zckpt.tools.exporting.checkpoint_source import CheckpointFiller
from zckpt.tools.exporting.place import Place, write_in_place
from zckpt.tools.exporting.write import WINDOW_BYTES_MAX, write_files
from zckpt.tools.share import batches, shared_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.progress import Progress
    from zckpt.ranks.collectives import Ranks
    from zckpt.tools.converting.deepspeed_plan import DeepSpeedFolderPlan
    from zckpt.tools.converting.to_dcp import DcpPlan
    from zckpt.transfer.budget import Budget


BATCH_FILES_MAX = 64
"""The most files that are open at a time."""


def write_folder(
    checkpoint: Loader,
    plan: DeepSpeedFolderPlan | DcpPlan,
    choose: Callable[[], Place],
    finish: Callable[[Place], None],
    ranks: Ranks,
    *,
    budget: Budget | None,
    progress: Progress | None,
) -> tuple[str, ...]:
    """Writes the files of a plan, and returns ``plan.missing()``. ``choose`` returns the place of the folder, and
    ``finish`` puts the folder there, both on rank 0. The processes ``ranks`` share the files, and all of them have to
    call this function. After an error, nothing of the folder remains."""
    place = Place.of(*ranks.first(choose, "look at the destination"))

    def measure() -> tuple[CheckpointFiller, list[tuple[str, int, int]], tuple[str, ...]]:
        with values_of(checkpoint.path):
            filler = CheckpointFiller(checkpoint, plan.infos, budget or checkpoint.budget, plan.copies)
            return filler, [(file.name, file.nbytes, filler.nbytes([file])) for file in plan.files()], plan.missing()

    filler, sizes, missing = ranks.together(measure, "plan the folder")
    owners = shared_out([nbytes for _, nbytes, _ in sizes], ranks.size)
    own_files = {number for number, owner in enumerate(owners) if owner == ranks.rank}

    def write() -> None:
        with reported(progress, "convert", sum(sizes[number][2] for number in own_files)) as filler.advance:
            files_of_rank = (file for number, file in enumerate(plan.files()) if number in own_files)
            # Threads are started for each batch, so a batch has several small files.
            for files in batches(files_of_rank, lambda item: item.nbytes, WINDOW_BYTES_MAX, BATCH_FILES_MAX):
                write_files(place.store, files, {}, filler)
                for directory in {file.name.rpartition("/")[0] for file in files} - {""}:
                    place.store.sync_names(directory)

    write_in_place(
        place, ranks, {name: nbytes for name, nbytes, _ in sizes}, lambda: ranks.together(write, "convert"),
        lambda: finish(place),
    )  # fmt: skip
    return missing
