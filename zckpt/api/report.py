"""From checkpoints to a page that shows them."""

from __future__ import annotations

import os
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zckpt.api.open import open_checkpoint
from zckpt.api.validate import validate
from zckpt.comparing.trees import settings
from zckpt.errors import FormatError
from zckpt.exporting.place import begin, find_place, put_in_place
from zckpt.listing.find import advised, find, open_contents
from zckpt.listing.summary import CheckpointSummary, summary
from zckpt.ranks.collectives import Ranks, check_equal
from zckpt.reporting.page import find_libraries, render
from zckpt.reporting.page_data import gather
from zckpt.reporting.values import Values, joined, look
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.validation.report import LEVELS, Finding, Level, Report, in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.progress import Progress
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.reporting.page import Libraries
    from zckpt.reporting.values import Found
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


def report(
    paths: StrPath | Sequence[StrPath],
    out: StrPath = "report.html",
    *,
    statistics: bool = True,
    level: Level = "structure",
    overwrite: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> str:
    """Writes a page about one checkpoint, or about several of a run: a single HTML file, which needs no network.

    It shows what the checkpoints are, a treemap of the bytes by part and module, the bytes of each rank, a table of all
    tensors, and what ``zckpt.validate`` has found; of several checkpoints also the norms of each layer, the sizes of
    their updates over the training steps, and what has changed between neighbours.

    ``paths``: one checkpoint or several, in any order; the directory of a run is the one that its ``latest`` names. The
    treemap, the ranks and the table are about the one of the highest step. ``statistics``: the values of all tensors
    are read, verified, for minimum, maximum, mean, norm and a histogram of each; False: no tensor is read, and the page
    has no norms and updates either. ``level``: what ``zckpt.validate`` checks; "digests" and "deep" read all bytes once
    more. ``overwrite``: replaces a file. ``budget``: memory, threads and kind of I/O; None:
    ``Budget.from_environment()``. 64 MiB and a fraction of the budget are in memory, however many checkpoints there
    are. ``progress``: such as ``zckpt.ProgressBar()``.

    Where a tensor has the same digests as in the checkpoint before, it is not read again. A tensor that is damaged or
    missing is among the findings, and has no statistics.

    Where torch.distributed is initialised, every rank calls it; they share the work, and rank 0 writes the page.
    Returns the path of the page, which appears once it is whole.

    Raises what ``zckpt.open`` raises; CheckpointExistsError if a file is there already; ValueError for no path and for
    an unknown level; UnsupportedError without plotly and itables, whose scripts the page has in it; StorageError,
    RankError.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise ValueError("give the path of a checkpoint at least")
    ranks = Ranks(call="zckpt.report")
    libraries = ranks.together(find_libraries, "find the scripts of the page")
    place = ranks.first(lambda: find_place(out, None, overwrite), "find the place")
    places = ranks.first(lambda: _find(given), "find the checkpoints")
    reports = [validate(one, level=level, budget=budget, progress=progress) for one in places]
    checkpoints = ranks.together(lambda: [_open(one, budget) for one in places], "open the checkpoints")
    check_equal(ranks.share(lambda: [one.manifest.save_id for one in checkpoints], "compare"), "checkpoints")
    found: list[Found] | None = None
    if statistics:
        found, damaged = _look(checkpoints, ranks, progress)
        reports = [_with(*one) for one in zip(reports, damaged, strict=True)]
    ranks.first(lambda: _write(place, places, checkpoints, reports, found, libraries), "write the page")
    return place


def _find(given: Sequence[StrPath]) -> list[str]:
    """The directories of the checkpoints, each once, the one of the lowest step first."""
    stores = {str(store.location.absolute()): store for store in map(find, given)}

    def step(store: Store) -> tuple[int, str]:
        contents = open_contents(store)
        contents.reader.close()
        return contents.manifest.step, str(store.location)

    return [str(store.location) for store in sorted(stores.values(), key=step)]


def _open(place: str, budget: Budget | None) -> Checkpoint:
    store = open_store(place)
    return open_checkpoint(store, budget, partial(advised, store))


def _look(
    checkpoints: Sequence[Checkpoint], ranks: Ranks, progress: Progress | None
) -> tuple[list[Found], list[list[Finding]]]:
    """The values of each checkpoint's tensors, and what is wrong with some of them. All ranks share the work."""

    def own() -> list[Any]:
        found, errors = look(checkpoints, ranks.rank, ranks.size, progress)
        rows = [{key: None if one is None else one.row for key, one in of_one.items()} for of_one in found]
        return [rows, [[astuple(Finding.of(error)) for error in of_one] for of_one in errors]]

    shares = ranks.share(own, "look at the values")
    found = [
        joined([{key: row and Values.of_row(row) for key, row in rows[n].items()} for rows, _ in shares])
        for n in range(len(checkpoints))
    ]
    return found, [[Finding(*fields) for _, errors in shares for fields in errors[n]] for n in range(len(checkpoints))]


def _with(report: Report, more: Sequence[Finding]) -> Report:
    return replace(report, findings=in_order([*report.findings, *more]))


def _write(
    place: str,
    places: Sequence[str],
    checkpoints: Sequence[Checkpoint],
    reports: Sequence[Report],
    found: Sequence[Found] | None,
    libraries: Libraries,
) -> None:
    trees: list[object] = []
    full = list(reports)
    for number, checkpoint in enumerate(checkpoints):
        try:
            trees.append(settings(checkpoint))
        except FormatError as error:
            trees.append(None)
            full[number] = _with(full[number], [Finding.of(error)])
    summaries = [one for one in map(summary, places) if isinstance(one, CheckpointSummary)]
    page = render(gather(checkpoints, summaries, full, trees, found), libraries)
    prepared = Location.of(begin(place, directory=False))
    directory = open_store(prepared.parent)
    try:
        directory.put(prepared.name, page)
        put_in_place(str(prepared), place)
    except BaseException:
        directory.remove(prepared.name)
        raise
