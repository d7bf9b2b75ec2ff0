"""Runs all checks of a validation on one checkpoint."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING

from zckpt.format.index import check_claims
from zckpt.progress import Progress, reported
from zckpt.tools.validating.file_checks import DataChecks, check_files
from zckpt.tools.validating.report import Finding, failures
from zckpt.transfer.tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.errors import FormatError
    from zckpt.format.manifest import Manifest
    from zckpt.tools.validating.report import Level
    from zckpt.transfer.budget import Budget

Unit = tuple[int, int, int]
"""The work on one rank's files that one process does: the rank, the number of the first read, and the distance to the
next."""

Processes = range | tuple[int, ...]
"""The processes that see the same files."""


@dataclass(frozen=True, slots=True)
class ValidationShare:
    """The share of one process in the validation of a checkpoint by several processes."""

    number: int = 0
    """The number of the process, counted from 0."""
    size: int = 1
    """The number of processes."""
    holders: Sequence[Processes] | None = None
    """For each rank of the writer, the processes that see its files, which alone check them. None means that all
    processes see all files."""

    def units(self, world_size: int) -> list[Unit]:
        """Returns the work of this process, rank by rank.

        Each unit is ``(rank, k, n)``. It stands for every ``n``-th read of the rank's files, from number ``k`` on. The
        process that has the unit with ``k`` = 0 does all other checks of the rank, too.
        """
        seen_by: dict[Processes, list[int]] = {}
        for rank, processes in enumerate(self.holders or repeat(range(self.size), world_size)):
            seen_by.setdefault(processes, []).append(rank)
        mine: list[Unit] = []
        for processes, ranks in seen_by.items():
            if self.number in processes:
                n = -(-len(processes) // len(ranks))
                units = ((rank, k, n) for rank in ranks for k in range(n))
                mine += islice(units, processes.index(self.number), None, len(processes))
        return sorted(mine)


def check_checkpoint(
    contents: Contents, budget: Budget, level: Level, share: ValidationShare, progress: Progress | None = None
) -> tuple[list[Finding], bytes, int]:
    """Checks one share of everything but the manifest, which has been read already. The level "structure" does not
    import torch.

    Args:
        contents: the contents of the checkpoint.
        budget: the memory, the threads and the kind of I/O.
        level: how much to check.
        share: the share of this process.
        progress: an object that is told the number of bytes that have been checked.

    Returns:
        The findings, in no order; the packed ``ValueChecks`` at the level "deep", and no bytes at the others; and the
        number of bytes that were read.
    """
    before, manifest = contents.reader.count.bytes_read, contents.manifest
    units = share.units(manifest.world_size)
    with_data = level != "structure"
    findings: list[Finding] = []

    def note(errors: Iterable[FormatError]) -> None:
        # Several threads do this. A single call of extend needs no lock.
        findings.extend([Finding.of(error) for error in errors])

    if not units:
        return [], b"", 0
    errors, sound = _check_index(contents)
    note(errors)
    budget_of_reads, values, data = budget.serving(contents.store), None, None
    with reported(progress, "validate", _data_bytes(manifest, units) if with_data else 0) as advance:
        if with_data:
            from zckpt.checkpoint.reading.loader import Loader
            from zckpt.tools.validating.values import ValueChecks, derived_weights
            from zckpt.transfer.staging import host_pool

            values = ValueChecks(derived_weights(contents) if sound else {}) if level == "deep" else None
            staging = host_pool(budget_of_reads.batch_bytes(manifest.block_bytes))
            data = DataChecks(contents, budget.direct, staging, values, note, advance)

        def tasks() -> Iterator[Callable[[], None]]:
            """Yields the reads of all data files, rank by rank. The headers of one rank are parsed while the data of
            another rank are being read."""
            ranks = [rank for rank, _, _ in units]
            each = contents.pieces_of_ranks(contents.all_rows, ranks) if sound else zip(ranks, repeat(None))
            for (rank, k, n), (_, pieces) in zip(units, each, strict=True):
                errors, headers = check_files(contents, rank, pieces)
                if k == 0:
                    note(errors)
                if data is not None and headers:
                    if k == 0:
                        advance(sum(header.data_start for header in headers.values()))
                    yield from islice(data.reads(headers), k, None, n)

        with nullcontext() if data is None else data.staging.work():
            run_tasks(tasks(), budget_of_reads.threads)
        if with_data and sound:
            checkpoint = Loader("", contents, budget)
            checked = [rank for rank, k, _ in units if k == 0]
            shared = [lambda: checkpoint.state] if 0 in checked else []  # Its tensors are in the files of rank 0.
            note(failures(*(partial(checkpoint.rank_state, rank) for rank in checked), *shared))
    return findings, b"" if values is None else values.pack(), contents.reader.count.bytes_read - before


def _check_index(contents: Contents) -> tuple[list[FormatError], bool]:
    """Returns the rules (I001 to I007) that the index breaks, and whether the pieces that it lists can be used."""
    errors = failures(contents.check_index_length)
    damaged = failures(*(partial(contents.chunk, number) for number in range(len(contents.manifest.chunks))))
    if damaged:
        return [*errors, *damaged], False
    claims = ((pieces.file, pieces.nbytes) for pieces in contents.pieces_of_parts(contents.all_rows))
    wrong = failures(partial(check_claims, contents.manifest, claims))
    return [*errors, *wrong], not wrong


def _data_bytes(manifest: Manifest, units: Iterable[Unit]) -> int:
    """Returns the number of bytes that progress is told for some units. A unit that shares the reads of a rank counts
    for its share."""
    of_rank: Counter[int] = Counter()
    for rank, nbytes in zip(manifest.files.rank, manifest.files.nbytes, strict=True):
        of_rank[rank] += nbytes
    return sum(of_rank[rank] // n for rank, _, n in units)
