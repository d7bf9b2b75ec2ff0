"""Writes a page that shows checkpoints."""

from __future__ import annotations

import os
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zckpt.api.open import open_checkpoint
from zckpt.api.validate import validate
from zckpt.comparing.trees import settings
from zckpt.errors import FormatError
from zckpt.exporting.place import begin, check_place, choose_place, put_in_place
from zckpt.listing.find import advised, find, open_contents
from zckpt.listing.summary import CheckpointSummary, summary
from zckpt.ranks.collectives import Ranks, check_equal
from zckpt.reporting.page import find_libraries, render
from zckpt.reporting.page_data import gather
from zckpt.reporting.values import Values, joined, look
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.validation.report import LEVELS, Finding, Level, Report, in_order

PAGE = (b"<!doctype html>", b'content="zckpt ')
"""These are near the beginning of every page. No other file is replaced by one."""

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
    """Writes a page about one checkpoint, or about several of a run. It is a single HTML file that needs no network.
    Returns its path.

    The page shows what the checkpoints are, a treemap of their bytes by part and module, the bytes of each rank, a
    table of all tensors, and the findings of ``zckpt.validate``. If there are several checkpoints, it also shows the
    norms and the updates of each layer over the training steps, and what has changed from each checkpoint to the next.

    ``paths``: one or several checkpoints, in any order. The directory of a run stands for the checkpoint that its file
    ``latest`` names. The treemap, the ranks and the table are those of the checkpoint with the highest step.
    ``statistics``: whether the values of all tensors are read and verified, for the minimum, maximum, mean, norm and
    histogram of each. Without them no tensor is read, and the page has no norms and updates. ``level``: what
    ``zckpt.validate`` checks. "digests" and "deep" read all bytes once more. ``overwrite``: replaces the file.
    ``budget``: the memory, the threads and the kind of I/O, or None for ``Budget.from_environment()``. 64 MiB more are
    in use, however many checkpoints there are. ``progress``: is told how much has been read, such as
    ``zckpt.ProgressBar()``.

    A tensor that has the same digests as in the checkpoint before is not read again. A tensor that is damaged or
    missing has no statistics, and is among the findings.

    If torch.distributed is initialised, every rank has to call it with the same arguments. The ranks share the work,
    and rank 0 writes the page. The file appears once it is whole.

    Raises what ``zckpt.open`` raises. Raises CheckpointExistsError if the file exists already, ValueError if there is
    no path or ``level`` is unknown, UnsupportedError if plotly, itables or jinja2 is not installed, StorageError and
    RankError.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise ValueError("give the path of a checkpoint at least")
    ranks = Ranks(call="zckpt.report")
    libraries = ranks.together(find_libraries, "find the scripts of the page")
    place, prepared = ranks.first(lambda: choose_place(out, None, overwrite, PAGE), "find the place")
    places = ranks.first(lambda: _find(given), "find the checkpoints")
    reports = [validate(one, level=level, budget=budget, progress=progress) for one in places]
    checkpoints = ranks.together(lambda: [_open(one, budget) for one in places], "open the checkpoints")
    check_equal(ranks.share(lambda: [one.manifest.save_id for one in checkpoints], "compare"), "checkpoints")
    found: list[Found] | None = None
    if statistics:
        found, damaged = _look(checkpoints, ranks, progress)
        reports = [_with(*one) for one in zip(reports, damaged, strict=True)]

    def write() -> None:
        page = _page(places, checkpoints, reports, found, libraries)
        begin(prepared, directory=False)
        try:
            open_store(prepared).parent.put(Location.of(prepared).name, page)
            check_place(place, None, overwrite, PAGE)  # Somebody may have put something there meanwhile.
            put_in_place(prepared, place)
        except BaseException:
            open_store(prepared).remove("")
            raise

    ranks.first(write, "write the page")
    return str(place)


def _find(given: Sequence[StrPath]) -> list[str]:
    """Returns the directories of the checkpoints, each once. The checkpoint with the lowest step is the first."""
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
    """Returns the values of each checkpoint's tensors, and findings about damaged ones. All ranks share the work."""

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
    """Returns the report with more findings in it."""
    return replace(report, findings=in_order([*report.findings, *more]))


def _page(
    places: Sequence[str],
    checkpoints: Sequence[Checkpoint],
    reports: Sequence[Report],
    found: Sequence[Found] | None,
    libraries: Libraries,
) -> bytes:
    """Gathers the rest of what the page shows, and returns the page."""
    trees: list[object] = []
    full = list(reports)
    for number, checkpoint in enumerate(checkpoints):
        try:
            trees.append(settings(checkpoint))
        except FormatError as error:
            trees.append(None)
            full[number] = _with(full[number], [Finding.of(error)])
    summaries = [one for one in map(summary, places) if isinstance(one, CheckpointSummary)]
    return render(gather(checkpoints, summaries, full, trees, found), libraries)
