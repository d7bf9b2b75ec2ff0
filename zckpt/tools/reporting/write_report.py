"""Writes an HTML page about one checkpoint, or about several of a run."""

from __future__ import annotations

import os
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zckpt.checkpoint.listing.find import find, open_contents
from zckpt.checkpoint.open import open_store_loader
from zckpt.errors import FormatError, check_flags
from zckpt.ranks.collectives import Ranks, check_equal
from zckpt.storage.schemes import open_store
from zckpt.tools.comparing.trees import settings
from zckpt.tools.exporting.place import Place
from zckpt.tools.reporting.page import find_libraries, render
from zckpt.tools.reporting.page_data import gather
from zckpt.tools.reporting.values import joined, look
from zckpt.tools.summary import CheckpointSummary, summary
from zckpt.tools.validating.report import LEVELS, Finding, Level, Report, in_order
from zckpt.tools.validating.validate import validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.progress import Progress
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.tools.reporting.page import Libraries
    from zckpt.tools.reporting.values import ValuesByKey
    from zckpt.transfer.budget import Budget

_PAGE = (b"<!doctype html>", b'content="zckpt ')
"""Bytes that are near the beginning of every page. A file that does not contain them is never replaced by a page."""


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
    """Writes an HTML page about one checkpoint, or about several of a run.

    The page is a single file that needs no network. It shows general information about the checkpoints, a treemap of
    their bytes by part and module, the bytes of each rank, a table of all tensors, and the findings of
    ``zckpt.validate``. If there are several checkpoints, it also shows the norms and the updates of each layer over the
    training steps, and what has changed from each checkpoint to the next.

    A tensor that has the same digests as in the checkpoint before is not read again. A tensor that is damaged or
    missing has no statistics, and is among the findings.

    If torch.distributed is initialised, every rank has to call this with the same arguments. The ranks share the work,
    and rank 0 writes the page. The file appears once it is complete.

    Args:
        paths: one or several checkpoints, in any order. The directory of a run stands for the checkpoint that its file
            ``latest`` names. The treemap, the ranks and the table are those of the checkpoint with the highest step.
        out: the path of the page, or its URL in an object store.
        statistics: whether the values of all tensors are read and verified, for the minimum, maximum, mean, norm and
            histogram of each. Without them the page has no norms and updates.
        level: what ``zckpt.validate`` checks. "structure" reads no tensor data. "digests" and "deep" read all bytes
            once more.
        overwrite: whether an earlier page at ``out`` is replaced.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``. 64 MiB more are
            in use, for any number of checkpoints.
        progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.

    Returns:
        The absolute path of the page, or its URL.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at one of ``paths``.
        FormatError: a manifest is damaged.
        CheckpointExistsError: there is already something at ``out`` that must not be replaced.
        ValueError: ``paths`` is empty, or ``level`` is unknown.
        UnsupportedError: plotly, itables or jinja2 is not installed, or there is no store for the scheme of a URL.
        StorageError: the operating system reports an error when it reads or writes.
        RankError: another rank has failed or is lost, or the ranks have different checkpoints.
    """
    ranks = Ranks(call="zckpt.report")
    all_paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)

    def prepare() -> Libraries:
        check_flags(statistics=statistics)
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
        if not all_paths:
            raise ValueError("give the path of a checkpoint at least")
        return find_libraries()

    libraries = ranks.together(prepare, "prepare the page")
    place_fields = ranks.first(lambda: Place.choose(out, "page", overwrite=overwrite, marks=_PAGE), "find the place")
    place = Place.of(*place_fields)
    directories = ranks.first(lambda: _find(all_paths), "find the checkpoints")
    reports = [validate(directory, level=level, budget=budget, progress=progress) for directory in directories]
    checkpoints = ranks.together(
        lambda: [_open(directory, budget) for directory in directories], "open the checkpoints"
    )
    ranks.decide(
        lambda: [checkpoint.manifest.save_id for checkpoint in checkpoints],
        partial(check_equal, what="checkpoints"), "compare",
    )  # fmt: skip
    shares: list[Any] = []
    """On rank 0, what each rank has found by looking at the values."""
    if statistics:
        ranks.decide(lambda: _look(checkpoints, ranks, progress), shares.extend, "look at the values")

    def write() -> None:
        values = statistics and [
            joined([values_of_each[n] for values_of_each, _ in shares]) for n in range(len(checkpoints))
        ]
        findings = [[Finding(*fields) for _, errors in shares for fields in errors[n]] for n in range(len(checkpoints))]
        complete_reports = [_with(report, more) for report, more in zip(reports, findings, strict=True)]
        page = _page(directories, checkpoints, complete_reports, values or None, libraries)
        place.begin([place.name])
        try:
            place.put_small({place.name: page})
            place.finish()
        except BaseException:
            place.remove()
            raise

    ranks.first(write, "write the page")
    return place.path


def _find(paths: Sequence[StrPath]) -> list[str]:
    """Returns the directory of each checkpoint once, in ascending order of the steps."""
    stores = {str(store.location.absolute()): store for store in map(find, paths)}

    def step(store: Store) -> tuple[int, str]:
        contents = open_contents(store)
        contents.reader.close()
        return contents.manifest.step, str(store.location)

    return [str(store.location) for store in sorted(stores.values(), key=step)]


def _open(directory: str, budget: Budget | None) -> Loader:
    return open_store_loader(open_store(directory), budget)


def _look(checkpoints: Sequence[Loader], ranks: Ranks, progress: Progress | None) -> list[Any]:
    """Returns what ``look`` returns for the share of this rank. The errors are the fields of findings."""
    values_of_each, errors = look(checkpoints, ranks.rank, ranks.size, progress)
    return [values_of_each, [[astuple(Finding.of(error)) for error in of_checkpoint] for of_checkpoint in errors]]


def _with(report: Report, more: Sequence[Finding]) -> Report:
    """Returns the report with these findings added."""
    return replace(report, findings=in_order([*report.findings, *more]))


def _page(
    directories: Sequence[str],
    checkpoints: Sequence[Loader],
    reports: Sequence[Report],
    values: Sequence[ValuesByKey] | None,
    libraries: Libraries,
) -> bytes:
    """Reads the summaries and the trees of state of the checkpoints, and returns the page."""
    trees: list[object] = []
    complete_reports = list(reports)
    for number, checkpoint in enumerate(checkpoints):
        try:
            trees.append(settings(checkpoint))
        except FormatError as error:
            trees.append(None)
            complete_reports[number] = _with(complete_reports[number], [Finding.of(error)])
    summaries = [result for result in map(summary, directories) if isinstance(result, CheckpointSummary)]
    return render(gather(checkpoints, summaries, complete_reports, trees, values), libraries)
