"""Validates the checkpoint at a path, in one process or on all ranks of a job together."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

from zckpt.api.open import open_checkpoint
from zckpt.errors import CheckpointNotFoundError, FormatError
from zckpt.listing.find import find
from zckpt.ranks.collectives import Ranks, check_equal
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.validation.check import Share, check_checkpoint
from zckpt.validation.report import LEVELS, Finding, Level, Report, in_order
from zckpt.validation.values import Values

if TYPE_CHECKING:
    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


def validate(
    path: StrPath, *, level: Level = "digests", budget: Budget | None = None, progress: Progress | None = None
) -> Report:
    """Checks a checkpoint against the specification.

    ``level``: "structure" reads all but the tensors' data: names, sizes, headers, index, digest tables. "digests" reads
    every byte too and compares it with its digest. "deep" looks at the values on the way: NaN, infinities, negative
    moments of squares, 16-bit weights that are not their masters rounded. Those are observations; no rule is about
    them. ``budget``: memory, threads and kind of I/O; None: ``Budget.from_environment()``. ``progress``: such as
    ``zckpt.ProgressBar()``.

    Where torch.distributed is initialised, every rank calls it; they share the work, and each gets the whole report.

    Never raises for what is wrong with the checkpoint: that is in the report, one finding per broken rule and place.
    Raises CheckpointNotFoundError if there is nothing to check, UnsupportedError for the URL of a store that does
    not exist, StorageError and RankError.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    ranks = Ranks(call="zckpt.validate")
    paths = ranks.share(lambda: str(Location.of(path)), "find the checkpoint")
    check_equal(paths, "paths")
    given = paths[0]
    share = Share(ranks.rank, ranks.size)
    place = ranks.first(lambda: _find(given), "find the checkpoint")
    while True:
        found, _, finding = place
        if finding:
            return Report(given, level, (Finding(*finding),), files=1)
        report = _join(found, level, ranks.share(partial(_check, found, level, share, budget, progress), "validate"))
        if report.ok:
            return report
        checked, place = place, ranks.first(lambda: _find(given), "find the checkpoint")
        # Another place: somebody has replaced it meanwhile, and what is missing says nothing about what is there now.
        if place == checked:
            return report


def _find(path: str) -> tuple[str, str, tuple[Any, ...]]:
    """The directory of the checkpoint, its save id, and the fields of what is wrong with its manifest, if anything."""
    try:
        found = find(path)
        return str(found.location), open_checkpoint(found).manifest.save_id, ()
    except FormatError as error:
        return "", "", astuple(Finding.of(error))


_Checked = tuple[list[tuple[Any, ...]], bytes, int, int]
"""What a rank has found: the fields of each finding, packed ``Values``, the number of files and of bytes read."""


def _check(path: str, level: Level, share: Share, budget: Budget | None, progress: Progress | None) -> _Checked:
    try:
        checkpoint = open_checkpoint(open_store(path), budget)
    except (CheckpointNotFoundError, FormatError) as error:  # replaced just now
        return [("", error.message)], Values({}).pack(), 0, 0
    findings, values, bytes_read = check_checkpoint(checkpoint, level, share, progress)
    manifest = checkpoint.manifest
    files = 2 + manifest.world_size + len(manifest.files)  # manifest, index, a digest table for each rank
    return [astuple(one) for one in findings], values.pack(), files, bytes_read


def _join(path: str, level: Level, checked: list[_Checked]) -> Report:
    findings: list[Finding] = []
    values = Values({})
    files = bytes_read = 0
    for own_findings, own_values, own_files, own_bytes in checked:
        findings += [Finding(*fields) for fields in own_findings]
        values.add(own_values)
        files = max(files, own_files)
        bytes_read += own_bytes
    return Report(path, level, in_order(findings), values.observations(), files, bytes_read)
