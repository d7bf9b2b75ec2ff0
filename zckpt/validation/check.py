"""Checks a checkpoint against the specification, with the reader's own rules, and reports every finding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from zckpt.progress import Progress, reported
from zckpt.transfer.staging import host_pool
from zckpt.validation.file_checks import DataChecks, check_files
from zckpt.validation.index_checks import check_index
from zckpt.validation.report import Finding, failures
from zckpt.validation.values import Values, derived_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zckpt.errors import FormatError
    from zckpt.format.manifest import Manifest
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.validation.report import Level

Unit = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Share:
    """Which of ``size`` processes that validate one checkpoint together this is."""

    number: int = 0
    size: int = 1

    def units(self, world_size: int) -> Iterator[Unit]:
        """What this process does: of the reads of rank ``rank``'s files, those with the numbers ``k``, ``k + n``, ...

        ``(rank, k, n)``; whoever has ``k`` 0 checks all else of the rank."""
        n = -(-self.size // world_size)
        units = ((rank, k, n) for rank in range(world_size) for k in range(n))
        return islice(units, self.number, None, self.size)


def check_checkpoint(
    checkpoint: Checkpoint, level: Level, share: Share, progress: Progress | None = None
) -> tuple[list[Finding], Values, int]:
    """Checks one share of everything behind the manifest: what it has found, in no order, and the bytes read."""
    before = checkpoint.reader.count.bytes_read
    contents, manifest = checkpoint.contents, checkpoint.manifest
    units = list(share.units(manifest.world_size))
    with_data, is_first = level != "structure", share.number == 0
    findings: list[Finding] = []

    def note(errors: Iterable[FormatError]) -> None:
        findings.extend([Finding.of(error) for error in errors])  # at once, for several threads do

    errors, pieces = check_index(contents)
    if is_first:
        note(errors)
    values = Values(derived_weights(manifest, pieces) if level == "deep" and pieces is not None else {})
    staging = host_pool(checkpoint.batch_bytes)
    with reported(progress, "validate", _data_bytes(manifest, units) if with_data else 0) as advance:
        data = DataChecks(checkpoint, staging, values if level == "deep" else None, note, advance)

        def tasks() -> Iterator[Callable[[], None]]:
            """Of all files, rank by rank: the headers of one are parsed while the data of another are being read."""
            for rank, k, n in units:
                errors, headers = check_files(contents, rank, pieces)
                if k == 0:
                    note(errors)
                if with_data and headers:
                    if k == 0:
                        advance(sum(header.data_start for header in headers.values()))
                    yield from islice(data.reads(headers), k, None, n)

        with staging.work():
            checkpoint.budget.run(tasks())
        if with_data and pieces is not None:
            trees = [partial(checkpoint.rank_state, rank) for rank, k, _ in units if k == 0]
            note(failures(*trees, *([lambda: checkpoint.state] if is_first else [])))
    return findings, values, checkpoint.reader.count.bytes_read - before


def _data_bytes(manifest: Manifest, units: Iterable[Unit]) -> int:
    """What progress is told: the bytes of the files of these units, or of their part of them."""
    of_rank: Counter[int] = Counter()
    for rank, nbytes in zip(manifest.files.rank, manifest.files.nbytes, strict=True):
        of_rank[rank] += nbytes
    return sum(of_rank[rank] // n for rank, _, n in units)
